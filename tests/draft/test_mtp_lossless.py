"""With the MTP drafter, tokens depend on the request alone: not on K, slots, preemption, what other rows ask for, or ranks.

Ranks are threads here; test_recurrent_jobs.py has them as processes.

In float64, with random layers, nearly all of whose drafts are rejected, and with those of tests/helpers/mtp_exact.py, whose
drafts are accepted always or often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec.batch.automata import AutomataCapacity
from batchspec.checkpoint.files import LocalFiles
from batchspec.distributed.collectives import Collectives
from batchspec.draft.base import Drafter
from batchspec.draft.frequent_tokens import FrequentTokens
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.mtp_head import Mtp, MtpShape, dummy_mtp
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.records import RoundOptions
from batchspec.model.layers.base import Shard
from batchspec.model.spec import read_spec, tokens_of
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from batchspec.records import Completion, Request, SamplingParams
from tests.engine.test_lossless_combined import Rule, jobs
from tests.helpers.automata import BEGIN, END, VOCABULARY, automaton
from tests.helpers.drafting import Proposals
from tests.helpers.engines import DEVICE, VOCAB, decode, make_engine, plain_rows, request
from tests.helpers.grammars import ExpandLate, Grammar
from tests.helpers.interpreter import dots_of_one_order
from tests.helpers.mtp_checkpoints import EXPERTS, SAYS_MTP, SHAPE, make_mtp_model
from tests.helpers.mtp_drafting import CHUNK, Recorded, drafter_spec, load_model, mixed_requests, run, trusting, wide_batch
from tests.helpers.mtp_exact import make_exact_model
from tests.helpers.ranks import on_ranks
from tests.helpers.recurrent import LoudNoise
from tests.helpers.row_lengths import LENGTHS
from tests.model.test_layers_lossless import requests_of_a_job
from tests.model.test_lora_lossless import NUM_ADAPTERS, RANK, StrongAdapters
from tests.text.test_thinking import thinking

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A target and the weights of its MTP layer."""

    target: Target
    weights: Mtp

    def drafter(self, draft_len: int, slots: int, **options: Any) -> MtpDrafter:
        return MtpDrafter(self.weights, self.target, draft_len, slots=slots, **options)


def loaded(folder: Path, ranks: Collectives | None = None) -> Pair:
    """Of a checkpoint, all of it or a rank's part."""
    model = load_model(folder, ranks=ranks)
    return Pair(model.target, model.weights)


def adapted(family: str, config: dict[str, Any]) -> Pair:
    """A model of noise whose rows have adapters, which change most tokens; its MTP layer has none."""
    spec = read_spec({"model_type": family, **SHAPE, **SAYS_MTP, **config, "vocab_size": VOCAB}, "config.json")
    adapters = StrongAdapters.of(spec, NUM_ADAPTERS, RANK)
    stacks = adapters.load(spec, dtype=torch.float64, device=DEVICE)
    weights = LoudNoise(spec, dtype=torch.float64, device=DEVICE)
    target = Target(spec.with_lora(adapters.shape), weights, DEVICE, lora=stacks)
    assert spec.mtp is not None
    return Pair(target, dummy_mtp(MtpShape.of(spec, spec.mtp), dtype=torch.float64, device=DEVICE))


MODELS: dict[str, Callable[[Path], Pair]] = {
    "dense": lambda folder: loaded(make_mtp_model(folder, "dense")),
    "experts": lambda folder: loaded(make_mtp_model(folder, "experts, fused")),
    "next": lambda folder: loaded(make_mtp_model(folder, "next")),
    "fp8": lambda folder: loaded(make_mtp_model(folder, "fp8, mtp plain and not listed")),
    "glm": lambda folder: loaded(make_mtp_model(folder, "glm")),
    "latents": lambda folder: loaded(make_mtp_model(folder, "glm, latents")),
    "deepseek, fp8": lambda folder: loaded(make_mtp_model(folder, "deepseek, fp8, fc plain and not listed")),
    "nemotron": lambda folder: loaded(make_mtp_model(folder, "nemotron")),
    "exact": lambda folder: loaded(make_exact_model(folder)),
    "often right": lambda folder: loaded(make_exact_model(folder, noise=0.05)),
    "adapters, experts": lambda folder: adapted("qwen3_next", EXPERTS),
}
ADAPTED = ("adapters, experts",)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return cache(lambda name: MODELS[name](tmp_path_factory.mktemp("model")))


