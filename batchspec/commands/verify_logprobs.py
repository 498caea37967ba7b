"""Compares the log-probabilities that a job wrote with those of decoding its rows again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from batchspec.commands.decode_again import Again
from batchspec.data.dataset.writer import logprob_cells, top_logprob_cells
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning

ROUNDING = {"float64": 1e-4, "float32": 1e-2, "bfloat16": 1.0}
"""By data type: a larger difference, in nats, is not rounding, which gives about a tenth of it."""

Cell = TypeVar("Cell")
Key = tuple[int, int]
Logprob = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The columns `logprobs` and `top_logprobs` of a row."""

    logprobs: Sequence[Logprob] | None
    top: Sequence[Sequence[Mapping[str, Any]]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The largest difference of a row."""

    request_id: str
    sample_index: int
    token_index: int
    nats: float
    """Infinite if a number is missing on one side."""

    def line(self, num_rows: int) -> str:
        """For people."""
        where = f"{self.request_id} sample {self.sample_index} token {self.token_index}"
        return f"logprobs of {num_rows} completions compared: the largest difference is {self.nats:.3g} nats, at {where}"


def written_logprobs(out: str | Path, keys: Collection[Key]) -> dict[Key, Written]:
    """The log-probabilities of these (row, sample); empty if the job wrote none."""
    table = OutputFolder(out).scan()
    names = [name for name in ("logprobs", "top_logprobs") if name in table.collect_schema().names()]
    if not names:
        return {}
    wanted = pl.col("row_index").is_in([row for row, _ in keys])
    with scanning(str(out)):
        rows = table.filter(wanted).select("row_index", "sample_index", *names).collect()
    return {
        (row["row_index"], row["sample_index"]): Written(logprobs=row["logprobs"], top=row.get("top_logprobs"))
        for row in rows.iter_rows(named=True)
    }


def gap_of(written: Written, again: Again) -> Gap:
    """The largest difference up to the first token that differs; up to there both depend on the same tokens."""
    done, difference = again.completion, again.difference
    num_tokens = 0 if done.token_ids is None else len(done.token_ids)
    count = num_tokens if difference is None else difference.token_index
    own, top = logprob_cells(done.logprobs) or [], top_logprob_cells(done.top_logprobs) or []
    gaps = [0.0, *_gaps(written.logprobs, own[:count], _apart), *_gaps(written.top, top[:count], _tops_apart)]
    nats = max(gaps)
    place = (gaps.index(nats) - 1) % max(1, count)
    request = again.request
    return Gap(request_id=request.request_id, sample_index=request.sample_index, token_index=place, nats=nats)


def _gaps(written: Sequence[Cell] | None, now: Sequence[Cell], compare: Callable[[Cell, Cell], float]) -> list[float]:
    """A difference for each of the tokens, infinite if nothing was written for it; none for a job without the column."""
    if written is None:
        return []
    gaps = [compare(one, other) for one, other in zip(written, now, strict=False)]
    return gaps + [math.inf] * (len(now) - len(gaps))


def _apart(one: Logprob, other: Logprob) -> float:
    if one is None or other is None:  # a token that a thinking budget forced has none
        return 0.0 if one is other else math.inf
    return abs(one - other) if one != other else 0.0


def _tops_apart(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> float:
    """The difference for tokens in both lists; a token that the other list lacks counts as that list's least likely."""
    known = {entry["id"]: entry["logprob"] for entry in other}
    least = min(known.values(), default=None)
    gaps = (_apart(entry["logprob"], known.get(entry["id"], least)) for entry in one)
    return max(gaps, default=0.0) if len(one) == len(other) else math.inf
