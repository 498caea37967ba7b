"""Harmony, the output format of gpt-oss: channels told apart by token ids, tool calls, budgets, dates, whole jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec import run
from batchspec.commands import export, plan, verify
from batchspec.engine.features.channel_calls import tool_calls
from batchspec.engine.features.thinking import ThinkingBudget, split_thoughts
from batchspec.records import Thinking
from batchspec.text.thinking import ThinkTokens, find_think_tokens
from batchspec.text.tokenizer import Tokenizer
from batchspec.tool_calls.split import call_id
from tests.helpers.engines import request
from tests.helpers.harmony import SPECIAL, make_harmony_model, make_harmony_tokenizer
from tests.helpers.models import make_tokenizer
from tests.helpers.one_row import OneRow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_harmony_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture(scope="module")
def think(tokenizer: Tokenizer) -> ThinkTokens:
    found = find_think_tokens("auto", tokenizer, 10_000)
    assert found is not None
    return found


def after(think: ThinkTokens, tokenizer: Tokenizer, prompt: str, budget: int | None = None, closing: str = "") -> Thinking:
    ids = np.array(tokenizer.encode_part(prompt), np.int32)
    return think.of_row(ids, budget, tuple(tokenizer.encode_part(closing)))


USER = "<|start|>user<|message|>Hi<|end|>"
ASKED = f"{USER}<|start|>assistant"


def said(
    think: ThinkTokens, tokenizer: Tokenizer, text: str, prompt: str = ASKED
) -> tuple[list[str], list[str], Any, list[str], bool]:
    """Thoughts, messages of the answer, tool calls, texts that looked like calls, whether it ended inside a thought."""
    how = after(think, tokenizer, prompt)
    parts = split_thoughts(tokenizer.encode_part(text), how)
    calls, texts = tool_calls(parts.calls, replace(request(3, [1], cap=9), thinking=how), tokenizer.decode)
    thoughts, answers = ([tokenizer.decode(ids) for ids in found] for found in (parts.thoughts, parts.answers()))
    return thoughts, answers, None if calls is None else json.loads(calls), texts, parts.inside


def call(name: str, arguments: str, recipient: str, content_type: str | None, index: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "id": call_id(request(3, [1], cap=9), index),
        "type": "function",
        "function": function,
        "recipient": recipient,
        "content_type": content_type,
    }


THOUGHT = "<|channel|>analysis<|message|>Let me see<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "thoughts", "answers", "inside"),
    [
        (f"{THOUGHT}{FINAL}It rains", ["Let me see"], ["It rains"], False),
        (f"{FINAL}It rains", [], ["It rains"], False),
        ("<|channel|>analysis<|message|>Let me", ["Let me"], [""], True),  # cut off in the thought
        (f"{THOUGHT}<|start|>assistant<|channel|>", ["Let me see"], [""], False),  # in a header
        (f"{THOUGHT}<|start|>assistant<|channel|>fin", ["Let me see"], [""], False),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}7", ["Let me see", "Let me see"], ["7"], False),
        (f"{THOUGHT}<|channel|>commentary<|message|>First<|end|>{FINAL}7", ["Let me see"], ["First", "7"], False),
        (f"{THOUGHT}<|channel|>final<|message|>7", ["Let me see"], ["7"], False),  # without start
        (f"{THOUGHT}{FINAL}analysis<|end|>", ["Let me see"], ["analysis"], False),  # a channel's name in the text
        (f"{FINAL}7 is <think>no<|end|>", [], ["7 is <think>no"], False),
        ("<|channel|>final <|constrain|>json<|message|>{}", [], ["{}"], False),
        ("It rains", [], ["It rains"], False),  # malformed from here on: no channel
        (f"{THOUGHT}It rains", ["Let me see"], ["It rains"], False),
        (f"{THOUGHT}<|start|>assistantIt rains", ["Let me see"], ["It rains"], False),
        ("<|channel|>final It rains<|return|>", [], [" It rains"], False),  # no message token
        ("<|channel|>final It rains<|start|>assistant<|channel|>final<|message|>7", [], [" It rains", "7"], False),
        ("<|channel|>finale<|message|>7", [], ["7"], False),
        ("<|message|>7<|message|>8", [], ["78"], False),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>7", ["a"], ["7"], False),  # no end
        ("", [], [""], False),
    ],
)
def test_channels_are_told_apart(
    think: ThinkTokens, tokenizer: Tokenizer, text: str, thoughts: list[str], answers: list[str], inside: bool
) -> None:
    assert said(think, tokenizer, text) == (thoughts, answers, None, [], inside)


@pytest.mark.parametrize(
    ("prompt", "text", "thoughts", "answers"),
    [
        (f"{USER}{FINAL}It", " rains", [], [" rains"]),  # the answer continues
        (f"{ASKED}<|channel|>analysis<|message|>Let", f" me<|end|>{FINAL}7", [" me"], ["7"]),
        (f"{ASKED}<|channel|>", "analysis<|message|>a", ["a"], [""]),
        (f"{ASKED}{THOUGHT}{FINAL}7<|end|>", "8", [], ["8"]),
        ("It", " rains", [], [" rains"]),  # a plain prompt
        ("It", f"{THOUGHT}{FINAL}7", ["Let me see"], ["7"]),
    ],
)
def test_the_output_continues_the_channel_in_which_the_prompt_ends(
    think: ThinkTokens, tokenizer: Tokenizer, prompt: str, text: str, thoughts: list[str], answers: list[str]
) -> None:
    assert said(think, tokenizer, text, prompt)[:2] == (thoughts, answers)


@pytest.mark.parametrize(
    ("text", "expected", "answers"),
    [
        (
            f'{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 7}}<|call|>',
            [call("add", '{"a": 7}', "functions.add", "json")], [""],
        ),
        (" to=functions.add<|channel|>commentary json<|message|>{}", [call("add", "{}", "functions.add", "json")], [""]),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", [call("python", "1+1", "python", "code")], [""]),
        ("<|channel|>commentary to=functions.add<|message|>{", [call("add", "{", "functions.add", None)], [""]),  # cut off
        ("<|channel|>commentary to=functions.add", [call("add", "", "functions.add", None)], [""]),
        (
            "<|channel|>commentary<|message|>First<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
            "1<|end|><|start|>assistant to=functions.rain<|channel|>commentary json<|message|>2<|call|>",
            [call("add", "1", "functions.add", "json"), call("rain", "2", "functions.rain", "json", 1)], ["First"],
        ),
    ],
)
def test_tool_calls_are_kept(
    think: ThinkTokens, tokenizer: Tokenizer, text: str, expected: list[dict[str, Any]], answers: list[str]
) -> None:
    _, found_answers, calls, texts, inside = said(think, tokenizer, text)
    assert (calls, found_answers, texts, inside) == (expected, answers, [], False)


@pytest.mark.parametrize(
    ("text", "arguments", "answers"),
    [
        ("7}<|call|>", "7}", [""]),
        ("7} sun", "7} sun", [""]),  # cut off
        ("<|call|>", "", [""]),
        (f"7}}<|end|>{FINAL}rain<|return|>", "7}", ["rain"]),
        ("7}<|channel|>final<|message|>rain<|return|>", "7}", ["rain"]),  # an end token is missing
    ],
)
def test_a_tool_call_that_the_prompt_begins_goes_on_in_the_output(
    think: ThinkTokens, tokenizer: Tokenizer, text: str, arguments: str, answers: list[str]
) -> None:
    prompt = f'{ASKED} to=functions.add<|channel|>commentary json<|message|>{{"a": '
    expected = [call("add", arguments, "functions.add", "json")]
    assert said(think, tokenizer, text, prompt) == ([], answers, expected, [], False)


def test_text_that_only_looks_like_a_call_stays_text(think: ThinkTokens, tokenizer: Tokenizer) -> None:
    assert said(think, tokenizer, " to be or not<|return|>")[2:4] == (None, ["to be or not"])


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("<|channel|>commentary to", []),  # cut off in the recipient
        ("<|channel|>commentary to=", []),
        ("<|start|>assistant<|channel|>analysis to<|end|>", []),
        ("<|channel|>commentary to be<|return|>", ["to be"]),
        (" to", ["to"]),
    ],
)
def test_a_name_of_a_channel_is_no_text_where_a_recipient_is_missing(
    think: ThinkTokens, tokenizer: Tokenizer, text: str, texts: list[str]
) -> None:
    assert said(think, tokenizer, f"{THOUGHT}{text}" if text.startswith("<") else text)[1:4] == ([""], None, texts)


@given(data=st.data())
def test_every_token_of_text_is_in_exactly_one_part(think: ThinkTokens, tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Whatever comes in whatever order: but for role, name, recipient and type before a message token, which name the message."""
    names = ["assistant", "analysis", "final", "commentary", " to", "=functions.", "json"]
    ids = [tokenizer.encode_part(f"<|{name}|>")[0] for name in SPECIAL] + [tokenizer.encode_part(name)[0] for name in names]
    drawn = data.draw(st.lists(st.one_of(st.sampled_from(ids), st.none()), max_size=40))
    tokens = [1000 + place if token is None else token for place, token in enumerate(drawn)]  # each text token once
    begun = ["", "<|channel|>analysis<|message|>", "<|channel|>", " to=functions.", " to=functions.add<|message|>"]
    prompt = data.draw(st.sampled_from(["Hi", *(f"{ASKED}{header}" for header in begun)]))
    how = after(think, tokenizer, prompt)
    parts = split_thoughts(tokens, how)
    found = [token for ids in (*parts.thoughts, parts.answer) for token in ids]
    for one in parts.calls:
        found += [*one.header, *one.arguments]
    text = [token for token in found if token >= 1000]
    assert len(text) == len(set(text))
    assert set(text) <= set(tokens)
    channels = how.channels
    assert channels is not None
    in_headers: set[int] = set()
    header: list[int] | None = list(how.header) if how.header and how.header[-1] != channels.message_id else None
    for token in tokens:
        if token in (channels.start_id, channels.channel_id):
            header = (header or []) if token == channels.channel_id and channels.channel_id not in (header or []) else []
            header.append(token)
        elif token == channels.message_id:
            in_headers |= set(header or [])
            header = None
        elif token in channels.end_ids:
            header = None
        elif header is not None:
            header.append(token)
    assert {token for token in tokens if token >= 1000} - set(text) <= in_headers


