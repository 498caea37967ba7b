"""Turns overrides as users write them into the form that Hydra reads.

Text that Hydra's grammar does not allow is quoted, a single value for a key that takes a list becomes a list, and dictionaries
that accept any key need no `+`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from batchspec.config.reference import options
from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError

OPEN = ("input.columns", "input.template_kwargs", "model.adapters")
"""Dictionaries that accept any key."""
_PLAIN_LIST = re.compile(r"\[([^\[\]{}'\"]*)\]")


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """The overrides in the form that Hydra reads; options, and words without `=`, are unchanged.

    Raises ConfigError for an override without a key, and if a group's value is not the name of one of its options.
    """
    return [item if item.startswith("-") or "=" not in item else _one(item) for item in overrides]


def overrides_of(options: Mapping[str, Any]) -> list[str]:
    """Options as Python values, turned into overrides: {"model.path": "MODEL", "draft": "eagle3", "decode": {"n": 2}}."""
    found: list[str] = []
    for key, value in options.items():
        if isinstance(value, Mapping):
            found += overrides_of({f"{key}.{name}": item for name, item in value.items()})
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
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(_text, value))}]"
    return QuotedString(str(value).replace("${", "\\${"), Quote.single).with_quotes()


def _one(override: str) -> str:
    key, _, value = override.partition("=")
    bare = key.lstrip("+~")
    if not bare:
        raise ConfigError(f"cannot read the override '{override}'; write key=value")
    if bare in OPTIONS and (value == "null" or value.startswith(("[", "{"))):
        raise ConfigError(f"{override} is not a choice of the group {bare}; choices: {', '.join(OPTIONS[bare])}")
    if bare in OPEN or bare.startswith(tuple(f"{name}." for name in OPEN)):
        key = f"++{bare}" if not key.startswith("~") else key
    if not _reads(f"{key}={value}"):
        value = _quoted(value)
    if bare in LISTS and value and value != "null" and not value.startswith(("[", "${")):
        value = f"[{value}]"
    return f"{key}={value}"


def _reads(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def _quoted(value: str) -> str:
    """Text in quotes; each item of a plain list in quotes. Text that is quoted, nested or an interpolation is unchanged, and
    Hydra reports what is wrong with it.
    """
    listed = _PLAIN_LIST.fullmatch(value)
    if listed:
        return f"[{','.join(_quoted(item.strip()) for item in listed[1].split(','))}]"
    if value.startswith(("'", '"', "[", "{")) or "${" in value:
        return value
    # Backslashes before a quote are doubled, also before the closing one.
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def list_keys(config: Any, prefix: str = "", kind: str = "list[") -> list[str]:
    """Keys whose value is a list; with kind `list[str]` only those of text."""
    found: list[str] = []
    hints = get_type_hints(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            found += list_keys(value, f"{prefix}{item.name}.", kind)
        elif str(hints[item.name]).startswith(kind):
            found.append(prefix + item.name)
    return found


OPTIONS = options()
"""Group -> its options."""
LISTS = frozenset(list_keys(RunConfig()))
