"""What a round with an EAGLE-3 head launches, as a chain and in parallel: own kernels, matrix products, no operation of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from batchspec.draft import chain, head, output, parallel, reader, tree
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import load_head
from batchspec.engine.rounds.records import RoundOptions
from batchspec.model import decoder
from batchspec.model.layers.attention import block, paged
from batchspec.model.layers.attention.plan import AttentionPlan, plan_attention
from batchspec.model.quant import plain
from batchspec.model.target import Target
from tests.helpers.engines import DEVICE, make_engine, packed, request, tiny_target
from tests.helpers.heads import random_tensors, tiny_design, write_head

OWN_KERNELS = {
    chain: ("prepare_chain_draft_inputs", "gather_last_accepted"),
    parallel: ("prepare_parallel_draft_inputs", "gather_last_accepted"),
    tree: ("prepare_tree_inputs", "expand_tree", "rerank_tree"),
    reader: ("rope_of",),
    head: ("eagle_head_input", "rms_norm", "tap_norm"),
    output: ("lm_head", "argmax"),
    decoder: ("add_norm", "rms_norm"),
    paged: ("rope_write",),
    plain: ("rms_norm", "silu_and_mul"),
}
"""Wrappers of one kernel each on a GPU (rope_of: of none); here their references run, which are operations of torch."""
PRODUCTS = {"mm", "addmm"}
FREE = {"view", "slice", "select", "unbind", "split", "unsqueeze", "t", "transpose", "as_strided", "alias", "detach", "empty",
        "empty_like", "new_empty", "_unsafe_view", "reshape", "expand"}
"""Views and allocations: nothing of them reaches a captured graph."""


class Launches(TorchDispatchMode):
    """Counts the operations of torch that would be kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # inference mode hands over operations that are made of others
            made_of_others = func.decompose(*args, **(kwargs or {}))
        if made_of_others is not NotImplemented:
            return made_of_others
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def uncounted(call: Callable[..., Any], calls: Counter[str], name: str) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        with _disable_current_modes():
            return call(*args, **options)

    return run


class _Plan:
    """Attention runs in kernels of its own."""

    def __init__(self, plan: AttentionPlan, calls: Counter[str]) -> None:
        self.attend = uncounted(plan.attend, calls, "attend")


@contextmanager
def own_kernels() -> Iterator[Counter[str]]:
    """Calls of each kernel's wrapper inside the context."""
    calls: Counter[str] = Counter()

    def plan(*args: Any, **options: Any) -> _Plan:
        calls["plan_attention"] += 1
        return _Plan(plan_attention(*args, **options), calls)

    with pytest.MonkeyPatch.context() as patch:
        for module, names in OWN_KERNELS.items():
            for name in names:
                patch.setattr(module, name, uncounted(getattr(module, name), calls, name))
        patch.setattr(block, "plan_attention", plan)
        yield calls


