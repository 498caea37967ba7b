"""No function has a copy: what is corrected in one of two copies would stay wrong in the other."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.house.test_imports import module_of, sources


def _shape(function: ast.FunctionDef) -> str | None:
    """What a function does, apart from its name, its docstring and the types of its arguments. None if it calls nothing: such
    functions are single expressions, shorter than an import of them."""
    body = ast.Module(function.body[1:] if ast.get_docstring(function) is not None else function.body, [])
    names = [argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)]
    return ast.dump(body) + " ".join(names) if any(isinstance(node, ast.Call) for node in ast.walk(body)) else None


@pytest.mark.second
def test_no_function_exists_twice() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (shape := _shape(node)) is not None:
                found[shape].append(f"{module_of(path)}.{node.name}")
    assert len(found) > 1000
    assert [names for names in found.values() if len(names) > 1] == []
