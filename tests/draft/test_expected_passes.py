"""The prefill passes that a job is expected to need, estimated from the survey of its rows."""

from __future__ import annotations

import numpy as np
import pytest

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.none import NoDrafter
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.prefill.expected_passes import SIZES, expected_uses, rows_of_a_refill
from batchspec.engine.prefill.shapes import PassShape, PassShapes
from batchspec.packed_batch import ExpectedRows
from batchspec.packing.survey import PREFIX_ROWS, Survey
from batchspec.records import Request
from tests.helpers.engines import DEVICE, make_engine, packed, request, tiny_target

GREEDY = SamplingMode()
COST = PrefillCost(least=100.0, token=0.0, replay=2.0, most_replayed=2048)


@pytest.mark.parametrize(("slots", "rounds", "fixed_s"), [(256, 76, 1.1), (64, 30, 2.0), (512, 190, 0.4)])
def test_a_refill_has_as_many_rows_as_the_rule_of_the_allocator_gives(slots: int, rounds: int, fixed_s: float) -> None:
    """Rows that end at a constant rate, and a refill as soon as idle slots have cost its fixed time."""
    free, idle, sizes, ending = 0.0, 0.0, [], slots / rounds
    for _ in range(2000):
        free += ending
        idle += int(free) / slots
        if idle >= fixed_s:
            sizes.append(int(free))
            free, idle = free - int(free), 0.0
    estimate = rows_of_a_refill(slots, fixed_s=fixed_s, round_s=1.0, rounds=rounds)
    assert estimate == pytest.approx(np.mean(sizes), rel=0.15)


@pytest.mark.parametrize(("fixed_s", "expected"), [(1e9, 8), (1e-9, 1)])
def test_a_refill_has_at_least_one_row_and_at_most_one_in_each_slot(fixed_s: float, expected: int) -> None:
    assert rows_of_a_refill(8, fixed_s=fixed_s, round_s=1.0, rounds=10) == expected


def shapes(slots: int = 32) -> PassShapes:
    engine = make_engine(tiny_target(), NoDrafter(), packed(slots), device=DEVICE)
    return PassShapes(engine.executor.round, packed(slots, prefill_tokens=4096))


def uses(rows: ExpectedRows) -> dict[PassShape, float]:
    return expected_uses(rows, shapes(), GREEDY, COST, num_slots=32, draft_len=2, round_s=1.0, page_size=16)


def test_uses_are_those_of_all_rows_of_the_job_and_each_number_of_tokens_occurs_once() -> None:
    """64 surveyed rows of a hundred tokens, 80 rounds each: about 7 rows a refill."""
    found = uses(ExpectedRows(prompt_lens=np.full(64, 100, np.int32), common_tokens=0, output_tokens=160.0, num_rows=1000))
    estimate = rows_of_a_refill(32, fixed_s=2.0, round_s=1.0, rounds=80)
    counts = [round(size * estimate) for size in SIZES]
    assert sum(found.values()) == pytest.approx(sum(1000 / count for count in counts) / len(SIZES))
    assert len({shape.num_tokens for shape in found}) == len(found) > 1
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for count in counts:
        exact = PassShape(100 * count, count, 100, 100, 100 * count, GREEDY)
        assert any(shape.holds(exact) for shape in found), count


@pytest.mark.parametrize(("common", "computed"), [(0, 100), (16, 100), (33, 68), (32, 84), (100, 4)])
def test_tokens_of_pages_that_all_prompts_share_are_not_computed(common: int, computed: int) -> None:
    """A page is shared if the token after it is common too, so the last token of a prompt is always computed."""
    rows = ExpectedRows(prompt_lens=np.full(64, 100, np.int32), common_tokens=common, output_tokens=160.0, num_rows=1000)
    counts = [round(size * rows_of_a_refill(32, fixed_s=2.0, round_s=1.0, rounds=80)) for size in SIZES]
    own = shapes()
    fitting = [own.fitting(PassShape(computed * n, n, computed, 100, 100 * n, GREEDY), COST) for n in counts]
    assert {shape.num_tokens for shape in uses(rows)} == {shape.num_tokens for shape in fitting if shape}


def test_fewer_surveyed_rows_than_a_refill_has_give_no_shape() -> None:
    assert not uses(ExpectedRows(prompt_lens=np.full(2, 100, np.int32), common_tokens=0, output_tokens=160.0, num_rows=2))


def surveyed(*prompts: list[int]) -> tuple[Survey, list[Request]]:
    survey, requests = Survey(), [request(i, ids, cap=4) for i, ids in enumerate(prompts)]
    survey.add(len(requests), requests)
    return survey, requests


def test_the_survey_gives_prompt_lengths_window_by_window_the_longest_output_first() -> None:
    survey = Survey()
    outputs = (4, 2, 6, 1, 8, 3)
    survey.add(6, [request(i, [1] * n, cap=cap) for i, (n, cap) in enumerate(zip((3, 5, 4, 9, 7, 8), outputs, strict=True))])
    found = survey.expected_rows(60, 3)
    assert found is not None
    assert found.prompt_lens.tolist() == [4, 3, 5, 7, 8, 9]
    assert (found.num_rows, found.common_tokens) == (60, 3)
    part = survey.expected_rows(60, 12)
    assert part is not None
    assert part.prompt_lens.tolist() == [7, 4, 3, 8, 5, 9], "all are of one window"


def test_the_survey_gives_the_length_of_the_common_prefix() -> None:
    def common(*prompts: list[int]) -> int:
        found = surveyed(*prompts)[0].expected_rows(9, 9)
        assert found is not None
        return found.common_tokens

    assert common([1, 2, 3]) == 3
    assert common([1, 2, 3, 4], [1, 2, 9, 4, 5]) == 2
    assert common([1, 2, 3, 4], [1, 2], [1, 2, 3, 4]) == 2
    assert common([1, 2], [2, 2]) == 0
    assert common(*[[1, 2]] * PREFIX_ROWS, [9]) == 2, "only so many are compared"


def test_a_survey_without_requests_expects_nothing() -> None:
    assert Survey().expected_rows(5, 5) is None
