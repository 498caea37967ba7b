"""One run of a job: what the output folder holds of the job, and what this run does there. Whether the job is new, resumed,
retried, extended or complete is decided here alone, and every run takes the same course.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property

from batchspec.config.schema import RunConfig
from batchspec.console.text import counted
from batchspec.data.runstate.extensions import EXTENSION_MAY_CHANGE
from batchspec.data.runstate.generations import Change, Generation
from batchspec.data.runstate.journal import Journaled, saved_rows
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import OutputError, TooManyErrors
from batchspec.job.prepare import Job
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.report.stats import count_error_rows
from batchspec.job.runner.compute_all import ComputeAll
from batchspec.job.runner.identity import job_fingerprint, recorded_facts
from batchspec.job.runner.kv_scales import keep_scales, with_saved_scales
from batchspec.job.runner.new_extension import advice, check_added_columns, new_extension
from batchspec.job.runner.new_retry import RETRY_MAY_CHANGE, new_retry, retry_advice
from batchspec.job.runner.oom_fallback import EngineWithFallback
from batchspec.job.runner.retry_plan import RetryPlan
from batchspec.job.runner.weight_sums import keep_sums, with_kept_sums
from batchspec.packing.survey import Survey


def open_run(job: Job, attempt: str | None = None) -> FoundRun:
    """The run that this command asks for. The output folder is absent or that of this job. Writes nothing.

    attempt  the run's id; None: a new one
    Raises OutputError if it holds another job, or one that this command cannot retry or extend.
    """
    config = job.config.output
    assert config.dir is not None
    folder = OutputFolder(config.dir, attempt)
    check_added_columns(job, folder)
    folder.check(
        fingerprint=job_fingerprint(job),
        num_rows=job.source.num_rows,
        shard_rows=config.shard_rows,
        files=job.source.files,
        overwrite=config.overwrite,
        may_differ=EXTENSION_MAY_CHANGE if job.config.resume.extend else RETRY_MAY_CHANGE[job.config.resume.retry],
        advice=lambda manifest: advice(job, manifest) or retry_advice(job, folder),
    )
    return FoundRun(job, folder, new_retry(job, folder) or new_extension(job, folder))


def check_errors(job: Job, num_errors: int, *, failed: str | None = None) -> None:
    """Raises TooManyErrors if the share of rows with errors exceeds input.max_error_fraction, or every completion is an error.

    num_errors  input rows with at least one error completion
    failed      the first error if every completion is one
    """
    rows = job.layout.num_rows
    if failed is not None:
        all_rows = f"all {rows} rows" if rows > 1 else "the only row"
        said = f"every completion of {all_rows} is an error (column `error` of the output), the first one this: {failed}"
        raise TooManyErrors(said)
    if not job.config.input.allows(num_errors, rows):
        raise TooManyErrors(
            f"{num_errors} of {rows} rows are error rows, more than input.max_error_fraction="
            f"{job.config.input.max_error_fraction:g} allows; inspect the `error` column of the output, then correct the input "
            "or raise the fraction"
        )


class FoundRun:
    """One run of a job, as it finds the output folder. `begin` makes it a `BegunRun`, unless no row is left to compute.

    job         with the shards of the folder, those that an extension adds included
    folder      the output folder
    change      the retry or the extension that this run begins; None: it begins none
    begins_job  whether no earlier run did
    """

    def __init__(self, job: Job, folder: OutputFolder, change: Change | None) -> None:
        self.folder, self.change = folder, change
        self.begins_job = folder.begins_job(job.config.output.overwrite)
        manifest = None if self.begins_job else folder.manifest
        if manifest is not None and change is not None:
            manifest = change.of(manifest)
        self.job = job if manifest is None else replace(job, layout=manifest.layout)
        found = 0 if self.begins_job else folder.retry_number
        self._retry_number = change.number if isinstance(change, Generation) else found

    @cached_property
    def finished(self) -> set[int]:
        """Shards that need no work of this run. They are listed once, when they are asked for first."""
        if self.begins_job:
            return set()
        anew = self.change.shards if isinstance(self.change, Generation) else ()
        return self.folder.finished() - {*anew}

    @property
    def found_complete(self) -> bool:
        """Whether the job was complete when this run found it, so that no row is left to compute."""
        return not self.begins_job and len(self.finished) == self.job.layout.num_shards

    @cached_property
    def is_retry(self) -> bool:
        """Whether rows that the output has are computed anew: this run begins a retry, or goes on with one."""
        return isinstance(self.change, Generation) or (not self.begins_job and bool(self.folder.to_retry()))

    @cached_property
    def num_errors(self) -> int:
        """Committed input rows with at least one error completion; 0 in a retry."""
        return 0 if self.is_retry or not self.finished else count_error_rows(self.folder, sorted(self.finished))

    @cached_property
    def saved(self) -> Journaled:
        """Rows that earlier runs saved of shards that are not committed. A retry has a journal of its own."""
        if self.begins_job or self.found_complete or isinstance(self.change, Generation):
            return Journaled()
        return self.folder.journal().read(self.finished)

    def job_to_load(self) -> Job:
        """The job with what earlier runs kept for it: K/V scales and sums of the weights.

        Raises OutputError if these are damaged, or lost although there are rows, and TooManyErrors.
        """
        num_errors = self.num_errors
        has_rows = self.is_retry or bool(self.finished) or self.saved.num_rows > 0
        job = self.job if self.begins_job else with_saved_scales(self.job, self.folder)
        job = with_kept_sums(job, self.folder, is_new=self.begins_job, has_rows=has_rows)
        check_errors(job, num_errors)
        return job

    def num_done(self, survey: Survey) -> int:
        """Expected number of output rows that are finished."""
        return survey.num_outputs(self.job.layout.num_rows_of(self.finished)) + len(self.saved.completions)

    def begin(self, job: Job, engines: EngineWithFallback, progress: ProgressBar) -> BegunRun:
        """Make the folder a job, or join the job in it: no check refuses it from here on. Tells what earlier runs have done.

        job  as it was loaded into `engines`
        Raises as `OutputFolder.create`; OutputError if another run has begun a retry or another change meanwhile, or was first
        with other weights or scales.
        """
        self.begin_change()
        self.folder.create(
            fingerprint=job_fingerprint(job),
            config=asdict(job.config),
            recorded=recorded_facts(job),
            num_rows=job.source.num_rows,
            shard_rows=job.config.output.shard_rows,
            files=job.source.files,
            overwrite=job.config.output.overwrite,
        )
        if self.folder.retry_number != self._retry_number:
            raise OutputError(
                f"the job in {self.folder.path} was complete and a retry of it began while this run loaded; run the same command "
                "again"
            )
        keep_scales(job, self.folder, engines)
        keep_sums(job, self.folder, engines)
        shards = self.folder.num_shards
        if self.is_retry:
            progress.phase(f"{len(self.folder.missing())} of {shards} shards are written anew; the other rows stay")
        elif self.finished or self.saved.num_rows:
            done = f"{len(self.finished)} of {shards} shards are committed already"
            progress.phase(f"{done}, {saved_rows(self.saved)}; the rest is computed")
        return BegunRun(job=job, folder=self.folder, plan=self._plan(), saved=self.saved, num_errors=self.num_errors)

    def begin_change(self) -> None:
        """Record the retry or the extension that this run begins, if any. An extension may add no row: the command has another
        input.limit for the same rows, say. Raises OutputError if another run has begun another change.
        """
        if isinstance(self.change, Generation):
            self.folder.retry(self.change)
        elif self.change is not None:
            self.folder.extend(self.change)

    def _plan(self) -> ComputeAll | RetryPlan:
        if not self.is_retry:
            return ComputeAll()
        generation = self.folder.generation
        assert generation is not None
        return RetryPlan(self.folder, generation)

    def end(self) -> RunEnd:
        """What is left of the job now that this run has nothing more to compute."""
        job, folder, left = self.job, self.folder, ""
        if not self.found_complete:
            if missing := folder.missing():
                left = f"this run's part is done; other runs work on {len(missing)} of {folder.num_shards} shards"
            elif folder.is_extended():
                folder = OutputFolder(folder.path)
                if folder.missing():
                    left = "this run's rows are done; another command added rows since, and its runs go on with them"
                else:
                    job = replace(job, layout=folder.manifest.layout)
        return RunEnd(job=job, folder=folder, left=left, was_complete=self.found_complete)


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRun:
    """A run that computes rows: its folder is a job."""

    job: Job
    """As it was loaded."""
    folder: OutputFolder
    plan: ComputeAll | RetryPlan
    """Which rows of a shard are computed."""
    saved: Journaled
    """Rows that earlier runs saved of shards that are not committed."""
    num_errors: int
    """Committed input rows with at least one error completion; 0 in a retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What a run leaves of its job."""

    job: Job
    """With the rows that another command has added meanwhile, if they are committed."""
    folder: OutputFolder
    left: str
    """Which rows other runs still do, for a message; empty if all rows of the job are committed."""
    was_complete: bool
    """Whether the run had no row to compute."""

    def outcome(self) -> str:
        """Which rows are left, or the job's size and whether this run found it complete, for a message."""
        if self.left:
            return self.left
        size = f"{counted(self.job.layout.num_rows, 'row')} in {counted(self.folder.num_shards, 'shard')}"
        if not self.was_complete:
            return f"done, {size}"
        return f"already complete: {size}{_nothing_more(self.job.config, goes_on=not self.folder.is_concluded())}"


def _nothing_more(config: RunConfig, *, goes_on: bool) -> str:
    """The end of the message about a complete job if resume.retry asks for a retry that was done before, or that no row needs, or
    resume.extend for rows that there are not.

    goes_on  an earlier run computed the last row, and was interrupted before it had done what follows
    """
    if goes_on and config.resume.retry == "error":
        return "; an earlier run computed the rows of resume=error, this one does what follows them"
    if config.resume.retry == "length":
        cap = config.decode.max_new_tokens
        return f"; nothing left for resume=length decode.max_new_tokens={cap}: a row that is still cut off there needs more"
    if config.resume.extend:
        return "; the input has no row to add"
    return "" if config.resume.retry == "none" else f"; nothing left for resume={config.resume.retry}"
