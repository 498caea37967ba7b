"""Which input rows each shard holds: shards of equal size, then those of each extension of the job
(data/runstate/extensions.py)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive shards of the same number of rows; the last of them may have fewer."""

    first_row: int
    first_shard: int
    shard_rows: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The shards of `num_rows` input rows, numbered in the order of the rows."""

    segments: tuple[Segment, ...]
    """At least one, in order. Each but the last has rows."""
    num_rows: int

    @classmethod
    def even(cls, num_rows: int, shard_rows: int) -> ShardLayout:
        """Shards of the same number of rows."""
        return cls((Segment(0, 0, shard_rows),), num_rows)

    def extended(self, num_rows: int, shard_rows: int) -> ShardLayout:
        """The same shards, and then others of `shard_rows` each for the rows up to `num_rows`. Raises ValueError for fewer rows
        than before.
        """
        if num_rows < self.num_rows:
            raise ValueError(f"a layout of {self.num_rows} rows cannot be extended to {num_rows}")
        if num_rows == self.num_rows:
            return self
        kept = self.segments if self.num_rows else ()
        return ShardLayout((*kept, Segment(self.num_rows, self.num_shards, shard_rows)), num_rows)

    @property
    def num_shards(self) -> int:
        last = self.segments[-1]  # the division rounds up: the last shard may have fewer rows
        return last.first_shard - (last.first_row - self.num_rows) // last.shard_rows

    @property
    def last_shard_rows(self) -> int:
        """Rows a shard in the last segment."""
        return self.segments[-1].shard_rows

    def shard_of(self, row: int) -> int:
        """The shard that holds an input row."""
        segment = self.segments[bisect_right(self.segments, row, key=lambda one: one.first_row) - 1]
        return segment.first_shard + (row - segment.first_row) // segment.shard_rows

    def rows_of(self, shard: int) -> range:
        """The input rows of a shard."""
        place = bisect_right(self.segments, shard, key=lambda one: one.first_shard) - 1
        segment = self.segments[place]
        stop = self.segments[place + 1].first_row if place + 1 < len(self.segments) else self.num_rows
        first = segment.first_row + (shard - segment.first_shard) * segment.shard_rows
        return range(first, min(first + segment.shard_rows, stop))

    def num_rows_of(self, shards: Iterable[int]) -> int:
        """Input rows of these shards together."""
        return sum(len(self.rows_of(shard)) for shard in shards)

    def most_rows(self, shards: Iterable[int]) -> int:
        """Rows a shard in the segments of these shards, where they differ the most; 1 without any shard."""
        places = {bisect_right(self.segments, shard, key=lambda one: one.first_shard) - 1 for shard in shards}
        return max((self.segments[place].shard_rows for place in places), default=1)
