"""Rows that follow an automaton: the tokens are those of the definition, whatever drafts, slots, pages and run-ahead."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.automata.token_automaton import ENDS, FORCED, TokenAutomaton
from batchspec.batch.automata import Automata, AutomataCapacity, ConstraintOffsets
from batchspec.batch.device_batch import DeviceBatch
from batchspec.draft.base import Drafter
from batchspec.engine.features.automaton_places import AutomatonPlaces
from batchspec.engine.features.constraints import Constraints, FiniteConstraints
from batchspec.engine.features.last_check import LastCheck
from batchspec.engine.rounds.vocabulary import greedy_sample as choose_greedily
from batchspec.engine.slots import expected_pages
from batchspec.engine.slots.request_state import RequestState
from batchspec.model.target import Target
from batchspec.records import Completion, Request, SamplingParams, Snapshot, Thinking
from tests.batch.test_logit_rules import ALL
from tests.helpers.automata import BEGIN, END, EOS, TOKENS, VOCABULARY, automaton, constrained_tokens, may_follow, written
from tests.helpers.automata import PATTERNS_OF_LETTERS as PATTERNS
from tests.helpers.engines import DEVICE, VOCAB, ForcedDrafter, make_engine, packed, request, tiny_target
from tests.helpers.replaying import SLOTS
from tests.helpers.row_lengths import LENGTHS

pytestmark = pytest.mark.usefixtures("poisoned")

SAMPLINGS = (
    SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_k=3, top_p=0.9),
    SamplingParams(temperature=1.2, min_p=0.1), SamplingParams(repetition_penalty=1.4),
)


def constrained(req: Request, pattern: str | None, **more: Any) -> Request:
    if pattern is None:
        return req
    made = automaton(pattern)
    return replace(req, stop_ids=(EOS,), automaton=made, automaton_state=made.answer, **more)


def run(requests: Sequence[Request], drafter: Drafter, *, short_cap: int = 512, **shape: Any) -> dict[int, Completion]:
    room = shape.pop("room", None) or AutomataCapacity(num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14)
    logprobs, lengths = shape.pop("logprobs", None), shape.pop("lengths", None)
    engine = make_engine(
        tiny_target(window=5), drafter, packed(SLOTS, **{"num_verified": drafter.draft_len, **shape}), device=DEVICE,
        vocabulary=VOCABULARY, automata_capacity=room, logprobs=logprobs, lengths=lengths,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", short_cap)
        return {done.row_index: done for done in engine.run(iter(requests))}


def tokens(done: dict[int, Completion]) -> dict[int, list[int]]:
    return {row: c.token_ids.tolist() for row, c in done.items() if c.token_ids is not None}


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[Request, str | None]]:
    found = []
    for index in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
        cap = draw(st.integers(1, 14))
        one = request(
            index, prompt, cap=cap, sampling=draw(st.sampled_from(SAMPLINGS)), predicted=draw(st.integers(1, cap)),
            min_new_tokens=draw(st.sampled_from([0, 0, 3, cap])),
        )
        pattern = draw(st.sampled_from((None, *PATTERNS)))
        found.append((constrained(one, pattern), pattern))
    return found


@pytest.mark.second
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_are_those_of_the_definition_whatever_drafts(name: str, data: st.DataObject) -> None:
    job = data.draw(jobs())
    shape = {"run_ahead": data.draw(st.sampled_from([0, 2])), "prefill_tokens": data.draw(st.sampled_from([5, 64]))}
    num_pages = data.draw(st.sampled_from([400, 24]))  # few pages: rows are preempted and walk their tokens again
    one_by_one = AutomataCapacity(num_tokens=VOCAB, table_words=700, masks_bytes=4 * 16)
    room = data.draw(st.sampled_from([None, one_by_one]))
    lengths = data.draw(LENGTHS, label="lengths")
    done = run([req for req, _ in job], ALL[name](), short_cap=0, num_pages=num_pages, room=room, lengths=lengths, **shape)
    assert tokens(done) == {req.row_index: constrained_tokens(req, pattern) for req, pattern in job}
    for req, pattern in job:
        out = done[req.row_index]
        if pattern is not None and out.status == "ok":
            assert out.token_ids is not None
            assert re.fullmatch(pattern, written(out.token_ids.tolist()).decode(), re.ASCII)


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "tree", "hybrid"])
def test_a_product_that_masks_by_itself_chooses_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the logits of greedy rows are not written out; here the masks are applied to them."""
    greedy_sample, told = Target.greedy_sample, [0]

    def masked(self: Target, hidden: Tensor, vocab: int | None = None, *, allowed: Any = None, **flags: Any) -> Tensor:
        if allowed is None:
            return greedy_sample(self, hidden, vocab, **flags)
        masks, lines = allowed
        told[0] += 1
        ids = torch.arange(VOCAB, device=hidden.device)
        forbidden = ((masks[lines.clamp(min=0).long()][:, ids >> 5] >> (ids & 31).int()) & 1 == 0) & (lines >= 0)[:, None]
        return choose_greedily(self.logits(hidden).masked_fill(forbidden, -torch.inf))

    monkeypatch.setattr(Target, "greedy_sample", masked)
    monkeypatch.setattr(Target, "masks_in_product", lambda *_: True)
    patterns = (*PATTERNS, None)
    job = [(constrained(request(i, [i, 7], cap=12), pattern), pattern) for i, pattern in enumerate(patterns)]
    assert tokens(run([req for req, _ in job], ALL[name]())) == {
        req.row_index: constrained_tokens(req, pattern) for req, pattern in job
    }
    assert told[0] > 5
    told[0] = 0
    least = [(replace(req, min_new_tokens=4), pattern) for req, pattern in job[:2]]  # these need the logits
    assert tokens(run([req for req, _ in least], ALL[name]())) == {
        req.row_index: constrained_tokens(req, pattern) for req, pattern in least
    }
    assert not told[0]


