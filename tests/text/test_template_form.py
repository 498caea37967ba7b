"""The form in which a template wants a chat, found by rendering, and what a template leaves out of one.

The templates here are of the kinds that published ones are. Which spelling a kind uses (a filter, a method, an alias, a test) may
not matter, only what it writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.data.dataset.messages import BadChat, read_chat
from batchspec.text.template_process import environment
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import make_tokenizer

PARAMETERS = {"type": "object", "properties": {"w": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "area", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "How large?"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "9"}


def calls(arguments: Any, content: Any = "", name: str = "area") -> dict[str, Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def template_of(each_call: str, *, content: str = "{{ m.content or '' }}", more: str = "") -> str:
    each = "{% for c in m.tool_calls or [] %}" + each_call + "{% endfor %}"
    return "{% for m in messages %}[{{ m.role }}]" + content + each + more + "{% endfor %}{{ tools | tojson if tools }}"


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    return Tokenizer(make_tokenizer(folder, chat_template=template))


def rendered(template: str, chat: list[dict[str, Any]], **variables: Any) -> str:
    return environment("2026-01-01").from_string(template).render(messages=chat, tools=None, **variables)


WRITES_OBJECTS = {
    "a filter": "{{ c.function.name }}{{ c.function.arguments | tojson }}",
    "the whole function": "{{ c.function | tojson }}",
    "quoted keys": "{{ c['function']['arguments'] | tojson }}",
    "an alias": "{% set a = c.function.arguments %}{{ a | tojson }}",
    "the items of an alias": "{% set a = c.function.arguments %}{% for k, v in a.items() %}<{{ k }}={{ v }}>{% endfor %}",
    "sorted": "{% for k, v in c.function.arguments | dictsort %}<{{ k }}={{ v }}>{% endfor %}",
    "objects alone": "{% if c.function.arguments is mapping %}{% for k in c.function.arguments %}{{ k }}={{ "
    "c.function.arguments[k] }}{% endfor %}{% endif %}",
    "both, text as it is": "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    "a macro, and a test of something else": "{% macro text(x) %}{{ x if x is string else x | tojson }}{% endmacro %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ text(v) }}{% endfor %}",
}
WRITES_TEXT = {
    "added to text": "{{ '```json\n' + c.function.arguments + '\n```' }}",
    "printed": "{{ c.function.arguments }}",
    "only if it is text": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}",
}


@pytest.mark.parametrize("given", ['{"w": 3, "note": "é"}', {"w": 3, "note": "é"}], ids=["text", "object"])
@pytest.mark.parametrize("kind", [*WRITES_OBJECTS, *WRITES_TEXT])
def test_arguments_have_the_form_that_the_template_writes(kind: str, given: Any, tmp_path: Path) -> None:
    template = template_of((WRITES_OBJECTS | WRITES_TEXT)[kind])
    wanted = {"w": 3, "note": "é"} if kind in WRITES_OBJECTS else '{"w": 3, "note": "é"}'
    expected = rendered(template, [USER, calls(wanted), RESULT])
    assert tokenizer_of(tmp_path, template).render_chat([USER, calls(given), RESULT]) == expected
    assert "3" in expected.partition("[assistant]")[2]


@pytest.mark.parametrize("given", [None, "", {}, "{}", "left out"])
def test_a_call_without_arguments_has_an_empty_object(given: Any, tmp_path: Path) -> None:
    message = calls(given)
    if given == "left out":
        del message["tool_calls"][0]["function"]["arguments"]
    for kind, form in ((WRITES_OBJECTS["a filter"], "area{}"), ("{{ c.function.name + c.function.arguments }}", "area{}")):
        text = tokenizer_of(tmp_path, template_of(kind)).render_chat([USER, message, RESULT])
        assert f"[assistant]{form}[tool]" in text


@pytest.mark.parametrize("given", ["not JSON", "[1]", "5", [1], 5, '{"a": 1', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(given: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, template_of(WRITES_OBJECTS["a filter"]))
    with pytest.raises(ValueError, match=r"^message 1: the arguments of the call of 'area' are not a JSON object$"):
        tokenizer.encode_chat([USER, calls(given), RESULT])


def test_a_template_of_text_gets_text_that_is_no_json_as_it_is(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, template_of(WRITES_TEXT["added to text"]))
    assert "```json\nw=3\n```" in tokenizer.render_chat([USER, calls("w=3"), RESULT])


def test_a_function_alone_is_a_call(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, template_of("{{ c.type }} {{ c.function | tojson }}"))
    alone = {"role": "assistant", "content": "", "tool_calls": [{"name": "area", "arguments": '{"w": 3}'}]}
    assert 'function {"name": "area", "arguments": {"w": 3}}' in tokenizer.render_chat([USER, alone, RESULT])
    with pytest.raises(ValueError, match="message 0 has a tool call without the name of a function"):
        tokenizer.encode_chat([{**alone, "tool_calls": [{"id": "x"}]}])


ONLY_WITHOUT_CONTENT = template_of(
    "{% if m.content is none %}{{ c.function.name + c.function.arguments }}{% endif %}", content="{{ m.content or '' }}"
)


def test_content_beside_calls_is_what_the_template_needs_to_write_them(tmp_path: Path) -> None:
    """DeepSeek-R1's writes calls only of a message whose content is null; others write the word None for it."""
    tokenizer = tokenizer_of(tmp_path, ONLY_WITHOUT_CONTENT)
    for content in ("", None):
        assert '[assistant]area{"w": 3}[tool]' in tokenizer.render_chat([USER, calls('{"w": 3}', content), RESULT])
    with pytest.raises(ValueError, match="leaves out the tool calls of message 1"):
        tokenizer.encode_chat([USER, calls('{"w": 3}', "Let me see."), RESULT])
    printed = tokenizer_of(tmp_path, template_of(WRITES_OBJECTS["a filter"], content="{{ m.content }}"))
    assert "None" not in printed.render_chat([USER, calls({"w": 3}, None), RESULT])


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_has_the_name_that_the_template_reads(read: str, given: str, tmp_path: Path) -> None:
    """Also if only the turn that led to the newest result has one, and its name is no literal word of the template."""
    half = len(read) // 2
    key = f"{{% set key = '{read[:half]}' ~ '{read[half:]}' %}}"
    written = key + "{% if m[key] and not loop.last %}<{{ m[key] }}>{% endif %}"
    tokenizer = tokenizer_of(tmp_path, template_of(WRITES_OBJECTS["a filter"], more=written))
    chat = [USER, {**calls({"w": 3}), given: "because"}, RESULT]
    assert "<because>" in tokenizer.render_chat(chat)
    tokenizer.encode_chat(chat)
    assert not tokenizer.chats.dropped_keys


