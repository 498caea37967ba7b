"""Rounds without drafts put a block head's context off: what the head computes in rounds, counted, and that no draft changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchspec.draft.block_head import BlockHead, BlockWeights
from batchspec.draft.output import DraftOutput
from batchspec.draft.waiting_states import PLACES, WaitingStates
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.draft_lengths import DraftLengths
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.rounds.round import Round
from batchspec.engine.slots import expected_pages
from batchspec.engine.step import RoundWidth
from batchspec.packing.kv_memory import KVMemory
from tests.draft.test_block import DFLASH2, Recorded, Seen, check, design_of, loaded
from tests.helpers.block_heads import random_block
from tests.helpers.drafting import TARGET, mixed_requests, synthetic
from tests.helpers.engines import DEVICE, make_engine, packed, request
from tests.helpers.row_lengths import set_widths

SLOTS, K = 3, 4
LONG = (0,) * 11 + (K, 0, 0, 2, 0, K)
"""Draft lengths of rounds in turn: more rounds without drafts than may wait, and runs of a few."""


def engine_of(lengths: Iterator[int], drafter: Recorded, **packing: Any) -> Engine:
    batch = packed(SLOTS, num_verified=K, prefill_tokens=7, **{"num_pages": 60, "max_len": 64} | packing)
    engine = make_engine(TARGET(), drafter, batch, device=DEVICE, options=synthetic(K))
    set_widths(engine, lambda: RoundWidth(next(lengths)))
    return engine


DESIGNS: dict[str, dict[str, Any]] = {"DSpark": {"rank": 3}, "DFlash2": DFLASH2, "a causal window": {"windows": (8, None)}}


@pytest.mark.parametrize("name", DESIGNS)
def test_drafts_after_rounds_without_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    """Rows end, are preempted and begin in slots where other rows' states wait."""
    design = design_of(**DESIGNS[name])
    tensors = random_block(design, seed=7)
    check(drafted(loaded(tmp_path, design, tensors)), design, tensors)


def drafted(head: BlockWeights) -> Seen:
    """In rounds of LONG, with pages for fewer rows than slots."""
    drafter = Recorded(head, TARGET(), K, slots=SLOTS)
    requests = mixed_requests(9, cap=34)
    engine = engine_of(cycle(LONG), drafter, num_pages=22)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
        assert len(list(engine.run(iter(requests)))) == len(requests)
    assert engine.totals.preempted > 0
    assert len(drafter.seen) > 30
    return drafter.seen


FAULTS: dict[str, Callable[..., Any]] = {
    "enter": lambda self, slot_ids, kv_len, cache: None,  # states of a slot's earlier row are taken for the next one's
    "put": lambda self, batch, states, cache: None,  # they are lost
}


@pytest.mark.parametrize("method", FAULTS)
def test_states_that_are_lost_or_of_another_row_change_drafts(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitingStates, method, FAULTS[method])
    changes_drafts(tmp_path)


def changes_drafts(folder: Path) -> None:
    """They are not those of the definition."""
    design = design_of(**DESIGNS["DSpark"])
    tensors = random_block(design, seed=7)
    seen = drafted(loaded(folder, design, tensors))
    with pytest.raises(AssertionError):
        check(seen, design, tensors)


def test_more_rounds_than_may_wait_lose_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "most_unprepared", PLACES)
    changes_drafts(tmp_path)


