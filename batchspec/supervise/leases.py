"""Taking and releasing a run's claims. A claim that its run did not release makes its shard suspect.

Claims are leases: see runstate/claims.py. For suspect shards see poison_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from batchspec.dataset.reader import InputShard
from batchspec.errors import BatchspecError, DivergedError, RankLost, StorageError, WorkerLost
from batchspec.runstate.attempts import Attempts
from batchspec.runstate.claims import Claims
from batchspec.runstate.journal import Journal, Journaled


def claim_shards(
    shards: Iterator[InputShard], claims: Claims, attempts: Attempts, journal: Journal, journaled: Journaled,
    is_done: Callable[[int], bool] = lambda shard: False,
) -> Iterator[tuple[InputShard, bool]]:
    """The shards that this run could claim, each with whether its last owner crashed while it held the shard. Raises
    StorageError.

    journaled  updated with what that owner saved
    is_done    whether another run has committed the shard in the meantime: then its claim may be deleted, and so look free
    """
    for shard in shards:
        if is_done(shard.index) or not claims.take(shard.index):
            continue
        crashed = claims.crashed_owners.pop(shard.index, None)
        if crashed is not None:
            attempts.add_crash(shard.index, crashed)
        if claims.inherited:
            claims.inherited = False
            journal.refresh(journaled)
        yield shard, crashed is not None


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
