"""pythonic: a list of calls in Python's syntax, [f(x=1), g(y="a")], whose arguments are named and are literals.

Between marks (LFM2, Llama 4, OLMo 3) they may follow other text; there each call may be on a line of its own, without a list, as
OLMo 3 writes them. Without marks an answer is calls only if all of it is calls of the row's own tools.
"""

from __future__ import annotations

import ast
import json
import warnings
from dataclasses import dataclass
from math import isfinite
from typing import Any

from batchspec.tool_calls.form import Found, Tools

MARKS = (
    ("<|tool_call_start|>", "<|tool_call_end|>"), ("<|python_start|>", "<|python_end|>"),
    ("<function_calls>", "</function_calls>"),
)
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, which some models write."""
_MOST_ENDS = 16
"""Closing marks that are tried for one opening mark: a string may hold some."""


@dataclass(frozen=True, slots=True)
class Pythonic:
    name: str = "pythonic"

    def find(self, text: str, tools: Tools) -> list[Found]:
        for begin, end in MARKS:
            if begin in text and not text.lstrip().startswith("["):  # a string may hold the mark
                return _between(text, begin, end)
        calls = _calls(text)
        if not all(name in tools for name, _ in calls):
            return []
        return [Found(0 if place == 0 else len(text), len(text), *call) for place, call in enumerate(calls)]


def _between(text: str, begin: str, end: str) -> list[Found]:
    found: list[Found] = []
    at = text.find(begin)
    while at >= 0:
        inner = at + len(begin)
        stop, after = inner, inner
        for _ in range(_MOST_ENDS):
            stop = text.find(end, stop)
            until = len(text) if stop < 0 else stop
            if calls := _calls(text[inner:until], by_line=True):
                after = min(len(text), until + len(end))
                found += [Found(at if place == 0 else after, after, *call) for place, call in enumerate(calls)]
                break
            if stop < 0:
                break
            stop += len(end)
        at = text.find(begin, after)
    return found


def _calls(text: str, *, by_line: bool = False) -> list[tuple[str, str]]:
    """Name and arguments of each call of a list; none if the text is anything else. by_line: or of each line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as \d
            body = ast.parse(text.strip()).body
        nodes = [node.value for node in body if isinstance(node, ast.Expr)]
        if len(nodes) < len(body):
            return []
        if len(nodes) == 1 and isinstance(nodes[0], ast.List):
            return [_call(node) for node in nodes[0].elts]
        return [_call(node) for node in nodes] if by_line else []
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("it is no call with named arguments")
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if len(arguments) < len(node.keywords):
        raise ValueError("two arguments have one name")
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        text = json.dumps(arguments)
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else _not_a_name(), text


def _not_a_name() -> str:
    raise ValueError("what is called has no name")


def _value(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError for anything that JSON does not have."""
    match node:
        case ast.Constant(value=bool() | int() | str() | None as value):
            return value
        case ast.Constant(value=float() as value) if isfinite(value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if isfinite(value):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("it is no value that JSON has")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is not text")


PYTHONIC = Pythonic()
