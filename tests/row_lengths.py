"""Rounds whose rows verify different numbers of drafts, without a GPU's times: every round draws how many."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from torch import Tensor

from batchspec.engine.loop.engine import Engine
from batchspec.engine.slots.launch import Launch
from batchspec.engine.step import RoundWidth


def draw_lengths(engine: Engine, seed: int, *, blindly: bool = False) -> list[Launch]:
    """From now on rounds have a random draft length and number of positions. Returns the launches, as they are made.

    blindly  which drafts of a row are verified is random too, whatever their chances are
    """
    noise, launches, choose = random.Random(seed), list[Launch](), engine.planner.choose
    chances = engine.executor.round.chances
    assert chances is not None
    allocate = chances.allocate

    def drawn(num_rows: int, *others: Any) -> Launch:
        launch = choose(num_rows, *others)
        draft_len = noise.randint(0, launch.width.draft_len)
        mean_len = noise.choice([None, noise.uniform(0, draft_len)]) if draft_len else None
        launches.append(replace(launch, width=RoundWidth(draft_len, mean_len)))
        return launches[-1]

    def cut(live: Tensor, draft_len: Tensor, *, width: int, num_positions: int) -> Tensor:
        levels = allocate(live, draft_len, width=width, num_positions=num_positions)
        if num_positions < len(live) * (width + 1):
            draft_len.copy_(draft_len.new_tensor([noise.randint(0, length) for length in draft_len.tolist()]))
        return levels

    engine.planner.choose = drawn  # type: ignore[method-assign,assignment]
    if blindly:
        chances.allocate = cut  # type: ignore[method-assign]
    return launches
