"""With layers of any kind tokens depend on the request alone: not on drafter, K, slots, preemption or order.

As in test_lossless.py: the reference decodes each request by itself, each token anew from the first one, in float64. There
recurrent layers take all tokens in chunks, never one after another, latent attention expands keys and values in nearly every
pass, and nothing is kept. This is the contract that each kind of layer must keep (`batchspec/model/layers/kind.py`); each brings
the faults that must break it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.executor import Executor
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.slots.expected_pages import ExpectedPages
from batchspec.model.layers.kind import Computing
from batchspec.model.layers.latent import attend
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams
from tests.engine.test_lossless import SAMPLINGS, few_tokens, lookup
from tests.gpu_jobs.entry_points import nothing, of_prompt
from tests.helpers.block_heads import tiny_block
from tests.helpers.engines import (
    DEVICE,
    VOCAB,
    ForcedDrafter,
    decode,
    make_engine,
    packed,
    plain_rows,
    request,
    tiny_spec,
    tiny_target,
)
from tests.helpers.latents import E4M3_FAULTS, LATENT_FAULTS, latent_target
from tests.helpers.padded_prefill import padded_passes
from tests.helpers.recurrent import FAULTS, PREFIX_FAULTS, recurrent_target
from tests.helpers.row_lengths import LENGTHS
from tests.helpers.short_convs import CONV_FAULTS, conv_target
from tests.helpers.state_spaces import MAMBA_FAULTS, mamba_target, parallel_target

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

__all__ = ["few_tokens"]


class Kind(NamedTuple):
    """A kind of layer."""

    target: Callable[..., Target]
    """A model with such layers. Those that keep row tensors are around one that attends, with a window of `window` keys."""
    faults: Mapping[str, Callable[[pytest.MonkeyPatch], None]]
    """What may go wrong in what they keep and how they read it."""
    passes: Sequence[int] = (64, 100, 300)
    """Lengths of prefill passes."""

    @property
    def drafters(self) -> list[str]:
        spec = self.target(window=None).spec
        found = ["none", "lookup", "eagle3", "parallel", "block", "hybrid", "pard", "right", "wrong"]
        found += [] if spec.refuses("self_draft") else ["window"]
        return found + ([] if spec.refuses("drafter") else ["pard of this kind"])


KINDS = {
    "gated delta": Kind(recurrent_target, FAULTS), "short convolution": Kind(conv_target, CONV_FAULTS),
    "mamba2": Kind(mamba_target, MAMBA_FAULTS), "parallel": Kind(parallel_target, MAMBA_FAULTS),
    "latent": Kind(lambda window: latent_target(), LATENT_FAULTS, (5, 16, 300)),
    "latent in e4m3": Kind(lambda window: latent_target(fp8=True), E4M3_FAULTS, (5, 16, 300)),
}
LATENT = ("latent", "latent in e4m3")
WITH_ROW_TENSORS = ("gated delta", "short convolution", "mamba2", "parallel")
DRAFTERS = [(kind, name) for kind, own in KINDS.items() for name in own.drafters]


def target_of(kind: str, window: int | None = None) -> Target:
    return KINDS[kind].target(window=window)


@cache
def head(kind: str) -> Head:
    like = tiny_spec() if kind in LATENT else target_of(kind).spec  # heads attend as the model does, or as any
    spec = dummy_spec(like, draft_vocab_size=19, parallel=True)
    return dummy_head(spec, dtype=torch.float64, device=target_of(kind).device)


def drafter_of(
    kind: str, name: str, draft_len: int, slots: int, outputs: dict[int, list[int]], window: int | None = None
) -> Drafter:
    target = target_of(kind, window)
    match name:
        case "none":
            return NoDrafter()
        case "lookup":
            return lookup(draft_len, 3, 40)
        case "eagle3":
            return ChainDrafter(head(kind), target, draft_len, slots=slots)
        case "parallel":
            return ParallelDrafter(head(kind), target, draft_len, slots=slots)
        case "block":
            like = tiny_spec() if kind in LATENT else target.spec
            return BlockDrafter(tiny_block(like, from_anchor=draft_len % 2 == 0), target, draft_len, slots=slots)
        case "hybrid":
            chain = ChainDrafter(head(kind), target, draft_len, slots=slots)
            return HybridDrafter(chain, lookup(draft_len, 3, 0), slots=slots, device=target.device)
        case "window":
            return WindowDrafter(target, draft_len, slots=slots, window=3, sink=1)
        case "pard" | "pard of this kind":
            model = tiny_target(window=3) if name == "pard" else target
            pard = PardModel(PardSpec(model=model.spec, mask_token_id=VOCAB - 1), model)
            return PardDrafter(pard, target.spec, draft_len, slots=slots, parallel=draft_len > 1)
        case _:
            return ForcedDrafter(draft_len, outputs, right=name == "right", fixed_len=draft_len % 2 == 0)


@st.composite
def requests_of_a_job(draw: st.DrawFn) -> list[Request]:
    """Some prompts are longer than a chunk of the recurrence, and some begin with the same chunks."""
    beginning, found = draw(st.lists(st.integers(0, VOCAB - 1), max_size=9)) * draw(st.sampled_from([1, 10, 16])), []
    for index in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)) * draw(st.sampled_from([1, 1, 6]))
        cap = draw(st.integers(1, 24))
        found.append(
            request(
                index, beginning + own if draw(st.booleans()) else own, cap=cap, sampling=draw(st.sampled_from(SAMPLINGS)),
                stop_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True))),
                stop=tuple(draw(st.lists(st.sampled_from(["A", "BC", "Z"]), max_size=1))), predicted=draw(st.integers(1, cap)),
            )
        )
    return draw(st.permutations(found))


def run(
    kind: str, requests: Sequence[Request], batch: PackedBatch, drafter: Drafter, *, trusting: bool = False,
    window: int | None = None, lengths: int | None = None,
) -> dict[str, Completion]:
    """trusting: rows enter slots as soon as there are pages for their prompts, so that pages run out and rows are preempted."""
    target = target_of(kind, window)
    engine = make_engine(target, drafter, batch, device=target.device, decode=decode, lengths=lengths)
    with pytest.MonkeyPatch.context() as patch:
        if trusting:
            patch.setattr(ExpectedPages, "of_waiting", of_prompt)
            patch.setattr(ExpectedPages, "promised", nothing)
        return {done.request_id: done for done in engine.run(iter(requests))}


def tokens(done: dict[str, Completion]) -> dict[str, list[int]]:
    return {name: one.token_ids.tolist() for name, one in done.items() if one.token_ids is not None}


def expected(
    kind: str, requests: Sequence[Request], window: int | None = None, guesses: Mapping[str, Sequence[int]] | None = None
) -> dict[str, list[int]]:
    return plain_rows(target_of(kind, window), requests, guesses)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=requests_of_a_job(), data=st.data())
def test_every_packing_and_drafter_gives_the_tokens_of_plain_decoding(
    kind: str, requests: list[Request], data: st.DataObject
) -> None:
    window = data.draw(st.sampled_from([None, 5]), label="window")
    slots, draft_len = data.draw(st.sampled_from([1, 3, 8]), label="slots"), data.draw(st.integers(1, 6), label="K")
    name = data.draw(st.sampled_from(KINDS[kind].drafters), label="drafter")
    wanted = expected(kind, requests, window) if name in ("right", "wrong") else {}
    outputs = {one.seed: wanted[one.request_id] for one in requests if wanted}
    drafter = drafter_of(kind, name, draft_len, slots, outputs, window)
    longest = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
    page_size = data.draw(st.sampled_from([2, 4, 8]), label="page_size")
    scarce = 1 + -(-longest // page_size) + data.draw(st.integers(0, 6))
    batch = packed(
        slots, row_buckets=tuple(bucket for bucket in (1, 2, 3, 8) if bucket <= slots), page_size=page_size,
        num_pages=data.draw(st.sampled_from([scarce, 900]), label="pages"), max_len=longest, num_verified=drafter.draft_len,
        prefill_tokens=data.draw(st.sampled_from(KINDS[kind].passes), label="prefill_tokens"),
        run_ahead=data.draw(st.integers(0, 3), label="run_ahead"),
    )
    trusting, lengths = data.draw(st.booleans(), label="trusting"), data.draw(LENGTHS, label="lengths")
    found = tokens(run(kind, requests, batch, drafter, trusting=trusting, window=window, lengths=lengths))
    assert found == expected(kind, requests, window, found)


def jobs() -> list[Request]:
    """Rows with one beginning and outputs of different lengths, more than there are slots."""
    samplings = (SamplingParams(), SamplingParams(temperature=1.0))
    return [
        request(i, [(7 * i + j) % VOCAB for j in range(3 + 11 * i)], cap=16 + 3 * (i % 4), sampling=samplings[i % 2], predicted=2)
        for i in range(8)
    ]


def drafted(
    kind: str, name: str, requests: list[Request], *, pages: int = 900, lengths: int | None = None
) -> dict[str, Completion]:
    outputs = dict(zip((one.seed for one in requests), expected(kind, requests).values(), strict=True))
    batch = packed(4, page_size=4, num_pages=pages, max_len=128, num_verified=3, prefill_tokens=64, run_ahead=1)
    return run(kind, requests, batch, drafter_of(kind, name, 3, 4, outputs), trusting=True, lengths=lengths)


@pytest.mark.parametrize(("kind", "name"), DRAFTERS)
def test_rows_that_are_preempted_go_on_as_if_they_had_not_been(kind: str, name: str) -> None:
    """Four rows of 18 pages each have 39 together."""
    rows = [request(i, [(5 * i + j) % VOCAB for j in range(7)], cap=64, predicted=2) for i in range(6)]
    done = drafted(kind, name, rows, pages=40, lengths=1)
    assert tokens(done) == expected(kind, rows)
    assert max(one.stats.num_prefills for one in done.values() if one.stats) > 1, "no row was preempted"


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, own in KINDS.items() for fault in own.faults])
def test_a_fault_in_what_layers_keep_changes_tokens(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(kind, jobs())
    assert tokens(drafted(kind, "wrong", jobs())) == tokens(drafted(kind, "right", jobs())) == wanted
    KINDS[kind].faults[fault](monkeypatch)
    found = [tokens(drafted(kind, name, jobs())) != wanted for name in ("right", "none", "wrong")]
    assert any(found), fault


def test_rounds_of_latent_attention_absorb_and_prefills_expand(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(form: Callable[..., Tensor], seen: list[int], q: Tensor, *args: Any) -> Tensor:
        seen.append(len(q))
        return form(q, *args)

    sizes: dict[str, list[int]] = {"absorbed": [], "expanded": []}
    for form, seen in sizes.items():
        monkeypatch.setattr(attend, form, partial(noted, getattr(attend, form), seen))
    drafted("latent", "right", jobs())
    assert 4 in sizes["absorbed"], "a round with three drafts"
    assert max(sizes["expanded"]) > 10


@pytest.mark.parametrize("kind", WITH_ROW_TENSORS)
def test_a_round_with_more_drafts_than_its_rings_have_room_for_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computing = ModelSpec.computing

    def with_smaller_k(spec: ModelSpec, dtype: torch.dtype, page_size: int = 1, *, draft_len: int) -> Computing:
        return computing(spec, dtype, page_size, draft_len=max(0, draft_len - 1))

    monkeypatch.setattr(ModelSpec, "computing", with_smaller_k)
    with pytest.raises((AssertionError, ValueError), match=r"\(4, 4, .*6|rings of 6 positions for 4 tokens"):
        drafted(kind, "wrong", jobs())


def test_a_batch_that_was_planned_for_fewer_drafts_than_the_drafters_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"ChainShape\(draft_len=3\), 2"):
        Executor(tiny_target(), lookup(3, 3, 0), packed(4, num_verified=2), device=DEVICE, options=RoundOptions())


@pytest.mark.parametrize("name", ["right", "wrong", "window"])
def test_passes_of_prompts_may_be_padded_for_short_convolutions(name: str) -> None:
    wanted = expected("short convolution", jobs())
    with padded_passes() as shapes:
        assert tokens(drafted("short convolution", name, jobs())) == wanted
    assert shapes


def samples() -> list[Request]:
    """Of one prompt of more than two chunks, and rows that have its first chunk alone in common with them."""
    prompt = [(3 * i * i + i) % VOCAB for i in range(140)]
    hot = SamplingParams(temperature=1.0)
    found = [request(i, prompt, cap=9 + i, sampling=hot) for i in range(5)]
    return found + [request(5 + i, [*prompt[:70], i, 3], cap=9, sampling=hot) for i in range(4)]


def sampled(kind: str, name: str) -> tuple[dict[str, list[int]], int]:
    """The tokens, and the number of prompt tokens whose K/V and states were taken over."""
    outputs = {one.seed: expected(kind, samples())[one.request_id] for one in samples()}
    batch = packed(4, page_size=16, num_pages=90, max_len=200, num_verified=3, prefill_tokens=100)
    target = target_of(kind)
    engine = make_engine(target, drafter_of(kind, name, 3, 4, outputs), batch, device=target.device, decode=decode)
    done = {one.request_id: one for one in engine.run(iter(samples()))}
    return tokens(done), engine.totals.cached_tokens


@pytest.mark.parametrize(("kind", "name"), DRAFTERS)
def test_rows_with_a_common_prefix_take_over_what_is_kept_of_it(kind: str, name: str) -> None:
    found, cached = sampled(kind, name)
    assert found == expected(kind, samples())
    # Four samples take over two chunks. The first of the other rows finds no state after one chunk and leaves it for the rest;
    # pages it finds.
    assert cached == 4 * 128 + (3 if kind in WITH_ROW_TENSORS else 4) * 64


@pytest.mark.parametrize("kind", WITH_ROW_TENSORS)
@pytest.mark.parametrize("fault", PREFIX_FAULTS)
def test_a_fault_in_the_states_of_prefixes_changes_tokens(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PREFIX_FAULTS[fault](monkeypatch)
    assert sampled(kind, "none")[0] != expected(kind, samples())


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_without_drafts_between_rounds_with_drafts_lose_nothing(kind: str) -> None:
    """Lookup drafts for some rows of a round and none for others, and rounds without any draft follow each other."""
    rows = [request(i, [3, 4, 5, 6] * (3 + i), cap=30) for i in range(3)] + [request(3 + i, [9 + i], cap=30) for i in range(3)]
    batch = packed(4, page_size=4, num_pages=400, max_len=96, num_verified=4, prefill_tokens=64)
    done = run(kind, rows, batch, lookup(4, 3, 0))
    assert tokens(done) == expected(kind, rows)
    stats = [one.stats for one in done.values() if one.stats]
    assert any(one.num_drafted == 0 or one.drafted_at[0] < one.num_rounds for one in stats)
    assert any(one.num_accepted for one in stats)
