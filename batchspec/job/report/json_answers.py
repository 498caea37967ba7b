"""Answers that are JSON objects: how many are valid JSON, how often each field is present or null, and the values of enums.

Fields and values are counted in the answers themselves, so jobs whose rows have different schemas, or none, are counted too.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

MAX_FIELDS = 200
"""Fields that are counted, the first ones of the output."""
MAX_VALUES, VALUE_CHARS, MIN_REPEATS = 20, 60, 2
"""A field that the job's schema does not list the values of counts as an enum if its values are texts, whole numbers or booleans,
at most so many and so long, and each occurs so often on average."""
MAX_LISTED = 200
"""Values of an enum that are counted where the job's schema lists them."""
FINISHED = ("ok", "invalid")
"""Statuses of answers that ended by themselves."""
_NOT_TEXT = re.compile(r"-?\d+|true|false|null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    name: str
    present: int
    """Objects that have the field, those with null included."""
    null: int
    values: dict[str, int] | None
    """Enum value -> objects that have it, the most frequent first; None: the field is not an enum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonAnswers:
    finished: int
    """Answers that ended by themselves, those that violate their schema (status invalid) included."""
    valid: int
    """Those of them that are JSON texts."""
    objects: int
    """Those of them that are JSON objects."""
    fields: tuple[Field, ...]
    """Top-level fields: those of the job's schema, then those found besides, in their order."""


class JsonTally:
    """Counts over all rows read so far. config: the job's configuration."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        schema = config.get("decode", {}).get("schema")
        self._wanted = schema is not None
        self._finished = self._valid = self._objects = 0
        self._fields: dict[str, _Values] = {name: _Values(listed) for name, listed in _properties(schema)}

    def columns(self) -> Iterator[pl.Expr]:
        """What `add` needs of the output. Only texts that may be objects are read, unless the job has a schema."""
        text = pl.col("completion")
        may_be = pl.lit(value=True) if self._wanted else text.str.strip_chars_start().str.starts_with("{")
        yield pl.when(pl.col("status").is_in(FINISHED) & may_be).then(text).alias("json_text")

    def add(self, rows: pl.DataFrame) -> None:
        self._finished += rows.filter(pl.col("status").is_in(FINISHED) & pl.col("has_text")).height
        for text in rows["json_text"].drop_nulls():
            try:
                answer = msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError):
                continue
            self._valid += 1
            if isinstance(answer, dict):
                self._objects += 1
                for name, value in answer.items():
                    self._count(name, value)

    def _count(self, name: str, value: Any) -> None:
        field = self._fields.get(name)
        if field is None:
            if len(self._fields) >= MAX_FIELDS:
                return
            field = self._fields[name] = _Values(None)
        field.add(value)

    def result(self) -> JsonAnswers | None:
        """None if the job has no schema and most answers are no objects."""
        if not self._wanted and 2 * self._objects <= self._finished:
            return None
        fields = tuple(
            Field(name=name, present=one.present, null=one.null, values=one.enum()) for name, one in self._fields.items()
        )
        return JsonAnswers(finished=self._finished, valid=self._valid, objects=self._objects, fields=fields)


class _Values:
    """The values of one field. listed: all that the schema allows; None: it lists none."""

    def __init__(self, listed: list[Any] | None) -> None:
        self.present = self.null = 0
        self._counts: Counter[str] | None = Counter()
        self._listed = listed is not None
        if listed is not None:
            self._counts.update(dict.fromkeys((_shown(value) for value in listed if value is not None), 0))

    def add(self, value: Any) -> None:
        self.present += 1
        if value is None:
            self.null += 1
        elif self._counts is not None:
            if self._listed or (isinstance(value, str | int) and len(str(value)) <= VALUE_CHARS):
                self._counts[_shown(value)] += 1
            if len(self._counts) > (MAX_LISTED if self._listed else MAX_VALUES) or not self._counts:
                self._counts = None

    def enum(self) -> dict[str, int] | None:
        counts, found = self._counts, self.present - self.null
        if counts is None or sum(counts.values()) < found or (not self._listed and found < MIN_REPEATS * len(counts)):
            return None
        return dict(counts.most_common()) or None


def _shown(value: Any) -> str:
    """A value as text: a text as it is, unless it could be taken for another value."""
    if isinstance(value, str) and not _NOT_TEXT.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _properties(schema: Any) -> Iterator[tuple[str, list[Any] | None]]:
    """The top-level fields of a schema, a map or JSON text, and the values that it lists for each; none of the path of a file,
    whose content may have changed."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    for name, about in list(properties.items())[:MAX_FIELDS] if isinstance(properties, Mapping) else ():
        listed = about.get("enum") if isinstance(about, Mapping) else None
        yield name, list(listed) if isinstance(listed, list) and len(listed) <= MAX_LISTED else None