def test_of_two_names_of_a_thought_the_template_gets_one(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, template_of("", more="{{ m.reasoning }}{{ m.reasoning_content }}"))
    answer = {"role": "assistant", "content": "9", "reasoning": "same", "reasoning_content": "same"}
    text = tokenizer.render_chat([USER, answer, USER])
    assert text.count("same") == 1


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
READS_PARTS = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (READS_PARTS, "[user]onetwo"),
        ("{{ m.content }}", "[user]one\ntwo"),  # as vLLM; the template would write the list as Python does
        ("{{ m.content | tojson }}", '[user]"one\\ntwo"'),
        ("{% for p in m.content %}<{{ p.text }}>{% endfor %}", "[user]<one><two>"),
        ("{% if m.role == 'user' %}" + READS_PARTS + "{% else %}{{ m.content }}{% endif %}", "[user]onetwo"),
    ],
)
def test_text_parts_stay_parts_where_the_template_reads_them(content: str, expected: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, template_of("", content=content))
    assert tokenizer.render_chat([{"role": "user", "content": PARTS}]) == expected


def test_a_template_that_reads_parts_alone_gets_text_as_a_part(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, template_of("", content="{% for p in m.content %}<{{ p.text }}>{% endfor %}"))
    chat = [USER, {"role": "assistant", "content": "It is"}]
    assert tokenizer.render_chat(chat) == "[user]<How large?>[assistant]<It is>"
    assert tokenizer.render_chat(chat, continue_final=True) == "[user]<How large?>[assistant]<It is"