@given(data=st.data())
def test_a_split_of_a_beginning_is_the_beginning_of_the_split(
    think: ThinkTokens, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """What a token is does not depend on what comes later, so that budgets and stop strings hold while tokens come."""
    ids = [tokenizer.encode_part(f"<|{name}|>")[0] for name in SPECIAL] + [tokenizer.encode_part("analysis")[0], 1000]
    tokens = data.draw(st.lists(st.sampled_from(ids), max_size=30))
    how = after(think, tokenizer, ASKED)
    whole = split_thoughts(tokens, how).thoughts
    for count in range(len(tokens)):
        first = split_thoughts(tokens[:count], how).thoughts
        assert [ids[: len(one)] for ids, one in zip(whole, first, strict=False)] == first


@pytest.mark.parametrize(
    ("text", "stops_before"),
    [
        (f"{FINAL}It is 7 or 8", " or 8"),
        ("<|channel|>commentary<|message|>First 7, then<|end|>", ", then<|end|>"),  # to the user
        ("It is 7 or 8", " or 8"),  # outside of any channel
        ("<|channel|>analysis<|message|>7<|end|>", None),
        (
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7}<|call|>',
            None,
        ),  # half of it is not valid JSON
        ("<|channel|>analysis to=python code<|message|>7 + 7<|call|>", None),
        ("<|channel|>commentary to=functions.add7<|message|>{}", None),
    ],
)
def test_stop_strings_end_the_answer_and_neither_thoughts_nor_tool_calls(
    think: ThinkTokens, tokenizer: Tokenizer, text: str, stops_before: str | None
) -> None:
    asked = replace(request(0, [1], cap=200), thinking=after(think, tokenizer, ASKED))
    row = OneRow(replace(asked, stop=("7",)), decode=tokenizer.decode)
    state, tokens = row.state, tokenizer.encode_part(text)
    for token in tokens:
        if state.finish_reason is None:
            row.add_round(0, 0, [token])
    assert state.stop_reason == (None if stops_before is None else "7")
    assert state.tokens == tokens[: len(tokens) - len(tokenizer.encode_part(stops_before or ""))]


