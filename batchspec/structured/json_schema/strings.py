"""Strings of JSON Schema: patterns, lengths, formats, and the texts that a negation excludes, all of them at once.

Validators read patterns by ECMA-262 or as Python's `re`. A text is written only if it matches by both, and counts as not matching
only if it does so by neither. A string with a pattern and a length has as many characters as `char_dfa.MAX_STATES` allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from batchspec.structured.char_dfa import NO_TEXT, CharDfa
from batchspec.structured.emptiness import marked
from batchspec.structured.json_schema.formats import FORMATS
from batchspec.structured.json_schema.leaves import NOT_PATTERNS, NOT_VALUES, BadSchema, Leaf, count_of, listed_values, types_of
from batchspec.structured.json_schema.values import ANY_STRING, escaped, string, wrapped
from batchspec.structured.regex import BadRegex, regex_node
from batchspec.structured.regex_dialects import Dialect, possible, sure
from batchspec.structured.regular import ANY, NOTHING, Alt, Chars, LeftOut, Node, Repeat, TooLarge, text

AHEAD = re.compile(r"\^\(\?([=!])")


def string_node(leaves: Sequence[Leaf]) -> Node:
    """The strings that all leaves allow. Raises BadSchema and TooLarge."""
    keys = ("format", "pattern", "minLength")
    place = next((f"{where}/{key}" for key in keys for where, schema in leaves if key in schema), leaves[0].where)
    found = marked(_node(leaves), f"{place}: no string that can be written fits; leave it out, or what else holds here")
    try:
        return NOTHING if isinstance(found, LeftOut) and possible_language(leaves).is_empty else found
    except TooLarge:
        return found


def _node(leaves: Sequence[Leaf]) -> Node:
    least, most = count_of(leaves, "minLength", max), count_of(leaves, "maxLength", min)
    patterns = _patterns(leaves)
    formats = {schema["format"]: where for where, schema in leaves if _is_format(schema)}
    if not patterns and not formats and not _left_out(leaves):
        return ANY_STRING if least is None and most is None else string(least or 0, most)
    if len(patterns) + len(formats) == 1 and not least and most is None and not _left_out(leaves):
        if formats:
            return wrapped('"', regex_node(FORMATS[next(iter(formats))], escaped), '"')
        (pattern,) = patterns
        if not AHEAD.match(pattern):
            return wrapped('"', _regex(pattern, patterns[pattern], sure(), escape=True), '"')
    return wrapped('"', language(leaves).node(escaped), '"')


def language(leaves: Sequence[Leaf]) -> CharDfa:
    """The same as an automaton over the characters of the string. Raises BadSchema and TooLarge."""
    types = types_of(leaves)
    if types is not None and "string" not in types:
        return NO_TEXT
    found = CharDfa.of(Repeat(ANY, 0, None))
    for pattern, where in _patterns(leaves).items():
        found = found.both(matching(pattern, where))
    for _, schema in leaves:
        if _is_format(schema):
            found = found.both(CharDfa.of(regex_node(FORMATS[schema["format"]])))
        for pattern in schema.get(NOT_PATTERNS, ()):
            found = found.without(matching(pattern, "", sure_=False))
        values = listed_values(schema)
        found = found if values is None else found.both(listed(_texts(values)))
        found = found.without(listed(_texts(schema.get(NOT_VALUES, ()))))
    least, most = count_of(leaves, "minLength", max), count_of(leaves, "maxLength", min)
    return found if not least and most is None else found.of_length(least or 0, most)


def possible_language(leaves: Sequence[Leaf]) -> CharDfa:
    """A superset of the strings that validators allow: formats need not be checked. Raises BadSchema and TooLarge."""
    found = CharDfa.of(Repeat(ANY, 0, None))
    for pattern, where in _patterns(leaves).items():
        found = found.both(matching(pattern, where, sure_=False))
    for _, schema in leaves:
        for pattern in schema.get(NOT_PATTERNS, ()):
            found = found.without(matching(pattern, ""))
        found = found.without(listed(_texts(schema.get(NOT_VALUES, ()))))
    least, most = count_of(leaves, "minLength", max), count_of(leaves, "maxLength", min)
    if least:
        found = found.both(CharDfa.of(Repeat(ANY, min(least, 500), None)))
    if most is not None and most <= 500:
        found = found.both(CharDfa.of(Repeat(ANY, 0, most)))
    return found


@lru_cache(maxsize=200)
def matching(pattern: str, where: str, *, sure_: bool = True) -> CharDfa:
    """The texts that match an expression somewhere: surely, or possibly. Raises BadSchema and TooLarge."""
    begin = AHEAD.match(pattern)
    if begin is None:
        return CharDfa.of(_regex(pattern, where, sure() if sure_ else possible()))
    end = _closing(pattern, begin.start() + 1)
    if end is None or _has_bar(pattern):
        raise BadSchema(f"{where}/pattern: {pattern!r} holds a lookahead inside, which is not supported; write it another way")
    rest = matching("^" + pattern[end + 1 :], where, sure_=sure_)
    inside, wanted = f"^(?:{pattern[begin.end() : end]})", begin[1] == "="
    ahead = CharDfa.of(_regex(inside, where, sure() if sure_ == wanted else possible()))
    return rest.both(ahead) if wanted else rest.without(ahead)


def listed(values: Sequence[str]) -> CharDfa:
    """Exactly these texts."""
    return CharDfa.of(Alt(tuple(text(value) for value in values)))


def _texts(values: Sequence[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _regex(pattern: Any, where: str, dialect: Dialect, *, escape: bool = False) -> Node:
    try:
        of_char = escaped if escape else _plain
        return regex_node(str(pattern), of_char, anywhere=True, dialect=dialect)
    except BadRegex as error:
        raise BadSchema(f"{where}/pattern: {error}") from None


def _plain(chars: Chars) -> Node:
    return chars


def _closing(pattern: str, begin: int) -> int | None:
    """The index of the parenthesis that closes the one at `begin`; None if that is uncertain."""
    depth, place = 0, begin
    while place < len(pattern):
        depth += (pattern[place] == "(") - (pattern[place] == ")")
        if not depth:
            return place
        place = _after(pattern, place)
    return None


def _has_bar(pattern: str) -> bool:
    """Whether there may be an alternative outside of all groups, to which a lookahead before it would not apply."""
    place = 0
    while place < len(pattern):
        end = _closing(pattern, place) if pattern[place] == "(" else place
        if pattern[place] == "|" or end is None:
            return True
        place = _after(pattern, end)
    return False


def _after(pattern: str, place: int) -> int:
    """The index after the character, escape or class at this one."""
    if pattern[place] == "\\":
        return place + 2
    if pattern[place] == "[":
        place += 1 + pattern.startswith("^", place + 1)
        place += pattern.startswith("]", place)  # to Python a character of the class
        while place < len(pattern) and pattern[place] != "]":
            place += 1 + (pattern[place] == "\\")
    return place + 1


def _patterns(leaves: Sequence[Leaf]) -> dict[str, str]:
    """The patterns of all leaves, with their paths."""
    found = dict[str, str]()
    for where, schema in leaves:
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise BadSchema(f"{where}/pattern is {json.dumps(schema['pattern'])[:60]}, not a text; correct it")
            found.setdefault(schema["pattern"], where)
    return found


def _is_format(schema: Any) -> bool:
    """Names that are not in the standard are ignored."""
    return isinstance(schema.get("format"), str) and schema["format"] in FORMATS


def _left_out(leaves: Sequence[Leaf]) -> bool:
    return any(
        NOT_PATTERNS in schema or any(isinstance(value, str) for value in schema.get(NOT_VALUES, ())) for _, schema in leaves
    )
