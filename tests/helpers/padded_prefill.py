"""Prefill passes on a CPU, padded like those that a GPU replays; memory that a replay must not read is filled with NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.engine.loop import engine as engine_module
from batchspec.engine.loop.executor import Executor
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.prefill.graphs import PrefillGraphs
from batchspec.engine.prefill.padded import PassInputs
from batchspec.engine.prefill.passes import Prefilled
from batchspec.engine.prefill.shapes import PassShape
from batchspec.engine.rounds.records import Moment, PendingResult, RoundResult
from batchspec.engine.step import Segment

ALWAYS = PrefillCost(least=1.0, token=0.0)
"""Padding takes no time."""


@contextmanager
def padded_passes() -> Iterator[list[PassShape]]:
    """Engines that are made within this block pad all passes that can be padded; yields the shapes of those that were.

    As with graphs, a pass of a shape writes its results where the last one of that shape wrote them; the next pass makes them
    invalid, so the host must have copied them. The scratch page and the buffer hold NaN and wrong numbers before each pass.
    """
    shapes: list[PassShape] = []
    left: list[Tensor] = []
    homes: dict[tuple[int, PassShape], tuple[Tensor, ...]] = {}
    run_pass, fill_inputs, send_result = PrefillGraphs._run, PassInputs.fill, PendingResult.send

    def fill(inputs: PassInputs, segments: Sequence[Segment], num_rows: int) -> None:
        inputs._buffer.fill_(1 << 30)
        for tensor in left:
            tensor.fill_(99)
        fill_inputs(inputs, segments, num_rows)

    def run(graphs: PrefillGraphs, shape: PassShape) -> Prefilled:
        shapes.append(shape)
        for layer in graphs._round.cache.layers:
            layer.pages[0, 0], layer.pages[1, 0] = torch.nan, 77.0
        found = run_pass(graphs, shape)
        assert found.result is not None
        values = [found.result.log, *found.result.read]
        home = homes.setdefault((id(graphs), shape), tuple(value.clone() for value in values))
        for there, value in zip(home, values, strict=True):
            there.copy_(value)
        left[:] = home
        log, *others = home
        count = len(found.result.read)
        result = RoundResult(log, tuple(others[:count]), *others[count:])
        return Prefilled(result, found.mask)

    def send(result: RoundResult, began: Moment | None = None) -> PendingResult:
        read = tuple(value.clone() for value in result.read)
        return send_result(replace(result, log=result.log.clone(), read=read), began)

    def executor(*args: Any, **options: Any) -> Executor:
        return Executor(*args, **(options | {"prefill_graphs": True}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillGraphs, "cost", ALWAYS)
        patch.setattr(PrefillGraphs, "_run", run)
        patch.setattr(PassInputs, "fill", fill)
        patch.setattr(PendingResult, "send", staticmethod(send))
        patch.setattr(engine_module, "Executor", executor)
        yield shapes