def test_a_thought_that_used_its_budget_is_led_to_the_final_channel(think: ThinkTokens, tokenizer: Tokenizer) -> None:
    encode = tokenizer.encode_part
    how = after(think, tokenizer, ASKED, budget=3, closing=" So:")
    budget = ThinkingBudget(how, (), 200)
    opening = encode("<|channel|>analysis<|message|>")
    assert budget.forced([*opening, 1001, 1002]) is None
    assert budget.left == 1
    kept, closing = budget.forced([*opening, 1001, 1002, 1003, 1004]) or (0, ())
    assert kept == len(opening) + 3
    assert list(closing) == encode(f" So:<|end|>{FINAL}")
    assert budget.forced([*opening, 1001, 1002, 1003, *closing, 1005]) is None
    parts = split_thoughts([*opening, 1001, 1002, 1003, *closing, 1005], how)
    assert (parts.thoughts, parts.answer) == ([[1001, 1002, 1003, *encode(" So:")]], [1005])


def test_harmony_is_found_by_its_special_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert find_think_tokens("none", tokenizer, 10_000) is None
    assert find_think_tokens("auto", Tokenizer(make_tokenizer(tmp_path / "plain")), 320) is None
    assert find_think_tokens("auto", tokenizer, min(tokenizer.added_ids.values())) is None  # the model has no such token
    found = find_think_tokens("auto", tokenizer, 10_000)
    assert found is not None
    assert sorted(found.stop_ids) == sorted(tokenizer.added_ids[f"<|{name}|>"] for name in ("return", "call"))