class Watched:
    """A drafter that keeps what one propose and one catch_up launch: torch's operations and batchspec's own kernels."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.found: list[tuple[str, Counter[str], Counter[str]]] = []

    def _watch(self, name: str, call: Callable[[], Any]) -> Any:
        with own_kernels() as calls, Launches() as torch_calls:
            result = call()
        self.found.append((name, torch_calls.counts, calls))
        return result

    def propose(self, *args: Any, **options: Any) -> Any:
        return self._watch("propose", partial(super().propose, *args, **options))  # type: ignore[misc]

    def catch_up(self, *args: Any, prepare_next: bool, **options: Any) -> None:
        catch_up = partial(super().catch_up, *args, prepare_next=prepare_next, **options)  # type: ignore[misc]
        self._watch("catch_up" if prepare_next else "keep warm", catch_up)


class WatchedChain(Watched, ChainDrafter):
    pass


class WatchedParallel(Watched, ParallelDrafter):
    pass


class WatchedTree(Watched, TreeDrafter):
    def __init__(self, head: Head, target: Target, depth: int, *, slots: int) -> None:
        super().__init__(head, target, TreeShape(topk=3, depth=depth, nodes=7), slots=slots)


def launches(
    folder: Path,
    draft_len: int,
    design: dict[str, Any],
    *,
    prepare_next: bool = True,
    drafter: type[Any] = WatchedChain,
    **options: Any,
) -> list[Any]:
    """(part of the round, torch's operations, own kernels) of every part of some rounds."""
    target = tiny_target(torch.float32)
    own = tiny_design(target.spec, **design)
    checkpoint = write_head(folder, own, random_tensors(own), layout="speculators")
    loaded = load_head(checkpoint, target.spec, dtype=target.dtype, device=DEVICE, aux_layers="input")
    watched = drafter(loaded, target, draft_len, slots=2, **options)
    engine = make_engine(target, watched, packed(2, num_verified=draft_len), device=DEVICE, options=RoundOptions())
    if not prepare_next:
        run_round = engine.executor.round.run
        engine.executor.round.run = lambda rows, mode, *_: run_round(rows, mode, 0, prepare_next=False)  # type: ignore[method-assign]
    assert len(list(engine.run(iter([request(i, [i, 2, 3], cap=9) for i in range(3)])))) == 3
    found: list[Any] = watched.found
    return found


DESIGNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed state fed back": {"norm_output": True},
    "norms of every kind, biases": {"norm_before_residual": True, "fc_norm": True, "qk_norm": True, "attention_bias": True},
    "two layers": {"layers": 2, "windows": (None, 3)},
}


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: weights as they are."""
    monkeypatch.setattr(plain, "_can_pack", lambda weight: False)


@pytest.mark.parametrize("name", DESIGNS)
def test_the_fast_path_launches_products_and_own_kernels_only(name: str, tmp_path: Path) -> None:
    num_layers = DESIGNS[name].get("layers", 1)
    found = launches(tmp_path, 3, DESIGNS[name])
    assert {part for part, _, _ in found} == {"propose", "catch_up"}
    for part, of_torch, own in found:
        assert set(of_torch) <= PRODUCTS, (part, of_torch)
        if part == "propose":
            assert own["prepare_chain_draft_inputs"] == 1
            assert own["plan_attention"] == num_layers  # one for each window, none for each step
            assert own["attend"] == 2 * num_layers
            assert own["eagle_head_input"] == own["argmax"] == 2
        else:
            assert own["gather_last_accepted"] == own["eagle_head_input"] == own["argmax"] == 1
            assert own["attend"] == num_layers


@pytest.mark.parametrize("name", DESIGNS)
def test_a_round_without_drafts_after_it_computes_k_and_v_only(name: str, tmp_path: Path) -> None:
    num_layers = DESIGNS[name].get("layers", 1)
    for part, of_torch, own in launches(tmp_path, 3, DESIGNS[name], prepare_next=False):
        assert part == "keep warm"
        assert set(of_torch) <= PRODUCTS
        assert sum(of_torch.values()) == 2 + 4 * (num_layers - 1)  # fc, K and V of the last layer, all of those before it
        assert own["attend"] == num_layers - 1
        assert not own["argmax"] + own["gather_last_accepted"]


@pytest.mark.parametrize(
    ("option", "part", "operations"),
    [
        ("uniform_slots", "propose", {"cumsum", "cat", "_to_copy"}),
        ("dead_positions", "catch_up", {"index_select", "add"}),
        ("argmax", "propose", {"_softmax", "topk"}),
    ],
)
def test_the_general_paths_stay_general(option: str, part: str, operations: set[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {option: False}
    found = [of_torch for kind, of_torch, _ in launches(tmp_path, 3, {}, **options) if kind == part]
    assert found
    assert all(operations <= set(of_torch) for of_torch in found)


@pytest.mark.parametrize("draft_len", [1, 5])
@pytest.mark.parametrize("name", DESIGNS)
def test_parallel_drafts_take_one_forward_whatever_their_number(name: str, draft_len: int, tmp_path: Path) -> None:
    num_layers = DESIGNS[name].get("layers", 1)
    found = launches(tmp_path, draft_len, {**DESIGNS[name], "mask_id": 3}, drafter=WatchedParallel)
    assert {part for part, _, _ in found} == {"propose", "catch_up"}
    for part, of_torch, own in found:
        if part == "propose":
            assert set(of_torch) <= PRODUCTS | {"copy_"}
            assert of_torch["copy_"] == 1  # the draft ids to where they are verified
            assert own["prepare_parallel_draft_inputs"] == own["eagle_head_input"] == own["argmax"] == 1
            assert own["attend"] == own["plan_attention"] == num_layers
        else:
            assert set(of_torch) <= PRODUCTS
            assert own["gather_last_accepted"] == own["eagle_head_input"] == 1
            assert sum(of_torch.values()) == 2 + 4 * (num_layers - 1)  # fc, K and V of the last layer, all of those before it
            assert own["attend"] == num_layers - 1
            assert not own["argmax"]


@pytest.mark.parametrize("name", DESIGNS)
def test_a_tree_is_grown_by_a_forward_and_a_choice_a_level(name: str, tmp_path: Path) -> None:
    num_layers = DESIGNS[name].get("layers", 1)
    once = {"mul", "sub", "add", "minimum", "clone"}  # the positions of the levels, before the first of them
    for part, of_torch, own in launches(tmp_path, 4, DESIGNS[name], drafter=WatchedTree):
        if part == "propose":
            assert set(of_torch) <= PRODUCTS | once | {"topk", "logsumexp", "index_select"}
            assert sum(of_torch[operation] for operation in once) <= 8
            assert of_torch["topk"] == of_torch["logsumexp"] == own["expand_tree"] == 4
            assert of_torch["index_select"] == own["eagle_head_input"] == 3  # nothing goes through the head after the last level
            assert own["prepare_tree_inputs"] == own["rerank_tree"] == 1
            assert own["attend"] == 3 * num_layers
        else:
            assert set(of_torch) <= PRODUCTS | {"copy_"}
            assert of_torch["copy_"] == 1  # what the next tree begins with
            assert not own["argmax"]
