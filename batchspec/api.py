"""`batchspec.generate`: run a job on data in memory, in this process."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

import polars as pl

from batchspec.config.checks import AUTO
from batchspec.config.compose import compose
from batchspec.config.overrides import Options, overrides_of, recipe_overrides
from batchspec.config.unread import refuse_unread
from batchspec.data.dataset.in_memory import table_of
from batchspec.data.dataset.job_rows import JobOutput, JobRows
from batchspec.data.dataset.reader import Source, table_source
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning
from batchspec.errors import ConfigError
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.load.short_jobs import drafting_of
from batchspec.job.prepare import choose_device, open_job, open_model, open_output, survey_first
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.run_job import run_job
from batchspec.job.runner.decode_shards import decode_shards
from batchspec.job.runner.job_run import check_errors
from batchspec.job.runner.run_monitor import RunMonitor
from batchspec.job.runner.shard_work import ShardWork
from batchspec.job.supervise.watchdog import Watchdog, limit_s
from batchspec.packing.row_templates import RowTemplates
from batchspec.process.out_of_memory import within_memory
from batchspec.tasks.registry import task_of
from batchspec.warm.call import empty_frame
from batchspec.warm.call_arguments import explains_arguments
from batchspec.warm.loading import job_without_rows

_OF_FILES = dict.fromkeys(
    ("input.path", "input.config_name", "input.split"), "the call brings its own rows, such as polars.read_parquet(PATH)"
)
_OF_OUTPUT = dict.fromkeys(
    ("output.overwrite", "output.push_to_hub", "output.push_private", "output.push_overwrite", "output.license", "resume"),
    "nothing is written without output.dir",
) | {
    "input.num_workers": "without output.dir it prepares rows in its own process",
    "draft.train": "without output.dir it trains no head; give one, draft=eagle3 draft.path=HEAD",
}
_OF_PROCESSES = {"cluster.workers": "it computes in its own process"}


@explains_arguments("batchspec.generate", "overrides={...}")
def generate(
    data: Any = None, *, job: str | None = None, config_dir: str | PathLike[str] | None = None, overrides: Options = (),
    **keys: Any,
) -> pl.DataFrame:
    """Completions of every row of `data`, in input order, in the output schema.

    data       a table (polars, pyarrow, pandas, datasets.Dataset), a list of dictionaries, of texts or of chats, or anything that
               polars.DataFrame accepts; the columns of a job's input; or a `JobOutput`. None: the rows of input.from_job
    job        name of a recipe: "demo" is `+job=demo`; its own input is not read
    config_dir  folder of recipes of your own, job/NAME.yaml, and groups
    overrides  keys of a job: a list, ["model.path=smollm2-135m", "decode.n=4"], or a dictionary, nested or dotted,
               {"model.path": "smollm2-135m", "decode": {"n": 4}}
    keys       more keys: model={"path": "smollm2-135m"}, draft="eagle3"

    Uses the same engine and checks as `python -m batchspec.run`, and raises its errors (errors.py).
    Nothing is written unless the overrides set output.dir (also through a recipe, `+job=...`); then the same call resumes the
    job.
    """
    recipe = [*recipe_overrides(job, config_dir), *([] if job is None else ["output.dir=null"])]
    given = overrides_of(overrides, **keys)
    config = compose([*recipe, *given], require=("model.path",))
    recipe += [word for word in given if word.startswith(("+job=", "hydra."))]
    unread = _OF_FILES | _OF_PROCESSES | (_OF_OUTPUT if config.output.dir is None else {})
    refuse_unread(config, recipe, unread, "batchspec.generate")
    if config.cluster.tensor_parallel not in (1, AUTO):
        raise ConfigError(
            f"cluster.tensor_parallel={config.cluster.tensor_parallel}: this call computes in its own process; use "
            "batchspec.Engine or `batchspec run`, which start one per GPU"
        )
    source: Source | JobRows | None = None
    if isinstance(data, JobOutput) and data.folder is not None:
        config = replace(config, input=data.keys(config.input))
    elif isinstance(data, JobOutput):
        source = open_output(data, config)
    elif config.input.from_job is None:
        table = table_of(data, lambda: RowTemplates(config.input, task_of(config).texts).no_rows())
        if not table.num_rows and config.output.dir is None:
            model = open_model(config)
            return empty_frame(model, table, job_without_rows(model).admission)
        source = table_source(table, config.input.limit)
    elif data is not None:
        raise ConfigError(f"input.from_job={config.input.from_job} beside rows: the rows of that job are the input; remove one")
    if config.output.dir is not None:
        limit = limit_s(config.cluster.watchdog_s, gpu=choose_device(config.device).type == "cuda")
        with Watchdog(limit).watching() as watchdog:
            run_job(config, source, watchdog=watchdog)
        with scanning(config.output.dir):
            return OutputFolder(config.output.dir).scan().collect()
    opened = open_job(config, source)
    survey = survey_first(opened)
    smaller = "lower packing.max_num_seqs, packing.memory_gb or packing.max_num_batched_tokens"
    with within_memory("rows were decoded", smaller), ProgressBar(survey.num_outputs(opened.source.num_rows)) as progress:
        opened = drafting_of(opened, survey)
        loaded, work = LoadedEngine.load(opened, survey, progress), ShardWork.of(opened)
        monitor = RunMonitor(progress, survey.mean_output, loaded.totals)
        frames = {done.shard.index: work.frame(done.shard, done.completions) for done in decode_shards(loaded, monitor, work)}
    frame = pl.concat([frames[index] for index in sorted(frames)])
    errors = frame.filter(pl.col("status") == "error")
    failed = errors["error"][0]["message"] if 0 < errors.height == frame.height else None
    check_errors(opened, errors["row_index"].n_unique(), failed=failed)
    return frame
