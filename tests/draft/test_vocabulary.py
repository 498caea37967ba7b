"""Choices over logits of which each rank has a part are those over all logits, and rounds of ranks emit the same tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.distributed.collectives import Collectives
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.features.logprobs import LogprobReader
from batchspec.engine.rounds.vocabulary import Vocabulary, choose_by_logits, cutoffs
from batchspec.engine.rounds.vocabulary_of_ranks import SharedVocabulary, choose_of_ranks, cutoffs_of_ranks
from batchspec.kernels.sampling import cutoff
from batchspec.model.target import Target
from batchspec.model.vocabulary import greedy_of_ranks
from batchspec.records import Completion, Request, SamplingParams
from tests.batch.test_sampling import make_rows
from tests.distributed.test_shard import SPECS
from tests.distributed.test_tensor_parallel import Loud
from tests.helpers.engines import DEVICE, VOCAB, decode, make_engine, packed, request, tiny_spec
from tests.helpers.ranks import Table, on_ranks, part_of, whole_of

pytestmark = pytest.mark.second

WIDTH = 60


def columns(rank: int, count: int, vocab: int = WIDTH) -> slice:
    return slice(rank * vocab // count, (rank + 1) * vocab // count)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Logits [T, WIDTH] with ties and numbers that are not finite, rows with settings of every kind, drafts before positions."""
    count, noise = draw(st.integers(1, 4)), torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(count, WIDTH, generator=noise, dtype=torch.float64) * draw(st.sampled_from([0.1, 3.0]))
    if draw(st.booleans()):
        logits = logits.round()  # ties, across ranks too
    for value in draw(st.lists(st.sampled_from([float("nan"), float("inf"), -float("inf")]), max_size=2)):
        logits[draw(st.integers(0, count - 1)), draw(st.integers(0, WIDTH - 1))] = value
    rows = make_rows(count, vocab=WIDTH)
    settings_of_rows: dict[str, list[float]] = {
        "temperature": [0.0, 0.5, 1.0], "top_k": [0, 1, 7, 40, 100], "top_p": [1.0, 0.9, 0.2], "min_p": [0.0, 0.1],
        "repetition": [1.0, 1.5], "presence": [0.0, 0.7], "frequency": [0.0, 0.5], "min_tokens": [0, 50],
    }
    for name, values in settings_of_rows.items():
        getattr(rows, name).copy_(torch.tensor([draw(st.sampled_from(values)) for _ in range(count)]))
    rows.seen.copy_(torch.randint(0, 8, (count, WIDTH), generator=noise))
    rows.provide(SamplingMode(options=frozenset({"logit_bias"})))
    rows.options["bias_ids"][:, :9] = torch.stack([torch.randperm(WIDTH, generator=noise)[:9] for _ in range(count)])
    rows.options["bias"][:, :9] = torch.randn(count, 9, generator=noise) * 3
    rows.stop_ids[:, :3] = torch.randint(0, WIDTH, (count, 3), generator=noise)
    rows.keys.copy_(torch.randint(0, 2**40, (count,), generator=noise))
    at = LogitRows(
        torch.arange(count, dtype=torch.int32), torch.arange(20, 20 + count),
        torch.randint(0, WIDTH, (count, 3), generator=noise, dtype=torch.int32), torch.randint(0, 4, (count,), generator=noise),
    )
    random, penalties, min_tokens = (draw(st.booleans()) for _ in range(3))
    options = frozenset(draw(st.sets(st.just("logit_bias"))))
    mode = SamplingMode(random=random, filters=random, penalties=penalties, min_tokens=min_tokens, options=options)
    return {"logits": logits, "rows": rows, "at": at, "mode": mode}


