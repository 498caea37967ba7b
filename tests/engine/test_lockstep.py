"""The leader decides, all ranks execute: they have the same state, and a difference ends the run before a wrong row leaves."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.automata.lazy_automaton import Expanding
from batchspec.batch.automata import AutomataCapacity
from batchspec.batch.device_batch import SLOT_FIELDS, DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.distributed import channel as channel_module
from batchspec.distributed.channel import Channel, make_memory
from batchspec.distributed.collectives import Collectives
from batchspec.draft.base import Drafter
from batchspec.draft.corpus import Corpus
from batchspec.draft.lookup import LookupDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.follower import Beats, follow
from batchspec.engine.loop.run_times import RoundClock, RoundTime
from batchspec.engine.ranks import messages
from batchspec.engine.ranks.lead import RUN, Lead
from batchspec.engine.ranks.messages import Begin, Build, Calibrate, End, Load, Message, Prepare, Scales, Step, decode, encode
from batchspec.engine.rounds import draft_lengths
from batchspec.engine.rounds.records import PendingResult, RoundOptions
from batchspec.engine.rounds.vocabulary import DIVERGED
from batchspec.engine.rounds.vocabulary_of_ranks import checksums
from batchspec.engine.slots import expected_pages
from batchspec.engine.step import RoundWidth, ScheduledStep
from batchspec.errors import DivergedError, RankLost
from batchspec.kernels.rounds.accept import UNDECIDED
from batchspec.kernels.sampling.argmax import NO_TOKEN
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.records import Choice, Completion, Repetition, SamplingParams, Thinking
from tests.distributed.test_tensor_parallel import Loud
from tests.draft.test_vocabulary import drafter, expected_ids
from tests.engine.test_replay import any_times, recorded, requests_of_every_kind
from tests.helpers.automata import PATTERNS_OF_LETTERS, VOCABULARY, constrained_tokens
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, plain_tokens, request, tiny_spec
from tests.helpers.engines import decode as letters
from tests.helpers.grammars import GRAMMARS, ExpandLate, grammar_tokens
from tests.helpers.ranks import on_ranks, part_of, whole_of
from tests.helpers.replaying import scenario, state_digest
from tests.structured.test_constrained import constrained
from tests.structured.test_lazy import following

pytestmark = pytest.mark.second


@pytest.fixture
def handle() -> Iterator[int]:
    made = make_memory()
    yield made
    os.close(made)


SPEC = tiny_spec(5)
ROOM = AutomataCapacity(num_tokens=VOCAB, table_words=1 << 12, masks_bytes=1 << 11)
BATCH = packed(4, num_pages=26, max_len=72, num_verified=7, prefill_tokens=24)


def group_run(
    handle: int,
    count: int,
    lead: Callable[[Engine, Lead], Any],
    *,
    name: str = "eagle3",
    follower: Callable[[Engine], None] = lambda _: None,
    expanding: Expanding | None = None,
    batch: PackedBatch = BATCH,
    watchdog: Beats | None = None,
    synthetic: tuple[tuple[float, ...], ...] | None = None,
) -> tuple[Any, list[bytes]]:
    """What `lead` returns of the leader's engine, and the digests of all ranks' states at the end. Threads are the ranks."""

    def one(ranks: Collectives) -> tuple[Any, bytes]:
        end = Channel(handle, ranks.rank, count)
        target = part_of(SPEC, ranks, Loud)
        leading = Lead(end) if ranks.rank == 0 else None
        engine = make_engine(
            target, made(name, target), batch, device=DEVICE, decode=letters, lead=leading,
            vocabulary=VOCABULARY, automata_capacity=ROOM, expanding=None if leading is None else expanding,
            options=RoundOptions(row_lengths=True, synthetic=synthetic),
        )
        if leading is None:
            follower(engine)
            follow(end, engine, watchdog, new_weights=lambda _: None)
            return None, state_digest(engine.executor)
        try:
            found = lead(engine, leading)
        except BaseException:
            end.lose(0)
            raise
        leading.send(End())
        return found, state_digest(engine.executor)

    found = on_ranks(count, one)
    return found[0][0], [digest for _, digest in found]


def made(name: str, target: Target) -> Drafter:
    """With a corpus whose table a thread builds: only the leader may say when it is used."""
    if name == "corpus":
        return LookupDrafter(4, min_ngram=1, max_ngram=3, corpus=Corpus(200, lengths=(1, 2, 3), device=DEVICE))
    return drafter(name, target, BATCH.num_slots)


def tokens(engine: Engine, _: Lead) -> dict[str, list[int]]:
    return {done.request_id: expected_ids(done) for done in engine.run(iter(requests_of_every_kind()))}


def restless(engine: Engine, lead: Lead) -> dict[str, list[int]]:
    """Widths, preparation and probes by a clock that says anything."""
    clock = random.Random(3)
    engine.planner._lengths = any_times(engine, clock)
    add = RoundClock.add
    RoundClock.add = lambda *_: RoundTime(clock.uniform(0.1, 20.0), 0)  # type: ignore[method-assign]
    try:
        return tokens(engine, lead)
    finally:
        RoundClock.add = add  # type: ignore[method-assign]


def widths_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> set[RoundWidth]:
    """Rounds of few rows may verify a part of their drafts too. Returns the widths of all rounds that leaders send."""
    monkeypatch.setattr(draft_lengths, "LEAST_ROWS", 1)
    monkeypatch.setattr(draft_lengths, "PART_WORTH", 1.5)
    send_step, widths = Lead.send_step, set[RoundWidth]()

    def sent(self: Lead, step: ScheduledStep) -> None:
        if step.round is not None:
            widths.add(step.round.shape.width)
        send_step(self, step)

    monkeypatch.setattr(Lead, "send_step", sent)
    return widths


@pytest.mark.parametrize(("name", "count"), [
    ("corpus", 4), ("tree", 2), ("hybrid", 2), ("window", 2)
])
def test_followers_have_the_leaders_tokens_whatever_the_clock_says(
    name: str, count: int, handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemption, stop strings, thinking budgets, shared prefixes and compaction, which no follower decides."""
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    widths = widths_with_few_rows(monkeypatch)
    found, digests = group_run(handle, count, restless, name=name)
    assert len(set(digests)) == 1
    assert any(width.mean_len is not None for width in widths) == (name != "tree")
    whole = whole_of(SPEC, Loud)
    for one in requests_of_every_kind():
        if one.thinking is None:
            assert found[one.request_id] == plain_tokens(whole, one)


