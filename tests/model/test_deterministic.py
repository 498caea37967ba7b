"""decode.deterministic: in bf16 too, tokens and logprobs are bit for bit those of the row alone.

On a CPU the kernels are interpreted, and a product of tiles sums in the order of K, as tensor cores do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.slots import expected_pages
from batchspec.kernels.attention import ordered_prefill, settings
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams
from tests.helpers.engines import DEVICE, decode, make_engine, packed, request, tiny_spec
from tests.helpers.interpreter import dots_of_one_order

pytestmark = pytest.mark.second

PART = 64
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.8, top_k=12, top_p=0.9),
    SamplingParams(repetition_penalty=1.2),
)
Tokens = dict[str, tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of 64 keys, so that rows of a hundred tokens have several; products in one order, which a GPU has by itself."""
    monkeypatch.setattr(ordered_prefill, "PART", PART)
    monkeypatch.setattr(settings, "PART", PART)
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 4)
    with nullcontext() if DEVICE.type == "cuda" else dots_of_one_order():
        yield


@cache
def target(window: int | None = None) -> Target:
    spec = tiny_spec(window, hidden_size=32, head_dim=16, intermediate_size=48, vocab_size=61, max_len=512, dtype="bfloat16")
    return Target.load(Path(), spec.in_one_order(), dtype=torch.bfloat16, device=DEVICE, dummy=True)


@cache
def head(parallel: bool) -> Head:
    spec = dummy_spec(target().spec, draft_vocab_size=41, parallel=parallel)
    return dummy_head(replace(spec, aux_layer_ids=(0, 1, 2)), dtype=torch.bfloat16, device=DEVICE)


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    common = rng.integers(0, 61, 70).tolist()
    return [
        request(
            i, (common if i % 3 == 0 else []) + rng.integers(0, 61, length).tolist(), cap=int(rng.integers(4, 9)),
            sampling=SAMPLINGS[i % len(SAMPLINGS)], predicted=3,
        )
        for i, length in enumerate((1, 65, 20, 75, 7))
    ]


def run(
    asked: list[Request], batch: PackedBatch, drafter: Drafter, own: Target, *, lengths: int | None = None
) -> tuple[Tokens, list[Completion]]:
    """Tokens, and the bits of their logprobs."""
    engine = make_engine(own, drafter, batch, device=DEVICE, logprobs=1, decode=decode, lengths=lengths)
    done = list(engine.run(iter(asked)))
    found = {}
    for one in done:
        assert one.token_ids is not None
        assert one.logprobs is not None
        found[one.request_id] = one.token_ids.tolist(), one.logprobs.tolist()
    return found, done


def shape(slots: int, **changes: int) -> PackedBatch:
    return packed(slots, max_len=240, **({"page_size": 16, "num_pages": 80} | changes))


@cache
def alone(window: int | None = None) -> Tokens:
    """Each request by itself, without drafts, its prompt in one pass."""
    return run(requests(), shape(1, prefill_tokens=256), NoDrafter(), target(window))[0]


def drafter_of(name: str, slots: int, draft_len: int) -> Drafter:
    match name:
        case "lookup":
            return LookupDrafter(draft_len, min_ngram=1, max_ngram=3)
        case "chain":
            return ChainDrafter(head(False), target(), draft_len, slots=slots)
        case "parallel":
            return ParallelDrafter(head(True), target(), draft_len, slots=slots)
        case "window":
            return WindowDrafter(target(), draft_len, slots=slots, window=9, sink=2)
    return NoDrafter()


SLOW = (("lookup", 4), ("chain", 1), ("parallel", 2), ("window", 3))


@pytest.mark.parametrize(
    ("name", "draft_len"), [("none", 0), ("chain", 3), *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW)]
)
def test_tokens_and_logprobs_are_those_of_the_row_alone_with_any_drafter(name: str, draft_len: int) -> None:
    """And however many drafts a round verifies."""
    batch = shape(4, prefill_tokens=48, num_verified=draft_len)
    found, done = run(requests(), batch, drafter_of(name, 4, draft_len), target(), lengths=2)
    assert found == alone()
    if draft_len > 1:
        assert sum(one.stats.num_accepted for one in done if one.stats is not None) > 0


@pytest.mark.parametrize(("name", "draft_len"), [("none", 0), ("lookup", 3), pytest.param("chain", 3, marks=pytest.mark.slow)])
def test_preemption_changes_no_bit(name: str, draft_len: int) -> None:
    """Generated positions are prefilled again then: prefill and rounds agree, however many drafts these verify. Nor does the size
    of pages."""
    rng = np.random.default_rng(4)
    asked = [request(i, rng.integers(0, 61, 66).tolist(), cap=24, predicted=3) for i in range(2)]
    batch = shape(2, prefill_tokens=256, page_size=4, num_pages=43, num_verified=draft_len)
    found, done = run(asked, batch, drafter_of(name, 2, draft_len), target(), lengths=2)
    assert sum(one.stats.num_prefills for one in done if one.stats is not None) > len(done)
    assert found == run(asked, shape(1, prefill_tokens=256), NoDrafter(), target())[0]


def test_a_run_that_is_stopped_resumes_with_the_same_tokens() -> None:
    """In another engine, with other drafts, draft lengths and slots."""
    found: dict[str, list[int]] = {}
    left = {one.request_id: one for one in requests()}
    for slots, drafter in ((4, NoDrafter()), (3, LookupDrafter(3, min_ngram=1, max_ngram=3))):
        batch = shape(slots, prefill_tokens=100, num_verified=drafter.draft_len)
        engine = make_engine(target(), drafter, batch, device=DEVICE, decode=decode, lengths=3)
        if not drafter.draft_len:

            def stop(totals: EngineTotals, engine: Engine = engine) -> None:
                if totals.rounds >= 2:
                    engine.stop()

            engine.on_round = stop
        for one in engine.run(iter(list(left.values()))):
            assert one.token_ids is not None
            found[one.request_id] = one.token_ids.tolist()
            del left[one.request_id]
        unfinished = engine.unfinished()
        assert bool(unfinished) == (not drafter.draft_len)
        for snapshot in unfinished:
            left[f"r{snapshot.row_index}"] = replace(left[f"r{snapshot.row_index}"], resumed=snapshot)
    assert found == {name: tokens for name, (tokens, _) in alone().items()}


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4])
def test_layers_with_windows_have_one_order_too(slots: int) -> None:
    drafter = LookupDrafter(3, min_ngram=1, max_ngram=3)
    assert run(requests(), shape(slots, prefill_tokens=70, num_verified=3), drafter, target(20))[0] == alone(20)
