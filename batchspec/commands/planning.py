"""What a run would do, without running it (`batchspec plan`). It reads only the headers of the weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from batchspec.cluster.devices import visible_gpus
from batchspec.commands.plan_text import Plan
from batchspec.config.checks import AUTO, TENSOR_PARALLEL, check_ranks
from batchspec.config.schema import RunConfig
from batchspec.console.text import counted
from batchspec.distributed.group import check_reach
from batchspec.errors import ConfigError, OutputError, StorageError
from batchspec.kernels.common.card import assumed, assumed_card
from batchspec.load.memory import check_memory, plan_batch
from batchspec.model.blocks.base import Shard
from batchspec.model.shard import part_of
from batchspec.model.spec import ModelSpec
from batchspec.model.tokenizer import Tokenizer
from batchspec.packed_batch import PackedBatch
from batchspec.packing.planner import Forecast, forecast
from batchspec.packing.rates import Rates, device_rates
from batchspec.packing.replicas import GpuLayout, best, gpu_layouts
from batchspec.packing.survey import Survey
from batchspec.prepare import Job, open_job
from batchspec.process.out_of_memory import admitting_rows
from batchspec.report.push import check_push_key
from batchspec.runner.job_run import check_target, open_run
from batchspec.runstate.generations import Generation
from batchspec.tuning.cards import check_card, known_card
from batchspec.tuning.cpu_threads import limit_threads

SAMPLE_ROWS = 10_000
SHARD_ROWS = 500


def layouts_of(job: Job, survey: Survey, rates: Rates, num_gpus: int) -> list[GpuLayout]:
    """The ways to divide so many GPUs of this kind for the job, each predicted, or with the reason why a run would refuse it."""
    whole = job.spec.whole or job.spec
    demand = survey.demand(job.source.num_rows, job.admission.max_len)

    def predict(ranks: int, replicas: int) -> tuple[PackedBatch, Forecast]:
        check_ranks(job.config, ranks)
        if job.device.type == "cuda":
            for copy in range(replicas):
                check_reach(range(ranks * copy, ranks * (copy + 1)))
        part = _of_rank(job, whole, Shard(0, ranks))
        share = replace(demand, num_completions=-(-demand.num_completions // replicas))
        check_memory(part)
        batch = plan_batch(part, share, rates)
        return batch, forecast(
            batch, part.spec, rates, share, dtype=job.dtype, accepted=job.drafter.assumed_accepted,
            correlation=job.config.packing.expert_correlation,
        )

    workers = job.config.cluster.workers
    return gpu_layouts(TENSOR_PARALLEL, num_gpus, predict, copies=None if workers == AUTO else workers)


def _of_rank(job: Job, whole: ModelSpec, shard: Shard) -> Job:
    """What one rank of the job computes. Raises ConfigError for a model, or a draft head, that cannot be cut."""
    return replace(job, spec=part_of(whole, shard), drafter=job.drafter.of_rank(shard))


def plan(config: RunConfig, *, tokenizer: Tokenizer | None = None, full: bool = False) -> Plan:
    """Read and admit a sample of about 10,000 rows spread over the input (`full`: every row), choose the shape, predict.

    tokenizer  instead of the model folder's own
    A job for a GPU can be planned where there is none, as on the login node of a cluster: its rows, without shape and times.
    Raises InputError, CheckpointError, ConfigError or CapacityError as the run would.
    """
    check_push_key(config.output)
    card = assumed_card()
    lacks_gpu = card is None and config.device == "cuda" and not torch.cuda.is_available()
    job = open_job(config, tokenizer=tokenizer, fetch=False, on_this_machine=not lacks_gpu)
    if lacks_gpu:  # whether output.dir has the same job depends on dtypes that the GPU determines
        survey = survey_rows(job, full=full)
        demand = survey.demand(job.source.num_rows, job.admission.max_len)
        return Plan(job=job, survey=survey, num_completions=demand.num_completions, lacks_gpu=True)
    state = ""
    if card is None:  # what the output holds is compared by the machine of the run
        check_target(job)
        state = state_of_output(job)
    survey = survey_rows(job, full=full)
    demand = survey.demand(job.source.num_rows, job.admission.max_len)
    if job.device.type == "cpu":
        limit_threads()  # as the run does, whose products are measured here
    rates = device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises)
    batch, ahead = None, None
    num_gpus = len(visible_gpus()) if job.device.type == "cuda" and card is None else 1
    found = layouts_of(job, survey, rates, num_gpus) if num_gpus > 1 and demand.num_completions else []
    ranks = best(found).ranks if found and config.cluster.tensor_parallel == AUTO else config.cluster.tensor_parallel
    if demand.num_completions:
        if ranks not in (1, AUTO):
            job = _of_rank(job, job.spec, Shard(0, ranks))
        check_memory(job)
        batch = plan_batch(job, demand, rates)
        ahead = forecast(
            batch, job.spec, rates, demand, dtype=job.dtype, accepted=job.drafter.assumed_accepted,
            correlation=config.packing.expert_correlation,
        )
    return Plan(
        job=job, survey=survey, rates=rates, num_completions=demand.num_completions, batch=batch, forecast=ahead, layouts=found,
        output=state, card=None if card is None else known_card(card.name),
    )


def plan_for(name: str, config: RunConfig, *, tokenizer: Tokenizer | None = None, full: bool = False) -> Plan:
    """`plan` for a card of the table, whatever this machine has. Raises ConfigError for an unknown name and for device=cpu."""
    known = known_card(name)
    if config.device == "cpu":
        raise ConfigError(f"--card {known.card.name} plans for a GPU, and the job has device=cpu; remove one")
    check_card(known.card)
    with assumed(known.card):
        return plan(config, tokenizer=tokenizer, full=full)


def state_of_output(job: Job) -> str:
    """What a run would find in output.dir: how many rows are done, or why it would refuse; empty if it would begin a job."""
    if job.config.output.dir is None:
        return ""
    try:
        run = open_run(job)
    except (ConfigError, OutputError, StorageError) as error:
        return f"a run would be refused: {error}"
    if run.begins_job:
        return ""
    folder, change, layout = run.folder, run.change, run.job.layout
    if isinstance(change, Generation):
        return f"{folder.path}: {len(change.shards):,} of {counted(folder.num_shards, 'shard')} have rows to compute again"
    rows = layout.num_rows_of(run.finished)
    added = f", {layout.num_rows - folder.manifest.num_rows:,} of them added by resume=extend" if change else ""
    return f"{folder.path}: {rows:,} of {counted(layout.num_rows, 'row')} are done, {layout.num_rows - rows:,} are to do{added}"


def survey_rows(job: Job, *, full: bool) -> Survey:
    """Admit every row, or every k-th stretch of 500 rows so that about 10,000 are read."""
    survey = Survey()
    stride = 1 if full else max(1, job.source.num_rows // SAMPLE_ROWS)
    with admitting_rows():
        for shard in job.source.shards(SHARD_ROWS, skip=_AllBut(stride)):
            survey.add(shard.table.num_rows, job.admission.admit_compiled(shard))
    return survey


class _AllBut:
    """All shard numbers but every k-th."""

    def __init__(self, stride: int) -> None:
        self.stride = stride

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index % self.stride != 0
