"""Jobs that read states and decode nothing: passes are full, padded ones give what plain ones give, and nearly all are graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchspec.draft.none import NoDrafter
from batchspec.engine.features.states import MeanFeatures, StateFeatures, last_states, token_logits
from batchspec.engine.loop.engine import Engine
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.prefill.graphs import CAPTURE_AT
from batchspec.engine.slots.row_feature import Features
from batchspec.engine.step import ScheduledStep, Segment
from batchspec.model.target import Target
from batchspec.records import Completion, Request
from tests.engine.test_prefill_graphs import graphs_with
from tests.helpers.engines import DEVICE, VOCAB, one_pass, packed, request, tiny_target
from tests.helpers.moe_models import tiny_moe
from tests.helpers.padded_prefill import ALWAYS, padded_passes

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]
TOKENS = (3, 11)
KINDS: dict[str, Callable[[], Features]] = {
    "last": lambda: StateFeatures(last_states),
    "logits": lambda: StateFeatures(partial(token_logits, TOKENS)),
    "mean": MeanFeatures,
}
Values = NDArray[np.floating[Any]]


def prompts_of(*prompts: list[int]) -> list[Request]:
    return [replace(request(i, prompt, cap=1), max_new_tokens=0, predicted_tokens=0) for i, prompt in enumerate(prompts)]


def engine_of(target: Target, kind: str, slots: int = 5, **shape: Any) -> Engine:
    batch = packed(slots, num_verified=0, decodes=False, **shape)
    return Engine(target, NoDrafter(), batch, device=DEVICE, features=KINDS[kind](), prefill_graphs=True)


def expected(target: Target, kind: str, ids: Sequence[int]) -> Values:
    """The definition: all states of a row alone, in one pass."""
    hidden, _ = one_pass(target, ids)
    values = {"last": hidden[-1], "logits": target.logits(hidden[-1:])[0, list(TOKENS)], "mean": hidden.mean(0)}
    found: Values = values[kind].numpy()
    return found


def check(done: Sequence[Completion], target: Target, kind: str, *, atol: float = 1e-5) -> None:
    for one in done:
        assert one.prompt_ids is not None
        assert one.state_values is not None
        assert (one.status, one.finish_reason) == ("ok", "stop")
        np.testing.assert_allclose(one.state_values, expected(target, kind, one.prompt_ids.tolist()), atol=atol)


def steps_of(engine: Engine) -> list[ScheduledStep]:
    """The steps of the engine's next run."""
    steps: list[ScheduledStep] = []
    execute = engine.executor.execute

    def noted(step: ScheduledStep) -> None:
        steps.append(step)
        execute(step)

    engine.executor.execute = noted  # type: ignore[method-assign]
    return steps


