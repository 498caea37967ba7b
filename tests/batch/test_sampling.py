"""Filters, penalties and the choice itself, against transformers' processors and against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logit_bias import add_bias
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import apply_penalties, forbid_stop_ids, mark_output
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.rounds.ablation import greedy_by_softmax
from batchspec.engine.rounds.vocabulary import choose_by_logits, cutoffs
from batchspec.kernels.sampling import cutoff
from batchspec.packed_batch import PackedBatch
from batchspec.records import LEAST_TEMPERATURE, SamplingParams
from tests.helpers.engines import request

VOCAB = 700  # more than QUICK_TOP, so that both the quick and the full sort run


def make_rows(slots: int, vocab: int = VOCAB) -> DeviceBatch:
    batch = PackedBatch(
        num_slots=slots, row_buckets=(slots,), num_pages=2, page_size=4, max_len=32, num_verified=3, prefill_tokens=8, run_ahead=0
    )
    rows = DeviceBatch.allocate(batch, vocab_size=vocab, device=torch.device("cpu"))
    rows.provide(SamplingMode(penalties=True))
    rows.temperature.fill_(1)
    rows.top_p.fill_(1)
    rows.repetition.fill_(1)
    return rows


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 600, VOCAB, 5000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.999, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_kept_set_is_that_of_transformers(
    seed: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    rows = make_rows(3)
    rows.temperature.fill_(temperature)
    rows.top_k.fill_(top_k)
    rows.top_p.fill_(top_p)
    rows.min_p.fill_(min_p)
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(float(rows.top_p[0])))  # float32, as the row holds it
    if min_p:
        chain.append(MinPLogitsWarper(float(rows.min_p[0])))
    none: Any = torch.zeros(3, 1, dtype=torch.long)
    expected = chain(none, logits.clone()) > -torch.inf
    kept = logits >= cutoffs(logits, torch.arange(3), rows).unsqueeze(1)
    assert torch.equal(kept, expected)


def test_ties_at_the_cutoff_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0]])
    rows = make_rows(1, vocab=4)
    rows.top_k.fill_(2)
    assert (logits >= cutoffs(logits, torch.tensor([0]), rows).unsqueeze(1)).tolist() == [[True, True, True, False]]


def test_ties_that_extend_past_the_quick_sort_are_kept_whatever_other_rows_hold() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 0] = 1.0
    rows = make_rows(2)
    rows.top_k[0], rows.top_p[0] = 2, 0.004
    rows.top_p[1] = 0.999  # needs the full sort
    alone = cutoffs(logits[:1], torch.tensor([0]), rows)
    assert cutoffs(logits, torch.tensor([0, 1]), rows)[0] == alone[0]


def test_a_kept_set_does_not_depend_on_the_rows_beside_it(monkeypatch: object) -> None:
    """A flat row beside it forces the full sort; the peaked row's cutoff stays what the quick sort gave."""
    peaked = torch.randn(1, VOCAB) * 8
    rows = make_rows(2)
    rows.top_p.fill_(0.9)
    alone = cutoffs(peaked, torch.tensor([0]), rows)
    beside = cutoffs(torch.cat([peaked, torch.zeros(1, VOCAB)]), torch.tensor([0, 1]), rows)
    assert cutoff.QUICK_TOP < VOCAB
    assert alone[0] == beside[0]


def seen_of(rows: DeviceBatch, prompt: list[int], output: list[int]) -> None:
    rows.seen.zero_()
    rows.seen[0, prompt] = 1
    for token in output:
        rows.seen[0, token] = (rows.seen[0, token] | 1) + 2


@settings(deadline=None, max_examples=50)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 9), max_size=6),
    drafts=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_penalties_after_drafts_equal_those_of_committed_tokens(
    prompt: list[int], output: list[int], drafts: list[int], seed: int
) -> None:
    rows = make_rows(1, vocab=10)
    rows.repetition.fill_(1.3)
    rows.presence.fill_(0.7)
    rows.frequency.fill_(0.45)
    seen_of(rows, prompt, output)
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    together = logits.clone()
    places = LogitRows(
        torch.zeros(4, dtype=torch.int32), torch.arange(4), torch.tensor([drafts], dtype=torch.int32), torch.arange(4)
    )
    apply_penalties(together, places, rows)
    repetition = RepetitionPenaltyLogitsProcessor(float(rows.repetition[0]))
    for place in range(4):
        emitted = output + drafts[:place]
        expected: Tensor = repetition(torch.tensor([prompt + emitted]), logits[place : place + 1].clone())
        for token in set(emitted):
            expected[0, token] -= float(rows.presence[0]) + emitted.count(token) * float(rows.frequency[0])
        torch.testing.assert_close(together[place : place + 1], expected)


def test_committed_tokens_are_marked_and_those_after_the_stop_are_not() -> None:
    rows = make_rows(2, vocab=6)
    seen_of(rows, [0, 5], [])
    mark_output(rows, torch.tensor([[5, 1, 2], [4, -1, -1]], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32))
    assert rows.seen.tolist() == [[1, 3, 0, 0, 0, 3], [0, 0, 0, 0, 3, 0]]
    mark_output(rows, torch.tensor([[5, 5, 2], [1, -1, -1]], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32))
    assert rows.seen.tolist() == [[1, 3, 3, 0, 0, 7], [0, 0, 0, 0, 3, 0]]


