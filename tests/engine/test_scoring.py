"""Prompts are scored: the log-probability of every prompt token, whatever passes, pages and shared prefixes it went through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.draft.none import NoDrafter
from batchspec.engine.features import scoring
from batchspec.engine.features.scoring import mark_diverged
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.vocabulary import DIVERGED
from batchspec.model.layers.gated_delta.block import RECURRENT_CHUNK
from batchspec.model.target import Target
from batchspec.records import Choice, Completion, Request
from batchspec.request_stream import ListedRequests
from batchspec.tasks.choices import steps_with_choices
from tests.helpers.engines import DEVICE, VOCAB, full_logits, make_engine, packed, request, tiny_spec, tiny_target
from tests.helpers.ranks import on_ranks, part_of, whole_of
from tests.helpers.recurrent import recurrent_target

pytestmark = pytest.mark.usefixtures("poisoned")


@cache
def logprobs_after(target: Target, prompt: tuple[int, ...]) -> Tensor:
    """The definition: log-softmax [V] of logits computed anew, without cache or batch."""
    return torch.log_softmax(full_logits(target, prompt), 0)


def prompts_of(*prompts: list[int]) -> list[Request]:
    return [replace(request(i, prompt, cap=1), max_new_tokens=0, predicted_tokens=0) for i, prompt in enumerate(prompts)]


def engine_of(target: Target, num_top: int, slots: int = 3, *, prefill_graphs: bool = False, **shape: Any) -> Engine:
    return make_engine(
        target, NoDrafter(), packed(slots, num_verified=0, **shape), device=DEVICE, logprobs=num_top, scores=True,
        prefill_graphs=prefill_graphs,
    )


def check(done: list[Completion], target: Target, num_top: int) -> None:
    for one in done:
        assert one.prompt_ids is not None
        assert one.prompt_logprobs is not None
        assert one.token_ids is not None
        assert (one.status, one.finish_reason, one.text, len(one.token_ids)) == ("ok", "length", None, 0)
        prompt, found = one.prompt_ids.tolist(), one.prompt_logprobs
        assert len(found) == len(prompt)
        assert np.isnan(found[0])
        after = [logprobs_after(target, tuple(prompt[:i])) for i in range(1, len(prompt))]
        expected = [float(after[i - 1][prompt[i]]) for i in range(1, len(prompt))]
        np.testing.assert_allclose(found[1:], expected, atol=2e-6)
        assert (one.prompt_top_logprobs is None) == (num_top == 0)
        if one.prompt_top_logprobs is not None:
            ids, values = one.prompt_top_logprobs
            assert ids.shape == values.shape == (len(prompt), num_top)
            assert (ids[0] == -1).all()
            for i in range(1, len(prompt)):
                best = after[i - 1].topk(num_top)
                np.testing.assert_allclose(values[i], best.values, atol=2e-6)
                np.testing.assert_allclose(after[i - 1][ids[i].tolist()], best.values, atol=2e-6)


TARGETS: dict[str, Callable[[], Target]] = {
    "all keys": tiny_target,
    "some windows": partial(tiny_target, window=5),
    "windows alone": cache(lambda: whole_of(tiny_spec(windows=(5, 9)))),
    "recurrent layers": recurrent_target,
    "recurrent layers and windows": partial(recurrent_target, window=5),
}
SHARED_AT = {"all keys": 16, "some windows": 16, "recurrent layers": RECURRENT_CHUNK}
"""Where a shared prefix may end, in tokens. Models without a layer that reads all keys share none."""


@pytest.mark.second
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_packing_gives_the_logprobs_of_the_definition(data: st.DataObject) -> None:
    """Common beginnings of whole pages and of parts of pages, prompts that are wholly alike, few pages, passes of few tokens."""
    kind, token = data.draw(st.sampled_from(["all keys", "some windows", "windows alone"])), st.integers(0, VOCAB - 1)
    beginnings = data.draw(st.lists(st.lists(token, max_size=14), min_size=1, max_size=2))
    own = data.draw(st.lists(st.tuples(st.sampled_from(beginnings), st.lists(token, max_size=9)), min_size=1, max_size=7))
    prompts = [[*beginning, *rest] or [3] for beginning, rest in own]
    page_size, num_top = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([0, 1, 4]))
    pages_of_a_row = -(-24 // page_size)
    target = TARGETS[kind]()
    num_pages = 1 + data.draw(st.integers(1, 5)) * pages_of_a_row
    engine = engine_of(
        target, num_top, slots=data.draw(st.integers(1, 4)), page_size=page_size, max_len=24, num_pages=num_pages,
        run_ahead=data.draw(st.integers(0, 2)), prefill_tokens=data.draw(st.sampled_from([1, 3, 8, 64])),
        prefill_graphs=data.draw(st.booleans()),  # a GPU has them
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "SCORED_TOKENS", data.draw(st.sampled_from([1, 5, 512])))
        done = list(engine.run(iter(prompts_of(*prompts))))
    assert sorted(one.row_index for one in done) == list(range(len(prompts)))
    check(done, target, num_top)
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    assert engine.totals.rounds == 0


def test_no_pass_is_captured_because_no_row_draws_a_token() -> None:
    assert engine_of(tiny_target(), 0, prefill_graphs=True).executor.prefill_graphs is None


def engine_of_chunks(target: Target, num_top: int) -> Engine:
    """Few slots and pages, so that rows share prefixes with those before them and with those that prefill with them."""
    return engine_of(target, num_top, page_size=16, max_len=140, num_pages=1 + 40, prefill_tokens=100)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("kind", TARGETS)
def test_prefixes_end_at_the_border_of_a_page_or_next_to_it(kind: str, more: int) -> None:
    """Prompts that go on with other tokens there, that end there, and that have the first half in common."""
    target, common = TARGETS[kind](), [(3 * i * i + i) % VOCAB for i in range(128 + more)]
    other = [[*common[: 64 + more], 7, i, 3] for i in range(2)]
    prompts = [*([*common, i, 3, 2 * i] for i in range(4)), *other, common, common]
    done = list(engine_of_chunks(target, 2).run(iter(prompts_of(*prompts))))
    assert len(done) == len(prompts)
    check(done, target, 2)
    step = SHARED_AT.get(kind, len(common))
    assert max(one.cached_tokens for one in done) == (len(common) - 1) // step * step


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("kind", TARGETS)
def test_choices_after_a_prompt_that_ends_at_the_border_of_a_page_or_next_to_it(kind: str, more: int) -> None:
    target, prompt = TARGETS[kind](), [(3 * i * i + i) % VOCAB for i in range(64 + more)]
    choices = tuple(Choice(text=str(number), token_ids=ids) for number, ids in enumerate([(3,), (4, 5), (4, 6, 7), (8, 1)]))
    asked = [replace(one, choices=choices) for one in prompts_of(prompt, prompt[: 48 + more])]
    done = [one for step in steps_with_choices(engine_of_chunks(target, 0), ListedRequests(asked)) for one in step]
    assert len(done) == 2
    for one in done:
        assert one.prompt_ids is not None
        assert one.choice_logprobs is not None
        before = one.prompt_ids.tolist()
        for choice, (_, found) in zip(choices, one.choice_logprobs, strict=True):
            ids = [*before, *choice.token_ids]
            parts = [float(logprobs_after(target, tuple(ids[:i]))[ids[i]]) for i in range(len(before), len(ids))]
            assert found == pytest.approx(sum(parts), abs=1e-5)


def test_shared_pages_are_computed_once() -> None:
    """Those that the same token follows: the log-probability of that token is kept with them."""
    target, common = tiny_target(), list(range(16))
    engine = engine_of(target, 2, page_size=4)
    computed = list[int]()
    forward = target.forward

    def counted(batch: Any, *rest: Any, **options: Any) -> Any:
        computed.append(len(batch.token_ids))
        return forward(batch, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "forward", counted)
        done = list(engine.run(iter(prompts_of([*common, 20, 21], [*common, 22], [*common, 20, 23, 24]))))
    check(done, target, 2)
    assert [one.cached_tokens for one in sorted(done, key=lambda one: one.row_index)] == [0, 12, 16]
    assert sum(computed) == 18 + 5 + 3


def test_keys_and_values_of_shared_pages_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target, common = tiny_target(), list(range(8))
    engine = engine_of(target, 0, page_size=4, slots=1, prefill_tokens=2)
    engine.keeps_prefixes = True
    list(engine.run(iter(prompts_of([*common, 9, 12]))))
    written: dict[int, int] = {}
    forward = target.forward

    def noted(batch: Any, *rest: Any, **options: Any) -> Any:
        written.update(zip(batch.positions.tolist(), batch.slot_mapping.tolist(), strict=True))
        return forward(batch, *rest, **options)

    monkeypatch.setattr(target, "forward", noted)
    done = list(engine.run(iter(prompts_of([*common, 9, 11]))))
    monkeypatch.undo()
    check(done, target, 0)
    assert done[0].cached_tokens == 8
    assert sorted(written) == [8, 9]
    assert all(slot >= 4 for slot in written.values()), "page 0 is no row's"


def test_logits_of_few_positions_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SCORED_TOKENS", 7)
    target, most = tiny_target(), 0
    logits = target.logits

    def counted(hidden: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return logits(hidden)

    monkeypatch.setattr(target, "logits", counted)
    done = list(engine_of(target, 0).run(iter(prompts_of(list(range(30)), list(range(25))))))
    assert most == 7
    monkeypatch.undo()
    check(done, target, 0)


def test_a_prompt_whose_logits_are_not_finite_is_an_error_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    logits = target.logits

    def damaged(hidden: Tensor) -> Tensor:
        found = logits(hidden).clone()
        found[2] = torch.nan  # after token 2 of the first prompt
        return found

    monkeypatch.setattr(target, "logits", damaged)
    first, second = sorted(engine_of(target, 1).run(iter(prompts_of([1, 2, 3, 4, 5], [6, 7]))), key=lambda one: one.row_index)
    assert first.error is not None
    assert first.error.code == "non_finite_logits"
    assert "position 3 (prompt token 3)" in first.error.message
    assert first.prompt_logprobs is None
    monkeypatch.undo()
    check([second], target, 1)


def test_a_page_with_a_score_that_is_not_finite_is_shared_with_no_later_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = tiny_target(), list(range(12))
    engine = engine_of(target, 0, page_size=4)
    engine.keeps_prefixes = True
    logits = target.logits
    monkeypatch.setattr(target, "logits", lambda hidden: logits(hidden) * torch.nan)
    (failed,) = engine.run(iter(prompts_of(prompt)))
    assert failed.error is not None
    monkeypatch.undo()
    done = list(engine.run(iter(prompts_of(prompt))))
    check(done, target, 0)
    assert done[0].cached_tokens == 0


def test_a_prompt_of_all_max_len_tokens_is_scored() -> None:
    target = tiny_target()
    done = list(engine_of(target, 0, max_len=9).run(iter(prompts_of(list(range(9)), [4]))))
    check(done, target, 0)


def test_ranks_that_share_a_model_score_as_one_process() -> None:
    prompts = [[*range(9), 20], [*range(9), 21, 22], [5]]
    expected = {one.row_index: one for one in engine_of(whole_of(tiny_spec()), 3).run(iter(prompts_of(*prompts)))}
    for found in on_ranks(2, lambda ranks: list(engine_of(part_of(tiny_spec(), ranks), 3).run(iter(prompts_of(*prompts))))):
        assert len(found) == 3
        for done in found:
            one = expected[done.row_index]
            assert done.prompt_logprobs is not None and one.prompt_logprobs is not None  # noqa: PT018
            np.testing.assert_allclose(done.prompt_logprobs, one.prompt_logprobs, atol=2e-6)
            assert done.prompt_top_logprobs is not None and one.prompt_top_logprobs is not None  # noqa: PT018
            np.testing.assert_allclose(done.prompt_top_logprobs[1], one.prompt_top_logprobs[1], atol=2e-6)


@pytest.mark.parametrize("differs", [False, True])
def test_a_pass_of_ranks_with_different_states_is_marked_though_no_row_ends_in_it(differs: bool) -> None:
    def marked(ranks: Collectives) -> list[list[int]]:
        engine = engine_of(part_of(tiny_spec(), ranks), 0)
        hidden = torch.ones(4, 16, dtype=torch.float64, device=DEVICE)
        hidden[2, 5] += differs * ranks.rank
        log = torch.full((3, 5), -1, dtype=torch.int32, device=DEVICE)
        mark_diverged(log, [1], engine.executor.round.vocabulary.diverged(hidden))
        return log.tolist()

    kept = [-1] * 5
    for log in on_ranks(2, marked):
        assert log == [kept, [0, 0, 0, 0, DIVERGED] if differs else kept, kept]