@pytest.mark.parametrize("right", [True, False])
def test_drafts_that_are_all_right_or_all_forbidden(right: bool) -> None:
    job = [
        (constrained(request(i, [i, 7], cap=12, sampling=SAMPLINGS[i % 2]), pattern), pattern)
        for i, pattern in enumerate(PATTERNS)
    ]
    expected = {req.row_index: constrained_tokens(req, pattern) for req, pattern in job}
    outputs = {req.seed: expected[req.row_index] for req, _ in job}
    done = run([req for req, _ in job], ForcedDrafter(4, outputs, right=right, fixed_len=True))
    assert tokens(done) == expected
    drafted = sum(c.stats.num_accepted for c in done.values() if c.stats)
    assert drafted > 20 if right else drafted < 20


@pytest.mark.parametrize("name", ["eagle3", "tree", "parallel", "window", "pard"])
def test_drafts_of_models_follow_the_automaton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is drafted before the end, where anything is."""
    drafter, pattern = ALL[name](), "[a-d]*"
    propose, drafted = drafter.propose, list[int]()

    def noted(rows: Any, draft_ids: torch.Tensor, *rest: Any) -> Any:
        parents = propose(rows, draft_ids, *rest)
        for slot in (rows.live * rows.automaton_state).nonzero().flatten().tolist():
            line = [-1, *draft_ids[slot].tolist()]
            above = range(-1, len(line) - 1) if parents is None else parents[slot].tolist()
            ended = [False] * len(line)
            for node, parent in list(enumerate(above))[1:]:
                ended[node] = ended[parent] or line[node] == EOS
                drafted.extend([] if ended[node] else [line[node]])
        return parents

    monkeypatch.setattr(drafter, "propose", noted)
    run([constrained(request(i, [i, 3], cap=20, sampling=SAMPLINGS[i % 2]), pattern) for i in range(4)], drafter)
    assert len(drafted) > 20
    assert all(may_follow(pattern, [], token) for token in drafted)


@pytest.mark.second
@pytest.mark.parametrize("name", ["none", "eagle3", "lookup", "tree"])
@pytest.mark.parametrize("opened", [True, None, False])
def test_an_answer_follows_its_automaton_after_the_thought(name: str, opened: bool | None) -> None:
    pattern, made = "(ab|c)*d", automaton("(ab|c)*d", thinks=True)
    states = {True: made.thought, None: made.either, False: made.answer}
    how = Thinking(begin_id=BEGIN, end_id=END, opened=opened, budget=5, closing=(END,))
    thought = {True: True, None: False, False: None}[opened]
    requests = [
        replace(
            request(i, [i, 11, 4], cap=25, sampling=SamplingParams(temperature=1.0)), stop_ids=(EOS,), automaton=made,
            automaton_state=states[opened], thinking=how,
        )
        for i in range(8)
    ]
    done = run(requests, ALL[name]())
    ended = 0
    for out in tokens(done).values():
        for place, token in enumerate(out):
            assert may_follow(pattern, out[:place], token, thought=thought), (out, place)
        ended += out[-1] == EOS
    assert ended >= 3
    assert tokens(done) == tokens(run(requests, ALL["none"]()))


@pytest.mark.parametrize("name", ["lookup", "hybrid"])
def test_forced_tokens_are_drafted_by_a_lookup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `cddd` nothing is known from the prompt; rows without an automaton draft what they did."""

    def accepted(done: dict[int, Completion]) -> int:
        return sum(stats.num_accepted for row in range(3) if (stats := done[row].stats) is not None)

    requests = [constrained(request(i, [i + 20, 1], cap=9), "ca(bab|dd)cddd") for i in range(3)]
    free = [request(i, [i + 20, 1, i + 20], cap=9) for i in range(3, 6)]
    done = run([*requests, *free], ALL[name]())
    for req in requests:
        assert tokens(done)[req.row_index] == constrained_tokens(req, "ca(bab|dd)cddd")
    alone = run(free, ALL[name]())
    assert {i: tokens(done)[i] for i in range(3, 6)} == tokens(alone)
    monkeypatch.setattr(DeviceBatch, "constrain_drafts", lambda *_: None)
    assert accepted(done) > accepted(run([*requests, *free], ALL[name]()))