@settings(deadline=None, max_examples=60)
@given(
    biases=st.lists(st.dictionaries(st.integers(0, 9), st.floats(-100, 100, width=32), max_size=10), min_size=1, max_size=3),
    row_ids=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    mapped=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True),
)
def test_a_bias_is_added_to_the_logits_of_its_token_alone(
    biases: list[dict[int, float]], row_ids: list[int], mapped: list[int] | None
) -> None:
    """Of the target's columns, and of those of a head that drafts other tokens."""
    rows, row_ids = make_rows(3, vocab=10), [row % len(biases) for row in row_ids]
    begin_biased(rows, biases)
    columns = list(range(10)) if mapped is None else mapped
    logits = torch.randn(len(row_ids), len(columns), dtype=torch.float64)
    expected = [
        [line[j] + biases[row].get(token, 0) for j, token in enumerate(columns)]
        for row, line in zip(row_ids, logits.tolist(), strict=True)
    ]
    at = LogitRows(torch.tensor(row_ids, dtype=torch.int32), torch.zeros(len(row_ids), dtype=torch.int64))
    add_bias(logits, at, rows, None if mapped is None else torch.tensor(mapped, dtype=torch.int32))
    assert logits.tolist() == expected


def begin_biased(rows: DeviceBatch, biases: list[dict[int, float]]) -> None:
    requests = [request(i, [1], cap=1, sampling=SamplingParams(logit_bias=tuple(bias.items()))) for i, bias in enumerate(biases)]
    rows.begin(range(len(biases)), requests, [[]] * len(biases))


def test_a_slot_forgets_the_counts_and_the_biases_of_its_last_row() -> None:
    rows = make_rows(1, vocab=10)
    begin_biased(rows, [{3: 1.0, 4: 2.0}])
    rows.seen.fill_(9)
    penalised = request(0, [2, 2], cap=9, sampling=SamplingParams(frequency_penalty=1.0, logit_bias=((5, 7.0),)))
    rows.begin([0], [penalised], [[4, 5, 4]])
    assert rows.seen.tolist() == [[0, 0, 1, 0, 5, 3, 0, 0, 0, 0]]
    assert rows.options["bias_ids"][0, :3].tolist() == [5, -1, -1]
    assert rows.options["bias"][0, :3].tolist() == [7, 0, 0]


def test_stop_ids_are_forbidden_exactly_before_min_tokens() -> None:
    rows = make_rows(1, vocab=5)
    rows.stop_ids[0, :2] = torch.tensor([3, 0], dtype=torch.int32)
    rows.min_tokens.fill_(7)
    logits = torch.ones(2, 5)
    forbid_stop_ids(logits, LogitRows(torch.zeros(2, dtype=torch.int32), torch.tensor([6, 7])), rows)
    assert (logits > 0).tolist() == [[False, True, True, False, True], [True] * 5]


@pytest.mark.parametrize("temperature", [math.ulp(0.0), 1e-39, 9e-8])
def test_temperatures_too_small_for_noise_to_matter_are_greedy(temperature: float) -> None:
    """A logit divided by a denormal number is infinite, and all such logits are equal."""
    sampling = SamplingParams(temperature=temperature, top_p=0.5)
    assert sampling.temperature == 0
    assert SamplingMode.of(sampling, 0) == SamplingMode()


@pytest.mark.parametrize("filters", [False, True])
def test_the_least_temperature_draws_the_likeliest_token(filters: bool) -> None:
    logits = torch.randn(4, VOCAB) * 1000
    rows = make_rows(4)
    rows.temperature.fill_(SamplingParams(temperature=LEAST_TEMPERATURE).temperature)
    rows.top_p.fill_(0.9 if filters else 1)
    places = LogitRows(torch.arange(4, dtype=torch.int32), torch.arange(4))
    chosen = choose_by_logits(logits, places, rows, SamplingMode(random=True, filters=filters))
    assert chosen.tolist() == logits.argmax(1).tolist()


def test_greedy_rows_beside_random_ones_stay_greedy() -> None:
    rows = make_rows(2)
    rows.temperature[0] = 0
    rows.top_k.fill_(50)
    logits = torch.randn(2, VOCAB)
    places = LogitRows(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5, 5]))
    best = int(logits[0].argmax())
    drawn = choose_by_logits(logits, places, rows, SamplingMode(random=True, filters=True))
    assert int(drawn[0]) == best


def test_the_general_greedy_path_chooses_what_the_argmax_path_chooses() -> None:
    rows = make_rows(4)
    logits = torch.randn(4, VOCAB)
    places = LogitRows(torch.arange(4, dtype=torch.int32), torch.arange(4))
    fast = choose_by_logits(logits.clone(), places, rows, SamplingMode())
    assert torch.equal(fast, choose_by_logits(logits.clone(), places, rows, SamplingMode(), greedy=greedy_by_softmax))
