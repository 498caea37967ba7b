"""What a run would do, without running it (`batchspec plan`). It reads only the headers of the weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from batchspec.cluster.devices import devices_of, visible_gpus
from batchspec.commands.plan_output import FoundOutput, found_output
from batchspec.commands.plan_text import Plan
from batchspec.config.checks import AUTO, TENSOR_PARALLEL, check_ranks
from batchspec.config.schema import RunConfig
from batchspec.distributed.group import check_reach
from batchspec.errors import BatchspecError, ConfigError
from batchspec.job.load.memory import check_memory, forecast_of, plan_batch
from batchspec.job.load.short_jobs import drafting_if_it_pays
from batchspec.job.prepare import SURVEY_ROWS, Job, open_job, survey_first
from batchspec.job.report.push import check_push_key
from batchspec.job.runner.head.planned import planned_head
from batchspec.kernels.common.card import Card, assumed, assumed_card
from batchspec.model.layers.base import Shard
from batchspec.model.shard import part_of
from batchspec.model.spec import ModelSpec
from batchspec.packed_batch import PackedBatch
from batchspec.packing.image_cost import image_times
from batchspec.packing.planner import Demand, Forecast
from batchspec.packing.rates import Rates, device_rates
from batchspec.packing.replicas import GpuLayout, best, gpu_layouts
from batchspec.packing.survey import Survey
from batchspec.process.out_of_memory import admitting_rows
from batchspec.text.tokenizer import Tokenizer
from batchspec.tuning.cards import check_card, known_card
from batchspec.tuning.cpu_threads import limit_threads

SAMPLE_ROWS = 10_000
SHARD_ROWS = 500


def layouts_of(job: Job, survey: Survey, rates: Rates, num_gpus: int) -> list[GpuLayout]:
    """The ways to divide so many GPUs of this kind for the job, each predicted, or with the reason why a run would refuse it."""
    whole = job.spec.whole or job.spec
    demand = survey.demand(job.source.num_rows, job.admission.max_len, job.admission.task)

    def predict(ranks: int, replicas: int) -> tuple[PackedBatch, Forecast]:
        check_ranks(job.config, ranks)
        if job.device.type == "cuda":
            for copy in range(replicas):
                check_reach(range(ranks * copy, ranks * (copy + 1)))
        part = _of_rank(job, whole, Shard(0, ranks))
        share = replace(demand, num_completions=-(-demand.num_completions // replicas))
        check_memory(part)
        batch = plan_batch(part, share, rates)
        return batch, forecast_of(part, batch, share, rates)

    workers = job.config.cluster.workers
    return gpu_layouts(TENSOR_PARALLEL, num_gpus, predict, copies=None if workers == AUTO else workers)


def _of_rank(job: Job, whole: ModelSpec, shard: Shard) -> Job:
    """What one rank of the job computes. Raises ConfigError for a model, or a draft head, that cannot be cut."""
    return replace(job, spec=part_of(whole, shard), drafter=job.drafter.of_rank(shard))


def plan(config: RunConfig, *, tokenizer: Tokenizer | None = None, full: bool = False) -> Plan:
    """Read and admit a sample of about 10,000 rows spread over the input (`full`: every row), choose the shape, predict.

    tokenizer  instead of the model folder's own
    A job for a GPU can be planned where there is none, as on the login node of a cluster: its rows, without shape and times.
    Raises InputError, CheckpointError, ConfigError or CapacityError as the run would; what the run would refuse in output.dir is
    part of the plan. Shape and times are left out for a job that is complete, unless they are for a card.
    """
    check_push_key(config.output)
    card = assumed_card()
    if card is None and config.cluster.tensor_parallel != AUTO:
        devices_of(config)  # refuses more processes than there are GPUs
    lacks_gpu = card is None and config.device == "cuda" and not torch.cuda.is_available()
    job = open_job(config, tokenizer=tokenizer, fetch=False, on_this_machine=not lacks_gpu)
    output = found_output(job, lacks_gpu=lacks_gpu)
    survey = survey_rows(job, full=full)
    demand = survey.demand(job.source.num_rows, job.admission.max_len, job.admission.task)
    is_complete = output is not None and output.is_complete and card is None  # for a card, its times are asked for all the same
    if lacks_gpu or is_complete:
        return Plan(job=job, survey=survey, num_completions=demand.num_completions, output=output, lacks_gpu=lacks_gpu)
    try:
        return _with_shape(job, survey, demand, output, card)
    except BatchspecError:
        if output is not None and output.error is not None:
            raise output.error from None  # a run would come to this one first
        raise


def _with_shape(job: Job, survey: Survey, demand: Demand, output: FoundOutput | None, card: Card | None) -> Plan:
    """With the shape that a run would choose, if any row can run. Raises CapacityError and ConfigError as the run would."""
    if job.device.type == "cpu":
        limit_threads()  # as the run does, whose products are measured here
    rates = device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises)
    num_gpus, ranks = len(visible_gpus()) if job.device.type == "cuda" and card is None else 1, job.config.cluster.tensor_parallel
    found = layouts_of(job, survey, rates, num_gpus) if num_gpus > 1 and demand.num_completions else []
    if found and ranks == AUTO:
        ranks = best(found).ranks
    if ranks not in (1, AUTO):
        job = _of_rank(job, job.spec, Shard(0, ranks))
    check_memory(job)
    first = first_demand(job, survey)
    job = drafting_if_it_pays(job, first, rates)
    batch = plan_batch(job, first, rates)
    made = Plan(
        job=job, survey=survey, num_completions=demand.num_completions, output=output,
        card=None if card is None else known_card(card.name),
    )
    if not demand.num_completions:
        return made
    workers = job.config.cluster.workers
    if workers == AUTO:
        workers = num_gpus if ranks == AUTO else max(1, num_gpus // ranks)
    images = image_times(job.spec.vision, survey, job.source.num_rows, rates, workers, job.spec.shard.ranks)
    return replace(
        made, rates=rates, batch=batch, forecast=forecast_of(job, batch, demand, rates), images=images, layouts=found,
        head=planned_head(job, first, demand, rates),
    )


def first_demand(job: Job, survey: Survey) -> Demand:
    """What a run chooses the shape of its batch by: its survey of the first rows. survey: of rows from the whole input."""
    rows = job.source.num_rows
    first = survey if rows <= SURVEY_ROWS and survey.num_rows == rows else survey_first(job)
    return first.demand(rows, job.admission.max_len, job.admission.task)


def plan_for(name: str, config: RunConfig, *, tokenizer: Tokenizer | None = None, full: bool = False) -> Plan:
    """`plan` for a card of the table, whatever this machine has. Raises ConfigError for an unknown name and for device=cpu."""
    known = known_card(name)
    if config.device == "cpu":
        raise ConfigError(f"--card {known.card.name} plans for a GPU, and the job has device=cpu; remove one")
    check_card(known.card)
    with assumed(known.card):
        return plan(config, tokenizer=tokenizer, full=full)


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
