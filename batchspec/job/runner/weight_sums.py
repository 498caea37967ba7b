"""All runs of a job load the same weights: the first keeps the sums of its own in the output folder, all others are compared.

The comparison comes after the weights are loaded and before a row is written. Other weights that samples of the files show are
refused earlier, by the job's fingerprint (`identity.py`). Not compared: dummy weights, which are the same for all; a drafter's,
on which no token depends; a LoRA adapter's, whose whole file is part of the fingerprint.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from batchspec.checkpoint.weight_sums import SumsOfJob, WeightSums
from batchspec.data.runstate.claims import this_process
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.run_folder import WEIGHTS
from batchspec.errors import OutputError
from batchspec.job.prepare import Job
from batchspec.job.runner.oom_fallback import EngineWithFallback


def with_kept_sums(job: Job, output: OutputFolder, *, is_new: bool = False, has_rows: bool = True) -> Job:
    """The job with the sums of its earlier runs, or with none to compare with if no run has kept them yet.

    is_new    no earlier run is of this job, whatever the folder holds
    has_rows  earlier runs have saved rows, before which they kept their sums
    Raises OutputError if the sums are damaged, or lost although there are rows.
    """
    if job.dummy:
        return job
    data = None if is_new else output.weight_sums()
    if data is None and has_rows:
        raise OutputError(
            f"{output.path}/{WEIGHTS} is missing, so that the weights cannot be compared with those that the job's rows came "
            "from; restore it or use another output.dir"
        )
    kept = None if data is None else _read(data, output)
    return replace(job, sums=SumsOfJob(where=output.path, kept=kept))


def keep_sums(job: Job, output: OutputFolder, engines: EngineWithFallback) -> None:
    """After the folder is made and before a row is written: this run's sums become the job's, or are compared with those that
    another run has kept since. Raises OutputError where another run was first, with other weights.
    """
    if job.sums is None or job.sums.kept is not None:  # those that are kept were compared when the engine was made
        return
    own = engines.current.target.weight_sums
    assert own is not None
    run = f"run {output.attempt[:8]} on {this_process()['host']} at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    kept = output.keep_weight_sums(replace(own, run=f"{run} (model.path={job.config.model.path})").to_json())
    engines.adopt_sums(replace(job.sums, kept=_read(kept, output)))


def _read(data: bytes, output: OutputFolder) -> WeightSums:
    return WeightSums.from_json(data, f"{output.path}/{WEIGHTS}")