def test_a_row_resumes_at_the_token_where_an_earlier_run_stopped() -> None:
    req = constrained(request(0, [5, 9], cap=14, sampling=SAMPLINGS[1]), PATTERNS[1])
    whole = constrained_tokens(req, PATTERNS[1])
    left = Snapshot(
        row_index=0, sample_index=0, shard=0, tokens=tuple(whole[:2]), num_prefills=1, cached_tokens=0, accepted=(1,),
        drafted=(1,), prefill_s=0.0, decode_s=0.0,
    )
    assert tokens(run([replace(req, resumed=left)], ALL["none"]())) == {0: whole}
    wrong = replace(left, tokens=(END, END))  # of another automaton: not taken over
    assert tokens(run([replace(req, resumed=wrong)], ALL["none"]())) == {0: whole}


def test_logprobs_are_those_of_the_raw_logits() -> None:
    req = constrained(request(0, [5, 9], cap=6), "abcab")
    free = run([replace(req, max_new_tokens=1, automaton=None)], ALL["none"](), logprobs=VOCAB)[0]
    done = run([req], ALL["eagle3"](), logprobs=0)[0]
    assert done.token_ids is not None
    assert done.logprobs is not None
    assert free.top_logprobs is not None
    first = free.top_logprobs[0][0].tolist().index(int(done.token_ids[0]))
    assert done.logprobs[0] == pytest.approx(free.top_logprobs[1][0][first])


def test_the_end_is_drawn_where_the_text_may_end_alone() -> None:
    made = automaton("(ab)*")
    for out in ([], [3], [3, 4], [7], [7, 3]):
        state = made.walk(made.answer, out)
        assert made.allowed(state).tolist() == [may_follow("(ab)*", out, token) for token in range(len(TOKENS))]
        assert made.allowed(state)[EOS] == (written(out) in (b"", b"ab"))


