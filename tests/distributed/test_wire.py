"""What processes of one model send to each other comes out as it went in: types, shapes, and numbers bit for bit."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from batchspec.automata.lazy_automaton import LazyAutomaton
from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.distributed.seat import Seat, new_group
from batchspec.engine.loop.totals import EngineTotals
from batchspec.records import (
    Channels,
    Choice,
    Completion,
    Repetition,
    Request,
    RowError,
    RowStats,
    SamplingParams,
    Snapshot,
    Thinking,
)
from batchspec.warm.messages import FROM_LEADER, TO_LEADER, Ended, Failed, Given, Weights
from tests.helpers.engines import request

SYMBOLS = TokenSymbols.of([b"a", b"bc"])
AUTOMATON = TokenAutomaton(
    classes=np.arange(6, dtype=np.int32), table=np.arange(12, dtype=np.int32).reshape(3, 4), masks=np.ones((3, 1), np.int32),
    answer=1, thought=0, either=2, vocabulary=SYMBOLS,
)
CHANNELS = Channels(
    start_id=1, channel_id=2, message_id=3, constrain_id=None, end_ids=frozenset({4, 5}), role=frozenset({(6, 7), (8,)}),
    analysis=frozenset({(9,)}), others=frozenset({(10,)}), recipient=frozenset({11}),
)
FULL = replace(
    request(3, [4, 5, 6], cap=9, stop_ids=(2, 7), stop=("x\N{HONEYBEE}",), min_new_tokens=2),
    seed=-(2**62),
    sampling=SamplingParams(
        temperature=0.1, logit_bias=((3, -1.5),), bad_words=((1, 2), (3,)), no_repeat_ngram=(3, 50, (4,))
    ),
    thinking=Thinking(begin_id=None, end_id=4, opened=None, budget=6, closing=(11, 4), channels=CHANNELS, header=(1,)),
    constraint=("regex", "a+"), automaton=LazyAutomaton("regex", "a+", True), automaton_state=3, tools="[]", adapter=2,
    choices=(Choice(text="no", token_ids=(1, 2)),), synthetic_len=4,
    repetition=Repetition(min_pattern_size=1, max_pattern_size=2, min_count=3),
    resumed=Snapshot(
        row_index=3, sample_index=0, shard=0, tokens=(1, 2), num_prefills=1, cached_tokens=0, accepted=(1,), drafted=(0,),
        prefill_s=0.1, decode_s=1 / 3,
    ),
)
STATS = RowStats(
    drafter="none", draft_len=1, num_prefills=1, num_rounds=2, num_drafted=2, num_accepted=1, num_discarded=0, histogram=(1, 1),
    drafted_at=(2,), accepted_at=(1,), prefill_s=0.1, decode_s=0.2, slot=0,
)
DONE = Completion(
    request_id="q", row_index=3, sample_index=0, shard=0, status="ok", finish_reason="stop", token_ids=np.array([3], np.int32),
    logprobs=np.array([-0.1, np.nan], np.float32), top_logprobs=(np.ones((2, 3), np.int32), np.full((2, 3), 0.1, np.float32)),
    choice_logprobs=(("no", -1.5),), choice_probs=(1.0,), stats=STATS,
    error=RowError(code="c", stage="s", message="m", retryable=False),
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, msgspec.Struct):
        return same(msgspec.structs.astuple(one), msgspec.structs.astuple(other))
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return bool(one == other)


@pytest.mark.parametrize("one", [request(0, [1], cap=2), FULL], ids=["plain", "everything set"])
def test_a_request_reaches_the_leader_as_it_is(one: Request) -> None:
    found = TO_LEADER.decode(TO_LEADER.encode(Given([one], [-1], [AUTOMATON], over=True)))
    assert isinstance(found, Given)
    assert same(found.requests[0], one)
    assert same(found.automata[0], AUTOMATON)
    assert found.over


def test_a_completion_and_the_totals_come_back_as_they_are() -> None:
    totals = EngineTotals(rounds=2, prefill_s=0.1, expert_correlation=0.5)
    counted = DONE.replace(cached_tokens=cast(int, np.int64(7)))
    found = FROM_LEADER.decode(FROM_LEADER.encode(Ended([DONE, counted], totals, over=False)))
    assert isinstance(found, Ended)
    assert same(found.completions[0], DONE)
    assert found.completions[1].cached_tokens == 7
    assert same(found.totals, totals)


HALF = "a \ud83d b"
"""Half of a surrogate pair, which is no text in UTF-8: Python's strings may hold it."""


def test_strings_that_are_no_text_arrive_as_they_are() -> None:
    """Beside them everything else does too; a message after them is an ordinary one."""
    odd = replace(FULL, stop=(HALF, "\udcff", "\N{HONEYBEE}"), tools=HALF, choices=(Choice(text=HALF, token_ids=(1,)),))
    given = TO_LEADER.decode(TO_LEADER.encode(Given([odd, FULL], [-1, 0], [AUTOMATON], over=False)))
    assert isinstance(given, Given)
    assert same(given.requests[0], odd)
    assert same(given.requests[1], FULL)
    assert (given.follows, given.over) == ([-1, 0], False)
    assert same(given.automata[0], AUTOMATON)
    error = RowError(code="c", stage="s", message=HALF, retryable=True)
    done = DONE.replace(stop_reason=HALF, choice_logprobs=((HALF, -1.5),), error=error)
    ended = FROM_LEADER.decode(FROM_LEADER.encode(Ended([done], EngineTotals(rounds=2), over=True)))
    assert isinstance(ended, Ended)
    assert same(ended.completions[0], done)
    assert same(ended.totals, EngineTotals(rounds=2))
    for message in (Failed("CheckpointError", HALF), Failed("CheckpointError", "text")):
        assert FROM_LEADER.decode(FROM_LEADER.encode(message)) == message
    weights = Weights("/models/\udcff", True)
    assert TO_LEADER.decode(TO_LEADER.encode(weights)) == weights


def test_arrays_that_were_sent_can_be_written_to() -> None:
    found = FROM_LEADER.decode(FROM_LEADER.encode(Ended([DONE], EngineTotals(), over=False)))
    assert isinstance(found, Ended)
    ids = found.completions[0].token_ids
    assert ids is not None
    ids[0] = 4


def test_what_has_no_form_on_the_wire_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        FROM_LEADER.encode(Ended([], EngineTotals(_group=object()), over=False))


def test_a_seat_is_the_first_words_of_a_command_line() -> None:
    with new_group(2, sharing=4) as first:
        seat, words = Seat.of([*replace(first, rank=1).words(), "more", "words"])
        assert seat == Seat(1, 2, first.handle, first.rendezvous, 4)
        assert words == ["more", "words"]
        assert os.path.samefile(first.rendezvous_file, f"/dev/fd/{first.rendezvous}")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.handle)
