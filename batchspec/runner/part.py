"""One run's part of a job: it claims shards, decodes and commits them, until nothing is left for it or it is asked to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

from batchspec.cluster import slurm
from batchspec.dataset.reader import InputShard
from batchspec.errors import InputError, Interrupted, TooManyErrors
from batchspec.packing.survey import Survey
from batchspec.prepare import Job
from batchspec.records import Completion
from batchspec.report.progress import Progress
from batchspec.report.timeline import Timeline
from batchspec.runner.adaptation import Adaptation
from batchspec.runner.fitted import FittedEngine, Shortage
from batchspec.runner.passes import commit, decode_job, tabled
from batchspec.runner.reporter import Reporter
from batchspec.runstate.claims import BEAT_S
from batchspec.runstate.commits import commit_beside
from batchspec.runstate.journal import Journaled, saved_rows
from batchspec.runstate.progress import Beacon
from batchspec.runstate.shards import OutputFolder
from batchspec.supervise.deadline import Deadline
from batchspec.supervise.poison_rows import decode_suspects, leaving, taken
from batchspec.supervise.signals import ending
from batchspec.supervise.watchdog import Watchdog


class Part:
    """What is known of one run while it works.

    journaled   what earlier runs did of the shards to come
    num_errors  committed input rows of which some completion is an error
    """

    def __init__(
        self, job: Job, output: OutputFolder, fitted: FittedEngine, seen: Survey, progress: Progress, journaled: Journaled,
        num_errors: int, adaptation: Adaptation,
    ) -> None:  # fmt: skip
        self.job, self.output, self.fitted, self.progress = job, output, fitted, progress
        self.num_errors, self._adaptation = num_errors, adaptation
        self._mean_output, self._journaled = seen.mean_output, journaled
        self._awaited: set[int] = set()
        """Shards that the reader has still to give in this pass."""
        self._claims, self._attempts, self._journal = output.claims(), output.attempts(), output.journal()
        self._watchdog = Watchdog(watchdog_s(job), self._journal.flush)
        self._deadline = job_deadline(job, fitted)

    def run(self) -> None:
        """Work until nothing is left.

        Raises Interrupted at a signal or a time limit that asks for the end: finished rows and the tokens of the others are in
        the journal then. However it ends, its claims are free.
        """
        slots = self.fitted.engine.batch.num_slots
        with ExitStack() as stack:
            stack.enter_context(Beacon(self.output.progress(), self.progress.facts, slots=slots))
            timeline = stack.enter_context(closing(Timeline(self.output.log_timeline, slots=slots)))
            asked = stack.enter_context(ending(self.fitted.stop))
            stack.enter_context(leaving(self._claims, self._attempts))
            stack.enter_context(self._watchdog.watching())
            stack.enter_context(self._adaptation.kept())
            try:
                while not asked.name and (others := self._left_out()) is not None:
                    self._pass(others, timeline)
                    if self._deadline.reached and not asked.name:
                        asked.name = "time limit"
            except KeyboardInterrupt:  # the second one: the engine's rows are as they are
                saved = saved_rows(self._journal.flush(), ())
            else:
                left = self.fitted.engine.unfinished() if asked.name else []
                saved = saved_rows(self._journal.flush(left) if asked.name else 0, left)
            if asked.name is not None and self.output.missing():
                shards = f"{len(self.output.finished())} of {self.output.num_shards} shards are committed"
                raise Interrupted(f"{asked.name}: {shards}, {saved}; run the same command again to go on")

    def _pass(self, others: set[int], timeline: Timeline) -> None:
        """Decode and commit what can be claimed, but for `others`. Where memory runs out the next pass has a smaller batch."""
        totals, beat = self.fitted.engine.totals, self._watchdog.beat
        reporter = Reporter(self.progress, self._mean_output, totals, timeline, self._claims, beat, self._deadline)
        decoded = tabled(self.job, self.output, self._decoded(others, reporter))
        commits = commit_beside(decoded, lambda done: commit(self.job, self.output, *done))
        with Shortage() as short, closing(commits):
            for shard, completions, _ in commits:
                self._committed(shard, completions)
        self._watchdog.pause()
        if short.said:
            self._journal.flush(self.fitted.engine.unfinished())
            self._adaptation.leave()
            self.fitted.shrink(short.said)
            self._adaptation.serve(self.fitted.engine)
            self._journaled = self._journal.read(self.output.finished())
        elif not (self.fitted.stopping or self._deadline.reached):
            check_whole(self._awaited, self.output.num_shards)

    def _committed(self, shard: InputShard, completions: list[Completion]) -> None:
        self._journal.forget(shard.index)
        self._claims.forget(shard.index)
        self._watchdog.beat()
        self._adaptation.committed(completions)
        errors = [completion.row_index for completion in completions if completion.status == "error"]
        self.num_errors += len(set(errors))
        self.progress.update(shards=1, errors=len(errors))
        check_errors(self.job, self.num_errors)

    def _decoded(self, others: set[int], reporter: Reporter) -> Iterator[tuple[InputShard, list[Completion]]]:
        """One pass over the shards that are neither done nor another run's; those that a run died with come last."""
        job, engine, journal, journaled, attempts = self.job, self.fitted.engine, self._journal, self._journaled, self._attempts
        skip = others | attempts.suspected()
        self._awaited = set(range(self.output.num_shards)) - skip

        def ours(shards: Iterator[InputShard]) -> Iterator[tuple[InputShard, bool]]:
            came = self._deadline.shards(map(self._came, shards))
            return taken(came, self._claims, attempts, journal, journaled, self.output.is_done)

        def calm(shards: Iterator[InputShard]) -> Iterator[InputShard]:
            return (shard for shard, suspect in ours(shards) if not suspect)

        yield from decode_job(job, engine, reporter, journal, journaled, take=calm, skip=skip)
        suspects = attempts.suspected() & set(range(self.output.num_shards)) - others
        if suspects and not engine.stopping:
            self.progress.phase(f"{len(suspects)} shards were in work when a run died: their rows are computed apart")
            shards = ours(job.source.shards(job.shard_rows, set(range(self.output.num_shards)) - suspects))
            rows = (shard for shard, _ in shards)
            decoded = decode_suspects(job, engine, rows, attempts, journal, journaled, finished=reporter.finished)
            yield from map(reporter.admitted, decoded)

    def _came(self, shard: InputShard) -> InputShard:
        self._awaited.discard(shard.index)
        return shard

    def _left_out(self) -> set[int] | None:
        """Shards that a pass over the input leaves out; None where the run is over.

        With nothing left but shards of other runs it waits as long as it takes to tell whether those still live: the shards of
        one that died are taken up, the others are left to their runs.
        """
        waited_from = looked_from = time.monotonic()
        while not self.fitted.stopping and (missing := self.output.missing()):
            took_s = time.monotonic() - looked_from
            held = self._claims.held(missing)
            if missing - held:
                return held | set(range(self.output.num_shards)) - missing
            if time.monotonic() - waited_from > self._claims.stale_s + BEAT_S:
                return None
            time.sleep(max(1.0, took_s))  # a look at thousands of files is work for the file system
            looked_from = time.monotonic()
        return None


