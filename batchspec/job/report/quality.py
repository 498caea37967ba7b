"""Is the data good? Lengths, empty answers, answers that end in a loop, distinct answers of one request, and random samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.job.report.texts import Shown, shown_columns, with_texts
from batchspec.records import ANSWERED

SEED = 0
"""Of the random samples: the same committed rows give the same samples."""
NUM_SAMPLES, MAX_BINS = 6, 30
LOOP_COPIES, LOOP_CHARS, END_CHARS = 4, 60, 2000
"""A text ends in a loop if one sequence, repeated at least so often and over so many characters, fills its end. Only so much of
the end is looked at, which bounds the length of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """In tokens."""

    median: int
    p90: int
    p99: int
    longest: int
    shortest: int
    bin_width: int
    bins: tuple[int, ...]
    """Rows with a length of shortest .. shortest + bin_width - 1, and so on, up to the longest: at most MAX_BINS of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    answers: int
    """Completions with a text, whole (ok) or cut off (truncated)."""
    empty: int
    """Answers without a letter in them, and without a tool call."""
    loops: int
    """Answers whose end is one sequence again and again; of an empty answer its reasoning."""
    prompt_lengths: Lengths | None
    completion_lengths: Lengths | None
    """Over ok and truncated rows; None without any."""
    sampled_requests: int
    """Requests with several answers."""
    mean_answers: float | None
    """Answers of such a request."""
    mean_distinct: float | None
    """Distinct ones of them, letter by letter."""
    all_equal: int
    """Such requests whose answers are all the same."""
    samples: tuple[Shown, ...]
    """Random answers, in the order of the input."""


def ends_in_a_loop(text: str) -> bool:
    """Whether the end of the text is one sequence, LOOP_COPIES times or more and LOOP_CHARS characters or more in all."""
    end = text[-END_CHARS:]
    if len(end) < LOOP_CHARS:
        return False
    tail = end[-(LOOP_CHARS // LOOP_COPIES) :]
    place = len(end) - len(tail)
    while (place := end.rfind(tail, 0, place + len(tail) - 1)) >= 0:  # each earlier place of `tail`: a possible period
        period = len(end) - len(tail) - place
        span = max(LOOP_CHARS, LOOP_COPIES * period)
        if span > len(end):
            return False
        if end[-span + period :] == end[-span:-period]:
            return True
    return False


def quality_columns(columns: Collection[str]) -> Iterator[pl.Expr]:
    """What `QualityTally.add` needs of an output with these columns."""
    yield from shown_columns()
    text, thought = pl.col("completion"), pl.col("reasoning")
    calls = pl.col("tool_calls").is_not_null() if "tool_calls" in columns else pl.lit(value=False)
    no_text = text.str.strip_chars().str.len_chars() == 0
    yield text.hash().alias("text_hash")
    yield text.is_not_null().alias("has_text")
    yield (no_text & ~calls).alias("is_empty")
    yield pl.when(no_text).then(thought).otherwise(text).str.tail(END_CHARS).alias("end")


class QualityTally:
    """Counts over all rows read so far. The rows of one request come together."""

    def __init__(self) -> None:
        self.answers = self.empty = self.loops = self.sampled = self.answers_of = self.distinct = self.all_equal = 0
        self.lens = {"prompt_tokens": np.zeros(1, np.int64), "tokens": np.zeros(1, np.int64)}
        self._draws = np.random.default_rng(SEED)
        self._drawn = pl.DataFrame()

    def add(self, rows: pl.DataFrame) -> None:
        done = rows.filter(pl.col("status").is_in(ANSWERED))
        for name, counts in self.lens.items():
            self.lens[name] = _added(counts, done[name])
        answers = done.filter("has_text")
        self.answers += answers.height
        self.empty += int(answers["is_empty"].sum())
        self.loops += sum(map(ends_in_a_loop, answers["end"].drop_nulls()))
        each = answers.group_by("row_index").agg(pl.len().alias("count"), pl.col("text_hash").n_unique().alias("distinct"))
        several = each.filter(pl.col("count") > 1)
        self.sampled += several.height
        self.answers_of += int(several["count"].sum())
        self.distinct += int(several["distinct"].sum())
        self.all_equal += several.filter(pl.col("distinct") == 1).height
        drawn = answers.drop("end").with_columns(pl.Series("draw", self._draws.random(answers.height)))
        self._drawn = pl.concat([self._drawn, drawn]).sort("draw").head(NUM_SAMPLES)

    def result(self, folder: OutputFolder) -> Quality:
        """The counts, with the texts of the samples. Raises StorageError."""
        drawn = self._drawn.sort("row_index", "sample_index") if self._drawn.height else None
        return Quality(
            answers=self.answers,
            empty=self.empty,
            loops=self.loops,
            prompt_lengths=_lengths(self.lens["prompt_tokens"]),
            completion_lengths=_lengths(self.lens["tokens"]),
            sampled_requests=self.sampled,
            mean_answers=self.answers_of / self.sampled if self.sampled else None,
            mean_distinct=self.distinct / self.sampled if self.sampled else None,
            all_equal=self.all_equal,
            samples=() if drawn is None else with_texts(folder, drawn),
        )


def _added(counts: NDArray[np.int64], lengths: pl.Series) -> NDArray[np.int64]:
    """counts [longest + 1] rows of each length, with these rows."""
    more = np.bincount(lengths.drop_nulls().to_numpy(), minlength=len(counts)).astype(np.int64)
    more[: len(counts)] += counts
    return more


def _lengths(counts: NDArray[np.int64]) -> Lengths | None:
    if not (total := int(counts.sum())):
        return None
    below = np.cumsum(counts)
    median, p90, p99 = (int(np.searchsorted(below, share * total)) for share in (0.5, 0.9, 0.99))
    used = np.flatnonzero(counts)
    shortest, longest = int(used[0]), int(used[-1])
    width = -(-(longest + 1 - shortest) // MAX_BINS)
    bins = np.add.reduceat(counts[: longest + 1], np.arange(shortest, longest + 1, width)).tolist()
    return Lengths(median=median, p90=p90, p99=p99, longest=longest, shortest=shortest, bin_width=width, bins=tuple(bins))
