"""Runs of one job claim neighbouring shards, so that each computes prefixes of its own, and together claim every shard once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import cycle

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.data.dataset.reader import InputShard
from batchspec.job.supervise.nearby_shards import NearbyShards

ROWS = pa.table({"prompt": ["x"]})
PREFIX_SHARDS = 4
"""With 64 prefixes of 64 rows each, sorted, a prefix has 4 of 256 shards."""


class Claimed:
    """A job of some shards, and which run has which."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards, self.owner, self.num_asked = num_shards, dict[int, str](), 0

    def read(self, skip: Container[int]) -> Iterator[InputShard]:
        return (InputShard(index=i, first_row=i, table=ROWS) for i in range(self.num_shards) if i not in skip)

    def of_others(self, shards: Container[int], name: str) -> set[int]:
        self.num_asked += 1
        return {shard for shard, owner in self.owner.items() if owner != name and shard in shards}

    def nearby(self, name: str, shards: Sequence[int] | None = None) -> NearbyShards:
        left = {*range(self.num_shards)} if shards is None else {*shards}
        return NearbyShards(self.read, left, lambda of: self.of_others(of, name), name)

    def run(self, name: str) -> Iterator[int]:
        """The shards that a run claims, one at a time."""
        nearby = self.nearby(name)
        for shard in nearby:
            if self.owner.setdefault(shard.index, name) == name:
                nearby.claimed()
                yield shard.index
            else:
                nearby.missed(done=False)

    def num_computed(self) -> int:
        """How often prefixes are computed, if each run computes each of its own once."""
        return len({(shard // PREFIX_SHARDS, owner) for shard, owner in self.owner.items()})


@pytest.mark.parametrize("left", [range(12), [0, 3, 4, 5, 9]])
def test_a_run_alone_reads_its_shards_in_order_and_asks_for_no_claims(left: Sequence[int]) -> None:
    job = Claimed(12)
    assert [shard.index for shard in job.nearby("a", left)] == [*left]
    assert job.num_asked == 0


@given(st.integers(1, 40), st.lists(st.integers(0, 4), max_size=60))
def test_runs_that_claim_in_any_order_claim_every_shard_once(num_shards: int, turns: list[int]) -> None:
    job = Claimed(num_shards)
    runs = [job.run(name) for name in "abcde"]
    claimed = [shard for turn in turns if (shard := next(runs[turn], None)) is not None]
    claimed += [shard for run in runs for shard in run]
    assert sorted(claimed) == [*range(num_shards)]


@pytest.mark.parametrize(("num_runs", "most"), [(2, 2.5), (4, 6.5), (8, 14.5)])
@pytest.mark.parametrize("ahead", [1, 8])
def test_runs_that_take_turns_compute_few_prefixes_twice(num_runs: int, most: float, ahead: int) -> None:
    """most: mean number of prefixes computed again. ahead: number of shards that a run claims at a time."""
    computed = []
    for attempt in range(20):
        job = Claimed(256)
        runs = [job.run(f"{attempt}-{number}") for number in range(num_runs)]
        for _, run in zip(range(256 * num_runs), cycle(runs), strict=False):
            for _ in zip(range(ahead), run, strict=False):
                pass
        computed.append(job.num_computed())
        counts = Counter(job.owner.values())
        assert counts.total() == 256
        assert max(counts.values()) - min(counts.values()) <= ahead, "no run waits while a shard is left"
    assert sum(computed) / 20 <= 64 + most


def test_an_input_that_lacks_shards_ends_the_pass() -> None:
    job = Claimed(20)
    job.num_shards = 10
    job.owner = {0: "other"}
    nearby = NearbyShards(job.read, {*range(20)}, lambda of: job.of_others(of, "a"), "a")
    next(nearby)
    nearby.missed(done=False)
    assert sorted(shard.index for shard in nearby) == [*range(1, 10)]


def test_the_shards_of_a_job_that_others_completed_are_passed_without_a_listing_for_each() -> None:
    job = Claimed(50)
    nearby = job.nearby("a")
    next(nearby)
    nearby.claimed()
    for _ in nearby:
        nearby.missed(done=True)
    assert job.num_asked == 2
