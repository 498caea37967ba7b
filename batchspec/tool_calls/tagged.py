"""Calls with a tag for each argument. The row's tools say which type each value has.

qwen3_coder  <tool_call><function=f><parameter=x>1</parameter></function></tool_call>, each tag on a line of its own
seed_oss     the same in <seed:tool_call></seed:tool_call>, its values without line breaks around them
glm          <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>
minimax_m2   <minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>

A value ends at the closing tag that is followed by the next tag of the form: it may hold the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchspec.tool_calls.form import Found, Tools, past_space


@dataclass(frozen=True, slots=True)
class Tags:
    """The regular expressions of a form, each for one tag."""

    begin: re.Pattern[str]
    """Up to the first argument; its group 1 is the name."""
    key: re.Pattern[str]
    """Up to a value; its group 1 is the key."""
    value_end: re.Pattern[str]
    """Up to the next tag."""
    end: re.Pattern[str]
    own_lines: bool = False
    """Whether a value is on lines of its own, without its first and last line break."""
    untyped_is_json: bool = True
    """Whether the template writes JSON for all values but strings: as `Tools.typed`."""


def _function_tags(mark: str, *, own_lines: bool) -> Tags:
    """Tags of a function and its parameters, which may be inside <mark>."""
    return Tags(
        begin=re.compile(rf"(?:<{mark}>\s*)?<function=([^>\n]+)>"),
        key=re.compile(r"<parameter=([^>\n]+)>"),
        value_end=re.compile(r"</parameter>\s*(?=<parameter=|</function>)"),
        end=re.compile(rf"</function>(?:\s*</{mark}>)?"),
        own_lines=own_lines,
        untyped_is_json=False,
    )


_TAGS = {
    "qwen3_coder": _function_tags("tool_call", own_lines=True),
    "seed_oss": _function_tags("seed:tool_call", own_lines=False),
    "glm": Tags(
        begin=re.compile(r"<tool_call>\s*([^\s<]+)"),
        key=re.compile(r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>"),
        value_end=re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)"),
        end=re.compile(r"</tool_call>"),
    ),
    "minimax_m2": Tags(
        begin=re.compile(r'(?:<minimax:tool_call>\s*)?<invoke name="([^"\n]+)">'),
        key=re.compile(r'<parameter name="([^"\n]+)">'),
        value_end=re.compile(r"</parameter>\s*(?=<parameter name=|</invoke>)"),
        end=re.compile(r"</invoke>(?:\s*</minimax:tool_call>)?"),
    ),
}


@dataclass(frozen=True, slots=True)
class Tagged:
    name: str

    def find(self, text: str, tools: Tools) -> list[Found]:
        tags, found, at = _TAGS[self.name], list[Found](), 0
        while (begin := tags.begin.search(text, at)) is not None:
            at = begin.end()
            if (read := _arguments_at(text, at, tags)) is not None:
                arguments, at = read
                if tags.own_lines:
                    arguments = {key: value.removeprefix("\n").removesuffix("\n") for key, value in arguments.items()}
                name = begin[1].strip()
                typed = tools.typed(name, arguments, untyped_is_json=tags.untyped_is_json)
                found.append(Found(begin.start(), at, name, typed))
        return found


def _arguments_at(text: str, at: int, tags: Tags) -> tuple[dict[str, str], int] | None:
    """The arguments that begin at `at`, as text, and the index after the call; None where the call is malformed."""
    arguments: dict[str, str] = {}
    while True:
        at = past_space(text, at)
        if end := tags.end.match(text, at):
            return arguments, end.end()
        key = tags.key.match(text, at)
        value_end = None if key is None else tags.value_end.search(text, key.end())
        if key is None or value_end is None:
            return None
        arguments[key[1].strip()] = text[key.end() : value_end.start()]
        at = value_end.end()


QWEN3_CODER = Tagged("qwen3_coder")
SEED_OSS = Tagged("seed_oss")
GLM = Tagged("glm")
MINIMAX_M2 = Tagged("minimax_m2")
