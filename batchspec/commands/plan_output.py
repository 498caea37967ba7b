"""What a run would find in its output folder: by the checks of a run, so that `plan` ends with the exit code of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchspec.console.text import counted
from batchspec.data.runstate.generations import Generation
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import BatchspecError
from batchspec.job.prepare import Job
from batchspec.job.report.stats import job_stats
from batchspec.job.report.status import StatusReader
from batchspec.job.runner.checked_run import check_target, checked_run
from batchspec.job.runner.conclude import check_all_errors
from batchspec.job.runner.job_run import FoundRun
from batchspec.packing.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOutput:
    """The output folder as a run would find it."""

    path: str
    run: FoundRun | None = None
    """None: a run would not come so far."""
    error: BatchspecError | None = None
    """With which a run would end there."""

    @property
    def is_complete(self) -> bool:
        return self.run is not None and self.run.found_complete

    def line(self) -> str:
        """How many rows are done, or how a run would end; empty if it would begin a job."""
        if self.error is not None:
            return f"a run would end with exit code {self.error.exit_code}: {self.error}"
        assert self.run is not None
        run = self.run
        if run.begins_job:
            return ""
        if self.is_complete:
            return f"{self.path}: {run.end().outcome()}"
        folder, change, layout = run.folder, run.change, run.job.layout
        if isinstance(change, Generation):
            return f"{self.path}: {len(change.shards):,} of {counted(folder.num_shards, 'shard')} have rows to compute again"
        rows = layout.num_rows_of(run.finished)
        added = f", {layout.num_rows - folder.manifest.num_rows:,} of them added by resume=extend" if change else ""
        total = counted(layout.num_rows, "row")
        return f"{self.path}: {rows:,} of {total} are done, {layout.num_rows - rows:,} are to do{added}"

    def facts(self, survey: Survey) -> dict[str, Any]:
        """What `batchspec status --json` tells too, under the same names; empty if a run would not come so far."""
        if self.run is None:
            return {}
        run, layout = self.run, self.run.job.layout
        return {
            "state": self._state(run),
            "rows": layout.num_rows_of(run.finished),
            "rows_total": layout.num_rows,
            "shards": len(run.finished),
            "shards_total": layout.num_shards,
            "completions": run.num_done(survey),
        }

    def _state(self, run: FoundRun) -> str:
        if run.begins_job or self.is_complete:
            return "complete" if self.is_complete else "not begun"
        now = StatusReader(OutputFolder(self.path)).read().state
        return "stopped" if now == "complete" else now  # this command begins a retry or an extension of it


def found_output(job: Job, *, lacks_gpu: bool) -> FoundOutput | None:
    """What a run of the job would find in output.dir; None without an output.dir, or if it holds a job and this machine lacks the
    run's GPU: whether it is the same job depends on dtypes that the GPU determines.

    Raises as `check_target` for a job without an output.dir, to which no folder belongs yet, but perhaps a dataset to push to.
    """
    path, run = job.config.output.dir, None
    if path is None:
        check_target(job)
        return None
    try:
        if lacks_gpu and not OutputFolder(path).begins_job(job.config.output.overwrite):
            return None
        run = checked_run(job)
        if run.found_complete:
            check_all_errors(run.job, run.folder, job_stats(run.folder.path))
        else:
            run.job_to_load()
    except BatchspecError as error:
        return FoundOutput(path=path, run=run, error=error)
    return FoundOutput(path=run.folder.path, run=run)
