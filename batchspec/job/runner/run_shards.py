"""One run's share of a job: it claims shards, decodes and commits them, until nothing is left for it or it is asked to end."""

from __future__ import annotations

import time
from collections.abc import Container, Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial

from batchspec.console.text import counted
from batchspec.data.runstate.claims import RENEW_S
from batchspec.data.runstate.journal import saved_rows
from batchspec.errors import CapacityError, InputError, Interrupted, RankLost, WorkerLost
from batchspec.job.prepare import Job
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.report.timeline import Timeline
from batchspec.job.runner.commit_shards import ShardCommitter
from batchspec.job.runner.decode_shards import decode_shards
from batchspec.job.runner.interlude import Interlude
from batchspec.job.runner.job_run import BegunRun, check_errors
from batchspec.job.runner.oom_fallback import EngineWithFallback
from batchspec.job.runner.run_monitor import RunMonitor
from batchspec.job.runner.shard_work import ShardWork
from batchspec.job.runner.shard_workers import ShardWorkers
from batchspec.job.supervise import slurm
from batchspec.job.supervise.deadline import Deadline
from batchspec.job.supervise.leases import ClaimedShards, released_at_end
from batchspec.job.supervise.poison_rows import SuspectShards
from batchspec.job.supervise.watchdog import Watchdog
from batchspec.packing.survey import Survey
from batchspec.packing.work_plan import DecodedShard
from batchspec.process import load_progress
from batchspec.process.out_of_memory import OutOfMemoryGuard
from batchspec.process.signals import EndSignals
from batchspec.records import Snapshot