@settings(max_examples=150)
@given(problems(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([4, 512]))
def test_ranks_choose_what_one_process_does(problem: dict[str, Any], count: int, quick: int) -> None:
    logits, rows, at, mode = (problem[name] for name in ("logits", "rows", "at", "mode"))
    expected = choose_by_logits(logits.clone(), at, rows, mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchspec.engine.rounds.vocabulary_of_ranks.QUICK_TOP", quick)

        def chosen(ranks: Collectives) -> Tensor:
            own = columns(ranks.rank, count)
            greedy = partial(greedy_of_ranks, first=own.start, ranks=ranks, flag_nonfinite=True)
            return choose_of_ranks(logits[:, own].clone(), at, rows, mode, own, WIDTH, ranks, greedy=greedy)

        found = on_ranks(count, chosen)
    assert all(own.tolist() == expected.tolist() for own in found)


@settings(max_examples=60)
@given(problems(), st.sampled_from([2, 4]))
def test_the_cutoff_of_ranks_keeps_the_same_tokens(problem: dict[str, Any], count: int) -> None:
    logits, rows, row_ids = problem["logits"].nan_to_num(0.0, 0.0), problem["rows"], problem["at"].row_ids
    expected = logits >= cutoffs(logits, row_ids, rows)[:, None]
    found = on_ranks(count, lambda r: cutoffs_of_ranks(logits[:, columns(r.rank, count)], row_ids, rows, WIDTH, r))
    assert all(torch.equal(logits >= own[:, None], expected) for own in found)


def test_few_logits_are_exchanged_where_few_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchspec.engine.rounds.vocabulary_of_ranks.QUICK_TOP", 8)
    monkeypatch.setattr(cutoff, "QUICK_TOP", 8)
    rows, table = make_rows(2, vocab=WIDTH), Table(2)
    rows.top_k.fill_(5)
    logits = torch.randn(2, WIDTH, dtype=torch.float64)
    row_ids = torch.arange(2)
    on_ranks(2, lambda r: cutoffs_of_ranks(logits[:, columns(r.rank, 2)], row_ids, rows, WIDTH, r), table)
    assert sum(table.bytes_exchanged) == 8 * 2 * (8 + 1)  # eight logits and one sum a row


@settings(max_examples=60)
@given(problems(), st.sampled_from([2, 3, 4]), st.sampled_from([0, 1, 5, 20, WIDTH]))
def test_logprobs_of_ranks_are_those_of_all_logits(problem: dict[str, Any], count: int, num_top: int) -> None:
    logits = problem["logits"].nan_to_num(-1.0, 2.0)
    chosen = problem["at"].drafts[:, 0]
    reader = LogprobReader(num_top)
    target: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=WIDTH))
    expected = reader.read(logits, chosen, Vocabulary(target))

    def own(ranks: Collectives) -> Any:
        tokens = columns(ranks.rank, count)
        target: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=WIDTH, vocab_part=tokens), ranks=ranks)
        return reader.read(logits[:, tokens], chosen, SharedVocabulary(target))

    for found in on_ranks(count, own):
        torch.testing.assert_close(found[0], expected[0])
        assert len(found) == len(expected) == (3 if num_top else 1)
        if num_top:
            _, top_ids, top = found
            torch.testing.assert_close(top, expected[2])
            scores = logits.gather(1, top_ids.long()) - torch.logsumexp(logits, 1, keepdim=True)
            torch.testing.assert_close(scores.float(), top)
            assert all(len(set(ids)) == num_top for ids in top_ids.tolist())


def test_ranks_exchange_as_many_top_logits_as_are_asked_for() -> None:
    logits, table = torch.randn(2, WIDTH), Table(2)

    def own(ranks: Collectives) -> tuple[Tensor, Tensor]:
        tokens = columns(ranks.rank, 2)
        target: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=WIDTH, vocab_part=tokens), ranks=ranks)
        return SharedVocabulary(target).largest(logits[:, tokens], 3)

    for ids, values in on_ranks(2, own, table):
        assert torch.equal(values, logits.topk(3).values)
        assert torch.equal(logits.gather(1, ids.long()), values)
    assert sum(table.bytes_exchanged) == 2 * 3 * (4 + 4)  # a logit and an id


def head_for(target: Target, *, own_output: bool) -> Head:
    """A head of noise; without own_output it drafts with the target's embedding and lm_head."""
    spec = dummy_spec(target.spec.whole or target.spec, draft_vocab_size=19 if own_output else VOCAB, parallel=True)
    head = dummy_head(replace(spec, aux_layer_ids=(0, 1, 2)), dtype=torch.float64, device=DEVICE)
    if own_output:
        return head
    tensors = {name: tensor for name, tensor in head.tensors.items() if not name.startswith(("lm_head", "embed_tokens"))}
    return replace(head, tensors=tensors, map_ids=None)