def check_whole(left: set[int], num_shards: int) -> None:
    """Raises InputError where shards are left behind a pass over the whole input: the next pass would leave them too."""
    if left:
        raise InputError(
            f"the input gave no rows for {len(left)} of {num_shards} shards, shard {min(left)} among them; put back the files "
            "that the job began with, and run the same command again"
        )


def check_errors(job: Job, num_errors: int, *, all_failed: bool = False) -> None:
    """Raises TooManyErrors when a larger share of the rows than input.max_error_fraction has errors, or every completion is one.

    num_errors  input rows of which some completion is an error
    """
    fraction, rows = job.config.input.max_error_fraction, job.source.num_rows
    if all_failed:
        raise TooManyErrors(
            f"every completion of all {rows} rows is an error; look at the `error` column of the output, then mend the input, "
            "input.columns or the chat template"
        )
    if num_errors > fraction * rows + 1e-9:  # 0.29 * 100 is a little less than 29
        raise TooManyErrors(
            f"{num_errors} of {rows} rows are error rows, more than input.max_error_fraction={fraction:g} allows; "
            "look at the `error` column of the output, then mend the input or raise the fraction"
        )


def job_deadline(job: Job, fitted: FittedEngine) -> Deadline:
    """When Slurm ends this job; never where there is no Slurm."""
    task, config = slurm.this_task(), job.config
    return Deadline(
        lambda: None if task is None else slurm.time_left_s(task),
        config.cluster.signal_s,
        keeps_tokens=config.output.logprobs is None,
        stop=fitted.stop,
    )


def watchdog_s(job: Job) -> float:
    """Seconds without a round after which the run counts as hung; 0 is never."""
    own = job.config.cluster.watchdog_s
    return own if own is not None else 600.0 if job.device.type == "cuda" else 3600.0
