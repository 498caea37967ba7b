"""Where two outputs of the same rows differ, told so that the row can be found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl

from batchspec.records import Completion

Key = tuple[str, int, int]
"""request_id, sample_index, turn"""
Rows = dict[Key, dict[str, Any]]
OF_A_RUN = {"perf", "spec_decode", "row_index"}
"""Columns that say how, or in which place of the input, a row was computed."""
CLOSE = 1e-5
"""Most that log-probabilities of a float64 model may differ by, which are float32."""
_FIRST = ("status", "token_ids", "finish_reason", "stop_reason", "prompt_ids")


def rows_of(frame: pl.DataFrame, given: Iterable[str]) -> Rows:
    """The columns that must be equal in every run, without those that were copied from the input (`given`). Raises ValueError for
    a row that is there twice."""
    columns = [name for name in frame.columns if name not in OF_A_RUN and (name not in given or name == "messages")]
    found: Rows = {}
    for row in frame.select(columns).iter_rows(named=True):
        key = row["request_id"], row["sample_index"], row.get("turn", 0)
        if key in found:
            raise ValueError(f"row {key} was written twice")
        if row.get("usage"):
            row["usage"].pop("cached_tokens")
        if row.get("error"):
            row["error"] = row["error"]["code"]
        found[key] = row
    return found


def rows_of_stream(completions: Iterable[Completion]) -> Rows:
    """The same of completions, as far as they tell it. Raises ValueError for a row that came twice."""
    found: Rows = {}
    for one in completions:
        row: dict[str, Any] = {"status": one.status, "finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
        row["token_ids"] = None if one.token_ids is None else one.token_ids.tolist()
        row["completion"] = one.text
        row["error"] = None if one.error is None else one.error.code
        key = one.request_id, one.sample_index, 0
        if key in found:
            raise ValueError(f"row {key} came twice")
        given = None if one.logprobs is None else one.logprobs.tolist()
        row["logprobs"] = given and [None if math.isnan(value) else value for value in given]
        found[key] = row
    return found


def differences(found: Rows, wanted: Rows, *, bits: bool, whole: bool = True, of_stream: bool = False) -> list[str]:
    """One line for each row that differs or is missing.

    bits       log-probabilities too are bit for bit the same
    whole      every wanted row must be there
    of_stream  `found` has fewer columns, and those are compared
    """
    lines = [f"{_name(key)}: nobody asked for this row" for key in found.keys() - wanted.keys()]
    if whole:
        lines += [f"{_name(key)}: the row is missing" for key in wanted.keys() - found.keys()]
    for key in sorted(found.keys() & wanted.keys()):
        row, plain = found[key], wanted[key]
        order = [*_FIRST, *sorted(row.keys() - set(_FIRST))]
        told = (_difference(name, row[name], plain[name], bits) for name in order if name in row and name in plain)
        lacks = [] if of_stream else sorted(row.keys() ^ plain.keys())
        if line := next(filter(None, told), f"only one of the two has the columns {lacks}" if lacks else ""):
            lines.append(f"{_name(key)}: {line}")
    return lines


def _name(key: Key) -> str:
    return f"{key[0]}/{key[1]}" + (f" turn {key[2]}" if key[2] else "")


def _difference(name: str, found: Any, wanted: Any, bits: bool) -> str:
    """Empty if the values are equal."""
    if name == "logprobs" and found is not None and wanted is not None and len(found) == len(wanted):
        at = next((i for i, (x, y) in enumerate(zip(found, wanted, strict=True)) if not _equal(x, y, bits)), None)
        return "" if at is None else f"logprobs[{at}] {found[at]!r}, plain {wanted[at]!r}"
    if name == "top_logprobs" and found is not None and wanted is not None and len(found) == len(wanted):
        return _of_tops(found, wanted, bits)
    if found == wanted:
        return ""
    if isinstance(found, list) and isinstance(wanted, list):
        return f"{name} {_first_difference(found, wanted)}"
    return f"{name} {str(found)[:200]!r}, plain {str(wanted)[:200]!r}"


def _of_tops(found: Sequence[Any], wanted: Sequence[Any], bits: bool) -> str:
    for at, (top, plain) in enumerate(zip(found, wanted, strict=True)):
        same = [one["id"] for one in top] == [one["id"] for one in plain]
        if not same or not all(_equal(x["logprob"], y["logprob"], bits) for x, y in zip(top, plain, strict=True)):
            return f"top_logprobs[{at}] {top}, plain {plain}"
    return ""


def _equal(x: float | None, y: float | None, bits: bool) -> bool:
    if x is None or y is None or bits:
        return x == y
    return bool(np.isclose(x, y, rtol=CLOSE, atol=CLOSE))


def _first_difference(found: list[Any], wanted: list[Any]) -> str:
    at = next((i for i, (x, y) in enumerate(zip(found, wanted, strict=False)) if x != y), min(len(found), len(wanted)))
    one = found[at] if at < len(found) else "its end"
    other = wanted[at] if at < len(wanted) else "its end"
    return f"at {at} of {len(found)}: {str(one)[:120]}, plain (of {len(wanted)}) {str(other)[:120]}"
