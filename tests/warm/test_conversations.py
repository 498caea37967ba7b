"""Conversations: completions of a turn become the next turn's requests, in one stream with all other rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import batchspec
from batchspec.errors import ConfigError, EngineInUse
from batchspec.warm.conversations import Turn
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_thinking_tokenizer, make_tokenizer
from tests.helpers.runs import make_model

pytestmark = pytest.mark.second

MORE = [{"role": "user", "content": "And the next one?"}]


def options(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model.path": str(model), "model.dtype": "float64", "model.max_len": 200, "decode.max_new_tokens": 8,
        "output.token_ids": True, "output.prompt_ids": True, "packing.max_num_seqs": 3, "input.chat": True, **more,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("conversations") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[batchspec.Engine]:
    with batchspec.Engine(options(model)) as engine:
        yield engine


def chats(count: int = 5) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "prompt": f"Name sea number {i}", "system": "Be brief.", "turns": i % 4} for i in range(count)]


def as_many_as_the_row_says(turn: Turn) -> Any:
    return [*turn.messages, *MORE] if turn.number < turn.row["turns"] else None


def test_every_turn_is_what_its_chat_alone_would_give(engine: batchspec.Engine) -> None:
    frame = engine.converse(chats(), as_many_as_the_row_says)
    assert frame.select("request_id", "row_index", "turn").rows() == [
        (f"q{i}", i, turn) for i in range(5) for turn in range(i % 4 + 1)
    ]
    assert frame["turns"].to_list() == [i % 4 for i in range(5) for _ in range(i % 4 + 1)], "the input's columns are copied"
    alone = engine.generate({"prompt_ids": frame["prompt_ids"].to_list()})
    assert frame["token_ids"].to_list() == alone["token_ids"].to_list()


def test_messages_of_a_turn_are_the_whole_chat_so_far(engine: batchspec.Engine) -> None:
    last = engine.converse(chats(4), as_many_as_the_row_says).filter(request_id="q3")
    answers = last["completion"].to_list()
    assert [message["content"] for message in last["messages"][3]] == [
        "Be brief.", "Name sea number 3", answers[0], "And the next one?", answers[1], "And the next one?", answers[2],
        "And the next one?", answers[3],
    ]
    given = [{key: turn[key] for key in ("role", "content")} for turn in last["messages"][1]]
    again = engine.generate([{"messages": given[:-1]}])
    assert again["prompt_ids"].to_list() == [last["prompt_ids"].to_list()[1]]


def test_earlier_turns_are_not_prefilled_again(engine: batchspec.Engine) -> None:
    frame = engine.converse([{"id": "long", "prompt": "the lazy dog and " * 6, "turns": 2}], as_many_as_the_row_says)
    prompts, cached = (frame["usage"].struct.field(f"{name}_tokens").to_list() for name in ("prompt", "cached"))
    assert cached[1] >= prompts[0] - 16, "all whole pages of the first turn's prompt"
    assert cached[2] >= prompts[1] - 16


def test_turns_of_sampled_rows_have_noise_of_their_own_that_seeds_reproduce(model: Path) -> None:
    """The same chat in each turn: with the noise of the first turn, answers would be the same."""
    data = [{"id": f"q{i}", "prompt": "Name a sea", "n": 2} for i in range(2)]
    again = lambda turn: turn.messages[:-1] if turn.number < 2 else None  # noqa: E731
    with batchspec.Engine(options(model, **{"decode.temperature": 1.0})) as engine:
        first, second = engine.converse(data, again), engine.converse(data, again, threads=3)
        assert first["token_ids"].to_list() == second["token_ids"].to_list()
        assert first.select("request_id", "sample_index", "turn").n_unique() == first.height == 12
        assert len(set(map(tuple, first["token_ids"]))) == 12
        alone = engine.generate({"prompt": ["Name a sea"] * 12, "seed": first["seed"]})
    assert alone["token_ids"].to_list() == first["token_ids"].to_list()


def test_a_turn_may_be_another_chat_with_columns_of_its_own(engine: batchspec.Engine) -> None:
    def judge(turn: Turn) -> Any:
        if turn.number:
            return None
        chat = [{"role": "user", "content": f"Is this right: {turn.completion.text}"}]
        return {"messages": chat, "max_new_tokens": 2, "temperature": 0.5, "seed": 3}

    frame = engine.converse(chats(2), judge).filter(turn=1)
    assert frame["usage"].struct.field("completion_tokens").to_list() == [2, 2]
    assert frame["seed"].to_list() == [3, 3]
    assert [len(messages) for messages in frame["messages"]] == [2, 2]


ASKED = {"role": "user", "content": "Hi"}
PART = [{"type": "text", "text": "Well"}]


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ({"messages": [ASKED, {"role": "assistant", "content": "Well"}], "final_assistant": "drop"}, ["Hi"]),
        ({"messages": [ASKED, {"role": "assistant", "content": "Well"}], "final_assistant": "continue"}, ["Hi", "Well"]),
        ({"messages": [ASKED, {"role": "assistant", "content": PART}], "final_assistant": "continue"}, ["Hi", "Well"]),
        ({"messages": [ASKED], "system": "Be brief."}, ["Be brief.", "Hi"]),
        ({"messages": [{"from": "human", "value": "Hi"}]}, ["Hi"]),
    ],
)
def test_messages_after_a_turn_are_those_of_its_prompt_and_the_answer(
    given: dict[str, Any], prompt: list[str], engine: batchspec.Engine
) -> None:
    """Whether its last turn was dropped or continued, a system turn was added, or the chat came in another form."""
    seen: list[list[str]] = []

    def reply(turn: Turn) -> Any:
        seen.append([message["content"] for message in turn.messages])
        return None if turn.number else given

    (last,) = engine.converse(chats(1), reply).filter(turn=1).iter_rows(named=True)
    (alone,) = engine.generate([given]).iter_rows(named=True)
    assert (last["prompt_ids"], last["token_ids"]) == (alone["prompt_ids"], alone["token_ids"])
    answer = [prompt[-1] + last["completion"]] if prompt[-1] == "Well" else [prompt[-1], last["completion"]]
    assert seen[1] == [message["content"] for message in last["messages"]] == [*prompt[:-1], *answer]


@pytest.mark.parametrize("name", ["response_format", "regex", "choice", "schema", "grammar"])
def test_a_turn_may_bring_a_constraint_though_the_rows_have_none(name: str, engine: batchspec.Engine) -> None:
    given = {
        "response_format": {"type": "choice", "choice": ["42"]}, "regex": "4[2]", "choice": ["42"], "schema": {"const": 42},
        "grammar": 'root ::= "42"',
    }

    def reply(turn: Turn) -> Any:
        return {"messages": [*turn.messages, *MORE], name: given[name]} if not turn.number else None

    assert engine.converse(chats(2), reply).filter(turn=1)["completion"].to_list() == ["42", "42"]


def test_a_turn_with_a_constraint_that_the_job_excludes_is_an_error_row(model: Path) -> None:
    """Token 70 is text: as a stop id it would end up after the answer."""

    def reply(turn: Turn) -> Any:
        return {"messages": [*turn.messages, *MORE], "regex": "4[2]"} if not turn.number else None

    with batchspec.Engine(options(model, **{"decode.stop_ids": [70]})) as engine:
        (error,) = engine.converse(chats(1), reply).filter(turn=1)["error"].to_list()
    assert error["code"] == "bad_parameter"
    assert "regex with decode.stop_ids=[70]: token 70 is the text" in error["message"]


def test_a_callback_that_edits_the_history_changes_later_turns_alone(engine: batchspec.Engine) -> None:
    def shorten(turn: Turn) -> Any:
        if turn.number == 2:
            return None
        turn.messages[1]["content"] = "(left out)"
        turn.messages.extend(MORE)
        return turn.messages

    frame = engine.converse(chats(1), shorten)
    assert [chat[1]["content"] for chat in frame["messages"]] == ["Name sea number 0", "(left out)", "(left out)"]
    given = [[{key: turn[key] for key in ("role", "content")} for turn in chat[:-1]] for chat in frame["messages"]]
    again = engine.generate([{"messages": chat} for chat in given])
    assert again["prompt_ids"].to_list() == frame["prompt_ids"].to_list()


def test_a_row_or_a_turn_that_is_refused_is_an_error_row_and_ends_its_conversation(engine: batchspec.Engine) -> None:
    asked: list[tuple[str, int]] = []

    def reply(turn: Turn) -> Any:
        asked.append((turn.completion.request_id, turn.number))
        return {
            "a": [*turn.messages, {"role": "user", "content": "word " * 99}],
            "b": turn.messages,
            "c": {"messages": turn.messages[:1], "max_tokens": 3},
            "d": {"messages": turn.messages[:1], "n": 2},
            "e": [],
            "f": {"max_new_tokens": 3},
        }[turn.completion.request_id]

    data = [{"id": name, "prompt": None if name == "null" else "Name a sea"} for name in ("a", "b", "null", "c", "d", "e", "f")]
    frame = engine.converse(data, reply)
    errors = frame.filter(status="error").select("request_id", "turn", pl.col("error").struct.field("code"))
    assert errors.rows() == [
        ("a", 1, "too_long"), ("b", 1, "bad_messages"), ("null", 0, "null_prompt"), ("c", 1, "bad_parameter"),
        ("d", 1, "bad_parameter"), ("e", 1, "empty_prompt"), ("f", 1, "empty_prompt"),
    ]
    assert "has no column 'max_tokens'" in frame.filter(request_id="c", turn=1)["error"].struct.field("message")[0]
    assert sorted(asked) == [(name, 0) for name in "abcdef"]


def test_rows_decode_while_a_tool_is_waited_for(engine: batchspec.Engine) -> None:
    """The tool of the first row returns only when all other rows have answered."""
    others = threading.Event()
    seen: list[str] = []

    def tool(turn: Turn) -> None:
        seen.append(turn.completion.request_id)
        if turn.row["slow"]:
            assert others.wait(30)
        elif len(seen) == 8:
            others.set()

    data = [{"id": f"q{i}", "prompt": "Name a sea", "slow": not i, "max_new_tokens": 2 + i} for i in range(8)]
    assert engine.converse(data, tool, threads=2).height == 8
    assert others.is_set()


def test_later_turns_go_before_rows_that_have_not_begun(engine: batchspec.Engine) -> None:
    order: list[tuple[str, int]] = []

    def reply(turn: Turn) -> Any:
        order.append((turn.completion.request_id, turn.number))
        return [*turn.messages, *MORE] if turn.number < 2 else None

    engine.converse(chats(20), reply)
    begun = [place for place, (_, number) in enumerate(order) if number == 0]
    assert order.index((order[0][0], 2)) < begun[-1]


def test_an_error_of_the_callback_ends_the_call_and_frees_the_engine(engine: batchspec.Engine) -> None:
    def broken(turn: Turn) -> Any:
        raise LookupError("no such tool")

    def wrong(turn: Turn) -> Any:
        return "the next question"

    with pytest.raises(LookupError, match="no such tool"):
        engine.converse(chats(), broken)
    with pytest.raises(TypeError, match="next_turn returned str as the next chat; return a list of messages"):
        engine.converse(chats(), wrong)
    assert engine.generate(chats()).height == 5


@pytest.mark.parametrize(
    "error", [MemoryError("of a tool"), RuntimeError("CUDA out of memory: of a reward model"), StopIteration("of a tool")]
)
def test_every_error_of_the_callback_reaches_the_caller_as_it_is(error: Exception, engine: batchspec.Engine) -> None:
    """A tool that runs out of memory is no reason for the engine to use fewer slots."""

    def tool(turn: Turn) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        engine.converse(chats(), tool)
    assert caught.value is error
    assert engine.generate(chats()).height == 5


def test_closing_the_engine_ends_a_call_that_waits_for_a_tool(model: Path) -> None:
    engine, waits, goes_on = batchspec.Engine(options(model)), threading.Event(), threading.Event()
    ended: list[str] = []

    def tool(turn: Turn) -> None:
        waits.set()
        goes_on.wait(30)

    def call() -> None:
        try:
            engine.converse(chats(1), tool)
        except EngineInUse as error:
            ended.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    assert waits.wait(30)
    engine.close()
    thread.join(30)
    assert ended
    assert not goes_on.is_set()
    goes_on.set()


def test_answers_continue_a_final_assistant_turn_and_thoughts_are_separate_fields(tmp_path: Path) -> None:
    model = make_thinking_tokenizer(make_checkpoint(tmp_path, "llama", dtype=torch.float64))
    first = [{"role": "user", "content": "Name a sea"}, {"role": "assistant", "content": "It is"}]
    seen: list[Turn] = []

    def reply(turn: Turn) -> Any:
        seen.append(turn)
        return {"messages": [*turn.messages, *MORE], "thinking_token_budget": 2} if not turn.number else None

    with batchspec.Engine(options(model), input={"final_assistant": "continue", "chat": False}) as engine:
        engine.converse([{"messages": first}], reply)
    assert [message["role"] for message in seen[1].messages] == ["user", "assistant", "user", "assistant"]
    assert seen[0].messages[1]["content"] == f"It is{seen[0].completion.text}"
    assert seen[1].completion.reasoning, "its template opens a thought"
    for turn in seen:
        assert turn.messages[-1].get("reasoning_content") == turn.completion.reasoning


def test_results_of_tools_reach_the_template_and_are_kept_in_the_messages(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE + "{% for message in messages %}{{ message.tool_calls | tojson if message.tool_calls }}{% endfor %}"
    model = make_tokenizer(make_checkpoint(tmp_path, "llama", dtype=torch.float64), chat_template=template)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    def tool(turn: Turn) -> Any:
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [*turn.messages[:1], asked, {"role": "tool", "content": "7", "tool_call_id": "c1"}] if not turn.number else None

    with batchspec.Engine(options(model)) as engine:
        last = engine.converse([{"prompt": "Add"}], tool)["messages"][1]
    assert [message["role"] for message in last] == ["user", "assistant", "tool", "assistant"]
    assert last[2] == {"role": "tool", "content": "7", "name": None, "tool_calls": None, "tool_call_id": "c1"}
    assert json.loads(last[1]["tool_calls"]) == [call]


def test_rows_that_are_no_chats_are_refused(engine: batchspec.Engine) -> None:
    with pytest.raises(ConfigError, match="conversations need chats, and the rows have prompt_ids"):
        engine.converse({"prompt_ids": [[1, 2]]}, as_many_as_the_row_says)
