"""Taking and releasing a run's claims on shards. A claim that its run did not release makes its shard suspect.

Claims are leases: see data/runstate/claims.py. For suspect shards see poison_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress

from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.attempts import Attempts
from batchspec.data.runstate.claims import Claims
from batchspec.data.runstate.journal import Journal, Journaled
from batchspec.errors import BatchspecError, DivergedError, RankLost, StorageError, WorkerLost
from batchspec.job.supervise.deadline import Deadline
from batchspec.job.supervise.nearby_shards import NearbyShards, ReadShards


class ClaimedShards:
    """Claims shards for this run in one pass over the input, each when it is read, in the order of `nearby_shards.py`: leaves out
    those that other runs hold or have committed, and all that come after the deadline.

    journaled  updated with what the earlier owners of the shards saved
    is_done    whether another run has committed the shard in the meantime: then its claim may be deleted, and so look free
    unread     shards that the input has to give in this pass; each is removed when it is read or left out
    """

    def __init__(
        self, claims: Claims, attempts: Attempts, journal: Journal, journaled: Journaled, deadline: Deadline, *,
        is_done: Callable[[int], bool], unread: set[int],
    ) -> None:
        self._claims, self._attempts, self._journal, self._journaled = claims, attempts, journal, journaled
        self._deadline, self._is_done, self.unread = deadline, is_done, unread

    def healthy(self, read: ReadShards) -> Iterator[InputShard]:
        """Those of the unread shards that this run could claim, less those whose last owner crashed while it held them: these are
        suspect from now on. Raises StorageError."""
        return (shard for shard, crashed in self._claimed(read, self.unread) if not crashed)

    def suspect(self, read: ReadShards, shards: Set[int]) -> Iterator[InputShard]:
        """Those of these suspect shards that this run could claim. Raises StorageError."""
        return (shard for shard, _ in self._claimed(read, shards))

    def _claimed(self, read: ReadShards, shards: Set[int]) -> Iterator[tuple[InputShard, bool]]:
        """The shards that this run could claim, each with whether its last owner crashed."""
        nearby = NearbyShards(read, shards, self._of_others, self._claims.attempt)
        for shard in nearby:
            self.unread.discard(shard.index)
            if self._deadline.reached:
                return
            if (done := self._is_done(shard.index)) or not self._claims.take(shard.index):
                nearby.missed(done=done)
                continue
            nearby.claimed()
            crashed = self._claims.crashed_owners.pop(shard.index, None)
            if crashed is not None:
                self._attempts.add_crash(shard.index, crashed)
            if self._claims.inherited:
                self._claims.inherited = False
                self._journal.refresh(self._journaled)
            yield shard, crashed is not None

    def _of_others(self, shards: Set[int]) -> set[int]:
        """Those of these shards that other runs hold at present, and those that runs have done which ended since."""
        held = self._claims.held(shards)
        of_others = held | {shard for shard in self._claims.owners(shards - held) if self._is_done(shard)}
        self.unread -= of_others
        return of_others


@contextmanager
def released_at_end(claims: Claims, attempts: Attempts) -> Iterator[None]:
    """Release the run's claims at the end of the block, however it ends; if it crashes, the shards that it held become
    suspect."""
    try:
        yield
    except (RankLost, WorkerLost, DivergedError):
        _release_as_suspect(claims, attempts)
        raise
    except (BatchspecError, KeyboardInterrupt):
        with suppress(StorageError):  # the first error is the one to report
            attempts.clear()
            claims.release()
        raise
    except Exception:
        _release_as_suspect(claims, attempts)
        raise
    attempts.clear()
    claims.release()


def _release_as_suspect(claims: Claims, attempts: Attempts) -> None:
    """The run crashed, or a rank of its group did: what it worked on may be the cause."""
    with suppress(StorageError):
        for shard in claims.own:
            attempts.add_crash(shard, claims.attempt)
        claims.release()
