"""The tool calls of a job, from the column `tool_calls`: how many of each tool, rows without one, and invalid ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import polars as pl

from batchspec.data.dataset.json_text import BadJson
from batchspec.records import ANSWERED
from batchspec.tool_calls.form import Tools

MAX_TOOLS = 1000
"""Names of tools that are counted, the first ones of the output."""
TOOLS_KEPT = 1024
"""Lists of tools whose names are kept while rows are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    answers: int
    """Rows with an answer; if the output has the rows' tools, only rows with tools."""
    without: int
    """Those of them without a call."""
    calls: int
    by_tool: dict[str, int]
    """Calls by the name of the tool, the most frequent first."""
    bad_arguments: int
    """Calls whose arguments are not a JSON object."""
    unknown_tools: int | None
    """Calls of a tool that the row does not have; None: the output does not have the rows' tools."""


class CallTally:
    """Counts over all rows read so far.

    config   the job's configuration
    columns  the output's columns
    """

    def __init__(self, config: Mapping[str, Any], columns: Collection[str]) -> None:
        self._wanted = "tool_calls" in columns
        tools = (config.get("input", {}).get("columns") or {}).get("tools", "tools")
        self._tools = tools if tools in columns else None
        self._answers = self._without = self._calls = self._bad = self._unknown = 0
        self._by_tool: Counter[str] = Counter()

    def columns(self) -> Iterator[pl.Expr]:
        """What `add` needs of the output."""
        if self._wanted:
            yield pl.col("tool_calls").alias("calls")
            yield (pl.lit(None) if self._tools is None else pl.col(self._tools)).alias("row_tools")

    def add(self, rows: pl.DataFrame) -> None:
        if not self._wanted:
            return
        answers = rows.filter(pl.col("status").is_in(ANSWERED))
        for calls, tools in answers.select("calls", "row_tools").iter_rows():
            known = None if self._tools is None else _names(tools)
            if calls is None and known is not None and not known:
                continue  # a row without tools
            self._answers += 1
            self._without += calls is None
            for call in () if calls is None else msgspec.json.decode(calls):
                self._count(call["function"], known)

    def _count(self, function: Mapping[str, Any], known: frozenset[str] | None) -> None:
        name = str(function.get("name"))
        self._calls += 1
        if name in self._by_tool or len(self._by_tool) < MAX_TOOLS:
            self._by_tool[name] += 1
        self._bad += not _is_object(function.get("arguments"))
        self._unknown += known is not None and name not in known

    def result(self) -> ToolCalls | None:
        """None if the output has no column of tool calls."""
        if not self._wanted:
            return None
        return ToolCalls(
            answers=self._answers, without=self._without, calls=self._calls, by_tool=dict(self._by_tool.most_common()),
            bad_arguments=self._bad, unknown_tools=None if self._tools is None else self._unknown,
        )


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, TypeError, RecursionError):
        return False


def _names(tools: Any) -> frozenset[str]:
    """The names of a row's tools: JSON text, or a list of records."""
    return _names_in(tools if isinstance(tools, str) else json.dumps(tools, default=str))


@lru_cache(TOOLS_KEPT)
def _names_in(text: str) -> frozenset[str]:
    try:
        return Tools(text).names
    except BadJson:
        return frozenset()
