"""Chats, thoughts and tool calls in the forms that Nemotron 3, Nemotron Nano 2 and Granite 4 H write: small templates of the
structure of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import batchspec
from batchspec.text.thinking import find_think_tokens
from batchspec.text.tokenizer import Tokenizer
from batchspec.tool_calls.form import Tools
from batchspec.tool_calls.registry import choose_form
from tests.helpers.models import make_checkpoint, make_thinking_tokenizer, make_tokenizer
from tests.tool_calls.tool_templates import tool, tools_text

NEMOTRON_3 = (
    "{% set thinks = enable_thinking if enable_thinking is defined else true %}"
    "{% set short = truncate_history_thinking if truncate_history_thinking is defined else true %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}"
    "{% set f = t.function or t %}\n<function>\n"
    "<name>{{ f.name }}</name>\n<description>{{ f.description }}</description>\n<parameters>"
    "{% for name, p in (f.parameters.properties or {}).items() %}\n<parameter>\n<name>{{ name }}</name>\n<type>{{ p.type }}"
    "</type>"
    "{% if p.description %}\n<description>{{ p.description }}</description>{% endif %}\n</parameter>{% endfor %}\n</parameters>\n"
    "</function>{% endfor %}\n</tools><|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought = m.reasoning_content or '' %}{% if short and loop.index0 < ns.last %}{% set thought = '' %}{% endif %}"
    "<|im_start|>assistant\n{{ '<think>\n' ~ thought ~ '\n</think>\n' if thought else '<think></think>' }}"
    "{{ (m.content or '') | trim }}{% for c in m.tool_calls or [] %}"
    "{% set f = c.function or c %}<tool_call>\n<function={{ f.name }}>"
    "\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>\n{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>\n<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\n' if thinks else '<think></think>' }}"
    "{% endif %}"
)
NANO_2 = (
    "{% set ns = namespace(thinks=true, system='') %}{% for m in messages %}{% if m.role in ('user', 'system') %}"
    "{% if '/think' in m.content %}{% set ns.thinks = true %}{% elif '/no_think' in m.content %}{% set ns.thinks = false %}"
    "{% endif %}{% endif %}{% endfor %}{% if messages[0].role == 'system' %}"
    "{% set ns.system = messages[0].content.replace('/think', '').replace('/no_think', '').strip() %}"
    "{% set messages = messages[1:] %}{% endif %}<SPECIAL_10>System\n{{ ns.system }}{% if tools %}\n<AVAILABLE_TOOLS>"
    "[{% for t in tools %}{{ (t.function or t) | tojson }}{{ ', ' if not loop.last }}{% endfor %}]</AVAILABLE_TOOLS>\n"
    'Call with <TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}]</TOOLCALL>\n{% endif %}\n'
    "{% if messages[-1].role == 'assistant' %}{% set last = messages[-1].content.strip() %}{% set messages = messages[:-1] %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}<SPECIAL_11>User\n"
    "{{ m.content.replace('/think', '').replace('/no_think', '').strip() }}\n{% elif m.role == 'tool' %}<SPECIAL_11>User\n"
    "<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE>\n{% else %}<SPECIAL_11>Assistant\n{{ m.content.split('"
    "</think>')[-1].strip() }}"
    "{% if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}{% set f = c.function or c %}"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments if f.arguments is string else f.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}\n<SPECIAL_12>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<SPECIAL_11>Assistant\n{{ '<think>\n' if ns.thinks else '<think></think>' }}"
    "{% endif %}{{ last }}"
)
GRANITE_4 = (
    "{% if tools %}<|start_of_role|>system<|end_of_role|>Tools:\n<tools>{% for t in tools %}\n{{ t | tojson }}"
    "{% endfor %}\n</tools>\n"
    'Answer with <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|end_of_text|>\n'
    '{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_of_role|>user<|end_of_role|>\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|end_of_text|>\n{% else %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}{% set f = c.function or c %}\n<tool_call>\n{"name": "{{ f.name }}", "arguments": '
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}}\n</tool_call>{% endfor %}<|end_of_text|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
TOOLS = [tool("area", w="integer", o="object", s="string")]
ARGUMENTS = {"w": 3, "o": {"k": [1, "é"]}, "s": "7 }\n</tool_call>"}
CALLS = {
    "id": "abcdefghi", "type": "function", "function": {"name": "area", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
}
USER: dict[str, Any] = {"role": "user", "content": "How large?"}
TURN: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALLS]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "abcdefghi", "content": "9"}
FORMS = {"nemotron 3": (NEMOTRON_3, "qwen3_coder"), "nano 2": (NANO_2, "nemotron_json"), "granite 4": (GRANITE_4, "hermes")}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_calls_is_found_and_reads_those_of_the_history(name: str, tmp_path: Path) -> None:
    template, form_name = FORMS[name]
    tokenizer = Tokenizer(make_tokenizer(tmp_path, chat_template=template))
    form = choose_form("auto", tokenizer.chats.answer_samples, channels=False)
    assert form is not None
    assert form.name == form_name
    text = tokenizer.render_chat([USER, TURN, RESULT], tools=TOOLS)
    (found,) = form.find(text.partition(USER["content"])[2], Tools(tools_text(*TOOLS)))
    assert (found.name, json.loads(found.arguments)) == ("area", ARGUMENTS)
    assert "9" in text.rpartition("area")[2]


@pytest.mark.parametrize(
    ("kwargs", "inside"), [({}, True), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)]
)
def test_a_variable_turns_thoughts_of_nemotron_3_off(kwargs: dict[str, Any], inside: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_thinking_tokenizer(tmp_path, chat_template=NEMOTRON_3))
    tokens = find_think_tokens("auto", tokenizer, 320)
    assert tokens is not None
    assert tokenizer.problem_of(kwargs) is None
    assert tokens.opened_by(np.array(tokenizer.encode_chat([USER], template_kwargs=kwargs), np.int32)) is inside


def test_thoughts_of_earlier_turns_are_written_where_nemotron_3_writes_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_thinking_tokenizer(tmp_path, chat_template=NEMOTRON_3))
    turn: dict[str, Any] = {**TURN, "reasoning": "by counting"}
    assert "<think>\nby counting\n</think>\n<tool_call>" in tokenizer.render_chat([USER, turn, RESULT], tools=TOOLS)
    again = [USER, turn, RESULT, {"role": "assistant", "content": "9"}, USER]
    keeps = {"truncate_history_thinking": False}
    assert "by counting" in tokenizer.render_chat(again, tools=TOOLS, template_kwargs=keeps)
    assert "<think></think><tool_call>" in tokenizer.render_chat(again, tools=TOOLS, whole=False)


@pytest.mark.parametrize(("system", "inside"), [("Be brief.", True), ("/no_think", False), ("Be brief. /think", True)])
def test_words_of_the_system_message_turn_thoughts_of_nano_2_off(system: str, inside: bool, tmp_path: Path) -> None:
    """Its think marks are no tokens, and then thoughts are part of the answer; a tokenizer may have them."""
    chat = [{"role": "system", "content": system}, USER]
    plain = Tokenizer(make_tokenizer(tmp_path / "plain", chat_template=NANO_2))
    assert plain.render_chat(chat).endswith("Assistant\n<think>\n" if inside else "Assistant\n<think></think>")
    assert find_think_tokens("auto", plain, 320) is None
    tokenizer = Tokenizer(make_thinking_tokenizer(tmp_path / "marks", chat_template=NANO_2))
    tokens = find_think_tokens("auto", tokenizer, 320)
    assert tokens is not None
    assert tokens.opened_by(np.array(tokenizer.encode_chat(chat), np.int32)) is inside


@pytest.mark.second
def test_a_nemotron_3_thinks_within_its_budget_and_then_makes_the_call_that_it_must(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "nemotron_h", dtype=torch.float64, max_position_embeddings=2048)
    make_thinking_tokenizer(folder, chat_template=NEMOTRON_3, more=("<tool_call>", "</tool_call>"))
    keys = {
        "model.path": str(folder), "model.dtype": "float64", "model.max_len": 900, "decode.max_new_tokens": 150,
        "decode.thinking_token_budget": 3, "draft": "lookup",
    }
    asked = {"messages": [USER], "tools": tools_text(tool("area", w="integer")), "tool_choice": "required"}
    quick = json.dumps({"enable_thinking": False})
    with batchspec.Engine(keys) as engine:
        thinks, answers = engine.generate([{"id": "a", **asked}, {"id": "b", **asked, "template_kwargs": quick}]).to_dicts()
    for row, thought in ((thinks, True), (answers, False)):
        assert (row["status"], row["completion"], bool(row["reasoning"])) == ("ok", "", thought)
        (call, *_) = json.loads(row["tool_calls"])
        assert call["function"]["name"] == "area"