def test_before_its_minimum_a_text_ends_only_if_it_cannot_continue() -> None:
    done = run(
        [
            constrained(request(i, [i, 5], cap=20, min_new_tokens=6, sampling=SAMPLINGS[1]), pattern)
            for i, pattern in enumerate(("[ab]{0,40}", "(ab|c)d"))
        ],
        ALL["lookup"](),
    )
    free, closed = tokens(done)[0], tokens(done)[1]
    assert EOS not in free[:6]
    assert len(closed) <= 4
    assert closed[-1] == EOS
    assert done[1].status == "ok"
    made = automaton("(ab|c)d")
    assert made.table[made.walk(made.answer, [5, 6]), FORCED] == ENDS
    assert made.table[made.walk(made.answer, [5]), FORCED] == 6


def held_in(places: AutomatonPlaces, one: TokenAutomaton) -> bool:
    """Whether there is room for the automaton of a row, which then enters a slot."""
    if not places.bring(one):
        return False
    places.hold(one)
    return True


def test_an_automaton_keeps_its_place_while_a_row_follows_it() -> None:
    first, second, third = (automaton(pattern) for pattern in PATTERNS[:3])
    largest = max((first, second, third), key=lambda one: one.num_words)
    room = AutomataCapacity(
        num_tokens=VOCAB, table_words=1 + largest.num_words, masks_bytes=4 * max(len(one.masks) for one in (first, second, third))
    )
    places = AutomatonPlaces(room)
    assert held_in(places, first)
    assert held_in(places, first)
    (upload,) = places.take_uploads()
    assert (upload.place, len(upload.words)) == (1, first.num_words)
    places.release(first)
    assert not held_in(places, second)  # a row still follows the first
    assert places.take_uploads() == ()
    places.release(first)
    assert held_in(places, first)  # it is there still
    assert places.take_uploads() == ()
    places.release(first)
    for one in (second, third, first):
        assert held_in(places, one)
        (upload,) = places.take_uploads()
        assert upload.masks is one.masks
        places.release(one)


