"""Reasoning models: thoughts are told from answers on token ids, and a budget for them holds whatever drafts or packs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec import run
from batchspec.commands import plan, stats, verify
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.engine.features.thinking import ThinkingBudgets, split_thoughts
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.rounds.records import RoundLog, RoundOptions
from batchspec.engine.slots import expected_pages
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RunFeatures
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.errors import ConfigError
from batchspec.records import Channels, Completion, Request, SamplingParams, Snapshot, Thinking
from batchspec.text.thinking import find_think_tokens
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.engines import (
    DEVICE,
    VOCAB,
    ForcedDrafter,
    _draw,
    decode,
    full_logits,
    make_engine,
    packed,
    request,
    stops,
    tiny_target,
)
from tests.helpers.models import make_checkpoint, make_thinking_tokenizer, make_tokenizer
from tests.helpers.ngrams import forbidden
from tests.helpers.one_row import OneRow
from tests.helpers.row_lengths import LENGTHS

BEGIN, END = 3, 4
MARKS = (BEGIN, END)


def thinking(
    budget: int | None = None, *, opened: bool | None = None, closing: tuple[int, ...] = (), begin: int | None = BEGIN
) -> Thinking:
    return Thinking(begin_id=begin, end_id=END, opened=opened, budget=budget, closing=(*closing, END))


START, CHANNEL, MESSAGE, RETURN, ROLE, ANALYSIS, FINAL, TO = 5, 3, 6, 8, 10, 7, 9, 2
CHANNELS = Channels(
    start_id=START, channel_id=CHANNEL, message_id=MESSAGE, constrain_id=None, end_ids=frozenset({END, RETURN}),
    role=frozenset({(ROLE,)}), analysis=frozenset({(ANALYSIS,)}), others=frozenset({(FINAL,)}), recipient=frozenset({TO}),
)
HEADERS = ((), (START, ROLE), (START, ROLE, CHANNEL, ANALYSIS, MESSAGE), (START, ROLE, CHANNEL, ANALYSIS), (START, CHANNEL))


def harmony(budget: int | None, header: tuple[int, ...], closing: tuple[int, ...]) -> Thinking:
    """Channels instead of a pair of marks."""
    lead = (END, START, ROLE, CHANNEL, FINAL, MESSAGE)
    return Thinking(
        begin_id=MESSAGE, end_id=END, opened=None, budget=budget, closing=(*closing, *lead), channels=CHANNELS, header=header
    )


def thought_of(tokens: list[int], how: Thinking) -> tuple[bool, int]:
    """Whether the next token is within a thought, and how many tokens of thoughts there are: by the definition of channels."""
    header: list[int] | None = None
    inside, used = False, 0
    for place, token in enumerate([*how.header, *tokens]):
        of_output = place >= len(how.header)
        if token == START or (token == CHANNEL and (header is None or CHANNEL in header)):
            header, inside = [token], False
        elif token == MESSAGE:
            if header is not None:
                inside = TO not in header and header[header.index(CHANNEL) :][1:2] == [ANALYSIS] if CHANNEL in header else False
            header = None
        elif token in (END, RETURN):
            header, inside = None, False
        elif header == [START, ROLE] and token not in (CHANNEL, TO):
            header = None
        elif header is not None:
            header.append(token)
        else:
            used += inside and of_output
    return inside, used


def answer_of(tokens: list[int], how: Thinking) -> list[int]:
    """What is neither thought nor mark, written as plainly as can be."""
    if how.opened is None and END in tokens and how.begin_id not in tokens[: tokens.index(END)]:
        tokens = tokens[tokens.index(END) + 1 :]
    inside, answer = how.opened is True, []
    for token in tokens:
        if token in (how.begin_id, END):
            inside = token == how.begin_id
        elif not inside:
            answer.append(token)
    return answer


@torch.inference_mode()
def plain_tokens(req: Request) -> list[int]:
    """The definition: one token at a time; inside a thought that has used its budget the closing tokens are put instead."""
    target, how, params = tiny_target(window=5), req.thinking, req.sampling
    assert how is not None
    out: list[int] = []
    prompt = req.prompt_ids.tolist()
    inside, used = (how.opened is True, 0) if how.channels is None else thought_of([], how)
    text = early = ""
    while True:
        if inside and how.budget is not None and used >= how.budget:
            new, inside, used = list(how.closing), False, used + len(how.closing) - 1
        else:
            logits = full_logits(target, prompt + out).clone()
            for token in set(out):
                logits[token] -= params.presence_penalty
            logits[sorted(forbidden(out, params.no_repeat_ngram))] = -torch.inf
            if len(out) < req.min_new_tokens:
                logits[list(req.stop_ids)] = -torch.inf
            new = [_draw(logits, params, req.seed, len(prompt) + len(out))]
            if new[0] in (how.begin_id, END):
                inside = new[0] == how.begin_id
            elif inside:
                used += 1
        for token in new:
            out.append(token)
            if how.channels is not None:
                inside, used = thought_of(out, how)
            before, text = text, decode(answer_of(out, how))
            if len(out) <= req.min_new_tokens or len(text) < len(before):  # or all of it was a thought
                early = text
            if token in req.stop_ids or stops(req, text, early) or len(out) == req.max_new_tokens:
                return out


@st.composite
def requests_that_think(draw: st.DrawFn) -> list[Request]:
    found = []
    for index in range(draw(st.integers(1, 5))):
        cap = draw(st.integers(1, 26))
        likely = draw(st.lists(st.sampled_from([*MARKS, 7, 9]), min_size=1, max_size=8))
        req = request(
            index,
            likely + draw(st.lists(st.integers(0, VOCAB - 1), max_size=5)),
            cap=cap,
            sampling=draw(st.sampled_from([
                SamplingParams(), SamplingParams(temperature=1.2), SamplingParams(presence_penalty=0.4),
                SamplingParams(temperature=0.6, no_repeat_ngram=(2, 20, (END,))),
            ])),
            stop_ids=tuple(draw(st.lists(st.integers(0, 10), max_size=2, unique=True))),
            stop=tuple(draw(st.lists(st.sampled_from(["A", "BC", "Z"]), max_size=1))),
            min_new_tokens=draw(st.integers(0, min(3, cap))),
            predicted=draw(st.integers(1, cap)),
        )
        how = thinking(
            draw(st.one_of(st.none(), st.integers(0, 12))),
            opened=draw(st.sampled_from([True, True, False, None])),
            closing=draw(st.sampled_from([(), (11,), (12, 13, 12)])),
            begin=draw(st.sampled_from([BEGIN, BEGIN, None])),
        )
        if draw(st.booleans()):  # a tiny vocabulary, so that noise says these tokens often
            likely = draw(st.lists(st.sampled_from(range(2, 11)), min_size=3, max_size=8))
            req = replace(req, prompt_ids=np.array(likely, np.int32), stop=())
            how = harmony(how.budget, draw(st.sampled_from(HEADERS)), how.closing[:-1])
        found.append(replace(req, thinking=how))
    return found


def check(completion: Completion, req: Request) -> None:
    """The statistics' identities, and that thought, answer and what is said of them follow from the tokens."""
    counts, how = completion.stats, req.thinking
    assert counts is not None
    assert how is not None
    assert completion.token_ids is not None
    tokens = completion.token_ids.tolist()
    emitted = counts.num_prefills + counts.num_accepted + counts.num_rounds
    assert len(tokens) - counts.num_forced + counts.num_discarded == emitted
    assert sum(counts.histogram) == counts.num_rounds
    if counts.num_forced:
        assert completion.reasoning_truncated
    if how.channels is not None:
        said = tokens[:-1] if completion.finish_reason == "stop" else tokens
        assert completion.reasoning_tokens == thought_of(said, how)[1]
        return
    by_string = completion.stop_reason in req.stop
    said = tokens[:-1] if completion.finish_reason == "stop" and not by_string else tokens
    text = decode(answer_of(said, how))
    assert completion.text == (text[: text.index(str(completion.stop_reason))] if by_string else text)
    marks = sum(token in (how.begin_id, END) for token in said)
    assert completion.reasoning_tokens == len(said) - marks - len(answer_of(said, how))
    assert (completion.reasoning is None) == (not split_thoughts(said, how).thoughts)


