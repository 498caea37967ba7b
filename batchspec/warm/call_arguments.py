"""Errors of a call from Python, in its own terms: for an argument that it does not take, such as vLLM's max_tokens, they name the
key or column to use, and KEY=VALUE that they advise is an entry of a dictionary."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import ParamSpec, TypeVar

from batchspec.config.schema import RunConfig
from batchspec.config.typed import keys, suggest
from batchspec.config.vllm_names import NAMES, REMARKS
from batchspec.console.text import error_line
from batchspec.data.dataset.columns import TYPES
from batchspec.errors import ConfigError, InputError

Given = ParamSpec("Given")
Result = TypeVar("Result")
ROWS = ("prompts", "inputs", "messages", "prompt_token_ids")
"""What vLLM's `generate` and `chat` and OpenAI's calls name their rows."""
_GROUPS = "|".join(item.name for item in fields(RunConfig))
_FORM = re.compile(rf"(?<=\s)((?:{_GROUPS})(?:\.\w+)*)=(\.\.\.|[\w./-]*\w)(?=[\s;,)]|$)(?! is )")
"""KEY=VALUE: VALUE is one word, and nothing is said of it."""
_WORDS = {"`+job=demo`": 'job="demo"', "--config-dir FOLDER": "config_dir=FOLDER"}
_LITERALS = {"true": "True", "false": "False", "null": "None"}
OBJECTS = {
    "sampling_params": REMARKS["sampling_params"],
    "lora_request": "adapters are the key model.adapters and the column `adapter`",
    "model": "the model is the key model.path",
}
"""Arguments of other programs that are not the name of one key -> the keys for them."""


def explains_arguments(name: str, takes_keys: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator: a call with arguments that the function does not take raises ConfigError, which names the key or the column.

    A function with **keys takes the names of groups and of keys without one, and dotted keys, which others check.
    name        of the function, for the message
    takes_keys  what takes the keys of a job: "batchspec.Engine"
    """

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        signature = inspect.signature(function)
        known = [each for each, its in signature.parameters.items() if each != "self" and its.kind is not its.VAR_KEYWORD]
        groups = [item.name for item in fields(RunConfig)] if len(known) < len(signature.parameters.keys() - {"self"}) else []

        @wraps(function)
        def called(*args: Given.args, **named: Given.kwargs) -> Result:
            unknown = next((each for each in named if each not in (*known, *groups) and not (groups and "." in each)), None)
            try:
                signature.bind(*args, **named)
                said = ""
            except TypeError as error:
                said = str(error)
            if said or unknown is not None:
                raise ConfigError(_explained(known, name, takes_keys, unknown, said))
            try:
                return function(*args, **named)
            except (ConfigError, InputError) as error:
                error.args = (error_line(_in_python(str(error))),)  # of the same object, which the caller's rows may have raised
                raise

        return called

    return decorate


def _in_python(message: str) -> str:
    """The message with what it advises, after the semicolon, as entries of a dictionary of keys."""
    for words, of_python in _WORDS.items():
        message = message.replace(words, of_python)
    found, semicolon, advice = message.partition(";")
    return found + semicolon + _FORM.sub(_pair, advice).replace("} {", ", ")  # one dictionary of several keys


def _pair(found: re.Match[str]) -> str:
    key, value = found.groups()
    plain = value == "..." or re.fullmatch(r"-?\d+(\.\d+)?", value)
    return f'{{"{key}": {_LITERALS.get(value) or (value if plain else json.dumps(value))}}}'


def _explained(known: Sequence[str], name: str, takes_keys: str, unknown: str | None, said: str) -> str:
    """known, unknown: arguments that the function takes, and one of the call that it does not; said: Python's own message."""
    if unknown is None:
        return f"{name}: {said}; it takes {', '.join(known)}, and {takes_keys} takes the keys of a job"
    begin = f"{unknown} is not an argument of {name}"
    if unknown in ROWS:
        return f"{begin}: rows are its first argument, `{known[0]}`"
    if unknown in OBJECTS:
        return f"{begin}: {OBJECTS[unknown]}, which {takes_keys} takes"
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys())}
    key = NAMES.get(unknown) or (unknown if unknown in leaves.values() else leaves.get(unknown))
    column = key.removeprefix("decode.") if key else unknown
    row = f"; a value for each row is the column {column!r}" if column in TYPES else ""
    if unknown in REMARKS:
        return f"{begin}: {REMARKS[unknown]}{row}"
    if key is not None:
        return f"{begin}: it is the key {key}, which {takes_keys} takes for all rows{row}"
    hint = suggest(unknown, [*known, *keys()])
    return f"{begin}, which takes {', '.join(known)}; {takes_keys} takes the keys of a job{f': {hint}' if hint else ''}{row}"