def test_tools_go_where_the_template_reads_them(tmp_path: Path) -> None:
    """SmolLM3's reads xml_tools."""
    tokenizer = tokenizer_of(tmp_path, "{{ xml_tools | tojson if xml_tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert '"area"' in tokenizer.render_chat([USER], tools=[TOOL])
    tokenizer.encode_chat([USER], tools=[TOOL])


# --- what is left out

S = {"role": "system", "content": "Be brief."}
A = {"role": "assistant", "content": "It is 9."}
WHOLE = template_of(WRITES_OBJECTS["a filter"])


@pytest.mark.parametrize(
    ("template", "chat", "tools", "said"),
    [
        ("You may use tools. {% for m in messages %}{{ m.content }}{% endfor %}", [USER], [TOOL], "the tools"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", [USER], [TOOL], "the tools"),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ tools | tojson }}{% endif %}{{ m.content }}{% endfor %}",
         [USER], [TOOL], "the tools"),
        ("{{ tools[0] | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}", [USER], [TOOL, {
            **TOOL, "function": {"name": "volume"}}], "the tools"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [USER, calls({"w": 3}), RESULT], None,
         "the tool calls of message 1 (role assistant)"),
        (template_of("{{ c.function.name }}"), [USER, calls({"w": 3}), RESULT], None,
         "the tool calls of message 1 (role assistant)"),
        (template_of(""), [USER, calls({}), RESULT], [TOOL], "the tool calls of message 1 (role assistant)"),
        (template_of("{% if c.function.arguments %}{{ c.function | tojson }}{% endif %}"),
         [USER, calls({"w": 3}), RESULT, A, USER, calls("{}"), RESULT], None, "the tool calls of message 5 (role assistant)"),
        ("{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}",
         [USER, calls({}), RESULT], [{**TOOL, "function": {"name": "area"}}], "the tools"),
        (template_of(WRITES_OBJECTS["a filter"], content="{{ m.content if not m.tool_calls }}"),
         [USER, calls({"w": 3}, "Let me see."), RESULT], None, "the text of message 1 (role assistant)"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}",
         [USER, calls({"w": 3}), RESULT], None, "the text of message 2 (role tool)"),
        ("{% for m in messages %}{{ m.content if m.role != 'system' or loop.first }}{% endfor %}", [USER, S, USER], None,
         "the text of message 1 (role system)"),
        ("{% for m in messages if m.role in ['system', 'user', 'assistant'] %}{{ m.content }}{% endfor %}",
         [{"role": "developer", "content": "x"}, USER], None, "the text of message 0 (role developer)"),
        ("{{ messages[-1].content }}", [S, USER, A, USER, A, USER], None,
         "the text of message 0 (role system), the text of message 1 (role user), the text of message 2 (role assistant) and 2 "
         "other parts"),
    ],
)
def test_a_chat_of_which_the_template_leaves_out_a_part_is_refused(
    template: str, chat: list[dict[str, Any]], tools: Any, said: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, template)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole text is compared
        tokenizer.encode_chat(chat, tools=tools)
    advice = "take them out of the row, or set model.chat_template to a template that writes them"
    assert str(caught.value) == f"it leaves out {said}; {advice}"
    assert tokenizer.render_chat(chat, tools=tools), "what transformers would render"


@pytest.mark.parametrize(
    ("chat", "tools"),
    [
        ([USER], None), ([S, USER, A, USER], None), ([USER], [TOOL]), ([USER], [TOOL["function"]]), ([USER], []),
        ([USER, calls({}), RESULT, A, USER], [TOOL]), ([USER, calls("{}"), {**RESULT, "content": ""}], None),
        ([{"role": "user", "content": " \n"}], None), ([USER, calls({"w": {"deep": [1]}}, "Let me see."), RESULT], [TOOL]),
    ],
)
def test_a_chat_that_is_written_whole_is_not_refused(chat: list[dict[str, Any]], tools: Any, tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, WHOLE).encode_chat(chat, tools=tools)


def test_whether_a_part_is_left_out_is_asked_with_the_row_s_variables(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "{% for m in messages if m.role == 'user' or all %}{{ m.content }}{% endfor %}")
    assert tokenizer.encode_chat([USER, A, USER], template_kwargs={"all": True})
    for _ in range(2):
        with pytest.raises(ValueError, match="leaves out the text of message 1"):
            tokenizer.encode_chat([USER, A, USER])


def test_fields_that_templates_usually_leave_out_are_named_and_not_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, WHOLE)
    tokenizer.encode_chat([{**USER, "weight": 1}, {**A, "reasoning": "because"}, {**USER, "name": "Ann"}, calls({}), RESULT])
    assert tokenizer.chats.dropped_keys == {"name", "reasoning"}
    names = tokenizer_of(tmp_path, "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}")
    names.encode_chat([{**USER, "name": "Ann"}])
    assert not names.chats.dropped_keys


# --- what a row may leave out

_OPTIONAL = ("name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "annotations", "audio", "function_call")


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(_OPTIONAL), st.sampled_from([None, "", [], {}]), max_size=5))
def test_an_optional_field_that_is_null_or_empty_is_missing(empty: dict[str, Any]) -> None:
    plain = {"role": "user", "content": "x"}
    assert read_chat([{**plain, **empty}]) == read_chat([plain])


@pytest.mark.parametrize("content", [None, "", [], "left out"])
def test_a_message_with_calls_or_a_thought_needs_no_content(content: Any) -> None:
    for message in (calls({}), {"role": "assistant", "reasoning": "because"}):
        turn = {**message, "content": content}
        if content == "left out":
            del turn["content"]
        assert not read_chat([USER, turn, USER])[1].get("content")
    with pytest.raises(BadChat, match="message 0 has content None, which must be text"):
        read_chat([{"role": "user", "content": None}])


def test_parts_of_a_message_are_kept_and_one_part_is_text() -> None:
    one: dict[str, Any] = {"type": "text", "text": "a", "cache_control": {}}
    two = one | {"text": "b"}
    assert [turn["content"] for turn in read_chat([{"role": "user", "content": parts} for parts in ([one], [one, two])])] == [
        "a", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ]


def test_an_object_of_templates_by_name_is_read_by_name(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": {"default": "plain", "tool_use": "with tools"}}))
    assert Tokenizer(folder).render_chat([USER]) == "plain"
    assert Tokenizer(folder).render_chat([USER], tools=[TOOL]) == "with tools"