@pytest.mark.second
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=requests_that_think(), data=st.data())
def test_a_budget_holds_exactly_whatever_drafts_and_packs_the_rows(requests: list[Request], data: st.DataObject) -> None:
    check_budgets(requests, data)


@pytest.mark.slow
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=requests_that_think(), data=st.data())
def test_a_budget_holds_exactly_in_more_examples(requests: list[Request], data: st.DataObject) -> None:
    check_budgets(requests, data)


def check_budgets(requests: list[Request], data: st.DataObject) -> None:
    """Every drafter, K, layout and run-ahead, and runs that are stopped and resumed, give the definition's tokens."""
    expected = {r.request_id: plain_tokens(r) for r in requests}
    kind = data.draw(st.sampled_from(["none", "lookup", "right", "wrong"]), label="drafter")
    draft_len = data.draw(st.integers(1, 6), label="K")
    by_seed = {r.seed: expected[r.request_id] for r in requests}
    drafter: Drafter = NoDrafter()
    if kind == "lookup":
        drafter = LookupDrafter(draft_len, min_ngram=1, max_ngram=3)
    elif kind != "none":
        drafter = ForcedDrafter(draft_len, by_seed, right=kind == "right", fixed_len=data.draw(st.booleans()))
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    scarce = 1 + -(-longest // 4) + data.draw(st.integers(0, 4))
    batch = packed(
        data.draw(st.sampled_from([1, 4]), label="slots"),
        num_pages=data.draw(st.sampled_from([scarce, 400]), label="pages"),
        max_len=longest,
        num_verified=drafter.draft_len,
        prefill_tokens=data.draw(st.sampled_from([3, 64])),
        run_ahead=data.draw(st.integers(0, 3), label="run_ahead"),
    )
    stop_after = data.draw(st.sampled_from([2, 5, 10**6]), label="rounds until a signal")
    tokens: dict[str, list[int]] = {}
    left = {r.request_id: r for r in requests}
    while left:
        engine = make_engine(
            tiny_target(window=5), drafter, batch, device=DEVICE, decode=decode,
            options=RoundOptions(uniform_slots=data.draw(st.booleans())), refill_dead=data.draw(st.booleans()),
            lengths=data.draw(LENGTHS, label="lengths"),
        )

        def stop_in_time(totals: EngineTotals, engine: Engine = engine, last: int = stop_after) -> None:
            if totals.rounds >= last:
                engine.stop()

        engine.on_round = stop_in_time
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
            for completion in engine.run(iter(list(left.values()))):
                assert completion.token_ids is not None
                tokens[completion.request_id] = completion.token_ids.tolist()
                check(completion, left.pop(completion.request_id))
        for snapshot in engine.unfinished():
            name = f"r{snapshot.row_index}"
            assert list(snapshot.tokens) == expected[name][: len(snapshot.tokens)]
            assert resumed_state(left[name], snapshot).snapshot(0.0) == snapshot
            left[name] = replace(left[name], resumed=snapshot)
        stop_after += 3
    assert tokens == expected


def resumed_state(req: Request, snapshot: Snapshot) -> RequestState:
    """The state with which another run continues the row."""
    return OneRow(replace(req, resumed=snapshot), draft_len=len(snapshot.accepted) - 1, decode=decode).state


@settings(max_examples=80)
@given(
    cap=st.integers(1, 10), budget=st.integers(0, 6), closing=st.lists(st.sampled_from([11, 12]), max_size=3),
    stop_ids=st.lists(st.sampled_from([12, END, RETURN]), max_size=1), by_channels=st.booleans(), draft_len=st.integers(0, 3),
    larger=st.integers(0, 12), data=st.data(),
)
def test_a_row_that_is_resumed_at_any_token_has_the_counts_with_which_it_stopped(
    cap: int, budget: int, closing: list[int], stop_ids: list[int], by_channels: bool, draft_len: int, larger: int,
    data: st.DataObject,
) -> None:
    """Its tokens, how it ended, and what was forced, discarded and drafted. Nothing is counted twice, whether the row was
    complete or not. A larger limit adds only the closing tokens that the smaller one cut off."""
    how = harmony(budget, HEADERS[2], tuple(closing)) if by_channels else thinking(budget, opened=True, closing=tuple(closing))
    req = replace(request(0, [7, 9], cap=cap, stop_ids=tuple(stop_ids)), thinking=how)
    row = OneRow(req, draft_len=draft_len)
    state = row.state
    token = st.sampled_from([BEGIN, END, 7, 7, 7, 11, 12])
    num_rounds = 0
    while state.finish_reason is None:
        room = state.request.max_new_tokens - len(state.tokens)
        drawn = data.draw(st.lists(token, min_size=1, max_size=draft_len + 1))
        ends = (place + 1 for place, each in enumerate(drawn) if each in req.stop_ids)
        row.add_round(len(drawn) - 1, draft_len, drawn[: min(room, next(ends, len(drawn)))])
        num_rounds += 1
        again = resumed_state(req, state.snapshot(0.0))
        assert again.snapshot(0.0) == state.snapshot(0.0)
        assert (again.finish_reason, again.stop_reason, again.stop_id) == (state.finish_reason, state.stop_reason, state.stop_id)
        assert len(state.tokens) == state.num_accepted + num_rounds + state.num_forced - state.num_discarded
    if state.finish_reason == "length":
        more = resumed_state(replace(req, max_new_tokens=req.max_new_tokens + larger), state.snapshot(0.0))
        assert more.tokens[: len(state.tokens)] == state.tokens
        assert more.num_forced - state.num_forced == len(more.tokens) - len(state.tokens)
        assert more.num_discarded == state.num_discarded


def test_a_row_that_ends_at_a_stop_id_within_the_closing_tokens_has_only_those_before_it() -> None:
    how = harmony(2, HEADERS[2], (11,))
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
    (done,) = engine.run(iter([replace(request(0, [7, 9], cap=12, stop_ids=(END,)), thinking=how)]))
    assert done.token_ids is not None
    assert done.stats is not None
    assert done.token_ids[2:].tolist() == [11, END]
    assert (done.finish_reason, done.stats.num_forced, done.reasoning_truncated) == ("stop", 2, True)


def test_a_stop_string_cuts_off_tokens_that_the_budget_has_read() -> None:
    """A round may add the answer with the stop string, and after it a second thought that uses up its budget: nothing is forced
    then, as if the tokens had come one after the other."""
    how, stop = thinking(1, opened=True, closing=(11,)), decode([12])
    for again in ([], [BEGIN, 7, 11, END]):
        row = OneRow(replace(request(0, [7, 9], cap=20), thinking=how, stop=(stop,)), draft_len=9, decode=decode)
        row.add_round(9, 9, [END, 7, 12, 7, *again, 7])
        done = row.completion()
        assert (done.finish_reason, done.stop_reason, done.reasoning_truncated) == ("stop", stop, False)
        assert done.token_ids is not None
        assert done.stats is not None
        assert (done.token_ids.tolist(), done.stats.num_forced) == ([END, 7, 12], 0)
        assert done.stats.num_discarded == 1 + row.state.num_accepted - 3


def test_a_row_that_changes_its_slot_is_checked_when_its_budget_or_a_thought_requires_it() -> None:
    """Not a token later: at the one that uses the budget up, and at the one that begins a thought, in the new slot alone."""
    table = SlotTable(4, 64, 0)
    for slot, opened in ((2, True), (3, False)):
        how = thinking(2, opened=opened)
        asked = replace(request(slot, [7] * 10, cap=9), thinking=how)
        table.fill([RunFeatures([ThinkingBudgets()]).arrive(asked, 0)], [slot], slot)
    table.move([(2, 0), (3, 1)])
    slots = np.array([0, 1])
    begins, ends = (RoundLog.of(np.array([[0, 0, 1, 0, 7, -1], [0, 0, 1, 0, 7, mark]], np.int32)) for mark in (BEGIN, END))
    table.num_tokens[:2] = 12
    assert table.due(slots, begins).tolist() == [0, 1]
    table.num_tokens[:2] = 11
    assert table.due(slots, ends).tolist() == []
    table.clear(table.at(0))
    table.fill([RequestState.of(request(0, [7] * 20, cap=9), 0)], [0], 4)
    table.num_tokens[:2] = 70
    assert table.due(slots, ends).tolist() == []


def test_forced_tokens_have_no_logprobs_and_the_others_keep_theirs() -> None:
    req = replace(request(0, [7, 9], cap=12), thinking=thinking(4, opened=True, closing=(11,)))
    runs = []
    for drafter in (NoDrafter(), LookupDrafter(3, min_ngram=1, max_ngram=2)):
        batch = packed(2, num_verified=drafter.draft_len)
        engine = make_engine(tiny_target(), drafter, batch, device=DEVICE, logprobs=2)
        (done,) = engine.run(iter([req]))
        assert done.logprobs is not None
        assert done.top_logprobs is not None
        assert np.isnan(done.logprobs).tolist() == [place in (4, 5) for place in range(12)]
        assert (done.top_logprobs[0] < 0).any(1).tolist() == [place in (4, 5) for place in range(12)]
        runs.append(done.logprobs)
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)


