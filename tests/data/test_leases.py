"""Claiming shards while they are read: which ones a run gets, which become suspect, and what the pass has still to read."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from batchspec.data.dataset.reader import InputShard, table_source
from batchspec.data.runstate.attempts import Attempts
from batchspec.data.runstate.claims import Claims
from batchspec.data.runstate.journal import Journal, Journaled
from batchspec.data.storage.local_store import LocalStore
from batchspec.job.supervise.deadline import Deadline
from batchspec.job.supervise.leases import ClaimedShards
from tests.helpers.io_samples import dataset

SOURCE = table_source(dataset(5))


def read(skip: Container[int]) -> Iterator[InputShard]:
    return SOURCE.shards(1, skip)


def claims_of(folder: Path, attempt: str, **process: Any) -> Claims:
    claims = Claims(LocalStore(folder, "tmp"), attempt)
    claims._process |= process
    return claims


def claimed_shards(folder: Path, done: Iterable[int] = (), attempt: str = "me", num_shards: int = 5) -> ClaimedShards:
    store, deadline = LocalStore(folder, "tmp"), Deadline(lambda: None, 0.0, keeps_tokens=True)
    return ClaimedShards(
        Claims(store, attempt), Attempts(store, attempt), Journal(store, attempt), Journaled(), deadline,
        is_done={*done}.__contains__, unread={*range(num_shards)},
    )


def indices(shards: Iterable[InputShard]) -> list[int]:
    return [shard.index for shard in shards]


def test_shards_of_other_runs_and_committed_ones_are_left_out(tmp_path: Path) -> None:
    assert claims_of(tmp_path, "other", host="another machine", task="").take(1)
    claimed = claimed_shards(tmp_path, done=[3])
    assert indices(claimed.healthy(read)) == [0, 2, 4]
    assert not claimed.unread, "those that are left out were read too"


def test_two_runs_that_take_turns_claim_neighbours(tmp_path: Path) -> None:
    read_many = partial(table_source(dataset(64)).shards, 1)
    runs = [claimed_shards(tmp_path, attempt=name, num_shards=64) for name in ("one", "other")]
    for _ in zip_longest(*(run.healthy(read_many) for run in runs)):
        pass
    own = [run._claims.own for run in runs]
    assert sorted(own[0] + own[1]) == [*range(64)]
    assert len(own[0]) == len(own[1])
    for shards in own:
        assert sum(after - before > 1 for before, after in pairwise(shards)) <= 2, "at most three stretches"


def test_shards_that_a_run_has_done_which_ended_are_not_read(tmp_path: Path) -> None:
    assert claims_of(tmp_path, "other", host="another machine", task="").take(0)
    ended = claims_of(tmp_path, "ended", pid=2**22 + 1)
    assert ended.take(2)
    assert ended.take(3)
    seen: list[int] = []

    def noted(skip: Container[int]) -> Iterator[InputShard]:
        for shard in read(skip):
            seen.append(shard.index)
            yield shard

    claimed = claimed_shards(tmp_path, done=[2, 3])
    assert sorted(indices(claimed.healthy(noted))) == [1, 4]
    assert sorted(seen) == [0, 1, 4]
    assert not claimed.unread


def test_a_shard_whose_owner_crashed_is_left_to_the_end_of_the_pass(tmp_path: Path) -> None:
    assert claims_of(tmp_path, "dead", pid=2**22 + 1).take(2)
    claimed = claimed_shards(tmp_path)
    assert indices(claimed.healthy(read)) == [0, 1, 3, 4]
    assert Attempts(LocalStore(tmp_path, "tmp"), "x").suspect_shards() == {2}
    assert indices(claimed.suspect(read, {2})) == [2]


def test_nothing_is_claimed_after_the_deadline(tmp_path: Path) -> None:
    claimed = claimed_shards(tmp_path)
    shards = claimed.healthy(read)
    assert [next(shards).index, next(shards).index] == [0, 1]
    claimed._deadline.reached = True
    assert indices(shards) == []
    assert claims_of(tmp_path, "other").take(2)
    assert claimed.unread == {3, 4}
