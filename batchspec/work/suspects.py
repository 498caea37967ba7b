"""Shards that a run died with: computed apart from all others, so that a row that kills its process is found and costs itself.

A death is not told from a kill by what is left, so every row in flight is suspect. Of a shard that a run died with, rows are
computed in groups of a batch, each recorded before it is admitted. Who dies with a group leaves its rows struck; a struck row is
computed alone, and one that a run died with so resume.row_attempts times becomes an error row. A row that was only near comes
through alone and is done: no death of another row makes an error of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from batchspec.decode.engine import Engine
from batchspec.errors import BatchspecError, StorageError
from batchspec.io.attempts import Attempts
from batchspec.io.claims import Claims
from batchspec.io.columns import request_ids
from batchspec.io.journal import Journal, Journaled
from batchspec.io.reader import InputShard, locate
from batchspec.prepare import Job
from batchspec.records import Completion, Request, RowError


@contextmanager
def leaving(claims: Claims, attempts: Attempts) -> Iterator[None]:
    """However the run ends, its claims are free at once; where it crashes, the shards that it held are suspect too."""
    try:
        yield
    except (BatchspecError, KeyboardInterrupt):
        with suppress(StorageError):  # the first error is the one to tell
            attempts.clear()
            claims.release()
        raise
    except Exception:
        with suppress(StorageError):
            for shard in claims.own:
                attempts.suspect(shard, claims.attempt)
            claims.release()
        raise
    attempts.clear()
    claims.release()


def unsuspected(shards: Iterator[InputShard], claims: Claims, attempts: Attempts) -> Iterator[InputShard]:
    """The shards that are this run's now; those whose last owner died with them are marked and left for later."""
    for shard in shards:
        if not claims.take(shard.index):
            continue
        died = claims.died.pop(shard.index, None)
        if died is None:
            yield shard
        else:
            attempts.suspect(shard.index, died)


def decode_suspects(
    job: Job,
    engine: Engine,
    shards: Iterator[InputShard],
    attempts: Attempts,
    journal: Journal,
    journaled: Journaled,
    *,
    finished: Callable[[Completion], None],
) -> Iterator[tuple[InputShard, list[Completion]]]:
    """Each shard with its completions, as `decode_job` gives them; nothing more once the engine is asked to stop."""
    for shard in shards:
        strikes = attempts.strikes(shard.index)
        done = [_crashed(job, shard, row, alone) for row, alone in strikes.items() if alone >= job.config.resume.row_attempts]
        crashed = {completion.row_index for completion in done}
        for group in _groups(shard, strikes, crashed, engine.batch.slots):
            if engine.stopping:
                return
            attempts.enter(shard.index, group)
            entries = [entry for row in group for entry in _admitted(job, shard, row, journaled)]
            requests = [entry for entry in entries if isinstance(entry, Request)]
            done += [entry for entry in entries if isinstance(entry, Completion)]
            for completion in engine.run(iter(requests)):
                job.admission.observe(completion)
                finished(completion)
                journal.add(completion)
                done.append(completion)
            journal.flush()
        if engine.stopping:
            return
        attempts.clear()
        yield shard, done


def _groups(shard: InputShard, strikes: dict[int, int], crashed: set[int], slots: int) -> Iterator[Sequence[int]]:
    """Rows that nobody died with, a batch at a time; then the others one by one, those first that were alone least often."""
    rows = range(shard.first_row, shard.first_row + shard.table.num_rows)
    calm = (row for row in rows if row not in strikes)
    while group := list(itertools.islice(calm, slots)):
        yield group
    for row in sorted(strikes.keys() - crashed, key=lambda row: (strikes[row], row)):
        yield [row]


def _one(shard: InputShard, row: int) -> InputShard:
    bad = {row: shard.bad[row]} if row in shard.bad else {}
    return InputShard(index=shard.index, first_row=row, table=shard.table.slice(row - shard.first_row, 1), bad=bad)


def _admitted(job: Job, shard: InputShard, row: int, journaled: Journaled) -> Iterator[Request | Completion]:
    for entry in job.admission.admit(_one(shard, row)):
        yield journaled.known(entry)


def _crashed(job: Job, shard: InputShard, row: int, alone: int) -> Completion:
    file, place = locate(job.source.files, row)
    (request_id,) = request_ids(job.source, job.columns, _one(shard, row))
    message = (
        f"{file} row {place} (id {request_id!r}): {alone} runs died or hung while this row alone was computed; "
        "look at what they said last, and drop the row or raise resume.row_attempts"
    )
    return Completion(
        request_id=request_id, row_index=row, sample_index=0, shard=shard.index, status="error", finish_reason="error",
        error=RowError(code="crash", stage="decode", message=message, retryable=True),
    )  # fmt: skip