def test_a_row_that_waits_for_memory_keeps_its_turn_when_others_need_none() -> None:
    """Rows whose automaton is on the device pass it; one that would need memory, too, does not."""
    small, other, large = sorted((automaton(pattern) for pattern in PATTERNS[:6]), key=lambda one: one.num_words)[:: 5 // 2]
    room = AutomataCapacity(num_tokens=VOCAB, table_words=1 + small.num_words + other.num_words, masks_bytes=4 * 200)
    room = replace(room, table_words=max(room.table_words, 1 + large.num_words))
    feature = FiniteConstraints(LastCheck(VOCABULARY, None), room)

    def state(index: int, rule: TokenAutomaton) -> RequestState:
        asked = replace(request(index, [1], cap=9), stop_ids=(EOS,), automaton=rule, automaton_state=rule.answer)
        return RequestState.of(asked, 0)

    def enters(row: RequestState) -> bool:
        if not feature.may_go_on(row):
            return False
        feature.enter(row)
        return True

    first, waiting, passing, late = state(0, small), state(1, large), state(2, small), state(3, other)
    assert enters(first)
    assert not enters(waiting)
    assert enters(passing)
    assert not enters(late)
    for row in (first, passing):
        feature.leave(row)
    assert enters(waiting)


def test_automata_share_the_tables_without_overlap() -> None:
    room = AutomataCapacity(num_tokens=VOCAB, table_words=2000, masks_bytes=4 * 60)
    places, held, taken, refused = AutomatonPlaces(room), deque[Any](), 0, 0
    for turn in range(60):
        one = automaton(PATTERNS[(turn * 7) % len(PATTERNS)])
        while not held_in(places, one):
            there = sorted((each.place, each.place + each.automaton.num_words) for each in places._residents.values())
            assert all(each.num_rows for each in places._residents.values())  # whatever no row follows has made room
            ends, begins = [1, *(end for _, end in there)], [*(begin for begin, _ in there), room.table_words]
            gaps = [begin - end for end, begin in zip(ends, begins, strict=True)]
            num_free = room.num_masks - sum(len(each.mask_ids) for each in places._residents.values())
            assert max(gaps) < one.num_words or num_free < len(one.masks)
            refused += 1
            places.release(held.popleft())
        held.append(one)
        now = [places._residents[id(other)] for other in set(held)]
        spans = sorted((each.place, each.place + each.automaton.num_words) for each in now)
        assert spans[0][0] >= 1
        assert spans[-1][1] <= room.table_words
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        masks = [mask for each in now for mask in each.mask_ids.tolist()]
        assert len(set(masks)) == len(masks)
        taken += len(places.take_uploads())
    assert taken > 20  # many came more than once
    assert refused > 5
    assert len(held) > 1


def test_rows_that_the_host_ends_or_moves_leave_their_automata() -> None:
    rows = DeviceBatch.allocate(packed(SLOTS), vocab_size=VOCAB, device=DEVICE)
    rows.constrain([(slot, ConstraintOffsets(5, 300 + slot)) for slot in range(SLOTS)])
    rows.kill([1])
    assert rows.automaton_state.tolist() == [300, 0, 302, 303]
    rows.move([(3, 1)])
    assert rows.automaton_state.tolist() == [300, 303, 302, 0]
    rows.begin([0], [request(0, [1], cap=2)], [()])
    assert rows.automaton_state.tolist() == [0, 303, 302, 0]
    rows.clear()
    assert not rows.automaton_state.any()


def mixed_job() -> list[tuple[Request, str | None]]:
    """Rows of all patterns, and some without one, long enough for several rounds."""
    found: list[tuple[Request, str | None]] = []
    for i in range(12):
        pattern = None if i % 4 == 3 else PATTERNS[i % len(PATTERNS)]
        found.append((constrained(request(i, [i, 3], cap=12, sampling=SAMPLINGS[i % 2]), pattern), pattern))
    return found


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "tree"])
def test_a_row_that_enters_without_its_constraint_is_an_error_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may draw nothing, because it has been told no place; other rows are as ever."""
    job = mixed_job()
    monkeypatch.setattr(Constraints, "constrain", lambda *_: None)
    done = run([req for req, _ in job], ALL[name]())
    for req, pattern in job:
        if pattern is None:
            assert tokens(done)[req.row_index] == constrained_tokens(req, None)
        else:
            assert (error := done[req.row_index].error) is not None
            assert "no finite value of a token that its schema, regex, choice or grammar allows" in error.message
            assert done[req.row_index].token_ids is None


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "tree"])
def test_no_row_that_left_its_automaton_is_written_as_a_match(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no logits are masked: the rows whose tokens match by chance are kept, the others are error rows."""
    job = mixed_job()
    monkeypatch.setattr(Automata, "constrain", lambda *_, **__: None)
    done = run([req for req, _ in job], ALL[name]())
    for req, pattern in job:
        free, found = constrained_tokens(req, None), done[req.row_index]
        follows = all(may_follow(pattern, free[:i], free[i]) for i in range(len(free))) if pattern is not None else True
        assert (found.status == "error") == (not follows)
        if found.token_ids is not None:
            assert found.token_ids.tolist() == free
    errors = [one.error for one in done.values() if one.error is not None]
    assert len(errors) > 5
    assert {error.code for error in errors} == {"constraint_violated"}


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_a_row_whose_state_is_lost_between_rounds_is_an_error_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, advance, calls = mixed_job(), Automata.advance, [0]

    def losing(self: Automata, states: Tensor, *rest: Any) -> None:
        advance(self, states, *rest)
        calls[0] += 1
        if calls[0] == 3:
            states.zero_()

    monkeypatch.setattr(Automata, "advance", losing)
    done = run([req for req, _ in job], ALL[name]())
    assert any(one.status == "error" for one in done.values())
    for req, pattern in job:
        if done[req.row_index].token_ids is not None:
            assert tokens(done)[req.row_index] == constrained_tokens(req, pattern)
