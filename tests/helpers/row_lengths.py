"""Rounds whose rows verify different numbers of drafts, without a GPU's times: every round draws how many."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.draft_chances import DraftChances
from batchspec.engine.rounds.draft_lengths import DraftLengths
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.step import RoundWidth

LENGTHS = st.none() | st.integers(0, 1000)
"""For `make_engine`: None, or the seed of `draw_lengths`."""


def trial_won(lengths: DraftLengths) -> None:
    """Rounds may verify a part of their drafts, as after a trial that found that it pays."""
    lengths._trial.pays = True


def draw_lengths(engine: Engine, seed: int) -> list[UnreadLaunch]:
    """From now on rounds have a random draft length and number of positions, and prepare no draft where the next one has none.
    Returns the launches, as they are made. Nothing changes if rounds verify trees, or nothing.

    seed  an odd one also draws which drafts are verified, whatever their chances are
    """
    noise, chances = random.Random(seed), engine.executor.round.chances
    if chances is None:
        return []

    def width_of_next() -> RoundWidth:
        draft_len = noise.randint(0, engine.drafter.draft_len)
        return RoundWidth(draft_len, noise.choice([None, noise.uniform(0, draft_len)]) if draft_len else None)

    launches = set_widths(engine, width_of_next)
    if seed % 2:
        allocate_at_random(chances, noise)
    return launches


def set_widths(engine: Engine, width_of_next: Callable[[], RoundWidth]) -> list[UnreadLaunch]:
    """From now on rounds have these widths, and prepare drafts as a planner says. Returns the launches, as they are made."""
    choose, launches, following, unprepared = engine.planner.choose, list[UnreadLaunch](), width_of_next(), 0

    def chosen(num_rows: int, *others: Any) -> UnreadLaunch:
        nonlocal following, unprepared
        launch, now = choose(num_rows, *others), following
        following = width_of_next()
        drafts = now.draft_len > 0 or following.draft_len > 0 or unprepared == engine.drafter.most_unprepared
        unprepared = 0 if drafts else unprepared + 1
        launches.append(replace(launch, width=now, prepare_next=drafts))
        return launches[-1]

    engine.planner.choose = chosen  # type: ignore[method-assign,assignment]
    return launches


def allocate_at_random(chances: DraftChances, noise: random.Random) -> None:
    """From now on rounds with fewer places than drafts give rows a random number of them, in a random order of rows."""
    allocate = chances.allocate

    def drawn(live: Tensor, draft_len: Tensor, *, width: int, num_positions: int | None) -> Tensor:
        offered = draft_len.tolist()
        levels = allocate(live, draft_len, width=width, num_positions=num_positions)
        if num_positions is not None and num_positions < len(live) * (width + 1):
            taken, left = [0] * len(offered), num_positions - int((live != 0).sum())
            for row in noise.sample(range(len(offered)), len(offered)):
                taken[row] = noise.randint(0, min(left, offered[row]))
                left -= taken[row]
            draft_len.copy_(draft_len.new_tensor(taken))
        return levels

    chances.allocate = drawn  # type: ignore[method-assign]