@pytest.mark.parametrize(("name", "count"), [("tree", 2), ("hybrid", 4)])
def test_ranks_follow_automata_that_the_leader_sends(name: str, count: int, handle: int) -> None:
    """Each masks its part of the vocabulary; more automata than there is room for come and go."""
    samplings = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.9, top_k=3, top_p=0.8))
    asked = [
        (constrained(request(i, [i, 3, 7], cap=9 + i % 5, sampling=samplings[i % 3], min_new_tokens=i % 4), pattern), pattern)
        for i, pattern in enumerate((*PATTERNS_OF_LETTERS, None, *PATTERNS_OF_LETTERS))
    ]

    def lead(engine: Engine, _: Lead) -> dict[int, list[int]]:
        return {done.row_index: expected_ids(done) for done in engine.run(iter([one for one, _ in asked]))}

    found, digests = group_run(handle, count, lead, name=name)
    assert len(set(digests)) == 1
    whole = whole_of(SPEC, Loud)
    assert found == {one.row_index: constrained_tokens(one, pattern, target=whole) for one, pattern in asked}


@pytest.mark.parametrize(("name", "count"), [("none", 2), ("eagle3", 2), ("tree", 2)])
def test_ranks_follow_lazy_automata_whose_states_the_leader_finds(name: str, count: int, handle: int) -> None:
    samplings = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.9, top_k=3, top_p=0.8))
    asked = [
        (following(request(i, [i, 3, 7], cap=9 + i % 5, sampling=samplings[i % 3], min_new_tokens=i % 4), grammar), grammar)
        for i, grammar in enumerate((*GRAMMARS, *GRAMMARS))
    ]

    def lead(engine: Engine, _: Lead) -> dict[int, list[int]]:
        return {done.row_index: expected_ids(done) for done in engine.run(iter([one for one, _ in asked]))}

    expanding = ExpandLate(1, lost=0.05)
    found, digests = group_run(handle, count, lead, name=name, expanding=expanding)
    assert len(set(digests)) == 1
    whole = whole_of(SPEC, Loud)
    assert found == {one.row_index: grammar_tokens(one, grammar, target=whole) for one, grammar in asked}


