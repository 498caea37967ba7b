"""Turns overrides as users write them into the form that Hydra reads.

Text that Hydra's grammar does not allow is quoted, a single value for a key that takes a list becomes a list, dictionaries that
accept any key need no `+`, and a map may be JSON text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString, Sweep
from hydra.errors import HydraException

from batchspec.config.reference import options
from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError

Options = Sequence[str] | Mapping[str, Any]
"""Keys of a job in a call from Python: a list of overrides, or a map of keys to values."""
OPEN = ("input.columns", "input.template_kwargs", "model.adapters")
"""Dictionaries that accept any key."""
SCHEMA, INPUT = "decode.schema", "input.path"
MAPS = (*OPEN, SCHEMA, "decode.logit_bias")
"""Keys whose value is a map. The names in such a map are not keys of the configuration."""
_NAME = re.compile(r"[\w/+.$%*@?| -]+", re.ASCII)
"""The names that Hydra's grammar allows in a map; it does not allow quoted names."""
UNREADABLE = object()
_PLAIN_LIST = re.compile(r"\[([^\[\]{}'\"]*)\]")


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """The overrides in the form that Hydra reads; options, and words without `=`, are unchanged.

    Raises ConfigError for an override without a key, and if a group's value is not the name of one of its options.
    """
    return [item if item.startswith("-") or "=" not in item else _one(item) for item in overrides]


def overrides_of(options: Options, **keys: Any) -> list[str]:
    """Options of a call from Python as overrides: a list of overrides, or a map with Python values, nested or dotted.

    {"model.path": "MODEL", "draft": "eagle3", "decode": {"n": 2}}; `keys` are a second such map, after the options.
    Raises ConfigError for one text instead of a list, for anything else that is neither list nor map, and for a map whose names
    Hydra cannot read.
    """
    if isinstance(options, str):
        form = f"a list of overrides, [{options!r}]" if "=" in options else f"a dictionary of keys, {{'model.path': {options!r}}}"
        raise ConfigError(f"{options!r} is one text; give {form}")
    if isinstance(options, Mapping):
        return [*_of_map(options), *_of_map(keys)]
    if not isinstance(options, Iterable):
        raise ConfigError(f"{options!r} is neither a list of overrides nor a dictionary of keys; give one of them")
    words = list(options)
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise ConfigError(f"{wrong[0]!r} is not an override; write a list of texts, ['key=value'], or a dictionary of keys")
    return [*words, *_of_map(keys)]


def recipe_overrides(job: str | None, config_dir: str | os.PathLike[str] | None) -> list[str]:
    """The recipe of this name as overrides, and the folder of recipes and groups of one's own that may hold it.

    Raises ConfigError if there is no such folder.
    """
    words = [] if job is None else [f"+job={job}"]
    if config_dir is None:
        return words
    folder = os.path.abspath(config_dir)
    if not os.path.isdir(folder):
        raise ConfigError(f"config_dir={config_dir} is not a folder; correct the path")
    return [*words, f"hydra.searchpath=[{QuotedString(f'file://{folder}', Quote.single).with_quotes()}]"]


