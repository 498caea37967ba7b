"""Commits beside the decoding: in order, one at a time, bounded, and nothing they raise gets lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pytest

from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.output_folder import CheckInput, OutputFolder
from batchspec.data.runstate.shard_writer import PendingFile
from batchspec.job.runner.commit_shards import MOST_WAITING, SMALL_BYTES, WAITING, ShardCommitter
from batchspec.job.runner.shard_work import ShardWork
from batchspec.packing.work_plan import COPIES, TOKEN_BYTES, DecodedShard
from tests.helpers.io_samples import completion, dataset, shards_of


class Output:
    """An output folder to which a file is published by calling `commit` with the index of its shard."""

    def __init__(self, commit: Callable[[int], None]) -> None:
        self.commit = commit

    def unpublished(self, index: int) -> Path:
        return Path(str(index))

    def publish(self, index: int, file: PendingFile, check: CheckInput) -> bool:
        file.write()
        self.commit(index)
        return True


class Work:
    """Writes no file."""

    def begin_file(self, shard: InputShard, completions: object, file: Path) -> Work:
        return self

    def write(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedShard(DecodedShard):
    """A decoded shard without rows that takes `size` bytes of memory."""

    size: float

    @property
    def num_bytes(self) -> float:
        return self.size


def committed(indices: Iterable[int], commit: Callable[[int], None], size: float = math.inf) -> Generator[int]:
    """The indices of decoded shards, each after `commit` was called for it; size: bytes of memory that each shard takes."""
    committer = ShardCommitter(
        cast(OutputFolder, Output(commit)), cast(ShardWork, Work()), lambda index: None, lambda first, end: None
    )
    empty = pa.table({})
    shards = (
        SizedShard(shard=InputShard(index=index, first_row=0, table=empty), completions=[], size=size) for index in indices
    )
    with closing(committer.commit(shards)) as done:
        for one in done:
            yield one.shard.index


def test_shards_are_returned_in_order_when_committed_while_the_next_ones_are_decoded() -> None:
    events: list[str] = []
    third = threading.Event()

    def decoded() -> Iterator[int]:
        for shard in range(6):
            events.append(f"decoded {shard}")
            if shard == WAITING:
                third.set()
            yield shard

    def commit(shard: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert third.wait(60)  # the first commit lasts until this many more are decoded
        events.append(f"committed {shard}")

    for shard in committed(decoded(), commit):
        assert f"committed {shard}" in events
        assert f"committed {shard + WAITING + 1}" not in events
    assert [event for event in events if event.startswith("committed")] == [f"committed {shard}" for shard in range(6)]
    assert events.index(f"decoded {WAITING + 1}") > events.index("committed 0")  # decoding does not run away from it


@pytest.mark.parametrize(("num_bytes", "most"), [(SMALL_BYTES / 4, 4), (SMALL_BYTES, WAITING), (1.0, MOST_WAITING)])
def test_small_shards_that_end_together_do_not_keep_decoding_waiting(num_bytes: float, most: int) -> None:
    """No commit ends before as many shards are decoded as may wait: with one more, decoding waits for the first."""
    decoded: list[int] = []
    waits = threading.Event()

    def shards() -> Iterator[int]:
        for shard in range(most + 1):
            decoded.append(shard)
            if shard == most:
                waits.set()
            yield shard

    def commit(shard: int) -> None:
        assert waits.wait(60)

    for shard in committed(shards(), commit, num_bytes):
        assert len(decoded) == most + 1, shard


def test_what_a_shard_takes_grows_with_its_rows_and_a_retry_counts_as_large() -> None:
    (shard, other), columns = shards_of(dataset(4), 2)
    del columns
    few, more = ([completion(0, prompt_ids=np.zeros(count, np.int32))] for count in (10, 1010))
    small, large = (DecodedShard(shard=shard, completions=done).num_bytes for done in (few, more))
    assert large - small == 1000 * TOKEN_BYTES
    assert small > shard.table.nbytes
    tops = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    for with_tops in (few[0].replace(top_logprobs=tops), few[0].replace(prompt_top_logprobs=tops)):
        assert DecodedShard(shard=shard, completions=[with_tops]).num_bytes - small == COPIES * 3 * 2 * (4 + 4)
    assert DecodedShard(shard=other, completions=few, num_carried=1).num_bytes > SMALL_BYTES


def test_a_failed_commit_is_raised_and_no_shard_after_it_is_given_back() -> None:
    def commit(shard: int) -> None:
        if shard == 2:
            raise OSError("full")

    given: list[int] = []
    with pytest.raises(OSError, match="full"):
        given.extend(committed(range(6), commit))
    assert given == [0, 1]


def test_leaving_in_the_middle_waits_for_what_was_begun() -> None:
    over: list[int] = []

    def commit(shard: int) -> None:
        time.sleep(0.05)
        over.append(shard)

    def decoded() -> Iterator[int]:
        yield from range(2)
        raise MemoryError

    with pytest.raises(MemoryError), closing(committed(decoded(), commit)) as commits:
        list(commits)
    assert over == [0, 1]