class ShardRunner:
    """One run while it works.

    run       has rows to compute
    work      admits rows and makes tables
    engines   the run's engine, and a smaller one once memory runs out
    watchdog  of this process; it expects loading at first
    signals   of this process; they ask this run to end
    interlude what the run does between two passes
    """

    def __init__(
        self, run: BegunRun, work: ShardWork | ShardWorkers, engines: EngineWithFallback, survey: Survey,
        progress: ProgressBar, watchdog: Watchdog, signals: EndSignals, interlude: Interlude,
    ) -> None:
        self.job, self.folder, self.work_plan = run.job, run.folder, run.plan
        self.work, self.engines, self.progress, self._signals = work, engines, progress, signals
        self._committer = ShardCommitter(self.folder, work, self.work_plan.take_old_shard, self.job.source.check)
        self.num_errors, self._journaled, self._mean_output = run.num_errors, run.saved, survey.mean_output
        self._all_shards = set(range(self.folder.num_shards))
        self._claims, self._attempts, self._journal = self.folder.claims(), self.folder.attempts(), self.folder.journal()
        self._watchdog, watchdog.save = watchdog, self._saved_by_watchdog
        self._deadline, self._interlude = job_deadline(self.job, engines), interlude

    def run(self) -> None:
        """Work until nothing is left for this run. However it ends, its claims are released.

        Raises Interrupted after a signal or at the time limit: finished rows and the tokens of unfinished ones are then in the
        journal. InputError, TooManyErrors, CapacityError, StorageError and OutputError also end it.
        """
        slots = self.engines.current.batch.num_slots
        with ExitStack() as stack:
            timeline = stack.enter_context(closing(Timeline(self.folder.log_timeline, slots=slots)))
            self._signals.stop_with(self.engines.stop)
            stack.enter_context(released_at_end(self._claims, self._attempts))
            stack.callback(self._settle)
            stack.callback(self._watchdog.close)
            try:
                while not self._signals.name and (excluded := self._excluded_shards()) is not None:
                    self._run_pass(excluded, timeline)
                    if self._deadline.reached and not self._signals.name:
                        self._signals.name = "time limit"
            except (CapacityError, RankLost, WorkerLost):
                self._journal.flush()
                raise
            except KeyboardInterrupt:  # the second Ctrl-C: the engine may be in the middle of anything, its rows are not saved
                left = []
                self._journal.flush()
            else:
                left = self.engines.current.unfinished() if self._signals.name else []
                if self._signals.name:
                    self._journal.flush(left)
            self._settle()
            if self._signals.name is not None and self.folder.missing():
                finished = self.folder.finished()
                shards = f"{len(finished)} of {self.folder.num_shards} shards are committed"
                saved = self._saved(left, finished)
                raise Interrupted(f"{self._signals.name}: {shards}, {saved}; run the same command again to go on")

    def _saved(self, unfinished: Sequence[Snapshot], finished: Container[int]) -> str:
        """How many rows the next run will find saved, for a message."""
        return saved_rows(self._journal.saved(self._journaled, unfinished, finished))

    def _saved_by_watchdog(self) -> str:
        """Save the finished rows, and say how many are saved in all. The engine may hang: its unfinished rows are left out."""
        self._journal.flush()
        return self._saved([], self.folder.finished())

    def _run_pass(self, excluded: set[int], timeline: Timeline) -> None:
        """Decode and commit every shard that can be claimed, except `excluded`. After running out of memory, the next pass has a
        smaller batch."""
        self._settle()
        self._watchdog.begin_loading()  # until the first row begins
        totals, beat = self.engines.current.totals, self._watchdog.beat
        monitor = RunMonitor(
            self.progress, self._mean_output, totals, timeline, self._claims, beat, self._deadline, self._interlude,
            lambda: self.engines.current.stop(),
        )
        claimed = ClaimedShards(
            self._claims, self._attempts, self._journal, self._journaled, self._deadline, is_done=self.folder.is_done,
            unread=self._all_shards - excluded - self._attempts.suspect_shards(),
        )
        decoded = self._decode_claimed(claimed, excluded, monitor)
        committed = self._committer.commit(decoded)
        try:
            # Decoding is closed too if a commit has failed: it holds the engine, which a smaller one may replace.
            with OutOfMemoryGuard() as guard, closing(decoded), closing(committed):
                for done in committed:
                    self._after_commit(done)
        finally:
            monitor.ended()
            self._claims.stop_renewal()  # but nothing waits for a slow store before the rows are saved
        self._watchdog.pause()
        if guard.message:
            # Ranks of a group are in the middle of an exchange: it is unknown whether they agree on unfinished rows.
            self._journal.flush([] if self.job.group is not None else self.engines.current.unfinished())
            self._settle()
            self._watchdog.begin_loading()
            self.engines.shrink(guard.message)
            self._journaled = self._journal.read(self.folder.finished())
        elif self.engines.stopping or self._deadline.reached:
            return
        elif self._interlude.due and self.folder.missing():
            self._pause_for_interlude()
        else:
            check_all_read(claimed.unread, self.folder.num_shards)

    def _pause_for_interlude(self) -> None:
        """Save rows and release claims as at the end of a run, so that other runs may take the shards; then run the interlude."""
        self._journal.flush(self.engines.current.unfinished())
        self._settle()
        self._attempts.clear()
        self._claims.release()
        self._watchdog.begin_loading()
        began = time.monotonic()
        self._interlude.run(self.engines, lambda: self._signals.name or (None if self._deadline.leaves(0.0) else "time limit"))
        self._interlude.idle_s += time.monotonic() - began
        self._journaled = self._journal.read(self.folder.finished())

    def _settle(self) -> None:
        """Wait for the threads of a pass: after this only the caller's thread uses claims, attempts and what earlier runs saved.

        An operation of a store may take minutes, and a run that was asked to end is killed after 90 s: it saves its rows first.
        """
        self.work.settle()
        self._claims.settle()
        self._journal.settle()

    def _after_commit(self, done: DecodedShard) -> None:
        """Drop what would bring the shard back, and count its errors. Raises TooManyErrors."""
        self._journal.forget(done.shard.index)
        self._claims.forget(done.shard.index)
        self._watchdog.beat()
        errors = [completion.row_index for completion in done.completions if completion.status == "error"]
        self.num_errors += len(set(errors))
        self.progress.update(
            shards=1, errors=len(errors), replaced_errors=self.work_plan.num_replaced_errors(done.shard.index),
            skipped=sum(completion.status == "skipped" for completion in done.completions),
        )
        check_errors(self.job, self.num_errors)

    def _decode_claimed(
        self, claimed: ClaimedShards, excluded: set[int], monitor: RunMonitor
    ) -> Generator[DecodedShard]:
        """Decode the shards that can be claimed. Suspect shards, which a crashed run held, come last."""
        job, loaded, attempts = self.job, self.engines.loaded, self._attempts
        yield from decode_shards(
            loaded,
            monitor,
            self.work,
            rows=self.work_plan.rows,
            journal=self._journal,
            journaled=self._journaled,
            claim=claimed.healthy,
            skip=self._all_shards - claimed.unread,
        )
        suspects = attempts.suspect_shards() & self._all_shards - excluded
        if suspects and not self.engines.current.stopping:
            self.progress.phase(f"a crashed or killed run held {counted(len(suspects), 'shard')}: their rows are retried apart")
            shards = claimed.suspect(partial(job.source.shards, job.layout), suspects)
            suspect_shards = SuspectShards(
                loaded, self.work_plan, attempts, self._journal, self._journaled, on_round=monitor.after_round,
                finished=monitor.finished,
            )
            yield from map(monitor.count_shard, suspect_shards.decode(shards))

    def _excluded_shards(self) -> set[int] | None:
        """Shards that the next pass leaves out: those that are done and those of other runs. None if this run is over.

        If every missing shard is claimed by another run, it waits until it knows whether those runs live. It takes over the
        shards of dead runs and leaves the others to their runs.
        """
        waited_from = looked_from = time.monotonic()
        limit_s = self._claims.stale_s + RENEW_S
        while not self.engines.stopping and (missing := self.folder.missing()):
            took_s = time.monotonic() - looked_from
            held = self._claims.held(missing)
            if missing - held:
                return held | self._all_shards - missing
            if time.monotonic() - waited_from > limit_s:
                return None
            if looked_from == waited_from:  # the first time
                self.progress.phase(
                    f"{counted(len(missing), 'shard')} left, claimed by other runs: waiting up to {limit_s:.0f} s to learn "
                    "whether these live; shards of dead ones are taken over"
                )
            time.sleep(max(1.0, took_s))  # listing thousands of files loads the file system
            load_progress.count_step()
            looked_from = time.monotonic()
        return None


def check_all_read(unread: set[int], num_shards: int) -> None:
    """Raises InputError if a pass over the whole input did not yield these shards: no later pass would."""
    if unread:
        raise InputError(
            f"the input gave no rows for {len(unread)} of {num_shards} shards, shard {min(unread)} among them; put back the "
            "files that the job began with, and run the same command again"
        )


def job_deadline(job: Job, engines: EngineWithFallback) -> Deadline:
    """The deadline at which Slurm ends this job; infinite outside of Slurm."""
    task, config = slurm.this_task(), job.config
    return Deadline(
        lambda: None if task is None else slurm.time_left_s(task),
        config.cluster.signal_s,
        keeps_tokens=config.output.logprobs is None,
        stop=engines.stop,
    )
