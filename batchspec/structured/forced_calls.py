"""The texts of answers that must call tools, in each form of tool calls, with arguments that follow the schemas of the tools.

A mark, such as <tool_call>, is written as its token if the vocabulary has one (`TokenSymbols.marks`), else as text. What is
written is what the form's reader finds (`tool_calls/`); optional line breaks and spaces are those in which templates differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchspec.automata.token_automaton import MARKS
from batchspec.structured.call_parameters import parameters_of
from batchspec.structured.channels import CONSTRAIN_BYTE, MESSAGE_BYTE
from batchspec.structured.gemma4_values import QUOTE, Gemma4Values
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.structured.json_schema.values import COLON, COMMA, SPACE, literal, wrapped
from batchspec.structured.regular import EMPTY, Alt, Chars, Impossible, Joined, Mark, Members, Node, Repeat, Seq, optional, text
from batchspec.structured.rules import Rules, renamed
from batchspec.structured.tagged_values import tagged_value
from batchspec.structured.unsupported import obeyed
from batchspec.tool_calls.marks import CALL_MARKS, HARMONY

Tool = Mapping[str, Any]
"""{"name", "parameters"}: a JSON Schema, or null."""
BREAK = optional(text("\n"))
CALL_ID = Repeat(Chars.of([(0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)]), 9, 9)
_ALL, _ALL_END, _ONE, _SEP, _ONE_END = CALL_MARKS["deepseek"]


@dataclass(slots=True)
class Writer:
    """Makes the nodes of calls. marks: texts of the tokens that mark calls, by their places in MARKS."""

    marks: Sequence[str]
    named: dict[str, Node] = field(default_factory=dict)
    """The rules of all schemas so far."""

    def text(self, value: str) -> Node:
        """This text, in which marks are tokens where there are such."""
        if not self.marks:
            return text(value)
        parts = re.split(f"({'|'.join(map(re.escape, self.marks))})", value)
        return Seq(tuple(Mark(MARKS[self.marks.index(part)]) if part in self.marks else text(part) for part in parts))

    def json(self, schema: Mapping[str, Any]) -> Node:
        """The JSON texts of a schema. Raises BadSchema, Impossible, TooLarge."""
        found = renamed(schema_rules(schema), f"{len(self.named)} ")
        self.named |= found.named
        return found.start

    def arguments(self, tool: Tool) -> Node:
        """JSON text of the tool's arguments; {} for a tool without parameters."""
        schema = tool["parameters"]
        return text("{}") if _takes_nothing(schema) else self.json({**schema, "type": "object"})

    def object(self, tool: Tool, arguments: str) -> Node:
        """A call as a JSON object; arguments: the key of these."""
        name = Seq((literal("name"), COLON, literal(tool["name"]), COMMA, literal(arguments), COLON))
        return wrapped("{", Seq((name, self.arguments(tool))), "}")

    def tagged(self, tool: Tool, tags: Callable[[str, Node], Node], closing: str) -> Node:
        """The arguments, each with its tags around it. closing: the text of the tag after a value."""
        items = list[tuple[Node, bool]]()
        for name, schema, required in parameters_of(tool["parameters"]):
            items.append((tags(name, tagged_value(schema, closing, self.json)), required))
        return Members(tuple(items), EMPTY)


def _takes_nothing(schema: Mapping[str, Any] | None) -> bool:
    """Whether a tool has no parameters, as OpenAI's API reads it: none is named."""
    known = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema"}
    return not schema or (schema.keys() <= known and not schema.get("properties") and not schema.get("additionalProperties"))


def _hermes(to: Writer, tool: Tool) -> Node:
    return Seq((to.text("<tool_call>"), BREAK, to.object(tool, "arguments"), BREAK, to.text("</tool_call>")))


def _llama3_json(to: Writer, tool: Tool) -> Node:
    return to.object(tool, "parameters")


def _json_call(to: Writer, tool: Tool) -> Node:
    return to.object(tool, "arguments")