def test_an_end_that_the_model_writes_where_the_budget_forces_it_has_no_logprob_either() -> None:
    """Logprobs must not depend on whether a round wrote those tokens itself before the host would have forced them."""
    free = replace(request(0, [7, 9], cap=12), thinking=thinking(opened=True))
    output = plain_tokens(free)
    for begin, length in ((2, 1), (2, 2), (3, 3), (10, 3)):
        closing = (*output[begin : begin + length], 0)[:length]
        how = Thinking(begin_id=None, end_id=closing[-1], opened=True, budget=begin, closing=closing)
        forced, runs = range(begin, begin + length), []
        for drafter in (NoDrafter(), ForcedDrafter(4, {1000: output}, right=True, fixed_len=True)):
            batch = packed(2, num_verified=drafter.draft_len)
            engine = make_engine(tiny_target(), drafter, batch, device=DEVICE, logprobs=2)
            (done,) = engine.run(iter([replace(free, thinking=how)]))
            assert done.token_ids is not None
            assert done.token_ids.tolist() == output
            assert done.logprobs is not None
            assert done.top_logprobs is not None
            assert np.isnan(done.logprobs).tolist() == [place in forced for place in range(12)]
            assert (done.top_logprobs[0] < 0).any(1).tolist() == [place in forced for place in range(12)]
            assert done.reasoning_truncated
            runs.append(done.logprobs)
        np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)


