"""K/V scales of a job with cache.dtype=fp8: the first run saves its scales in the output folder, and all others use them."""

from __future__ import annotations

from dataclasses import replace

from batchspec.console.text import counted
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.run_folder import KV_SCALES
from batchspec.errors import OutputError
from batchspec.job.prepare import Job
from batchspec.job.runner.oom_fallback import EngineWithFallback
from batchspec.model.layers.attention.kv_scales import KVScales, checkpoint_scales
from batchspec.model.spec import ModelSpec


def with_saved_scales(job: Job, output: OutputFolder) -> Job:
    """The job with the scales of its earlier runs, if there are any.

    Raises OutputError if they are damaged, if the checkpoint's scales have changed, or if they are lost although shards are
    committed: a new calibration may differ on another machine, and would be used without notice.
    """
    spec = job.spec.whole or job.spec
    saved = saved_scales(output, spec) if spec.has_kv_scales else None
    dummy, how = job.config.model.load_format == "dummy", job.config.cache.scales
    if saved is None and not (job.spec.has_kv_scales and output.manifest.config["cache"]["dtype"] == "fp8"):
        return job
    own = None if dummy or how == "calibrate" else checkpoint_scales(job.folder, spec)
    if saved is None:
        if own is None and (done := output.committed()):
            raise OutputError(
                f"{output.path}/{KV_SCALES} is missing, and {counted(len(done), 'shard')} of the job came from these K/V scales; "
                "restore it or use another output.dir"
            )
        return job
    if own is not None and own.fingerprint != saved.fingerprint:
        raise OutputError(
            f"output.dir {output.path} holds this job with other K/V scales (kv_scales: {saved.fingerprint[:12]} -> "
            f"{own.fingerprint[:12]}); use the checkpoint that it began with, or another output.dir"
        )
    return replace(job, kv_scales=saved)


def saved_scales(output: OutputFolder, spec: ModelSpec) -> KVScales | None:
    """The scales that a job has saved; None if it has none. Raises OutputError if they are damaged."""
    data = output.kv_scales()
    return None if data is None else KVScales.from_json(data, spec, f"{output.path}/{KV_SCALES}")


def keep_scales(job: Job, output: OutputFolder, engines: EngineWithFallback) -> None:
    """After the folder is made: save this run's scales for the job, or use the ones that the job has. Raises OutputError."""
    if not job.spec.has_kv_scales:
        return
    scales = engines.current.target.all_kv_scales
    assert scales is not None
    kept = output.keep_kv_scales(KVScales(scales).to_json())
    engines.adopt_kv_scales(KVScales.from_json(kept, job.spec.whole or job.spec, f"{output.path}/{KV_SCALES}"))