def _mistral_named(to: Writer, tool: Tool) -> Node:
    call_id = optional(Seq((to.text("[CALL_ID]"), CALL_ID)))
    return Seq((to.text(f"[TOOL_CALLS]{tool['name']}"), call_id, to.text("[ARGS]"), to.arguments(tool)))


def _deepseek(to: Writer, tool: Tool) -> Node:
    name, arguments = tool["name"], to.arguments(tool)
    newer = Seq((to.text(f"{name}{_SEP}"), arguments))
    older = Seq((to.text(f"function{_SEP}{name}\n```json\n"), arguments, text("\n```")))
    return Seq((to.text(_ONE), Alt((newer, older)), to.text(_ONE_END)))


def _qwen3_coder(to: Writer, tool: Tool) -> Node:
    return _function_tags(to, tool, "tool_call", "\n")


def _seed_oss(to: Writer, tool: Tool) -> Node:
    return _function_tags(to, tool, "seed:tool_call", "")


def _function_tags(to: Writer, tool: Tool, mark: str, around: str) -> Node:
    """around: what is between a value and its tags."""
    def tags(name: str, value: Node) -> Node:
        return Seq((text(f"<parameter={name}>{around}"), value, text(f"{around}</parameter>\n")))

    inside = to.tagged(tool, tags, "</parameter>")
    return Seq((to.text(f"<{mark}>\n<function={tool['name']}>\n"), inside, to.text(f"</function>\n</{mark}>")))


def _glm4(to: Writer, tool: Tool) -> Node:
    return Seq((text(f"{tool['name']}\n"), to.arguments(tool)))


def _gemma4(to: Writer, tool: Tool) -> Node:
    values, schema = Gemma4Values(to.text(QUOTE), to.json), tool["parameters"]
    arguments = text("{}") if _takes_nothing(schema) else values.object(schema)
    return Seq((to.text(f"<|tool_call>call:{tool['name']}"), arguments, to.text("<tool_call|>")))


def _glm(to: Writer, tool: Tool) -> Node:
    def tags(name: str, value: Node) -> Node:
        key = to.text(f"<arg_key>{name}</arg_key>")
        return Seq((key, BREAK, to.text("<arg_value>"), value, to.text("</arg_value>"), BREAK))

    inside = to.tagged(tool, tags, "</arg_value>")
    return Seq((to.text(f"<tool_call>{tool['name']}"), BREAK, inside, to.text("</tool_call>")))


def _minimax_m2(to: Writer, tool: Tool) -> Node:
    def tags(name: str, value: Node) -> Node:
        return Seq((text(f'<parameter name="{name}">'), value, text("</parameter>\n")))

    return Seq((text(f'<invoke name="{tool["name"]}">\n'), to.tagged(tool, tags, "</parameter>"), text("</invoke>\n")))


def _pythonic(to: Writer, tool: Tool) -> Node:
    """Arguments are JSON values, which Python's reader of literals takes too, with the names of JSON's constants."""
    items = list[tuple[Node, bool]]()
    for name, schema, required in parameters_of(tool["parameters"]):
        if not name.isidentifier():
            raise BadSchema(f"parameter {name!r} is no name in Python, in which this model writes calls; rename it")
        items.append((Seq((text(f"{name}="), to.json(schema))), required))
    return wrapped(f"{tool['name']}(", Members(tuple(items), COMMA), ")")


def _harmony(to: Writer, tool: Tool) -> Node:
    """From the recipient's name on; `channels.py` has what is before it."""
    kind = Seq((SPACE, optional(Mark(CONSTRAIN_BYTE)), text("json")))
    return Seq((text(tool["name"]), optional(kind), Mark(MESSAGE_BYTE), to.arguments(tool)))


@dataclass(frozen=True, slots=True)
class _Form:
    call: Callable[[Writer, Tool], Node]
    names: str
    """Regular expression of the names of functions that the form can write."""
    before: tuple[str, Node] = ("", EMPTY)
    """What is before the first call: a text, and what comes after it."""
    between: Node = EMPTY
    after: str = ""
    one_call: bool = False
    """Whether an answer has one call at most."""


