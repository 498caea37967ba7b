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
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.weights import Head, dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine import allocator
from batchspec.engine.engine import Engine
from batchspec.engine.round import RoundOptions
from batchspec.kernels.attention import ordered_prefill, settings
from batchspec.model.target import Target
from batchspec.records import Completion, PackedBatch, Request, SamplingParams
from tests.engines import DEVICE, decode, packed, request, tiny_spec
from tests.interpreter import dots_of_one_order

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
    """Parts of 64 keys, so that rows of two hundred tokens have several; products in one order, which a GPU has by itself."""
    monkeypatch.setattr(ordered_prefill, "PART", PART)
    monkeypatch.setattr(settings, "PART", PART)
    monkeypatch.setattr(allocator, "SHORT_CAP_TOKENS", 4)
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
    common = rng.integers(0, 61, 80).tolist()
    lengths = (1, 63, 64, 65, 90, 130, 7, 20)
    return [
        request(
            i, (common if i % 3 == 0 else []) + rng.integers(0, 61, length).tolist(), cap=int(rng.integers(4, 12)),
            sampling=SAMPLINGS[i % len(SAMPLINGS)], predicted=3,
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip


def run(asked: list[Request], batch: PackedBatch, drafter: Drafter, own: Target) -> tuple[Tokens, list[Completion]]:
    options = RoundOptions(logprobs=1)
    engine = Engine(own, drafter, batch, device=DEVICE, options=options, decode=decode, penalties=True)
    done = list(engine.run(iter(asked)))
    found = {}
    for one in done:
        assert one.token_ids is not None
        assert one.logprobs is not None
        found[one.request_id] = one.token_ids.tolist(), one.logprobs.tolist()
    return found, done


def shape(slots: int, **changes: int) -> PackedBatch:
    return packed(slots, page_size=16, max_len=240, num_pages=80, **changes)


@cache
def alone(window: int | None = None) -> Tokens:
    """Each request by itself, without drafts, its prompt in one pass."""
    return run(requests(), shape(1, prefill_tokens=256), NoDrafter(), target(window))[0]


DRAFTERS = ("none", "lookup", "chain", "parallel", "window")


def drafter(name: str, slots: int, draft_len: int) -> Drafter:
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


@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_and_logprobs_are_those_of_the_row_alone_for_every_drafter(name: str) -> None:
    found, done = run(requests(), shape(5, prefill_tokens=48), drafter(name, 5, 3), target())
    assert found == alone()
    if name != "none":
        assert sum(one.stats.num_accepted for one in done if one.stats is not None) > 0