@pytest.mark.parametrize("num_top", [0, 2])
def test_forced_tokens_before_the_model_s_first_one_have_no_logprobs_either(num_top: int) -> None:
    """A budget of 0: the closing tokens come first, and logprob i is that of token i all the same."""
    req = replace(request(0, [7, 9], cap=8), thinking=thinking(0, opened=True, closing=(11,)))
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE, logprobs=num_top)
    (done,) = engine.run(iter([req]))
    assert done.token_ids is not None
    assert done.logprobs is not None
    assert np.isnan(done.logprobs).tolist() == [place < 2 for place in range(len(done.token_ids))]
    if num_top:
        assert done.top_logprobs is not None
        assert (done.top_logprobs[0] < 0).any(1).tolist() == [place < 2 for place in range(len(done.token_ids))]


@pytest.mark.parametrize(
    ("tokens", "opened", "thoughts", "answer", "inside"),
    [
        ([BEGIN, 7, 8, END, 9], None, [[7, 8]], [9], False),
        ([7, 8, END, 9], True, [[7, 8]], [9], False),
        ([7, 8, END, 9], None, [[7, 8]], [9], False),  # a begin that is never emitted
        ([7, 8, END, 9], False, [], [7, 8, 9], False),  # the prompt had closed it already
        ([7, 8], True, [[7, 8]], [], True),  # no end
        ([BEGIN, 7, END, 9, BEGIN, 8, END, 10], None, [[7], [8]], [9, 10], False),
        ([7, BEGIN, 8], None, [[8]], [7], True),
        ([9, 10], None, [], [9, 10], False),
        ([BEGIN, END, 9], None, [[]], [9], False),
    ],
)
def test_an_output_is_cut_into_thoughts_and_answer(
    tokens: list[int], opened: bool | None, thoughts: list[list[int]], answer: list[int], inside: bool
) -> None:
    parts = split_thoughts(tokens, thinking(opened=opened))
    assert (parts.thoughts, parts.answer, parts.inside) == (thoughts, answer, inside)