_LIST = Seq((SPACE, text("[")))
_FORMS: dict[str, _Form] = {
    "hermes": _Form(_hermes, r"(?s:.+)", between=BREAK),
    "llama3_json": _Form(_llama3_json, r"(?s:.+)", between=text("; ")),
    "mistral": _Form(_json_call, r"(?s:.+)", before=("[TOOL_CALLS]", _LIST), between=COMMA, after="]"),
    "mistral, named": _Form(_mistral_named, r"[\w.\-]+"),
    "granite": _Form(_json_call, r"(?s:.+)", before=("<|tool_call|>", _LIST), between=COMMA, after="]"),
    "phi4": _Form(_json_call, r"(?s:.+)", before=("<|tool_call|>", _LIST), between=COMMA, after="]<|/tool_call|>"),
    "nemotron_json": _Form(_json_call, r"(?s:.+)", before=("<TOOLCALL>[", EMPTY), between=COMMA, after="]</TOOLCALL>"),
    "deepseek": _Form(_deepseek, r"[^\n<]+", before=(_ALL, EMPTY), between=BREAK, after=_ALL_END),
    "qwen3_coder": _Form(_qwen3_coder, r"[^>\n]+", between=BREAK),
    "seed_oss": _Form(_seed_oss, r"[^>\n]+", between=BREAK),
    "gemma4": _Form(_gemma4, r"[^\s{]+"),
    "glm4": _Form(_glm4, r"[^\s{}<>|]+", one_call=True),
    "glm": _Form(_glm, r"[^\s<]+", between=BREAK),
    "minimax_m2": _Form(_minimax_m2, r'[^"\n]+', before=("<minimax:tool_call>\n", EMPTY), after="</minimax:tool_call>"),
    "pythonic": _Form(_pythonic, r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", before=("[", EMPTY), between=COMMA, after="]"),
    "pythonic, marked": _Form(
        _pythonic, r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", before=("<|tool_call_start|>[", EMPTY), between=COMMA,
        after="]<|tool_call_end|>",
    ),
    HARMONY: _Form(_harmony, r"[\w.\-]+", one_call=True),
}


def call_rules(source: str, marks: Sequence[str], *, checks: bool = False) -> Rules:
    """The answers that call tools. source: JSON of {"form", "tools", "several"}: whether there may be more than one call.

    checks: as for `parse.rules_of`
    Raises BadSchema, Impossible, TooLarge.
    """
    asked, to = json.loads(source), Writer(marks)
    form = _form_of(asked["form"], marks)
    found = [_call_of(to, form, tool, checks=checks) for tool in asked["tools"]]
    calls = Alt(tuple(node for node, _ in found))
    first, then = form.before
    several = asked["several"] and not form.one_call
    listed = Joined(calls, form.between) if several else calls
    return Rules(
        Seq((to.text(first), then, listed, to.text(form.after))), to.named, of_channel_call=asked["form"] == HARMONY,
        is_weaker=any(is_weaker for _, is_weaker in found),
    )


def _form_of(name: str, marks: Sequence[str]) -> _Form:
    newer = {"mistral": ("[ARGS]", "mistral, named"), "pythonic": ("<|tool_call_start|>", "pythonic, marked")}
    mark, other = newer.get(name, ("", ""))
    return _FORMS[other if mark in marks else name]


def _call_of(to: Writer, form: _Form, tool: Tool, *, checks: bool) -> tuple[Node, bool]:
    """A call, and whether its arguments are those of a weaker schema."""
    name = tool["name"]
    try:
        if not re.fullmatch(form.names, name):
            raise BadSchema("this model's form of calls cannot write the name; rename it")
        return obeyed(tool["parameters"], lambda parameters: form.call(to, {**tool, "parameters": parameters}), checks=checks)
    except BadSchema as error:
        raise type(error)(f"tool {name!r}: {error}") from error
    except Impossible as error:
        raise Impossible(f"tool {name!r}: {error}") from error