def test_ranks_make_up_the_same_acceptance_and_confidence(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would leave out other drafts than the leader."""
    widths = widths_with_few_rows(monkeypatch)
    rates = ((0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), (0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0))
    _, digests = group_run(handle, 2, restless, synthetic=rates)
    assert len(set(digests)) == 1
    assert any(width.mean_len is not None for width in widths)


def test_all_ranks_forget_the_chances_of_drafts_with_new_weights(handle: int) -> None:
    """The leader would choose drafts by other chances than its followers."""
    tried = list[float]()

    def lead(engine: Engine, lead: Lead) -> None:
        chances = engine.executor.round.chances
        assert chances is not None
        list(engine.run(request(i, [i, 3], cap=12) for i in range(6)))
        tried.append(float(chances.tried.sum()))
        lead.send(messages.NewWeights(""))
        with engine.changing_target():
            pass
        tried.append(float(chances.tried.sum()))

    _, digests = group_run(handle, 2, lead)
    assert tried[0] > 0
    assert tried[1] == 0
    assert len(set(digests)) == 1


def test_an_engine_may_run_again_also_after_a_run_that_was_left(handle: int) -> None:
    def lead(engine: Engine, _: Lead) -> list[list[int]]:
        asked = [request(i, [i, 3], cap=12) for i in range(6)]
        left = engine.run(iter(asked))
        next(left)
        left.close()
        engine.prepare(SamplingMode(random=True), shared=True)
        return [expected_ids(done) for _ in range(2) for done in engine.run(iter(asked))]

    found, digests = group_run(handle, 2, lead)
    assert len(set(digests)) == 1
    assert sorted(found[:6]) == sorted(found[6:])
    whole = whole_of(SPEC, Loud)
    assert sorted(found[:6]) == sorted(plain_tokens(whole, request(i, [i, 3], cap=12)) for i in range(6))


class Pulse:
    """A watchdog that notes how many results its rank had read at each beat."""

    def __init__(self, end: Channel) -> None:
        self._end, self.read = end, list[int]()

    def beat(self) -> None:
        self.read.append(self._end.progress(1).results % RUN)

    def begin_loading(self) -> None:
        self.read.append(-2)

    def pause(self) -> None:
        self.read.append(-1)


@pytest.mark.parametrize("left", [False, True])
def test_a_step_may_have_any_number_of_results(left: bool, handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of short passes over long prompts: more than digests are kept, and for longer than a watchdog waits. The leader may read
    none of them, if a call of a warm engine is cancelled.
    """
    monkeypatch.setattr(channel_module, "KEPT", 2)
    asked, pulse = [request(i, [i, 3], cap=1) for i in range(4)], Pulse(Channel(handle, 1, 2))

    def give_up(_: object) -> None:
        raise KeyError

    def lead(engine: Engine, lead: Lead) -> list[list[int]]:
        if left:
            engine.on_round = give_up
            with pytest.raises(KeyError):
                list(engine.run(iter(asked)))
            engine.on_round = None
            engine.prepare(SamplingMode())
        return [expected_ids(done) for done in engine.run(iter(asked))]

    batch = packed(4, prefill_tokens=2)
    found, digests = group_run(handle, 2, lead, name="none", batch=batch, watchdog=pulse)
    assert len(set(digests)) == 1
    assert sorted(found) == sorted(plain_tokens(whole_of(SPEC, Loud), one) for one in asked)
    assert "3, 4" in str(pulse.read), "a beat after each result of one step"


def test_ranks_that_differ_are_not_mistaken_for_rows_that_wait_or_fail() -> None:
    """Else `accept` lets a row with such a choice wait, round after round, and no rank says why."""
    assert len({NO_TOKEN, UNDECIDED, DIVERGED}) == 3
    assert max(NO_TOKEN, UNDECIDED, DIVERGED) < 0


def a_wrong_token(engine: Engine) -> None:
    """As after a flipped bit. The choices, which are exchanged, are the same on all ranks, and wrong."""
    rows = engine.executor.rows
    rows.tokens[0, int(rows.num_tokens[0]) - 1] ^= 1


def a_wrong_weight(engine: Engine) -> None:
    engine.target._norm[3] += 1e-9


def a_wrong_limit(engine: Engine) -> None:
    """The rank ends a row one token earlier: no exchange has anything to do with it."""
    engine.executor.rows.limit[1] -= 1


@pytest.mark.parametrize(
    ("harm", "what"), [(a_wrong_token, "hidden states"), (a_wrong_weight, "hidden states"), (a_wrong_limit, "tokens")]
)
def test_no_wrong_row_leaves_after_ranks_came_to_differ(harm: Callable[[Engine], None], what: str, handle: int) -> None:
    """From the fifth step on one rank computes something else."""
    done: list[Completion] = []

    def lead(engine: Engine, _: Lead) -> None:
        done.extend(engine.run(iter([request(i, [i, 3], cap=30) for i in range(4)])))

    def harmed(engine: Engine) -> None:
        execute, count = engine.executor.execute, [0]

        def then_harmed(step: ScheduledStep) -> None:
            execute(step)
            count[0] += 1
            if count[0] == 5:
                harm(engine)

        engine.executor.execute = then_harmed  # type: ignore[method-assign]

    with pytest.raises(DivergedError, match=rf"came to different {what} within \d+ rounds and prefill passes; rows that ended"):
        group_run(handle, 2, lead, follower=harmed)
    assert len(done) < 4
    for one in done:  # they ended before
        assert expected_ids(one) == plain_tokens(whole_of(SPEC, Loud), request(one.row_index, [one.row_index, 3], cap=30))


@pytest.mark.parametrize(("times", "said"), [(0, "step 3 instead of step 2"), (2, "step 2 instead of step 3")])
def test_a_rank_that_misses_a_step_or_gets_one_twice_raises(
    times: int, said: str, handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It executes no later step: its exchanges would be combined with those of other steps."""
    receive, again = Channel.receive, list[bytes]()

    def received(self: Channel) -> bytes:
        if again:
            return again.pop()
        found = receive(self)
        message = decode(found)
        if not isinstance(message, Step) or message.number != 2:
            return found
        again.extend([found] * (times - 1))
        return found if times else receive(self)

    def lead(_: Engine, lead: Lead) -> None:
        for _step in range(4):
            lead.send_step(ScheduledStep())

    monkeypatch.setattr(Channel, "receive", received)
    with pytest.raises(DivergedError, match=f"^rank 1 received {said}; run the same command again$"):
        group_run(handle, 2, lead, name="none")


@given(st.integers(1, 40), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]), st.data())
def test_a_checksum_changes_with_any_bit(width: int, dtype: torch.dtype, data: st.DataObject) -> None:
    hidden = torch.randn(2, width).to(dtype)
    other = hidden.clone()
    place, bit = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    bits = other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[1, place] ^= torch.tensor(-(2**63) if bit == 63 else 1 << bit).to(bits.dtype)
    assert (checksums(hidden) == checksums(other)).tolist() == [True, False]


def test_rows_and_snapshots_wait_for_all_ranks(handle: int) -> None:
    leader, lead = Channel(handle, 0, 2), Lead(Channel(handle, 0, 2))
    engine = make_engine(whole_of(SPEC, Loud), made("none", whole_of(SPEC, Loud)), BATCH, device=DEVICE, lead=lead)
    rows = engine.run(iter([request(0, [1, 2], cap=8)]))

    def next_row() -> None:
        with pytest.raises(RankLost):
            next(rows)

    thread = threading.Thread(target=next_row)
    thread.start()  # waits for the follower's digest of the row's end
    thread.join(0.1)
    assert thread.is_alive()
    leader.lose(1)
    thread.join(10)
    with pytest.raises(RankLost):
        engine.unfinished()


def test_messages_come_back_as_they_were() -> None:
    with pytest.MonkeyPatch.context() as patch:
        _, steps, _ = recorded(scenario("hybrid", 1), patch)
    for pickled, _ in steps:
        step = pickle.loads(pickled)
        back = decode(encode(Step(step, 7)))
        assert isinstance(back, Step)
        assert back.number == 7
        assert same(back.step, step)
    scales = torch.rand(2, 2, 3).tolist()
    others: list[Message] = [
        Load("cpu", {("linear", 8, 4): [(16, None)]}),
        Calibrate([[1, 2], [3]]), Scales(scales), Build(BATCH), Prepare(SamplingMode(random=True), True),
        Begin(3 * RUN), End(),
    ]
    assert [decode(encode(message)) for message in others] == others
    built = decode(encode(Build(BATCH, VOCABULARY)))
    assert isinstance(built, Build)
    assert built.vocabulary is not None
    assert np.array_equal(built.vocabulary.symbols, VOCABULARY.symbols)
    assert np.array_equal(built.vocabulary.starts, VOCABULARY.starts)


def same(one: Any, other: Any) -> bool:
    """Equal in what a rank reads; arrays too."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        left_out = (
            ("request_id", "stop", "thinking", "resumed", "constraint", "automaton") if type(one).__name__ == "Request" else ()
        )
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.name not in left_out)
    return bool(one == other)


