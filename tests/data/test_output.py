"""What the host makes of a row's tokens: stop strings across tokens and rounds, statistics, the completion."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.engine.features.stop_strings import StopFinder
from batchspec.engine.slots.open_requests import completion_of
from batchspec.kernels.rounds.accept import FULL
from batchspec.records import Request, SamplingParams, Thinking
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.automata import automaton
from tests.helpers.one_row import OneRow
from tests.text.test_tokenizer import byte_fallback

PIECES = [b"a", b"b", b"ab", b"\n", b"END", b"E", b"ND", b"\xe4", b"\xbd", b"\xa0", b"", b" x", b"b\xe4"]
"""Token id -> bytes: a tokenizer in which characters and stop strings span tokens; token 10 is special (no text), and
token 12 ends one character and begins another."""


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode("utf-8", errors="replace")


def make(stop: tuple[str, ...] = (), stop_ids: tuple[int, ...] = (), cap: int = 100, draft_len: int = 3) -> OneRow:
    request = Request(
        request_id="q",
        row_index=0,
        sample_index=0,
        shard=0,
        prompt_ids=np.array([1], np.int32),
        max_new_tokens=cap,
        min_new_tokens=0,
        sampling=SamplingParams(),
        stop_ids=stop_ids,
        stop=stop,
        seed=0,
        predicted_tokens=cap,
    )
    return OneRow(request, draft_len=draft_len, decode=decode)


def finish(progress: OneRow) -> tuple[str, str, str | None]:
    done = progress.completion(eos_ids=frozenset({10}))
    assert done.text is not None
    return done.text, done.finish_reason, done.stop_reason


def test_a_stop_string_that_spans_rounds_ends_the_row_at_the_token_that_completes_it() -> None:
    progress = make(stop=("END",))
    progress.add_prefill([0])
    progress.add_round(1, 1, [1, 5])
    assert progress.state.finish_reason is None
    progress.add_round(2, 3, [6, 0, 1])
    assert progress.state.tokens == [0, 1, 5, 6]
    assert progress.state.num_discarded == 2
    assert finish(progress) == ("ab", "stop", "END")


def test_a_stop_string_inside_one_token_is_cut_out_of_the_text() -> None:
    progress = make(stop=("b",))
    progress.add_prefill([2])
    assert finish(progress) == ("a", "stop", "b")


def test_the_earliest_of_several_stop_strings_counts() -> None:
    progress = make(stop=("ND", "EN"))
    progress.add_prefill([4])
    assert finish(progress) == ("", "stop", "EN")


def test_a_thought_that_is_cut_at_its_budget_shows_the_stop_strings_no_text_twice() -> None:
    """Its tokens are emitted anew from the first one on: the answer before the thought is still there once."""
    begin, end = 12, 13
    progress = make(stop=("abab",))
    thinking = Thinking(begin_id=begin, end_id=end, opened=False, budget=2, closing=(end,))
    progress = OneRow(replace(progress.request, thinking=thinking), decode=decode)
    progress.add_prefill([2])
    progress.add_round(3, 3, [begin, 0, 0, 0])
    assert progress.state.tokens == [2, begin, 0, 0, end]
    assert progress.state.finish_reason is None
    progress.add_round(0, 3, [2])
    assert finish(progress) == ("", "stop", "abab")


@pytest.mark.parametrize(
    ("constrained", "tokens", "answer"),
    [(False, [3, 3, 3, 11], "x"), (True, [3, 3, 3, 11], "\n x"), (True, [3, 11], " x"), (True, [11, 0], " xa")],
)
def test_white_space_that_a_constraint_asks_for_is_part_of_the_answer(constrained: bool, tokens: list[int], answer: str) -> None:
    """Two line breaks at most are none of it: those that an automaton allows after a thought."""
    begin, end = 13, 14
    request = make(cap=2 + len(tokens)).request
    thinking = Thinking(begin_id=begin, end_id=end, opened=True, budget=None, closing=(end,))
    made = automaton("(a|b)*") if constrained else None
    progress = OneRow(replace(request, thinking=thinking, automaton=made), decode=decode)
    progress.add_prefill([0])
    for token in (end, *tokens):
        progress.add_round(0, 0, [token])
    assert finish(progress) == (answer, "length", None)


def test_bytes_of_an_unfinished_character_wait_for_its_end() -> None:
    progress = make(stop=("\u4f60",))
    for token in (7, 8):
        progress.add_round(0, 0, [token])
        assert progress.state.finish_reason is None
    progress.add_round(0, 0, [9])
    assert finish(progress) == ("", "stop", "\u4f60")


def test_a_stop_string_before_an_unfinished_character_is_found_though_the_character_never_ends() -> None:
    full, ended = make(stop=("b",), cap=2), make(stop=("b",), stop_ids=(10,))
    for progress in (full, ended):
        progress.add_prefill([0])
        progress.add_round(0, 0, [12])
        assert finish(progress) == ("a", "stop", "b")


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_fallback(tmp_path_factory.mktemp("fallback")))


FIRST_BYTE = 3
"""The token of byte 0 in `byte_fallback`; the words are the 10 tokens after all bytes."""
SOME_TOKENS = [FIRST_BYTE + byte for byte in b"A\xc3\xa9\xe6\x97\xa5\xf0"] + list(range(259, 269))


@settings(max_examples=200)
@given(
    ids=st.lists(st.sampled_from(SOME_TOKENS), max_size=12),
    stops=st.lists(st.sampled_from(["A", "\u00e9", "\u65e5", "H", " ", "lo", "Hello", "eA", "lo\u00e9"]), min_size=1, max_size=2),
    least=st.sampled_from([0, 0, 1, 3, 6]),
)
def test_the_text_before_a_stop_string_is_that_of_all_tokens_decoded_at_once(
    fallback: Tokenizer, ids: list[int], stops: list[str], least: int
) -> None:
    """This decoder writes a run of bytes as text if it is all UTF-8, and else each byte as U+FFFD, those that were text too.

    The first stop string counts that ends after the text of the first tokens, `least` of them.
    """
    finder = StopFinder(fallback.decode, stops)
    early = len(fallback.decode(ids[:least]).rstrip("\ufffd"))
    for end, token in enumerate(ids, 1):
        whole = fallback.decode(ids[:end])
        places = [(whole.find(stop, max(0, early - len(stop) + 1)), stop) for stop in stops]
        found = min((place for place in places if place[0] >= 0), default=None) if end > least else None
        assert finder.push(token, may_end=end > least) == (found and found[1])
        if found is not None:
            assert finder.text == whole[: found[0]]
            return


def test_a_byte_that_was_text_is_none_before_a_stop_string_that_follows_bad_bytes(fallback: Tokenizer) -> None:
    finder = StopFinder(fallback.decode, ["H"])
    assert [finder.push(token) for token in (FIRST_BYTE + 0x41, FIRST_BYTE + 0xE6, 260)] == [None, None, "H"]
    assert finder.text == "\ufffd\ufffd"


def test_a_stop_id_names_itself_unless_it_is_the_models_own_eos() -> None:
    users, eos = make(stop_ids=(3, 10)), make(stop_ids=(3, 10))
    users.add_round(2, 3, [0, 3])
    eos.add_round(0, 0, [10])
    assert users.state.num_discarded == 1
    assert finish(users) == ("a", "stop", "3")
    assert finish(eos) == ("", "stop", None)


def test_the_cap_truncates() -> None:
    progress = make(cap=2)
    progress.add_prefill([0])
    progress.add_round(0, 0, [1])
    done = progress.completion()
    assert (done.status, done.finish_reason, done.stop_reason) == ("truncated", "length", None)


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    st.lists(st.integers(1, 4), min_size=1),
    st.sampled_from([("END",), ("ab", "x"), ("\u4f60", "\n")]),
)
def test_where_a_row_stops_depends_on_its_tokens_alone(tokens: list[int], sizes: list[int], stop: tuple[str, ...]) -> None:
    whole, cut = make(stop=stop), make(stop=stop)
    for token in tokens:
        if whole.state.finish_reason is None:
            whole.add_round(0, 0, [token])
    at = 0
    for size in sizes * len(tokens):
        if cut.state.finish_reason is None and at < len(tokens):
            part = tokens[at : at + size]
            cut.add_round(len(part) - 1, 3, part)
            at += size
    assert whole.state.tokens == cut.state.tokens
    assert (whole.state.finish_reason, whole.state.stop_reason) == (cut.state.finish_reason, cut.state.stop_reason)
    if whole.state.finish_reason is None:
        whole.state.set_finish_reason(FULL)
    written, *_ = finish(whole)
    assert not any(text in written for text in stop)


def test_seconds_are_those_of_all_prefills_and_from_the_first_token_on_and_of_earlier_runs() -> None:
    """Prefilled at 10, preempted, prefilled again at 20, stopped at 30; in the next run prefilled at 100 and done at 103."""
    progress = make()
    for seconds, now in ((0.5, 10.0), (0.25, 20.0)):
        progress.add_prefill([0])
        progress.state.note_prefill(seconds, now)
    progress = OneRow(replace(progress.request, resumed=progress.state.snapshot(30.0)))
    assert progress.state.snapshot(90.0).decode_s == 20.0  # nothing has happened in this run yet
    progress.add_prefill([0])
    progress.state.note_prefill(1.0, 100.0)
    progress.state.set_finish_reason(FULL)
    stats = progress.completion(now=103.0).stats
    assert stats is not None
    assert (stats.num_prefills, stats.prefill_s, stats.decode_s) == (3, 1.75, 23.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20), st.integers(0, 12))
def test_statistics_identities_hold_after_every_round(rounds: list[tuple[int, int]], stop_after: int) -> None:
    progress = make(stop=("END",), cap=10_000)
    progress.add_prefill([0])
    for number, (a, b) in enumerate(rounds):
        if progress.state.finish_reason is not None:
            break
        accepted, drafted = min(a, b), max(a, b)
        emitted = [0] * (accepted + 1)
        if number == stop_after:
            emitted[0] = 4
        progress.add_round(accepted, drafted, emitted)
        so_far = copy(progress.state)
        so_far.finish_reason = progress.state.finish_reason or "length"
        done = completion_of(so_far, drafter="lookup", eos_ids=frozenset(), slot=0, now=0.0).stats
        assert done is not None
        assert len(progress.state.tokens) + done.num_discarded == done.num_prefills + done.num_accepted + done.num_rounds
        assert sum(done.histogram) == done.num_rounds
        assert sum(j * count for j, count in enumerate(done.histogram)) == done.num_accepted == sum(done.accepted_at)
        assert sum(done.drafted_at) == done.num_drafted