# --- rows of any kind against the definition


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ADAPTED])
@settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))
@given(requests=requests_of_a_job(), data=st.data())
def test_every_packing_gives_the_tokens_of_plain_decoding(
    name: str, pair_of: Callable[[str], Pair], requests: list[Request], data: st.DataObject
) -> None:
    pair = pair_of(name)
    slots, draft_len = data.draw(st.sampled_from([1, 3, 8]), label="slots"), data.draw(st.integers(1, 8), label="K")
    flags: dict[str, Any] = {
        key: data.draw(st.booleans(), label=key) for key in ("dead_positions", "uniform_slots", "argmax", "fp8_kv")
    }
    drafter = pair.drafter(draft_len, slots, window=data.draw(st.sampled_from([None, 3]), label="window"), **flags)
    longest = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
    page_size = data.draw(st.sampled_from([2, 4, 8]), label="page_size")
    scarce = 2 + -(-longest // page_size) + data.draw(st.integers(0, 6))
    batch = wide_batch(
        slots, draft_len, row_buckets=tuple(size for size in (1, 2, 3, 8) if size <= slots), page_size=page_size,
        num_pages=data.draw(st.sampled_from([scarce, 900]), label="pages"), max_len=longest,
        prefill_tokens=data.draw(st.sampled_from([CHUNK, 100, 300]), label="prefill_tokens"),
        run_ahead=data.draw(st.integers(0, 3), label="run_ahead"),
    )
    with trusting():
        found = run(pair.target, requests, batch, drafter, lengths=data.draw(LENGTHS, label="lengths")).tokens
    assert found == plain_rows(pair.target, requests, found)


# --- all that rows may ask for, against rows without drafts


Asked = list[tuple[Request, Rule]]
ROOM = AutomataCapacity(num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14, lazy_words=1 << 14, lazy_masks_bytes=256)


@st.composite
def asked_rows(draw: st.DrawFn) -> Asked:
    """Those of test_lossless_combined.py, and some whose thoughts have a budget, constrained ones among them."""
    found: Asked = []
    for one, rule in draw(jobs()):
        if not isinstance(rule, Grammar) and draw(st.booleans()):
            opened = draw(st.sampled_from([True, False]))
            own = thinking(draw(st.integers(0, 6)), opened=opened, closing=draw(st.sampled_from([(), (11,)])), begin=BEGIN)
            one = replace(one, thinking=replace(own, end_id=END, closing=(*own.closing[:-1], END)))
            if rule is not None:
                made = automaton(rule, thinks=True)
                one = replace(one, automaton=made, automaton_state=made.thought if opened else made.answer)
        found.append((one, rule))
    return found


Outcome = tuple[list[int] | None, str]


def outcome(done: Completion) -> Outcome:
    if done.error is not None:
        assert done.error.code == "no_token_left" or "its bad_words do not forbid" in done.error.message, done.error
    return None if done.token_ids is None else done.token_ids.tolist(), done.finish_reason


def engine_of(pair: Pair, drafter: Drafter, batch: Any, late: ExpandLate, lengths: int | None = None) -> Engine:
    return make_engine(
        pair.target, drafter, batch, device=DEVICE, decode=decode, vocabulary=VOCABULARY, automata_capacity=ROOM, expanding=late,
        lengths=lengths,
    )


def without_drafts(pair: Pair, requests: Sequence[Request]) -> dict[str, Outcome]:
    """Each row by itself."""
    batch = wide_batch(1, 0, num_pages=200)
    engine = engine_of(pair, NoDrafter(), batch, ExpandLate(0, lost=0.0))
    return {done.request_id: outcome(done) for done in engine.run(iter(requests))}


@pytest.mark.parametrize("name", ["adapters, experts", "often right", "next", "latents"])
@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(job=asked_rows(), data=st.data())
def test_rows_that_ask_for_all_at_once_have_the_tokens_of_rows_without_drafts(
    name: str, pair_of: Callable[[str], Pair], job: Asked, data: st.DataObject
) -> None:
    """Schemas, grammars, penalties, biases, bad words, stops, budgets of thoughts, adapters; and runs that are stopped."""
    pair = pair_of(name)
    requests = [one if name in ADAPTED else replace(one, adapter=0) for one, _ in job]
    longest = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
    left, found = {one.request_id: one for one in requests}, dict[str, Outcome]()
    stop_after = data.draw(st.sampled_from([None, None, 1, 4]), label="stop_after")
    for turn in range(9):
        slots, draft_len = data.draw(st.sampled_from([1, 4]), label="slots"), data.draw(st.integers(1, 5), label="K")
        drafter: Drafter = pair.drafter(draft_len, slots)
        if turn % 3 == 2:
            drafter = LookupDrafter(draft_len, min_ngram=1, max_ngram=3)
        scarce = 3 + -(-(longest + draft_len) // 4)
        batch = wide_batch(
            slots, draft_len, row_buckets=(1, 2, 4)[: 1 + 2 * (slots > 1)], max_len=longest,
            num_pages=data.draw(st.sampled_from([scarce, 400]), label="pages"), run_ahead=data.draw(st.integers(0, 2)),
        )
        late = ExpandLate(data.draw(st.integers(0, 9), label="late"), lost=data.draw(st.sampled_from([0.0, 0.2]), label="lost"))
        engine = engine_of(pair, drafter, batch, late, data.draw(LENGTHS, label="lengths"))

        def stop(totals: Any, engine: Engine = engine, last: int = (stop_after or 10**6) if turn < 8 else 10**6) -> None:
            if totals.rounds >= last:
                engine.stop()

        engine.on_round = stop
        with trusting():
            for done in engine.run(iter(list(left.values()))):
                found[done.request_id] = outcome(done)
                del left[done.request_id]
        for snapshot in engine.unfinished() if left else ():
            left[f"r{snapshot.row_index}"] = replace(left[f"r{snapshot.row_index}"], resumed=snapshot)
        if not left:
            break
    assert found == without_drafts(pair, requests)


@pytest.mark.parametrize("name", ["exact", "often right", "next"])
def test_sampled_drafts_that_use_the_noise_of_the_draws_are_accepted_more_often(
    name: str, pair_of: Callable[[str], Pair]
) -> None:
    pair = pair_of(name)
    hot = SamplingParams(temperature=8.0 if name != "next" else 50.0)
    requests = [request(i, [(7 * i + j) % 30 for j in range(12 + i)], cap=25, sampling=hot) for i in range(6)]
    accepted = []
    for coupled in (True, False):
        ran = run(pair.target, requests, wide_batch(3, 3), pair.drafter(3, 3), options=RoundOptions(coupled=coupled))
        assert ran.tokens == plain_rows(pair.target, requests, ran.tokens)
        accepted.append(sum(one.stats.num_accepted for one in ran.done.values() if one.stats))
    assert accepted[0] > 2 * accepted[1]


@pytest.mark.parametrize("name", ["dense", "exact", "latents", "nemotron"])
def test_rows_that_are_preempted_again_and_again_lose_nothing(name: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(name)
    hot = SamplingParams(temperature=1.0)
    requests = [
        request(i, [(5 * i + j) % 30 for j in range(11)], cap=60, sampling=hot if i % 2 else None, predicted=2) for i in range(6)
    ]
    with trusting():
        ran = run(pair.target, requests, wide_batch(4, 5, num_pages=40, run_ahead=2), pair.drafter(5, 4))
    assert max(one.stats.num_prefills for one in ran.done.values() if one.stats) > 1, "no row was preempted"
    assert ran.tokens == plain_rows(pair.target, requests, ran.tokens)


def test_in_bf16_with_sums_in_one_order_tokens_and_logprobs_have_the_bits_of_the_row_alone(tmp_path: Path) -> None:
    """decode.deterministic. On a CPU the kernels are interpreted."""
    make_mtp_model(tmp_path, "dense", hidden_size=32)
    spec = judge_model(LocalFiles(tmp_path)).in_one_order()
    rng, found = np.random.default_rng(0), []
    requests = [
        request(i, rng.integers(0, VOCAB, size).tolist(), cap=7, sampling=SamplingParams(temperature=0.9 * (i % 2)))
        for i, size in enumerate((5, 70, 20))
    ]
    with nullcontext() if DEVICE.type == "cuda" else dots_of_one_order():
        target = Target.load(tmp_path, spec, dtype=torch.bfloat16, device=DEVICE)
        weights = drafter_spec(tmp_path, spec).load(dtype=torch.bfloat16, device=DEVICE)
        for slots, drafter in ((1, NoDrafter()), (3, MtpDrafter(weights, target, 3, slots=3))):
            batch = wide_batch(slots, drafter.draft_len, page_size=16, num_pages=60, prefill_tokens=CHUNK * (1 + 3 // slots))
            ran = run(target, requests, batch, drafter, logprobs=1, lengths=2)
            found.append((ran.tokens, {name: bits_of(one) for name, one in ran.done.items()}))
    assert found[0] == found[1]


def bits_of(done: Completion) -> list[float]:
    assert done.logprobs is not None
    return [float(value) for value in done.logprobs]


# --- ranks


RANKED = (
    "dense", "experts, fused", "experts, one by one", "next", "wrapped", "dense, tied, biases, half of each head rotated", "glm",
    "glm, latents", "deepseek", "nemotron", "nemotron, narrow experts in groups, mtp plain in a file of its own",
)
KINDS = {
    "greedy": SamplingParams(), "drawn": SamplingParams(temperature=0.9, top_k=12, top_p=0.9, repetition_penalty=1.3),
}


def drafted(pair: Pair, kind: str, *, vocabulary: int | None = None) -> tuple[dict[str, list[int]], Proposals]:
    """What rows write, and what was drafted for them. vocabulary: number of tokens that may be drafted."""
    weights, spec = pair.weights, pair.target.spec
    ranks = 1 if spec.whole is None else spec.shard.ranks
    if vocabulary is not None:
        tokens = range(spec.vocab_size)
        parts = [tokens[tokens_of(Shard(rank, ranks), len(tokens))] for rank in range(ranks)]
        weights = replace(weights, vocabulary=FrequentTokens(vocabulary, parts))
    drafter = Recorded(weights, pair.target, 4, slots=3)
    ran = run(pair.target, mixed_requests(5, cap=14, sampling=KINDS[kind]), wide_batch(3, 4), drafter)
    return ran.tokens, drafter.seen


@pytest.mark.parametrize(("name", "kind"), zip(RANKED, cycle(KINDS), strict=False))
def test_ranks_draft_and_write_what_one_process_does(name: str, kind: str, tmp_path: Path) -> None:
    make_mtp_model(tmp_path, name)
    expected = drafted(loaded(tmp_path), kind)
    assert len({token for _, drafts in expected[1] for token in drafts}) > VOCAB // 3, "too few different drafts"
    assert all(found == expected for found in on_ranks(2, lambda ranks: drafted(loaded(tmp_path, ranks), kind)))


def test_ranks_draft_with_fp8_weights_that_are_cut_at_blocks(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 256, "moe_intermediate_size": 256, "n_shared_experts": 1, "n_routed_experts": 3}
    heads = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "n_group": 1, "topk_group": 1}
    make_mtp_model(tmp_path, "deepseek, fp8, fc plain and not listed", **sizes, **heads)
    expected = drafted(loaded(tmp_path), "drawn")
    assert all(found == expected for found in on_ranks(2, lambda ranks: drafted(loaded(tmp_path, ranks), "drawn")))


def test_ranks_choose_equally_many_tokens_for_drafts(tmp_path: Path) -> None:
    """Of each rank's part of the vocabulary: the tokens that are written are the same, the drafts are the same on both."""
    make_mtp_model(tmp_path, "next")
    alone = drafted(loaded(tmp_path), "greedy")
    found = on_ranks(2, lambda ranks: drafted(loaded(tmp_path, ranks), "greedy", vocabulary=12))
    assert found[0] == found[1]
    assert found[0][0] == alone[0]
    lowest = {*range(6), *range(16, 22)}
    assert {token for _, drafts in found[0][1] for token in drafts} <= lowest


def test_the_exact_layer_is_as_right_on_two_ranks(tmp_path: Path) -> None:
    make_exact_model(tmp_path)

    def accepted(ranks: Collectives) -> list[bool]:
        pair = loaded(tmp_path, ranks)
        requests = [request(i, [(7 * i + 3 * j) % 30 for j in range(20)], cap=21) for i in range(4)]
        ran = run(pair.target, requests, wide_batch(2, 4), pair.drafter(4, 2))
        return [one.stats.num_accepted == one.stats.num_drafted for one in ran.done.values() if one.stats]

    assert on_ranks(2, accepted) == [[True] * 4] * 2