def test_a_request_that_was_sent_begins_alike_on_the_device() -> None:
    """What is left out of a message, `DeviceBatch.begin` does not read."""
    asked = replace(
        request(3, [4, 5, 6], cap=9, stop_ids=(2, 7), stop=("x",), min_new_tokens=2),
        thinking=Thinking(begin_id=3, end_id=4, opened=True, budget=6, closing=(11, 4)), synthetic_len=5, seed=-(2**62),
        repetition=Repetition(min_pattern_size=1, max_pattern_size=2, min_count=3), tools="[]",
        choices=(Choice(text="no", token_ids=(1, 2)),),
    )
    with pytest.MonkeyPatch.context() as patch:
        _, steps, _ = recorded(scenario("none", 0), patch)
    step = next(found for pickled, _ in steps if (found := pickle.loads(pickled)).refills)
    back = decode(encode(Step(replace(step, refills=(replace(step.refills[0], request=asked),)), 1)))
    assert isinstance(back, Step)
    sent = back.step.refills[0].request
    batches = []
    for one in (asked, sent):
        rows = DeviceBatch.allocate(packed(2), vocab_size=31, device=torch.device("cpu"))
        rows.begin([1], [one], [(9,)])
        batches.append([tensor for name in SLOT_FIELDS for tensor in rows._tensors(name)])
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


def test_results_read_by_one_rank_only_do_not_hide_a_difference() -> None:
    """A digest depends on the order of results and on the slots of their lines."""
    from batchspec.engine.ranks.lead import Digest
    from batchspec.engine.rounds.records import RoundResult

    def digest(*logs: list[list[int]]) -> int:
        found = Digest()
        for log in logs:
            found.add(PendingResult(RoundResult(torch.tensor(log, dtype=torch.int32))))
        return found.value

    one, other, dead = [0, 0, 1, 0, 5], [0, 0, 1, 0, 6], [-1, 7, 7, 7, 7]
    assert digest([one, dead]) == digest([one, [-1, 0, 0, 0, 0]])
    values = [digest([one, dead]), digest([other, dead]), digest([dead, one]), digest([one, dead], [other, dead])]
    values.append(digest([other, dead], [one, dead]))
    assert len(set(values)) == 5
