"""Opens and loads a warm engine: the checks of its configuration that need no rows, and the engine with its weights."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from batchspec.data.dataset.columns import ColumnMap
from batchspec.data.dataset.reader import table_source
from batchspec.engine.loop.engine import Engine
from batchspec.errors import CapacityError
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.prepare import Job, JobModel, fetch_weights, job_of, open_tokenizer
from batchspec.packing.planner import GPU_SLOTS, Demand
from batchspec.packing.predict import LengthPredictor
from batchspec.packing.unused import check_keys_of_engine
from batchspec.process.out_of_memory import OutOfMemoryGuard
from batchspec.tasks.registry import task_of

PROMPT_TOKENS = 1024
"""Prompt length for which the shape is planned, if model.max_len leaves room for it."""
_IDS = ColumnMap(names={"prompt_ids": "prompt_ids"}, prompt_kind="prompt_ids")


def open_warm(model: JobModel) -> Job:
    """As `job_without_rows`, and downloads the weights."""
    job = job_without_rows(model)
    fetch_weights(model)
    return job


def job_without_rows(model: JobModel) -> Job:
    """Makes all checks of a job that need no rows. Raises as `open_job`."""
    config = model.config
    check_keys_of_engine(config)
    tokenizer = open_tokenizer(model.folder, config, _IDS)
    cells = {"prompt_ids": pa.array([[0]], pa.list_(pa.int32()))}
    for name in task_of(config).cells_read:
        if config.input.columns.get(name) is not None:  # rows will bring their own
            cells[name] = pa.array([None], pa.list_(pa.string()))
    columns = ColumnMap(names={name: name for name in cells}, prompt_kind="prompt_ids")
    bare = replace(model, config=replace(config, output=replace(config.output, passthrough="none")))
    job = job_of(bare, table_source(pa.table(cells)), columns, tokenizer)
    job.admission.expect_constraints()
    return replace(job, config=config)


def load(job: Job) -> LoadedEngine[Engine]:
    """The engine with its weights. Raises CheckpointError and CapacityError."""
    with OutOfMemoryGuard() as guard:
        return LoadedEngine.load_warm(job, expected_demand(job))
    raise CapacityError(
        f"out of memory while the engine was made ({guard.message}); set packing.memory_gb, packing.max_num_seqs, "
        "packing.max_num_batched_tokens or model.max_len lower"
    )


def expected_demand(job: Job) -> Demand:
    """Endless rows of at most model.max_len tokens, with prompts of PROMPT_TOKENS and outputs of half of max_new_tokens.

    They may share prefixes: memory is kept for the graphs of such rounds.
    """
    max_len, task = job.admission.max_len, job.admission.task
    limit = task.output_limit(job.config.decode)
    prompt = min(PROMPT_TOKENS, max_len - limit)
    output = limit if job.config.decode.ignore_eos else LengthPredictor().predict(limit)
    return Demand(
        num_completions=GPU_SLOTS, prompt_tokens=float(prompt), output_tokens=float(output), max_tokens=max_len,
        shares_prefix=True, scores=task.reads.all_logits,
    )
