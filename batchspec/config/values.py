"""Checks of single values: required keys, choices and ranges as their fields declare them, no credentials.

A bad value is refused in one line: key, value, limit, what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from batchspec.config.key import Key, declared_keys, value_of
from batchspec.config.schema import KEYS
from batchspec.console.text import quoted
from batchspec.errors import ConfigError
from batchspec.records import MAX_LOGIT_BIAS

BIASES = (-100.0, 100.0)
"""Range of the values of decode.logit_bias, as OpenAI's."""
SHIPPED = "pkg://"
"""Prefix of paths of files that the package contains."""
CREDENTIALS = re.compile(r"://[^/]*@|[?&](\w*key|\w*token|\w*secret|\w*password|\w*signature|sig|x-amz-[\w-]+)=", re.IGNORECASE)
"""Matches a URL that contains a password, a key or a signature."""

_ENVIRONMENT = re.compile(r"\$\{\s*(oc\.)?env\s*:")
"""An interpolation that reads a variable of the environment, as omegaconf writes it."""
_SECRET = re.compile(r"(?<![A-Z])(SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|APIKEY|KEY)(?![A-Z])", re.IGNORECASE)
"""Matches names of environment variables that hold a secret: AWS_SECRET_ACCESS_KEY, HF_TOKEN."""
_SECRET_LEN = 8
"""Minimum length of a secret in characters, so that TOKENIZER_KEY=yes does not count as one."""


def written(key: str) -> str:
    """A key that takes a list or a map, with an example of its value: one word of a shell's command, for a message."""
    return f"'{key}={KEYS.get(key, Key()).example or '[TEXT,TEXT]'}'"


def logit_bias(value: Any, example: str = "{1734: -100}") -> dict[int, float]:
    """Token id -> bias of its logit, from a map whose ids may be text; empty for None.

    example  of a right value, for messages
    Raises ValueError for anything else; its message is a sentence without its subject.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a map of token ids to numbers, not {quoted(value)}; write {example}")
    low, high = BIASES
    found: dict[int, float] = {}
    for token, bias in value.items():
        if not re.fullmatch(r"\d{1,10}", str(token)):
            raise ValueError(f"names {quoted(token)}, which is not a token id; write {example}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not low <= bias <= high:
            raise ValueError(f"adds {str(bias)[:40]} to token {token}, which must be in {low:g} .. {high:g}; correct it")
        found[int(token)] = float(bias)
    if len(found) > MAX_LOGIT_BIAS:
        raise ValueError(f"names {len(found):,} tokens, and at most {MAX_LOGIT_BIAS:,} fit; shorten it")
    return found


def check_given(config: Any, keys: Mapping[str, str]) -> None:
    """`keys` (key -> advice) must not be null or empty. Raises ConfigError, like all checks here."""
    for key, advice in keys.items():
        if value_of(config, key) in (None, ""):
            raise ConfigError(f"{key} is required; give {key}=..., {advice}")


CONTAINER = re.compile(r"^(abfss?|az|azure)://[a-z0-9$][a-z0-9-]{1,62}@[a-z0-9][\w.-]*(?=/|$)")
"""Matches Azure's URLs, in which the name before the @ is a container, not a key."""
GIVE_THEM = {
    "s3": "set AWS_PROFILE or the AWS_... variables",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set the AZURE_STORAGE_... variables",
    "azure": "set the AZURE_STORAGE_... variables",
    "abfs": "set the AZURE_STORAGE_... variables",
    "abfss": "set the AZURE_STORAGE_... variables",
    "hf": "set HF_TOKEN",
}


def check_credentials(config: Any, keys: Iterable[str]) -> None:
    """Raise ConfigError for credentials in URLs, because the configuration is written to the manifest and the card. The message
    does not show them."""
    for key in keys:
        value = value_of(config, key)
        for url in value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]:
            if isinstance(url, str) and CREDENTIALS.search(CONTAINER.sub("", url)):
                how = GIVE_THEM.get(url.partition("://")[0], "give them as its tools do, by environment or profile")
                raise ConfigError(f"{key} holds credentials in a URL; take them out and {how}")


def check_saved(config: Any) -> None:
    """Raise ConfigError for strings that read the environment, contain one of its secrets, or are not valid Unicode.

    The configuration is written to the manifest and to the dataset card, which people publish and run again on other machines.
    """
    named = [(name, value) for name, value in os.environ.items() if len(value) >= _SECRET_LEN and _SECRET.search(name)]
    secrets = [(name, value) for name, value in named if not os.path.exists(value)]  # SSH_KEY=/home/me/.ssh/id is a path
    for key, text in _strings(asdict(config)):
        if found := _ENVIRONMENT.search(text):
            raise ConfigError(
                f"{key} holds {found[0]}...}} as plain text, and whatever reads the saved configuration could put a variable of "
                "its own environment there; remove it"
            )
        for name, value in secrets:
            if value in text:
                raise ConfigError(
                    f"{key} holds the value of the environment variable {name}, and the configuration is written to the manifest "
                    "and the dataset card; take it out"
                )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{key}={text!a} is not valid Unicode; rename what it names, in UTF-8")


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, string) for every string inside, including keys of free-form dictionaries."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _strings(str(name), key)
            yield from _strings(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, key)


def literal(value: Any) -> Any:
    """The value with its strings escaped for omegaconf, so that no `${...}` in them is an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value)
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, list | tuple) else value


def expand_home(config: Any) -> None:
    """Replace a leading `~` by the user's home in all paths of a configuration."""
    for name, key in declared_keys(config.__class__).items():
        if key.path:
            group, _, last = name.rpartition(".")
            holder, value = value_of(config, group), value_of(config, name)
            if isinstance(value, dict):
                setattr(holder, last, {each: _at_home(path) for each, path in value.items()})
            else:
                setattr(holder, last, list(map(_at_home, value)) if isinstance(value, list) else _at_home(value))


def _at_home(path: Any) -> Any:
    return os.path.expanduser(path) if isinstance(path, str) else path


def check_values(config: Any, keys: Mapping[str, Key]) -> None:
    """Raise ConfigError unless each value is one of its key's choices, and each number in its range; null always is."""
    for name, key in keys.items():
        value = value_of(config, name)
        if key.choices and value is not None and value not in key.choices:
            raise ConfigError(f"{name}={value} must be one of {', '.join(key.choices)}")
        if key.advice and isinstance(value, list | dict):
            raise ConfigError(f"{name}={value} must be one value; {key.advice}")
        if isinstance(value, int | float) and (problem := key.violation(name, value)):
            raise ConfigError(problem)


def shipped(kind: str, suffix: str = "") -> dict[str, Path]:
    """Name -> path of all files and folders of `kind`, a folder of conf, in the package: the names that `pkg://` takes."""
    places = sorted((Path(str(files("batchspec.conf"))) / kind).iterdir())
    return {place.name.removesuffix(suffix): place for place in places if place.name.endswith(suffix)}