def test_think_tokens_are_found_in_the_tokenizer_or_named(tmp_path: Path) -> None:
    plain, thinks = Tokenizer(make_tokenizer(tmp_path / "plain")), Tokenizer(make_thinking_tokenizer(tmp_path / "thinks"))
    assert find_think_tokens("auto", plain, 320) is None
    assert find_think_tokens("auto", thinks, 301) is None  # the model cannot draw the end
    assert find_think_tokens("none", thinks, 320) is None
    found = find_think_tokens("auto", thinks, 320)
    assert found is not None
    assert (found.begin, found.begin_id, found.end, found.end_id) == ("<think>", 300, "</think>", 301)
    named = find_think_tokens(["[", "]"], plain, 320)
    assert named is not None
    assert [plain.decode([token or 0]) for token in (named.begin_id, named.end_id)] == ["[", "]"]
    for setting, said in (
        (["<reflect>", "</think>"], "'<reflect>' is"),
        ([5, 5], "the same"),
        ([5, 320], "outside the vocabulary"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_think_tokens(setting, thinks, 320)

    def opened(text: str, setting: object = "auto") -> bool | None:
        tokens = find_think_tokens(setting, thinks, 320)
        assert tokens is not None
        return tokens.opened_by(np.array(thinks.encode_part(text), np.int32))

    assert opened("<|im_start|>assistant\n<think>\n") is True
    assert opened("<|im_start|>assistant\n<think>\nLet me see") is True
    assert opened("<|im_start|>assistant\n<think>\n\n</think>\n\n") is False
    assert opened("<|im_start|>assistant\n") is None
    assert opened("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n") is None  # of another turn
    spaced = Tokenizer(make_thinking_tokenizer(tmp_path / "spaced", more=["\n\n", "<|other|>"]))
    found = find_think_tokens("auto", spaced, 320)
    assert found is not None
    for text, inside in (("<think>\n\n", True), ("<think>\n\n</think>\n\n", False), ("<think><|other|>", None)):
        assert found.opened_by(np.array(spaced.encode_part(text), np.int32)) is inside  # of added tokens white space ends none
    assert opened("<|im_start|>assistant\n", ["</think>"]) is True
    assert opened("<|im_start|>assistant\n<think>\n\n</think>\n\n", ["</think>"]) is False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinking_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


BUDGET = 6


def arguments(model: Path, folder: Path, out: str, *more: str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={folder / 'prompts.parquet'}", f"output.dir={folder / out}",
        "output.shard_rows=4", "decode.max_new_tokens=20", "output.token_ids=true", "packing.max_num_seqs=3",
        f"decode.thinking_token_budget={BUDGET}", "decode.thinking_closing=' So:'", *more,
    ]


def write_prompts(folder: Path) -> None:
    rows = [
        {
            "id": f"q{i}",
            "messages": [{"role": "user", "content": f"Say word{i % 5}"}],
            "template_kwargs": '{"quick": 1}' if i == 3 else None,
            "thinking_token_budget": {4: 0, 5: 100, 7: -1}.get(i),
            "max_new_tokens": {2: 4, 6: 7}.get(i),
        }
        for i in range(10)
    ]
    pl.DataFrame(rows).write_parquet(folder / "prompts.parquet")


@pytest.mark.second
def test_a_job_of_a_reasoning_model_has_thoughts_and_answers_apart(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows with a budget, a cap or a template of their own; the same from any drafter, and found again by verify."""
    write_prompts(tmp_path)
    command = arguments(model, tmp_path, "plain", "draft=none")
    assert plan.main([*command, "decode.temperature=0"]) == 0
    said = capsys.readouterr().out
    assert "from <think> (300) to </think> (301); 8 of 9 prompts end inside one; at most 6 tokens, then " in said
    assert run.main(command) == 0
    assert run.main(arguments(model, tmp_path, "drafted", "draft=lookup", "packing.max_num_seqs=2", "packing.run_ahead=2")) == 0
    frame, drafted = (pl.read_parquet(tmp_path / out / "data") for out in ("plain", "drafted"))
    alike = ["request_id", "status", "messages", "completion", "reasoning", "reasoning_truncated", "finish_reason", "token_ids"]
    assert frame.select(alike).equals(drafted.select(alike))
    assert verify.main([str(tmp_path / "drafted"), "--rows", "0"]) == 0

    tokenizer = Tokenizer(model)
    rows = {row["request_id"]: row for row in frame.iter_rows(named=True)}
    assert rows.pop("q7")["error"]["message"].endswith("thinking_token_budget=-1 must be at least 0; null means no limit")
    closing = [*tokenizer.encode_part(" So:"), 301]
    for name, row in rows.items():
        budget = {"q4": 0, "q5": 100}.get(name, BUDGET)
        ids, thought = row["token_ids"], row["token_ids"][:budget]
        if name == "q3":
            assert (row["reasoning"], row["reasoning_truncated"], row["usage"]["reasoning_tokens"]) == (None, False, 0)
            continue
        assert row["reasoning_truncated"], "noise ends no thought by itself in so few tokens"
        if len(ids) <= budget + len(closing):  # the cap came first
            assert (row["status"], row["completion"]) == ("truncated", "")
            continue
        assert ids[budget : budget + len(closing)] == closing
        assert row["reasoning"] == tokenizer.decode(thought + closing[:-1]).strip()
        assert row["completion"] == tokenizer.decode(ids[budget + len(closing) :]).lstrip()
        assert row["messages"][-1]["content"] == row["completion"]
        assert row["usage"]["reasoning_tokens"] == budget + len(closing) - 1
    counts = drafted.filter(pl.col("request_id").is_in(["q0", "q4"]))["spec_decode"].struct.unnest()
    lengths = drafted.filter(pl.col("request_id").is_in(["q0", "q4"]))["token_ids"].list.len()
    emitted = counts["num_prefills"] + counts["num_accepted_draft_tokens"] + counts["num_spec_steps"]
    assert (lengths - counts["num_forced_tokens"] + counts["num_discarded_tokens"] == emitted).all()
    assert stats.main([str(tmp_path / "drafted")]) == 0
    assert "8 thoughts truncated" in capsys.readouterr().out


@pytest.mark.second
def test_messages_can_carry_the_thought_and_stop_strings_end_the_answer_alone(model: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    assert run.main(arguments(model, tmp_path, "free", "output.reasoning_in_messages=true", "input.limit=1")) == 0
    free = pl.read_parquet(tmp_path / "free/data").row(0, named=True)
    assert free["messages"][-1]["content"] == f"<think>\n{free['reasoning']}\n</think>\n\n{free['completion']}"
    stops = [free["reasoning"][0], free["completion"][2]]
    assert run.main(arguments(model, tmp_path, "stopped", f"decode.stop={stops!r}", "input.limit=1")) == 0
    row = pl.read_parquet(tmp_path / "stopped/data").row(0, named=True)
    assert (row["reasoning"], row["finish_reason"]) == (free["reasoning"], "stop")
    assert row["stop_reason"] in stops
    assert row["completion"] == free["completion"][: len(row["completion"])]
    assert len(row["completion"]) <= 2


def test_a_budget_without_think_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama"))
    write_prompts(tmp_path)
    assert run.main(arguments(model, tmp_path, "out")) == 2
    assert "decode.thinking_token_budget=6 needs think tokens" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
