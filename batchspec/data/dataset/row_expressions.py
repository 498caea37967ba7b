"""SQL expressions of polars over the rows of a job's output: conditions and scores that a command line gives."""

from __future__ import annotations

import difflib
from collections.abc import Collection

import polars as pl

from batchspec.console.text import one_line
from batchspec.errors import ConfigError

EXAMPLE = "\"usage.completion_tokens > 50 AND (choice_probs[1]->'prob') > 0.8\", with these brackets"


class RowExpression:
    """An expression over columns.

    given  where the text was given, and the text, for messages
    names  of the columns
    Raises ConfigError if the text is no expression, or names another column.
    """

    def __init__(self, text: str, given: str, names: Collection[str]) -> None:
        self._given = given
        try:
            self._made = pl.sql_expr(text)
            self.names = list(dict.fromkeys(self._made.meta.root_names()))
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            raise ConfigError(f"{given}: not an SQL expression ({said_of(error)}); an example is {EXAMPLE}") from None
        if unknown := [name for name in self.names if name not in names]:
            near = difflib.get_close_matches(unknown[0], names, n=3) or names
            raise ConfigError(f"{given}: no column {unknown[0]!r}; did you mean {', '.join(near)}?")

    def condition(self, rows: pl.DataFrame) -> pl.Series:
        """Whether it is true of each row; where it is null, it is not. Raises ConfigError if it cannot be computed."""
        value = self._value(rows)
        if value.dtype != pl.Boolean:
            raise ConfigError(f"{self._given}: its values are {value.dtype}, not true or false; an example is {EXAMPLE}")
        return value.fill_null(value=False)

    def score(self, rows: pl.DataFrame) -> pl.Series:
        """Its number for each row. Raises ConfigError if it cannot be computed."""
        value = self._value(rows)
        if not (value.dtype.is_numeric() or value.dtype == pl.Boolean):
            raise ConfigError(f"{self._given}: its values are {value.dtype}, not numbers; give a column of numbers")
        return value.cast(pl.Float64)

    def _value(self, rows: pl.DataFrame) -> pl.Series:
        try:
            return rows.with_columns(self._made.alias("batchspec.value"))["batchspec.value"]
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            raise ConfigError(f"{self._given}: cannot be computed ({said_of(error)})") from None


def said_of(error: BaseException) -> str:
    return one_line(str(error).split("\n")[0], 160)