def drafter(name: str, target: Target, slots: int = 3) -> Drafter:
    own = name != "shared head"
    match name:
        case "none":
            return NoDrafter()
        case "lookup":
            return LookupDrafter(4, min_ngram=1, max_ngram=2)
        case "window":
            return WindowDrafter(target, 3, slots=slots, window=4, sink=1)
        case "pard":
            model = PardModel(PardSpec(model=tiny_spec(None), mask_token_id=30), whole_of(tiny_spec(None), Loud))
            return PardDrafter(model, target.spec, 3, slots=slots, parallel=True)
        case "parallel":
            return ParallelDrafter(head_for(target, own_output=own), target, 4, slots=slots)
        case "tree":
            shape = TreeShape(topk=2, depth=3, nodes=7)
            return TreeDrafter(head_for(target, own_output=own), target, shape, slots=slots)
        case "hybrid":
            chain = ChainDrafter(head_for(target, own_output=own), target, 2, slots=slots)
            return HybridDrafter(chain, LookupDrafter(4, min_ngram=1, max_ngram=2), slots=slots, device=DEVICE)
    return ChainDrafter(head_for(target, own_output=own), target, 3, slots=slots)


def requests(kind: str) -> list[Request]:
    sampling = {
        "greedy": SamplingParams(),
        "drawn": SamplingParams(temperature=1.0),
        "filtered": SamplingParams(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02),
        "penalised": SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3),
        "biased": SamplingParams(temperature=0.7, logit_bias=((2, -100.0), (9, 1.5), (VOCAB - 1, 2.0))),
    }
    asked = [request(i, [i, 2, 3, i, 2], cap=14, sampling=sampling[kind], stop_ids=(7,), min_new_tokens=3) for i in range(4)]
    return [*asked, request(4, [9, 1], cap=20, sampling=sampling[kind], stop=("AB",))]


def completions(target: Target, name: str, kind: str) -> dict[str, Completion]:
    """Every rank schedules for itself: on a CPU no decision depends on a clock."""
    engine = make_engine(target, drafter(name, target), packed(3, num_verified=7), device=DEVICE, logprobs=3, decode=decode)
    return {done.request_id: done for done in engine.run(iter(requests(kind)))}


DRAFTERS = ("none", "lookup", "window", "eagle3", "shared head", "parallel", "tree", "hybrid", "pard")
KINDS = ("greedy", "drawn", "filtered", "penalised", "biased")


@pytest.mark.parametrize(("name", "kind"), zip(DRAFTERS, cycle(KINDS), strict=False))
def test_an_engine_of_ranks_emits_the_same_tokens(name: str, kind: str) -> None:
    spec = tiny_spec(5)
    expected = completions(whole_of(spec, Loud), name, kind)
    for found in on_ranks(2, lambda ranks: completions(part_of(spec, ranks, Loud), name, kind)):
        assert found.keys() == expected.keys()
        for key, done in found.items():
            one = expected[key]
            assert done.token_ids is not None and one.token_ids is not None  # noqa: PT018
            assert done.token_ids.tolist() == one.token_ids.tolist(), key
            assert done.logprobs is not None and one.logprobs is not None  # noqa: PT018
            torch.testing.assert_close(torch.tensor(done.logprobs), torch.tensor(one.logprobs))
            assert done.stats is not None and one.stats is not None  # noqa: PT018
            assert done.stats.histogram == one.stats.histogram


@pytest.mark.parametrize(
    "family",
    ["minimax_m2", "gpt_oss", "qwen3_moe", "olmo2", "gemma4 experts", "gemma4 layer inputs", "phi3", "gpt_oss mxfp4 uneven"],
)
def test_other_families_decode_on_four_ranks(family: str) -> None:
    spec = SPECS[family]
    expected = completions(whole_of(spec, Loud), "eagle3", "drawn")
    for found in on_ranks(4, lambda ranks: completions(part_of(spec, ranks, Loud), "eagle3", "drawn")):
        for key, done in found.items():
            assert done.token_ids is not None
            assert done.token_ids.tolist() == expected_ids(expected[key]), key


def test_ranks_reserve_room_for_what_a_round_of_all_slots_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, asked = tiny_spec(5), list[int]()

    def reserved(ranks: Collectives) -> None:
        monkeypatch.setattr(ranks, "reserve", asked.append)
        target = part_of(spec, ranks, Loud)
        make_engine(target, drafter("eagle3", target), packed(3, num_verified=7), device=DEVICE)

    on_ranks(2, reserved)
    assert asked == [3 * (7 + 1) * spec.hidden_size * torch.float64.itemsize] * 2


def expected_ids(done: Completion) -> list[int]:
    assert done.token_ids is not None
    return [int(token) for token in done.token_ids]