def passes_in(steps: Sequence[ScheduledStep]) -> Iterator[tuple[Segment, ...]]:
    for step in steps:
        yield from () if step.prefill is None else step.prefill.passes


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=st.lists(prompts, min_size=1, max_size=12), common=prompts, share=st.lists(st.booleans(), min_size=12, max_size=12),
    slots=st.integers(1, 8), tokens=st.sampled_from([16, 24, 64]), ahead=st.integers(0, 2),
)
def test_padded_passes_give_the_values_of_rows_by_themselves(
    kind: str, rows: list[list[int]], common: list[int], share: list[bool], slots: int, tokens: int, ahead: int
) -> None:
    """Rows with common beginnings, rows that are cut over passes, few slots."""
    target, asked = tiny_target(), [(common if own else []) + row for row, own in zip(rows, share, strict=False)]
    with padded_passes() as shapes:
        engine = engine_of(target, kind, slots, prefill_tokens=tokens, run_ahead=ahead)
        done = list(engine.run(iter(prompts_of(*asked))))
    assert sorted(one.row_index for one in done) == list(range(len(asked)))
    check(done, target, kind)
    assert shapes


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_value_of_a_target_with_experts(kind: str) -> None:
    target, rng = tiny_moe("mixtral"), np.random.default_rng(0)
    with padded_passes() as shapes:
        engine = engine_of(target, kind)
        done = list(engine.run(iter(prompts_of(*(rng.integers(0, VOCAB, 1 + 3 * i).tolist() for i in range(9))))))
    check(done, target, kind)
    assert len(done) == 9
    assert shapes


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_every_refill_is_one_pass_and_results_are_read_while_others_are_launched(ahead: int) -> None:
    """No row is cut that fits a pass; of the passes before the last none has room for the row that follows."""
    rng, target = np.random.default_rng(1), tiny_target()
    asked = [rng.integers(0, VOCAB, length).tolist() for length in rng.integers(2, 9, 200)]
    engine = engine_of(target, "last", 64, run_ahead=ahead, prefill_tokens=64)
    steps = steps_of(engine)
    check(list(engine.run(iter(prompts_of(*asked)))), target, "last")
    passes = list(passes_in(steps))
    assert all(step.prefill is None or len(step.prefill.passes) == 1 for step in steps)
    assert [segment.end for one in passes for segment in one] == [len(ids) for ids in asked]
    sizes = [sum(segment.end for segment in one) for one in passes]
    for size, one, following in zip(sizes, passes, passes[1:], strict=False):
        count = len(one) + 1
        assert size + following[0].end + (1 << (count - 1).bit_length()) - count > 64
    unread, most = 0, 0
    for step in steps:
        unread += step.prefill is not None
        unread -= step.num_reads
        most = max(most, unread)
    assert (unread, most) == (0, ahead + 1)


def test_long_rows_are_cut_so_that_passes_are_full() -> None:
    target, rng = tiny_target(), np.random.default_rng(2)
    asked = [rng.integers(0, VOCAB, length).tolist() for length in (5, 90, 6, 70, 3, 41, 95, 1, 60)]
    for kind in KINDS:
        engine = engine_of(target, kind, 16, prefill_tokens=32, run_ahead=2)
        steps = steps_of(engine)
        done = list(engine.run(iter(prompts_of(*asked))))
        assert len(done) == 9
        check(done, target, kind)
        sizes = [sum(segment.end - segment.begin for segment in one) for one in passes_in(steps)]
        assert sum(sizes) == sum(map(len, asked))
        assert min(sizes[:-1]) >= 32 * 7 / 8 - 7, sizes  # the last pass of a refill leaves room for up to seven dead rows


def test_nearly_every_pass_of_a_job_of_short_rows_replays_a_graph() -> None:
    """Lengths as of texts (lognormal), many passes: all but the first uses of each shape, and few shapes."""
    target, rng = tiny_target(), np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(np.log(8), 0.6, 2400), 1, 25).astype(int)
    engine = engine_of(target, "last", 256, prefill_tokens=320, num_pages=800, longest_prompt=25)
    graphs, pool = graphs_with(engine, replace(ALWAYS, token=1.0, least=60.0, adds_launches=True))
    steps = steps_of(engine)
    done = list(engine.run(iter(prompts_of(*(rng.integers(0, VOCAB, length).tolist() for length in lengths)))))
    assert len(done) == 2400
    check(done[::100], target, "last")
    passes = list(passes_in(steps))
    assert len(passes) > 60
    computed = sum(segment.end - segment.begin for one in passes for segment in one)
    assert computed > 0.85 * 320 * len(passes), "dead rows of a token each, up to the next power of two"
    assert graphs.num_captured <= 4
    few_tokens = sum(segment.end - segment.begin for segment in passes[-1]) < 200  # the last pass, which padding does not pay
    assert pool.replays >= len(passes) - CAPTURE_AT * len(graphs._uses) - few_tokens
    assert pool.replays > 0.8 * len(passes)


def test_padding_pays_where_the_host_has_other_rows_to_see_to_meanwhile() -> None:
    """A pass whose tokens take longer than its launches is padded only there."""
    cost = PrefillCost(least=10.0, token=1.0)
    assert not cost.pays_padding(100, 105)
    busy = replace(cost, adds_launches=True)
    assert busy.pays_padding(100, 110)
    assert not busy.pays_padding(100, 111)
