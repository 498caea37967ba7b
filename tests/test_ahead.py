"""Kernels are asked for by the passes that will launch them: the same variants, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from batchspec.decode import launcher
from batchspec.decode.engine import Engine
from batchspec.decode.graphs import Graphs, Shape
from batchspec.decode.round import RoundOptions
from batchspec.decode.sampling import SamplingMode
from batchspec.decode.scheduler import PassCost
from batchspec.draft.base import Drafter, NoDrafter
from batchspec.draft.eagle3 import Eagle3Drafter
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.tree import TreeDrafter, TreeShape
from batchspec.draft.weights import Head, load_head
from batchspec.draft.window import WindowDrafter
from batchspec.kernels import ahead
from tests.engines import DEVICE, packed, tiny_target
from tests.heads import random_tensors, tiny_design, write_head

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU stands in for a GPU here")
SLOTS, K = 2, 2
GREEDY = SamplingMode()
SAMPLED = SamplingMode(random=True, filters=True)
ALL = SamplingMode(random=True, filters=True, penalties=True, min_tokens=True)
Variant = tuple[object, ...]


def head(folder: Path, **design: Any) -> Head:
    target = tiny_target(torch.float32)
    own = tiny_design(target.spec, **design)
    write_head(folder, own, random_tensors(own), layout="speculators")
    return load_head(folder, target.spec, dtype=target.dtype, device=DEVICE, aux_layers="input")


def hybrid(folder: Path) -> Drafter:
    chain = Eagle3Drafter(head(folder), tiny_target(torch.float32), K, slots=SLOTS)
    return HybridDrafter(chain, LookupDrafter(K), slots=SLOTS, device=DEVICE)


DRAFTERS: dict[str, Callable[[Path], Drafter]] = {
    "none": lambda folder: NoDrafter(),
    "lookup": lambda folder: LookupDrafter(K),
    "window": lambda folder: WindowDrafter(tiny_target(torch.float32), K, slots=SLOTS, window=12, sink=2),
    "eagle3": lambda folder: Eagle3Drafter(head(folder), tiny_target(torch.float32), K, slots=SLOTS),
    "eagle3 general": lambda folder: Eagle3Drafter(
        head(folder), tiny_target(torch.float32), K, slots=SLOTS, uniform_slots=False, dead_positions=False, argmax=False
    ),
    "parallel": lambda folder: ParallelDrafter(head(folder, mask_id=30), tiny_target(torch.float32), K, slots=SLOTS),
    "hybrid": hybrid,
    "tree": lambda folder: TreeDrafter(
        head(folder), tiny_target(torch.float32), TreeShape(topk=2, depth=K, nodes=5), slots=SLOTS
    ),
}


class Variants:
    """Of kernels that were asked for, and of those that ran: what Triton compiles one by one."""

    def __init__(self) -> None:
        self.asked: set[Variant] = set()
        self.run: set[Variant] = set()

    def add(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], *, warmup: bool) -> None:
        of_names = dict(zip(kernel.arg_names, args, strict=False)) | options
        kinds = tuple((name, _kind(value)) for name, value in of_names.items())
        (self.asked if warmup else self.run).add((kernel.fn.__name__, *kinds))


def _kind(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "one" if value == 1 else value % 16 == 0
    return value


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[Variants]:
    """CPU tensors take the way of a GPU's, its kernels run in the interpreter, and each launch is noted."""
    found, launch = Variants(), InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.add(kernel, args, options, warmup=warmup)
        return launch(kernel, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(ahead, "_LAUNCHED", InterpretedFunction)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    yield found
    assert InterpretedFunction.run is run


CASES = [*((name, SAMPLED, 64) for name in DRAFTERS), ("eagle3", GREEDY, 64), ("eagle3", ALL, 64), ("tree", ALL, 64)]


@pytest.mark.parametrize(
    ("name", "mode", "prefill_tokens"),
    [*CASES, ("eagle3", GREEDY, 100)],  # more than 64 places of a row are attended otherwise
)
def test_a_pass_that_asks_and_one_that_runs_want_the_same_kernels(
    name: str, mode: SamplingMode, prefill_tokens: int, variants: Variants, tmp_path: Path
) -> None:
    drafter = DRAFTERS[name](tmp_path)
    batch = packed(SLOTS, draft_len=K, max_len=128, prefill_tokens=prefill_tokens)
    options = RoundOptions(logprobs=2 if mode == ALL else None)
    engine = Engine(tiny_target(torch.float32), drafter, batch, device=DEVICE, options=options, penalties=True)
    shapes = [Shape(rows, drafter.max_len, mode, shared=rows == 2) for rows in (1, 2)] + [Shape(1, 0, mode, lead=False)]
    with torch.inference_mode():
        passes = engine._launcher._passes(shapes, mode)
        assert len(passes) == 2 + len(shapes)
        carried = [tensor.clone() for tensor in drafter.state]
        with ahead.asking(set()):
            for run in passes:
                run()
        assert not variants.run
        torch.testing.assert_close(list(drafter.state), carried)
        for run in passes:
            run()
    assert variants.run
    assert variants.asked == variants.run, variants.asked ^ variants.run


@pytest.mark.parametrize("wanted", [True, False])
def test_preparing_asks_before_anything_runs_unless_told_not_to(
    wanted: bool, variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def compile_ahead(passes: list[Any], device: torch.device) -> None:
        steps.append(f"ask for {len(passes)} passes")

    def rehearse(*args: Any, **options: Any) -> PassCost:
        steps.append("prefill")
        return PassCost(least=1.0, token=1.0)

    monkeypatch.setattr(launcher, "compile_ahead", compile_ahead)
    monkeypatch.setattr(launcher, "rehearse", rehearse)
    monkeypatch.setattr(Graphs, "prepare", lambda graphs, shapes: steps.append(f"capture {len(shapes)} rounds"))
    monkeypatch.setattr(Graphs, "seconds", lambda graphs, shape: 1.0)
    engine = Engine(tiny_target(torch.float32), NoDrafter(), packed(SLOTS), device=DEVICE)
    engine.prepare(GREEDY, shared=True, ahead=wanted)
    assert steps == ["ask for 6 passes"] * wanted + ["prefill", "capture 4 rounds"]
