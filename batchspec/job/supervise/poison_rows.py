"""Poison rows: rows that crash the process that computes them. They are found by isolated retries, and cost only themselves.

A crashed run leaves no evidence of which row crashed it, so every shard that it held is suspect, with all in-flight rows. Suspect
shards are computed after all others: first in batch retries, then, in isolated retries, one by one, each row that was in flight
when a batch retry crashed. Each retry is recorded before it begins (data/runstate/attempts.py), so that the next run knows what
this one was doing. Only crashes of isolated retries count against a row: a crash of another row never makes it an error row.

A kill from outside looks like a crash. Two rules distinguish them. An isolated row is saved at checkpoints and continues from the
last one (`checkpoint`): between kills at random moments it makes progress, while a poison row never gets beyond one position. And
a run waits COOLDOWN_S before it retries a row whose isolated retry has crashed: kills at random moments, or at a set time after
the start, mostly come during that wait, and each of them lowers the row's crash count by one. One case remains:
resume.row_attempts kills that all hit the isolated retries themselves are indistinguishable from a poison row.

The state of a row of a suspect shard is never stored: it follows from the records of crashed runs and from the journal.

state            condition
untried          no record of a crashed run names the row
in-flight        this run's record names it: in a batch retry, a cooldown or an isolated retry
suspect, n       records of crashed runs name it, and its crash count is n < resume.row_attempts
poison           its crash count is at least resume.row_attempts
done             its completions are in the journal, or its shard is committed

state            event                                          next state              written
untried          its batch retry begins                         in a batch retry        rows-<attempt>.json: the rows of the batch
in a batch       the batch completes                            done                    a journal segment
  retry          the run crashes or is killed                   suspect, 0              shard-...json, by the shard's next owner
suspect, 0       its isolated retry begins                      in an isolated retry    rows-...: the row, "reached": 0
suspect, n > 0   its isolated retry is due                      in a cooldown           rows-...: the row, "still": true
in a cooldown    COOLDOWN_S have passed                         in an isolated retry    rows-...: the row, "reached": 0
                 the run is killed                              suspect, n - 1          shard-...json
in an isolated   it gets to another checkpoint                  in an isolated retry    a journal segment, "reached": position
  retry          a sample of it, or the row, completes          the same, or done       a journal segment
                 crash or kill before the furthest position     suspect, n              shard-...json
                   at the furthest position so far              suspect, n + 1, poison  shard-...json
                   beyond it                                    suspect, 1              shard-...json (less its crashed cooldowns)
any in-flight    the run ends by itself (signal, own error)     what it was before      rows-...: {}
poison           its shard is computed                          done                    an error row, code "crash"; in a retry
                                                                                        (resume=...) the row is carried over
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from batchspec.console.text import quoted
from batchspec.data.dataset.reader import InputShard, place_in_file
from batchspec.data.dataset.row_ids import request_ids
from batchspec.data.runstate.attempts import Attempts
from batchspec.data.runstate.journal import Journal, Journaled
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.job.load.loaded_engine import LoadedEngine, OnRound
from batchspec.packing.work_plan import DecodedShard, WorkPlan
from batchspec.records import Completion, Request, RowError

COOLDOWN_S = 10.0
"""Much longer than most rows take between two checkpoints, and short compared with the start of a run."""
TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Retry:
    """One step of computing a suspect shard."""

    rows: Sequence[int]
    """Input rows that are in flight together."""
    isolated: bool = False
    cooldown: bool = False
    """Whether the run waits COOLDOWN_S before it, because an isolated retry of the row has crashed."""


def planned_retries(rows: range, crash_counts: Mapping[int, int], *, row_attempts: int, num_slots: int) -> Iterator[Retry]:
    """The retries of a suspect shard, in order: batches of untried rows, then isolated retries of suspect rows, those with the
    lowest crash count first. Poison rows are not retried.

    crash_counts  crash count of each row that was in flight when a retry crashed, see `Attempts.crash_counts`
    """
    untried = (row for row in rows if row not in crash_counts)
    while batch := list(itertools.islice(untried, num_slots)):
        yield Retry(batch)
    suspects = [row for row in rows if crash_counts.get(row, row_attempts) < row_attempts]
    for row in sorted(suspects, key=lambda row: (crash_counts[row], row)):
        yield Retry([row], isolated=True, cooldown=crash_counts[row] > 0)


class SuspectShards:
    """Computes suspect shards by batch retries and isolated retries; rows whose isolated retries crash too often become error
    rows.

    plan       what is done with each output row
    attempts   records each retry before it begins
    journal    gets every finished row, and in an isolated retry every checkpoint
    journaled  saved work of earlier runs on these shards
    on_round   called after each round, and now and then during a cooldown
    finished   called with each row that finishes
    """

    def __init__(
        self,
        loaded: LoadedEngine[Engine],
        plan: WorkPlan,
        attempts: Attempts,
        journal: Journal,
        journaled: Journaled,
        *,
        on_round: OnRound,
        finished: Callable[[Completion], None],
    ) -> None:
        self._loaded, self._job, self._engine, self._plan = loaded, loaded.job, loaded.engine, plan
        self._attempts, self._journal, self._journaled = attempts, journal, journaled
        self._on_round, self._finished = on_round, finished

    def decode(self, shards: Iterator[InputShard]) -> Iterator[DecodedShard]:
        """Each shard when its last row is done; nothing more once the engine is asked to stop. Raises StorageError."""
        row_attempts, num_slots = self._job.config.resume.row_attempts, self._engine.batch.num_slots
        for shard in shards:
            counts = self._attempts.crash_counts(shard.index)
            rows = range(shard.first_row, shard.first_row + shard.table.num_rows)
            poison = {row: count for row, count in counts.items() if count >= row_attempts}
            done = [error for row, count in poison.items() for error in self._error_rows(shard, row, count)]
            num_carried = 0
            for retry in planned_retries(rows, counts, row_attempts=row_attempts, num_slots=num_slots):
                if self._engine.stopping:
                    return
                for entry in self._computed(shard, retry):
                    done += [] if entry is None else [entry]
                    num_carried += entry is None
            if self._engine.stopping:
                return
            self._attempts.clear()
            yield DecodedShard(shard=shard, completions=done, num_carried=num_carried)

    def _computed(self, shard: InputShard, retry: Retry) -> Iterator[Completion | None]:
        """The completions of one retry; None for a row that is carried over."""
        self._begin(shard, retry)
        entries = [entry for row in retry.rows for entry in self._planned(shard, row)]
        requests = [entry for entry in entries if isinstance(entry, Request)]
        self._on_round(self._engine.totals)  # a retry of error rows alone has no round
        yield from (entry for entry in entries if not isinstance(entry, Request))
        on_round = self._saving_checkpoints(entries) if retry.isolated else self._on_round
        with closing(self._loaded.run(requests, on_round)) as completions:
            for completion in completions:
                self._finished(completion)
                self._journal.add(completion)
                yield completion
                if retry.isolated:  # saved, so that a crash of the next sample does not cost this one
                    self._journal.flush()
        self._journal.flush()

    def _begin(self, shard: InputShard, retry: Retry) -> None:
        """Record the retry, after its cooldown if it has one, before any of its rows is computed."""
        if not retry.isolated:
            self._attempts.begin_batch_retry(shard.index, retry.rows)
            return
        (row,) = retry.rows
        if retry.cooldown:
            self._attempts.begin_cooldown(shard.index, row)
            cool_down(self._engine, self._on_round)
        self._attempts.begin_isolated_retry(shard.index, row)

    def _planned(self, shard: InputShard, row: int) -> Iterator[Request | Completion | None]:
        """`WorkPlan.rows` of one input row, with the saved work of earlier runs."""
        one = shard.only(row)
        for entry in self._plan.rows(one, self._journaled.with_finished(self._job.admission.admit_compiled(one))):
            yield None if entry is None else self._journaled.known(entry)

    def _saving_checkpoints(self, entries: Sequence[Request | Completion | None]) -> OnRound:
        """Record the checkpoint that earlier runs reached. Returns what is to be called after each round: it saves the tokens of
        the isolated row at every later checkpoint that the row reaches, counted over all its samples."""
        earlier, tokens_at_start = sum(map(_num_tokens, entries)), self._engine.totals.tokens
        position = checkpoint(earlier)

        def follow(totals: EngineTotals) -> None:
            nonlocal position
            self._on_round(totals)
            now = checkpoint(earlier + totals.tokens - tokens_at_start)
            if now > position:
                position = now
                self._journal.flush(self._engine.unfinished())
                self._attempts.reached(position)

        if position:
            self._attempts.reached(position)
        return follow

    def _error_rows(self, shard: InputShard, row: int, crash_count: int) -> Iterator[Completion]:
        """The poison row as one error row; if some of its samples are journaled, those and an error for each of the others.

        None in a retry of the job: the row keeps what the output has.
        """
        if self._plan.carries_over(shard.index):
            return
        place = place_in_file(self._job.source, row)
        (request_id,) = request_ids(self._job.source, self._job.columns, shard.only(row))
        message = (
            f"{place} (id {quoted(request_id)}): {crash_count} isolated retries of this row crashed or hung at the same "
            "output position; inspect the last lines of their logs and drop the row, or compute it again with resume=error if "
            "they were killed from outside"
        )
        samples = [0]
        if any(
            key[0] == row for key in self._journaled.completions
        ):  # admission of the row does not crash, since a sample is done
            entries = list(self._planned(shard, row))
            yield from (entry for entry in entries if isinstance(entry, Completion))
            samples = [entry.sample_index for entry in entries if isinstance(entry, Request)]
        for sample in samples:
            yield Completion(
                request_id=request_id, row_index=row, sample_index=sample, shard=shard.index, status="error",
                finish_reason="error", error=RowError(code="crash", stage="decode", message=message, retryable=True),
            )


def cool_down(engine: Engine, on_round: OnRound) -> None:
    """Wait COOLDOWN_S seconds, or until the engine is asked to stop.

    on_round  called all the while: keeps watchdog, claims and deadline informed that the run is alive
    """
    until = time.monotonic() + COOLDOWN_S
    while not engine.stopping and (left_s := until - time.monotonic()) > 0:
        on_round(engine.totals)
        time.sleep(min(TICK_S, left_s))


def checkpoint(num_tokens: int) -> int:
    """The last checkpoint at or before `num_tokens` tokens. Checkpoints are 0, 1 .. 32, then each a 16th larger than the last.

    They are the same in every run, so a row that always crashes at the same token always crashes at the same checkpoint.
    """
    position = 0
    while (following := position + max(1, position // 16)) <= num_tokens:
        position = following
    return position


def _num_tokens(entry: Request | Completion | None) -> int:
    """Number of output tokens that earlier runs saved."""
    if entry is None:
        return 0
    if isinstance(entry, Request):
        return 0 if entry.resumed is None else len(entry.resumed.tokens)
    return 0 if entry.token_ids is None else len(entry.token_ids)