def test_a_name_is_known_however_it_is_spelled_in_tokens(think: ThinkTokens, tokenizer: Tokenizer) -> None:
    letters = [tokenizer.encode_part(letter)[0] for letter in "analysis"]
    start, end = tokenizer.encode_part("<|channel|>"), tokenizer.encode_part("<|message|>")
    assert len(tokenizer.encode_part("analysis")) == 1
    assert split_thoughts([*start, *letters, *end, 1000], after(think, tokenizer, ASKED)).thoughts == [[1000]]
    assert all(tokenizer.decode(ids) == "analysis" for ids in tokenizer.spellings("analysis"))


def test_the_template_sees_the_job_s_date_and_a_row_s_effort(tmp_path: Path) -> None:
    folder = make_harmony_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "Hi"}]
    first = Tokenizer(folder).render_chat(chat)
    assert first.startswith("<|start|>system<|message|>Today is 2025-01-01. Reasoning: medium<|end|>")
    later = Tokenizer(folder, date="2025-08-05").render_chat(chat, template_kwargs={"reasoning_effort": "high"})
    assert later.startswith("<|start|>system<|message|>Today is 2025-08-05. Reasoning: high<|end|>")


def test_earlier_thoughts_and_calls_reach_the_template_under_its_names(tmp_path: Path) -> None:
    """OpenAI's null content, JSON text of arguments and reasoning_content, as servers call the thought."""
    tokenizer = Tokenizer(make_harmony_tokenizer(tmp_path))
    function = {"name": "add", "arguments": '{"a": 7}'}
    calling: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        calling | {"reasoning_content": "Let me see"},
        {"role": "tool", "content": "8"},
    ]
    assert tokenizer.render_chat(chat).partition("<|end|>")[2] == (
        f"{USER}<|start|>assistant<|channel|>analysis<|message|>Let me see<|end|><|start|>assistant to=functions.add<|channel|>"
        'commentary json<|message|>{"a": 7}<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>8<|end|>'
        "<|start|>assistant"
    )


def arguments(model: Path, folder: Path, out: str, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"input.path={folder / 'prompts.parquet'}", f"output.dir={folder / out}", "output.shard_rows=8",
        "decode.max_new_tokens=60", "decode.temperature=1", "output.token_ids=true", "output.prompt_ids=true", *more,
    ]


def write_prompts(folder: Path, num_rows: int = 24) -> None:
    rows = [
        {
            "id": f"q{i}",
            "messages": [{"role": "user", "content": f"rain {i}"}],
            "template_kwargs": '{"reasoning_effort": "high"}' if i == 3 else None,
        }
        for i in range(num_rows)
    ]
    pl.DataFrame(rows).write_parquet(folder / "prompts.parquet")


