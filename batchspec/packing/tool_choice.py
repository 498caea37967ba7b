"""Which of its tools a row may call, must call or must not call: the columns `tool_choice` and `parallel_tool_calls`.

auto      the model decides
none      the tools are in the prompt, and calls stay text, as in vLLM. A model with channels (harmony), whose calls are messages
          apart, cannot write any
required  the answer is one or more calls
function  {"type": "function", "function": {"name"}}: the answer is one call of it
allowed   {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools"}}: the row has these tools alone
A forced answer follows a constraint on the form in which the model writes calls (`structured/forced_calls.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from batchspec.data.dataset.json_text import BadJson, parse
from batchspec.errors import BadRow
from batchspec.packing.cells import json_cell
from batchspec.packing.constraints import COLUMNS, FORCED_CALL, Constraint
from batchspec.tool_calls.marks import HARMONY

WORDS = ("auto", "none", "required")
FREE_ANSWER: Constraint = ("regex", "(?s:.*)")
"""In a model with channels it excludes tool calls."""
IGNORE = "leave tool_choice null (of OpenAI's requests: input.drop=[tool_choice])"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a row asks for about its tools.

    tools       those that the template is given; None: the row has none
    readable    those whose calls are found in the answer; None: calls stay text
    constraint  what the answer must match; None: the choice demands nothing
    one_call    whether the first call alone is kept
    """

    tools: list[Any] | None = None
    readable: list[Any] | None = None
    constraint: Constraint | None = None
    one_call: bool = False

    @property
    def forces(self) -> bool:
        """Whether the answer must be calls: then no other constraint applies to it."""
        return self.constraint is not None and self.constraint[0] == FORCED_CALL


def tool_choice(row: Mapping[str, Any], form: str | None) -> ToolChoice:
    """The choice of a row. Raises BadRow.

    form  name of the form in which the model writes calls, or HARMONY; None: it is unknown
    """
    tools, asked, one_call = json_cell(row, "tools", list), _asked(row), not _parallel(row)
    mode, called = (asked, None) if isinstance(asked, str) else _of_object(asked, tools or [])
    if called is not None and asked.get("type") == "allowed_tools":
        tools, called = called, None
    if mode == "none":
        return ToolChoice(tools, None, FREE_ANSWER if form == HARMONY and tools else None)
    if mode == "auto":
        return ToolChoice(tools, tools, None, one_call)
    if not tools:
        raise BadRow("bad_parameter", f"tool_choice={mode} needs tools, and the row has none; add them, or {IGNORE}")
    if form is None:
        raise BadRow(
            "bad_parameter",
            "a forced tool_choice needs a known form of tool calls, and this model's is unknown; set model.chat_template to one "
            f"that writes tools (and model.tool_calls if it writes no calls), or {IGNORE}",
        )
    if both := next((name for name in COLUMNS if row.get(name) is not None), None):
        raise BadRow("bad_parameter", f"{both} and a tool_choice that forces a call are both given; leave one null")
    functions = [{"name": _name(tool), "parameters": _parameters(tool)} for tool in called or tools]
    several = not one_call and called is None
    source = json.dumps({"form": form, "tools": functions, "several": several}, ensure_ascii=False)
    return ToolChoice(tools, tools, (FORCED_CALL, source), not several)


def _asked(row: Mapping[str, Any]) -> Any:
    """One of WORDS, or an object."""
    value = row.get("tool_choice")
    if value is None or value in WORDS:
        return value or "auto"
    try:
        found = parse(value) if isinstance(value, str) else value
    except BadJson:
        found = None
    return found if isinstance(found, dict) else _refuse(value)


def _of_object(choice: Mapping[str, Any], tools: Sequence[Any]) -> tuple[str, list[Any]]:
    """The mode, and the tools that the object names."""
    if choice.get("type") != "allowed_tools":
        return "required", [_known(choice, tools, choice)]
    inner = choice.get("allowed_tools", choice)
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(listed, list) or not listed or (mode := inner.get("mode", "auto")) not in ("auto", "required"):
        _refuse(choice)
    return mode, [_known(named, tools, choice) for named in listed]


def _known(named: Any, tools: Sequence[Any], choice: Mapping[str, Any]) -> Any:
    """The tool of the row that an object of the choice names."""
    name = _name(named) if isinstance(named, dict) and named.get("type", "function") == "function" else None
    if not isinstance(name, str):
        _refuse(choice)
    found = next((tool for tool in tools if _name(tool) == name), None)
    if found is None:
        known = ", ".join(str(_name(tool)) for tool in tools) or "none"
        raise BadRow("bad_parameter", f"tool_choice names {name!r}, and the row's tools are: {known}; correct it, or {IGNORE}")
    return found


def _refuse(value: Any) -> NoReturn:
    raise BadRow(
        "bad_parameter",
        f"tool_choice={json.dumps(value, ensure_ascii=False)[:60]} must be auto, none, required, "
        '{"type": "function", "function": {"name": NAME}} or allowed_tools; correct it or leave it null',
    )


def _function(tool: Any) -> Mapping[str, Any]:
    """A tool's function, which may lack the object around it."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _name(tool: Any) -> Any:
    return _function(tool).get("name")


def _parameters(tool: Any) -> Mapping[str, Any] | None:
    name, found = _name(tool), _function(tool).get("parameters")
    if not isinstance(name, str) or not (found is None or isinstance(found, dict)):
        raise BadRow("bad_parameter", f"tools: {name!r} is no name, or its parameters are no object; correct it")
    return found


def _parallel(row: Mapping[str, Any]) -> bool:
    value = row.get("parallel_tool_calls")
    if isinstance(value, str) and value.lower() in ("true", "false"):  # of CSV
        value = value.lower() == "true"
    if not (value is None or isinstance(value, bool)):
        raise BadRow("bad_parameter", f"parallel_tool_calls={value!r} must be true or false; correct it or leave it null")
    return value is not False
