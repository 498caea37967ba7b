"""What ends a row and what its texts hold, in whole little jobs: stop strings, stop ids, and the least number of tokens, with and
without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import batchspec
from tests.text.scripted import BEGIN, make_scripted

SAYS = (
    "Let ", "me ", "<call>", '{"name": "f", "arguments": {"s": "STOP"}}', "</call>", " see ST", "<x>", "OP now", " STOP", "\n\n",
    "on",
)
"""With <call>, </call> and <x> as special tokens: 11 tokens, and then EOS."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}" + BEGIN
    return make_scripted(
        tmp_path_factory.mktemp("model") / "scripted", SAYS, special=["<call>", "</call>", "<x>"], chat_template=template
    )


@pytest.fixture(scope="module", params=["none", "lookup"])
def engine(request: pytest.FixtureRequest, model: Path) -> Any:
    given = {
        "model.path": str(model), "decode.max_new_tokens": 40, "output.token_ids": True, "output.logprobs": 0,
        "draft": request.param, "packing.max_num_seqs": 3, "packing.memory_gb": 0.1,
    }
    with batchspec.Engine(given) as made:
        yield made


def said(engine: batchspec.Engine, *rows: dict[str, Any]) -> list[tuple[str | None, int, str | None]]:
    """Of each row: completion, number of tokens, stop_reason. Each is asked for twice: then drafts are right."""
    names = {name: None for row in rows for name in row}
    found = engine.generate([{"prompt": BEGIN, **names, **row} for row in rows for _ in range(2)]).to_dicts()
    ends = [(row["completion"], len(row["token_ids"]), row["stop_reason"]) for row in found]
    assert ends[::2] == ends[1::2]
    return ends[::2]


@pytest.mark.second
def test_a_stop_string_ends_a_row_only_after_the_least_number_of_tokens(engine: batchspec.Engine) -> None:
    """One that earlier tokens complete is text. The second one is around a special token, and the third in a token of its own."""
    text = "".join(part for part in SAYS if part not in ("<call>", "</call>", "<x>"))
    json_begin = text.partition("STOP")[0]
    rows = [{"stop": ["STOP"], "min_new_tokens": least} for least in (0, 3, 4, 7, 8, 9, 12, None)]
    second = text.find("STOP", len(json_begin) + 1)
    third = text.find("STOP", second + 1)
    assert said(engine, *rows) == [
        (json_begin, 4, "STOP"), (json_begin, 4, "STOP"), (text[:second], 8, "STOP"), (text[:second], 8, "STOP"),
        (text[:third], 9, "STOP"), (text, 12, None), (text + json_begin, 16, "STOP"),
        (json_begin, 4, "STOP"),
    ], "with 12 tokens the EOS is not drawn, and the model begins again"


@pytest.mark.second
def test_a_stop_id_s_own_text_is_in_no_completion_and_completes_no_stop_string(model: Path) -> None:
    """Whatever decodes the text: the maker of the table, the search for stop strings, or that for tool calls."""
    stop_id = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]["\n\n"]
    keys = {"model.path": str(model), "decode.stop_ids": [stop_id], "output.token_ids": True, "decode.max_new_tokens": 40}
    chat, tools = [{"role": "user", "content": "Hi"}], json.dumps([{"type": "function", "function": {"name": "f"}}])
    with batchspec.Engine({**keys, "draft": "lookup", "packing.memory_gb": 0.1, "model.tool_calls": "hermes"}) as engine:
        rows = [{"messages": chat, "tools": each, "stop": stop} for each in (None, tools) for stop in (None, ["\n"], ["on"])]
        found = engine.generate(rows).to_dicts()
    text = "".join(part for part in SAYS[:9] if part not in ("<call>", "</call>", "<x>"))
    assert {(row["completion"], row["stop_reason"], row["finish_reason"]) for row in found} == {(text, str(stop_id), "stop")}
    assert all(row["token_ids"][-1] == stop_id for row in found), "it is a token of the output"
