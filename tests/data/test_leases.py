"""Claiming shards while they are read: which ones a run gets, which become suspect, and what the pass has still to read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.attempts import Attempts
from batchspec.data.runstate.claims import Claims
from batchspec.data.runstate.journal import Journal, Journaled
from batchspec.data.storage.local_store import LocalStore
from batchspec.job.supervise.deadline import Deadline
from batchspec.job.supervise.leases import ClaimedShards
from tests.helpers.io_samples import dataset, shards_of

SHARDS, _ = shards_of(dataset(5), 1)


def claims_of(folder: Path, attempt: str, **process: Any) -> Claims:
    claims = Claims(LocalStore(folder, "tmp"), attempt)
    claims._process |= process
    return claims


def claimed_shards(folder: Path, done: Iterable[int] = ()) -> ClaimedShards:
    store, deadline = LocalStore(folder, "tmp"), Deadline(lambda: None, 0.0, keeps_tokens=True)
    return ClaimedShards(
        Claims(store, "me"), Attempts(store, "me"), Journal(store, "me"), Journaled(), deadline, is_done={*done}.__contains__,
        unread={*range(5)},
    )


def indices(shards: Iterable[InputShard]) -> list[int]:
    return [shard.index for shard in shards]


def test_shards_of_other_runs_and_committed_ones_are_left_out(tmp_path: Path) -> None:
    assert claims_of(tmp_path, "other", host="another machine", task="").take(1)
    claimed = claimed_shards(tmp_path, done=[3])
    assert indices(claimed.healthy(iter(SHARDS))) == [0, 2, 4]
    assert not claimed.unread, "those that are left out were read too"


def test_a_shard_whose_owner_crashed_is_left_to_the_end_of_the_pass(tmp_path: Path) -> None:
    assert claims_of(tmp_path, "dead", pid=2**22 + 1).take(2)
    claimed = claimed_shards(tmp_path)
    assert indices(claimed.healthy(iter(SHARDS))) == [0, 1, 3, 4]
    assert Attempts(LocalStore(tmp_path, "tmp"), "x").suspect_shards() == {2}
    assert indices(claimed.suspect(iter(SHARDS[2:3]))) == [2]


def test_nothing_is_claimed_after_the_deadline(tmp_path: Path) -> None:
    claimed = claimed_shards(tmp_path)
    shards = claimed.healthy(iter(SHARDS))
    assert [next(shards).index, next(shards).index] == [0, 1]
    claimed._deadline.reached = True
    assert indices(shards) == []
    assert claims_of(tmp_path, "other").take(2)
    assert claimed.unread == {3, 4}