@pytest.mark.second
def test_a_job_has_reasoning_answers_and_tool_calls_apart(
    model: Path, tokenizer: Tokenizer, think: ThinkTokens, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same from any drafter, with a budget, and found again by verify; exported as OpenAI has it."""
    write_prompts(tmp_path)
    budget = ["decode.thinking_token_budget=2", "output.reasoning_in_messages=true"]
    assert plan.main(arguments(model, tmp_path, "plain", "draft=none", *budget)) == 0
    assert "from <|channel|>analysis<|message|> (" in capsys.readouterr().out
    assert run.main(arguments(model, tmp_path, "plain", "draft=none", *budget)) == 0
    assert run.main(arguments(model, tmp_path, "drafted", "draft=lookup", "packing.max_num_seqs=3", *budget)) == 0
    frame, drafted = (pl.read_parquet(tmp_path / out / "data") for out in ("plain", "drafted"))
    alike = [
        "request_id",
        "messages",
        "completion",
        "reasoning",
        "reasoning_truncated",
        "tool_calls",
        "finish_reason",
        "token_ids",
    ]
    assert frame.select(alike).equals(drafted.select(alike))
    assert verify.main([str(tmp_path / "drafted"), "--rows", "0"]) == 0

    names = {tokenizer.added_ids[f"<|{name}|>"]: name for name in SPECIAL}
    for row in frame.iter_rows(named=True):
        prompt = tokenizer.decode(row["prompt_ids"], skip_special=False)
        effort = "high" if row["request_id"] == "q3" else "medium"
        assert prompt.startswith(f"<|start|>system<|message|>Today is 2025-01-01. Reasoning: {effort}<|end|>")
        last = row["token_ids"][-1]
        assert (row["finish_reason"] == "stop") == (names.get(last) in ("return", "call"))
        assert all(names.get(token) not in ("return", "call") for token in row["token_ids"][:-1])
        content = "".join(text for text in (row["reasoning"], row["completion"]) if text)
        assert not any(f"<|{name}|>" in content for name in SPECIAL)
        assert row["usage"]["reasoning_tokens"] <= 2
        turn = row["messages"][-1]
        assert (turn["content"], turn["thinking"], turn["tool_calls"]) == (row["completion"], row["reasoning"], row["tool_calls"])
        assert turn["role"] == "assistant"
    assert frame["reasoning_truncated"].any()
    assert frame["tool_calls"].is_not_null().any()
    assert (frame["completion"].str.len_chars() > 0).any()
    called = frame.filter(pl.col("tool_calls").is_not_null()).row(0, named=True)
    assert json.loads(called["tool_calls"])[0]["function"]["name"].startswith("add")

    assert export.main([str(tmp_path / "plain"), "--to", "openai", str(tmp_path / "openai.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "openai.jsonl").read_text().splitlines()]
    choice = next(line for line in lines if line["custom_id"] == called["request_id"])["response"]["body"]["choices"][0]
    assert choice["message"]["tool_calls"] == json.loads(called["tool_calls"])
    assert choice["finish_reason"] == ("tool_calls" if called["finish_reason"] == "stop" else "length")
    assert choice["message"].get("reasoning_content") == called["reasoning"]
    for form in ("chat", "prompt_completion"):
        file = tmp_path / f"{form}.jsonl"
        assert export.main([str(tmp_path / "plain"), "--to", form, str(file), "--status", "ok,truncated"]) == 0
        turns = [list(json.loads(line).values())[-1][-1] for line in file.read_text().splitlines()]
        found = turns[frame["request_id"].to_list().index(called["request_id"])]
        assert found["tool_calls"] == json.loads(called["tool_calls"])
        assert found.get("thinking") == called["reasoning"]


@pytest.mark.second
def test_the_date_is_part_of_the_job(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(tmp_path, 1)
    dated = arguments(model, tmp_path, "out", "input.template_date=2025-08-05")
    assert run.main(dated) == 0
    prompt = pl.read_parquet(tmp_path / "out/data")["prompt_ids"][0].to_list()
    assert "Today is 2025-08-05." in Tokenizer(model).decode(prompt)
    assert run.main(arguments(model, tmp_path, "out")) == 2
    assert 'input.template_date: "2025-08-05" -> "2025-01-01"' in capsys.readouterr().err
    assert run.main(arguments(model, tmp_path, "out", "input.template_date=today")) == 2
    assert "input.template_date='today' must be a date" in capsys.readouterr().err


def test_openai_requests_bring_their_effort_and_thoughts(tmp_path: Path) -> None:
    body = {
        "model": "gpt-oss", "reasoning_effort": "low", "chat_template_kwargs": {"builtin_tools": ["python"]},
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes", "reasoning": "Let me see"},
            {"role": "user", "content": "And?"},
        ],
    }
    source, target = tmp_path / "in.jsonl", tmp_path / "in.parquet"
    source.write_text(json.dumps({"custom_id": "a", "body": body}) + "\n")
    assert export.main(["--from-openai", str(source), str(target)]) == 0
    row = pl.read_parquet(target).row(0, named=True)
    assert json.loads(row["template_kwargs"]) == {"builtin_tools": ["python"], "reasoning_effort": "low"}
    assert json.loads(row["messages"])[1]["reasoning"] == "Let me see"