@pytest.mark.parametrize(("name", "queries"), [("DSpark", 0), ("DFlash2", 1)])
def test_a_round_computes_no_more_than_its_drafts_need(
    name: str, queries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions of each part of the head in each round: none in most rounds without drafts, those of all of them at once in one
    of PLACES, and a block of the round's own K. Prefill writes the context of all prompts in any case.

    queries  of a block besides its drafts
    """
    design = design_of(**DESIGNS[name])
    head, found, rounds = loaded(tmp_path, design, random_block(design)), list[dict[str, int]](), list[int]()

    def noted(owner: type, method: str, part: str, index: int, size: Callable[[Any], int] = len) -> None:
        whole = getattr(owner, method)

        def counted(*args: Any, **options: Any) -> Any:
            found[-1][part] = found[-1].get(part, 0) + size(args[index])
            return whole(*args, **options)

        monkeypatch.setattr(owner, method, counted)

    noted(BlockHead, "features", "fc", 1)
    noted(BlockHead, "keep_all", "K and V", 1)
    noted(BlockHead, "block_layer", "layers", 2)
    noted(DraftOutput, "logits", "logits", 1)
    noted(DraftOutput, "choose", "logits", 1)
    whole_round = Round.run

    def round_of(self: Round, rows: Any, mode: Any, draft_len: int, *others: Any, **options: Any) -> Any:
        found.append({})
        rounds.append(draft_len)
        return whole_round(self, rows, mode, draft_len, *others, **options)

    monkeypatch.setattr(Round, "run", round_of)
    lengths = (2, *(0,) * (2 * PLACES + 3), 3, 1)
    engine = engine_of(cycle(lengths), Recorded(head, TARGET(), K, slots=SLOTS), max_len=96)
    found.append({})
    requests = [request(i, [i, 5, 7, 1 + i], cap=60) for i in range(SLOTS)]
    list(engine.run(iter(requests)))
    assert found[0] == {"fc": 4 * SLOTS, "K and V": 4 * SLOTS}
    own, layers = found[1 : 1 + len(lengths)], design.layers

    def drafted(k: int) -> dict[str, int]:
        context = SLOTS * (k + 1)
        return {"layers": layers * SLOTS * (k + queries), "logits": SLOTS * k, "fc": context, "K and V": context}

    waited = {"fc": SLOTS * PLACES, "K and V": SLOTS * PLACES}
    without: list[dict[str, int]] = [{}] * (PLACES - 1)
    assert rounds[: len(lengths)] == list(lengths)
    assert own == [drafted(2), *without, waited, *without, waited, {}, {}, waited, drafted(3), drafted(1)]


def test_the_plan_has_memory_for_what_one_round_computes_of_eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each row that may be in a slot: gathered states, features before and after their norm, and K and V of all layers."""
    design = design_of(**DESIGNS["DSpark"])
    head, made = loaded(tmp_path, design, random_block(design)), list[int]()
    take, features, keep_all = WaitingStates.take, BlockHead.features, BlockHead.keep_all

    def taken(self: WaitingStates, *args: Any) -> Any:
        batch, states = take(self, *args)
        made[:] = [states.nbytes]
        return batch, states

    def features_of(self: BlockHead, states: Any) -> Any:
        found = features(self, states)
        made.extend([self._fc(states).nbytes, found.nbytes])
        return found

    def kept(self: BlockHead, found: Any, *args: Any) -> None:
        made.append(self._context(found).nbytes)
        keep_all(self, found, *args)

    for owner, method, then in (
        (WaitingStates, "take", taken), (BlockHead, "features", features_of), (BlockHead, "keep_all", kept)
    ):
        monkeypatch.setattr(owner, method, then)
    drafter = Recorded(head, TARGET(), K, slots=SLOTS)
    engine = engine_of(cycle((0,)), drafter, max_len=96)
    list(engine.run(iter([request(i, [i, 5, 7, 1 + i], cap=30) for i in range(SLOTS)])))
    assert len(made) == 4
    layers = drafter.layer_states(16)
    assert sum(made) == SLOTS * sum(layer.temporary_bytes for layer in layers)

    def slot_bytes(draft_layers: Any) -> int:
        return KVMemory.of(
            TARGET().spec, TARGET().dtype, draft_layers, page_size=16, max_len=96, max_tokens=100, lookahead=K, pass_tokens=7,
            num_verified=K,
        ).slot_bytes

    kept_bytes = sum(layer.row_bytes for layer in layers)
    assert SLOTS * (slot_bytes(layers) - slot_bytes(()) - kept_bytes) == sum(made)


def speed(rates: tuple[float, ...], most: int | None, *, plain: float, taking: float, step: float) -> float:
    """Of 1,000 rounds whose K is chosen, relative to a job without drafts, whose rounds cost 1.

    rates  share of rows that accept draft k after those before it
    most   `Drafter.most_unprepared`
    plain, taking  cost of a round without drafts that prepares none, and of one that prepares some. One with K: 1.08 + step K
    """
    rng, lengths, rows = np.random.default_rng(0), DraftLengths(len(rates)), 64
    costs = {(0, False): plain, (0, True): taking} | {(k, True): 1.08 + step * k for k in range(1, len(rates) + 1)}
    for (k, prepares), cost in costs.items():
        lengths.set_base(rows, k, cost, prepare_next=prepares)
    tokens = seconds = unprepared = 0.0
    for _ in range(1000):
        width, drafts_next = lengths.choose(rows, 1000)
        k = width.draft_len
        prepares = k > 0 or drafts_next or unprepared == most
        unprepared = 0 if prepares else unprepared + 1
        accepted = np.cumprod(rng.random((rows, k)) < np.array(rates[:k]), axis=1).sum(axis=1, dtype=np.int32)
        lengths.observe(k, accepted)
        lengths.timed(rows, k, 1000, costs[k, prepares], prepare_next=prepares)
        tokens, seconds = tokens + 1 + float(accepted.mean()), seconds + costs[k, prepares]
    return tokens / seconds


@pytest.mark.parametrize("step", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("rates", [(0.45, 0.2, 0.1, 0.05, 0.02), (0.1, 0.02, 0.01, 0.01, 0.01)])
def test_drafts_that_fail_cost_less_than_two_percent(rates: tuple[float, ...], step: float) -> None:
    """By the weights that passes read: fc and the K/V products of 5 layers are 1.6 % of an 8B model's, launches and writes about
    0.4 %. What is put off costs one launch, and eight times the positions, and as many weights, in one round of eight."""
    assert speed(rates, Recorded.most_unprepared, plain=1.003, taking=1.028, step=step) > 0.98
    if step == 0.4:
        assert speed(rates, 0, plain=1.02, taking=1.02, step=step) < 0.98, "computing it in every round would cost as much"


@pytest.mark.parametrize("rank", [0, 3])
def test_a_plain_round_puts_nothing_off(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where K is not chosen, every round drafts."""
    design = design_of(rank=rank)
    calls = list[str]()
    for method in ("put", "take"):
        monkeypatch.setattr(WaitingStates, method, lambda *_, method=method: calls.append(method))
    drafter = Recorded(loaded(tmp_path, design, random_block(design)), TARGET(), 2, slots=SLOTS)
    engine = make_engine(TARGET(), drafter, packed(SLOTS, num_verified=2, max_len=40), device=DEVICE, options=RoundOptions())
    assert len(list(engine.run(iter(mixed_requests())))) == 5
    assert calls == []

