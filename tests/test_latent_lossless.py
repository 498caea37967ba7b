"""Of a target with latent attention too, tokens depend on the request alone: not on drafter, K, slots, preemption or order.

As in test_lossless.py: the reference decodes each request by itself, each token anew from the first one, in float64. There the
layers expand keys and values in nearly every pass; rounds absorb them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.slots.expected_pages import ExpectedPages
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams
from tests.engines import VOCAB, ForcedDrafter, decode, make_engine, packed, plain_tokens, request, tiny_spec, tiny_target
from tests.gpu_jobs.entry_points import nothing, of_prompt
from tests.latents import CPU, latent_target
from tests.row_lengths import LENGTHS
from tests.test_lossless import SAMPLINGS, few_tokens, lookup

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

__all__ = ["few_tokens"]


@cache
def head() -> Head:
    return dummy_head(dummy_spec(tiny_spec(), draft_vocab_size=19, parallel=True), dtype=torch.float64, device=CPU)


def drafter_of(name: str, draft_len: int, slots: int, outputs: dict[int, list[int]]) -> Drafter:
    target = latent_target()
    match name:
        case "none":
            return NoDrafter()
        case "lookup":
            return lookup(draft_len, 3, 40)
        case "window":
            return WindowDrafter(target, draft_len, slots=slots, window=6, sink=2)
        case "eagle3":
            return ChainDrafter(head(), target, draft_len, slots=slots)
        case "parallel":
            return ParallelDrafter(head(), target, draft_len, slots=slots)
        case "hybrid":
            chain = ChainDrafter(head(), target, draft_len, slots=slots)
            return HybridDrafter(chain, lookup(draft_len, 3, 0), slots=slots, device=CPU)
        case "pard" | "pard with latents":
            model = tiny_target(window=3) if name == "pard" else target
            pard = PardModel(PardSpec(model=model.spec, mask_token_id=VOCAB - 1), model)
            return PardDrafter(pard, target.spec, draft_len, slots=slots, parallel=draft_len > 1)
        case _:
            return ForcedDrafter(draft_len, outputs, right=name == "right", fixed_len=draft_len % 2 == 0)


DRAFTERS = ("none", "lookup", "window", "eagle3", "parallel", "hybrid", "pard", "pard with latents", "right", "wrong")


@st.composite
def requests_of_a_job(draw: st.DrawFn) -> list[Request]:
    """Some prompts begin with the same tokens."""
    beginning, found = draw(st.lists(st.integers(0, VOCAB - 1), max_size=20)), []
    for index in range(draw(st.integers(1, 6))):
        own, cap = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)), draw(st.integers(1, 24))
        found.append(
            request(
                index, beginning + own if draw(st.booleans()) else own, cap=cap, sampling=draw(st.sampled_from(SAMPLINGS)),
                stop_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True))),
                stop=tuple(draw(st.lists(st.sampled_from(["A", "BC", "Z"]), max_size=1))), predicted=draw(st.integers(1, cap)),
            )
        )
    return draw(st.permutations(found))


def run(
    requests: Sequence[Request], batch: PackedBatch, drafter: Drafter, *, trusting: bool = False, lengths: int | None = None
) -> dict[str, Completion]:
    """trusting: rows enter slots as soon as there are pages for their prompts, so that pages run out and rows are preempted."""
    engine = make_engine(latent_target(), drafter, batch, device=CPU, decode=decode, lengths=lengths)
    with pytest.MonkeyPatch.context() as patch:
        if trusting:
            patch.setattr(ExpectedPages, "of_waiting", of_prompt)
            patch.setattr(ExpectedPages, "promised", nothing)
        return {done.request_id: done for done in engine.run(iter(requests))}


def tokens(done: dict[str, Completion]) -> dict[str, list[int]]:
    return {name: one.token_ids.tolist() for name, one in done.items() if one.token_ids is not None}


def expected(requests: Sequence[Request]) -> dict[str, list[int]]:
    return {one.request_id: plain_tokens(latent_target(), one) for one in requests}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=requests_of_a_job(), data=st.data())
def test_every_packing_and_drafter_gives_the_tokens_of_plain_decoding(requests: list[Request], data: st.DataObject) -> None:
    wanted = expected(requests)
    slots, draft_len = data.draw(st.sampled_from([1, 3, 8]), label="slots"), data.draw(st.integers(1, 6), label="K")
    outputs = {one.seed: wanted[one.request_id] for one in requests}
    drafter = drafter_of(data.draw(st.sampled_from(DRAFTERS), label="drafter"), draft_len, slots, outputs)
    longest = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
    page_size = data.draw(st.sampled_from([2, 4, 8]), label="page_size")
    scarce = 1 + -(-longest // page_size) + data.draw(st.integers(0, 6))
    batch = packed(
        slots, row_buckets=tuple(bucket for bucket in (1, 2, 3, 8) if bucket <= slots), page_size=page_size,
        num_pages=data.draw(st.sampled_from([scarce, 900]), label="pages"), max_len=longest, num_verified=drafter.draft_len,
        prefill_tokens=data.draw(st.sampled_from([5, 16, 300]), label="prefill_tokens"),
        run_ahead=data.draw(st.integers(0, 3), label="run_ahead"),
    )
    trusting, lengths = data.draw(st.booleans(), label="trusting"), data.draw(LENGTHS, label="lengths")
    assert tokens(run(requests, batch, drafter, trusting=trusting, lengths=lengths)) == wanted


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_that_are_preempted_go_on_as_if_they_had_not_been(name: str) -> None:
    """Four rows of up to 14 pages each have 29 together; two rows are drawn, the others greedy."""
    samplings = SamplingParams(temperature=1.0), SamplingParams()
    rows = [
        request(i, [(5 * i + j) % VOCAB for j in range(7)], cap=46, predicted=2, sampling=samplings[i > 1])
        for i in range(6)
    ]
    wanted = expected(rows)
    outputs = dict(zip((one.seed for one in rows), wanted.values(), strict=True))
    batch = packed(4, page_size=4, num_pages=30, max_len=56, num_verified=3, prefill_tokens=64, run_ahead=1)
    done = run(rows, batch, drafter_of(name, 3, 4, outputs), trusting=True, lengths=1)
    assert tokens(done) == wanted
    assert max(one.stats.num_prefills for one in done.values() if one.stats) > 1, "no row was preempted"


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "right"])
def test_rows_with_a_common_prefix_share_its_pages(name: str) -> None:
    prompt = [(3 * i * i + i) % VOCAB for i in range(40)]
    rows = [request(i, [*prompt[:33], i], cap=9 + i, sampling=SamplingParams(temperature=1.0)) for i in range(6)]
    outputs = {one.seed: plain_tokens(latent_target(), one) for one in rows}
    batch = packed(3, page_size=8, num_pages=60, max_len=64, num_verified=3, prefill_tokens=64)
    engine = make_engine(latent_target(), drafter_of(name, 3, 3, outputs), batch, device=CPU, decode=decode)
    done = {one.request_id: one for one in engine.run(iter(rows))}
    assert tokens(done) == expected(rows)
    assert engine.totals.cached_tokens == 5 * 32