def _of_map(options: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key, value in options.items():
        if isinstance(value, Mapping) and key.lstrip("+") in MAPS:
            found.append(f"{key}={_map(key.lstrip('+'), value)}")
        elif isinstance(value, Mapping) and (value or key.lstrip("+") in GROUPS):
            found += _of_map({f"{key}.{name}": item for name, item in value.items()})
        else:
            found.append(f"{key}={value if key.lstrip('+') in OPTIONS else _text(value)}")
    return found


def _text(value: Any) -> str:
    """A Python value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_text(item)}' for name, item in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(_text, value))}]"
    return QuotedString(str(value).replace("${", "\\${"), Quote.single).with_quotes()


def _map(key: str, value: Mapping[Any, Any]) -> str:
    """The map of a key in Hydra's grammar; a schema as JSON text, which may have any names. Raises ConfigError."""
    if key == SCHEMA:
        return _text(json.dumps(value))
    for name in _names(value):
        if not _NAME.fullmatch(str(name)):
            raise ConfigError(
                f"{key}: Hydra cannot read the name {str(name)!r} in an override; write the map in a recipe, or use a name of "
                "ASCII letters, digits, spaces and _/+.$%*@?|-"
            )
    return _text(value)


def _names(value: Any) -> list[Any]:
    """The names in a map and in the maps that it holds."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [*(value if isinstance(value, Mapping) else ()), *(name for item in inner for name in _names(item))]


def _json_map(value: str) -> dict[str, Any] | None:
    """The map that the text holds as JSON; None if it holds anything else."""
    try:
        found = json.loads(value) if value.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _one(override: str) -> str:
    key, _, value = override.partition("=")
    bare = key.lstrip("+~")
    if not bare:
        raise ConfigError(f"cannot read the override '{override}'; write key=value")
    if bare in OPTIONS and (value == "null" or value.startswith(("[", "{")) or isinstance(_parsed(override), bool | int | float)):
        raise ConfigError(f"{override} is not a choice of the group {bare}; choices: {', '.join(OPTIONS[bare])}")
    if bare in OPEN or bare.startswith(tuple(f"{name}." for name in OPEN)):
        key = f"++{bare}" if not key.startswith("~") else key
    parsed = _parsed(f"{key}={value}")
    if bare in TEXTS and value.startswith(("[", "{")):
        value = _in_quotes(value)  # no list or map fits the key: it is text, such as the regular expression [A-E]
    elif bare in (*TEXTS, INPUT) and _changes(value, parsed):
        value = _in_quotes(value)
    elif parsed is UNREADABLE:
        written = _json_map(value) if bare in MAPS else None
        value = _quoted(value) if written is None else _map(bare, written)
    if bare in LISTS and value and value != "null" and not value.startswith(("[", "${")):
        value = f"[{value}]"
    return f"{key}={value}"


def _changes(value: str, parsed: Any) -> bool:
    """Whether Hydra reads text as other text: the commit 12345e6 as a number, a file's name without the spaces at its ends."""
    if isinstance(parsed, bool | int | float):
        return True
    inner = value.strip()
    return value != inner and not inner.startswith(("'", '"', "[", "{")) and not isinstance(parsed, Sweep)


def _parsed(override: str) -> Any:
    """The override's value as Hydra reads it; UNREADABLE if its grammar does not allow the override."""
    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException:
        return UNREADABLE


def _quoted(value: str) -> str:
    """Text in quotes; each item of a plain list in quotes. Text that is quoted, nested or an interpolation is unchanged, and
    Hydra reports what is wrong with it.
    """
    listed = _PLAIN_LIST.fullmatch(value)
    if listed:
        return f"[{','.join(_quoted(item.strip()) for item in listed[1].split(','))}]"
    if value.startswith(("'", '"', "[", "{")) or "${" in value:
        return value
    return _in_quotes(value)


def _in_quotes(value: str) -> str:
    # Backslashes before a quote are doubled, also before the closing one.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def list_keys(config: Any, prefix: str = "", kind: str = "list[") -> list[str]:
    """Keys whose type, as text, begins with `kind`: by default lists; `list[str]`: lists of text."""
    found: list[str] = []
    hints = get_type_hints(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            found += list_keys(value, f"{prefix}{item.name}.", kind)
        elif str(hints[item.name]).startswith(kind):
            found.append(prefix + item.name)
    return found


def groups(config: Any, prefix: str = "") -> list[str]:
    """The groups of keys, those within groups dotted."""
    found = [(prefix + item.name, getattr(config, item.name)) for item in fields(config)]
    return [name for key, value in found if is_dataclass(value) for name in (key, *groups(value, f"{key}."))]


OPTIONS = options()
"""Group -> its options."""
GROUPS = frozenset(groups(RunConfig()))
LISTS = frozenset(list_keys(RunConfig()))
TEXTS = frozenset(key for kind in ("str |", "<class 'str'>") for key in list_keys(RunConfig(), kind=kind))
"""Keys whose value is text alone."""
FLOATS = frozenset(key for kind in ("float |", "<class 'float'>") for key in list_keys(RunConfig(), kind=kind))
