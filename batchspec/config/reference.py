"""The reference of all keys: type, default, unit and description, read from the dataclasses that define the keys.

`batchspec run --help` and conf/README.md are made from it (commands/reference.py). Nothing heavy is imported: neither torch nor
Hydra.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from batchspec.config.key import ABOVE_0, INT64, Key
from batchspec.config.no_effect import READ_BY

_SENTENCE_END = re.compile(r"(?<!e\.g)\.\s")
TYPE_NAMES = {"int": "int", "float": "float", "bool": "bool", "str": "string", "Any": "anything"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedKey:
    """One key of the reference.

    name      dotted
    type      in words, with its range or choices
    default   in a job that sets nothing
    summary   the first sentence of the description
    details   the sentences after it, or an empty string
    choices   all values, if they are a few words
    drafters  those that read the key, if not all do
    advanced  whether few jobs set it
    """

    name: str
    type: str
    default: Any
    summary: str
    details: str
    choices: tuple[str, ...]
    drafters: tuple[str, ...]
    advanced: bool

    @property
    def default_text(self) -> str:
        """The default as it is written on a command line."""
        return self.default if isinstance(self.default, str) and self.default else json.dumps(self.default)


def described_keys(
    schema: type, keys: Mapping[str, Key], *, defaults: Mapping[str, Any], descriptions: Mapping[str, str] | None = None
) -> list[DescribedKey]:
    """The keys of a schema that `keys` declares, in the order of its fields.

    defaults      key -> default, for keys whose default option of a group gives another one than the dataclass
    descriptions  key -> text that replaces the docstring of its field
    """
    found = []
    for name, (owner, field_name, default) in _leaves(schema).items():
        if (key := keys.get(name)) is None:
            continue
        text = (descriptions or {}).get(name) or docstrings(owner).get(field_name, "")
        assert text, f"{owner.__name__}.{field_name} has no docstring"
        summary, *details = _SENTENCE_END.split(text, maxsplit=1)
        found.append(
            DescribedKey(
                name=name,
                type=key.form or _type(get_type_hints(owner)[field_name], key),
                default=defaults.get(name, default),
                summary=f"{summary.rstrip('.')}.",
                details="".join(details),
                choices=key.choices,
                drafters=READ_BY.get(name, ()),
                advanced=key.advanced,
            )
        )
    return found


def groups_of(schema: type) -> dict[str, str]:
    """Dataclass field -> first paragraph of its class's docstring, for the fields that are groups of keys."""
    hints = get_type_hints(schema)
    groups = {item.name: hints[item.name] for item in fields(schema) if is_dataclass(hints[item.name])}
    return {name: _words(_own_doc(kind)) for name, kind in groups.items()}


@cache
def docstrings(owner: type) -> dict[str, str]:
    """Field -> the string below it, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(item.target, ast.Name)
            found[item.target.id] = _words(str(after.value.value))
    return found


def options() -> dict[str, list[str]]:
    """Group -> its options: the folders of conf that hold YAML files."""
    groups = (path for path in sorted(_conf().iterdir()) if path.is_dir())
    found = {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in groups}
    return {group: names for group, names in found.items() if names}


def option_comment(group: str, option: str) -> str:
    """The comment at the top of an option's file, on one line."""
    lines = (_conf() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comments if not line.startswith("# @package"))


def default_options(name: str) -> dict[str, str]:
    """Group -> its default option in conf/NAME.yaml."""
    listed = yaml.safe_load((_conf() / f"{name}.yaml").read_text(encoding="utf-8"))["defaults"]
    return {
        group: option
        for item in listed
        if isinstance(item, dict)
        for group, option in item.items()
        if not group.startswith("override")
    }


def defaults_of(name: str) -> dict[str, Any]:
    """Dotted key -> value, for all keys that the default options of conf/NAME.yaml set."""
    found: dict[str, Any] = {}
    for group, option in default_options(name).items():
        found |= _dotted(option_values(group, option), f"{group}.")
    return found


def option_values(group: str, option: str) -> dict[str, Any]:
    """Key -> value, for all keys of the group that conf/GROUP/OPTION.yaml sets."""
    found: dict[str, Any] = yaml.safe_load((_conf() / group / f"{option}.yaml").read_text(encoding="utf-8"))
    return found


def _conf() -> Path:
    return Path(str(files("batchspec.conf")))


def _dotted(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _leaves(schema: type, prefix: str = "") -> dict[str, tuple[type, str, Any]]:
    """Dotted key -> (dataclass, field, default)."""
    hints = get_type_hints(schema)
    found: dict[str, tuple[type, str, Any]] = {}
    for item in fields(schema):
        kind, name = hints[item.name], f"{prefix}{item.name}"
        if isinstance(kind, type) and is_dataclass(kind):
            found |= _leaves(kind, f"{name}.")
        else:
            made = item.default_factory() if item.default_factory is not MISSING else item.default
            found[name] = (schema, item.name, made)
    return found


def _type(hint: Any, key: Key) -> str:
    inner = get_args(hint)
    if isinstance(hint, UnionType):
        (given,) = (kind for kind in inner if kind is not NoneType)
        return f"{_type(given, key)}, or null"
    if key.choices:
        return ", ".join(key.choices)
    if get_origin(hint) is list:
        return f"list of {_type(inner[0], key)}s"
    if get_origin(hint) is dict:
        return f"map from names to {'values' if inner[1] == Any else 'text' if inner[1] is str else 'names'}"
    return f"{TYPE_NAMES[getattr(hint, '__name__', str(hint))]}{_range(key)}"


def _range(key: Key) -> str:
    if not key.advice:
        return ""
    low, high = key.low, key.high
    if (low, high) == INT64:
        return " of 64 bits"
    above = low == ABOVE_0
    if high == math.inf:
        return f" {'above 0' if above else f'>= {_number(low)}'}"
    return f" above 0, up to {_number(high)}" if above else f" {_number(low)} .. {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _own_doc(kind: type) -> str:
    """The first paragraph of a class's docstring; empty if only the dataclass decorator wrote one."""
    doc = inspect.getdoc(kind) or ""
    return "" if re.match(rf"{kind.__name__}\(", doc) else doc.split("\n\n")[0]


def _words(text: str) -> str:
    return " ".join(text.split())
