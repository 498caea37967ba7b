"""Loads the weights of a checked job, and builds and prepares an engine with them. Nothing here writes to the output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from batchspec.automata.lazy_automaton import Expanding
from batchspec.automata.token_automaton import TokenSymbols
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.checkpoint.weight_files import weight_files
from batchspec.config.checks import AUTO
from batchspec.config.schema import RunConfig
from batchspec.console.text import counted
from batchspec.draft.base import Drafter
from batchspec.engine.features import RowFeatures
from batchspec.engine.features.images import WithImages
from batchspec.engine.features.without_rounds import FEATURES
from batchspec.engine.loop.engine import Engine
from batchspec.engine.ranks.lead import Lead
from batchspec.engine.ranks.messages import Build, Calibrate, Load, Scales
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.slots.row_feature import Features
from batchspec.images.prepared_images import PreparedImages, num_processes
from batchspec.job.load.memory import check_memory, kept_images, plan_batch
from batchspec.job.prepare import Job, JobModel, notes
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.kernels.common.card import card_of
from batchspec.model.dtype import dtype_name
from batchspec.model.kv_calibration import give_scales
from batchspec.model.lora import adapted
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint
from batchspec.packed_batch import PackedBatch
from batchspec.packing.constraints import asked_by
from batchspec.packing.ordered_requests import window_shards
from batchspec.packing.planner import Demand
from batchspec.packing.rates import device_rates
from batchspec.packing.survey import Survey
from batchspec.structured.expander import Expander
from batchspec.tasks.registry import task_of
from batchspec.text.tokenizer import Tokenizer
from batchspec.tool_calls.split import CallParser
from batchspec.tuning.cpu_threads import limit_threads
from batchspec.tuning.table import table_in_use


def device_facts(device: torch.device) -> str:
    """The facts that determine how a kernel is launched: the kind of device, and the software versions."""
    kind = "cpu"
    if device.type == "cuda":
        card = card_of(device)
        kind = f"{card.name} with {card.num_sms} SMs"
    return f"{kind}, torch {torch.__version__}"


def load_message(device: torch.device, folder: Path | None = None, *, vision: bool = False) -> Load:
    """What rank 0 of a group tells the other ranks when the model's files are ready. Raises ConfigError as `table_in_use`.

    folder  of the weights that all ranks load; None: the ranks do not compare them, for example because they are dummy weights
    vision  the model reads images
    """
    return Load(device_facts(device), table_in_use(device), "" if folder is None else weight_files(folder).state, vision)


def load_engine(
    job: Job, demand: Demand, progress: ProgressBar, survey: Survey, *, defers_text: bool = False, most_rounds: int | None = None
) -> Engine:
    """Load the weights, choose the shape from the remaining memory, set up the engine; shows each step on the progress line.

    survey       of the job's rows; if it is empty, only its `shares_prefix` counts
    defers_text  leave the decoding of text to the maker of the table (`Completion.num_undecoded`)
    most_rounds  after the job's last row began, its rows end within this many rounds; None: unknown
    """
    config, dtype = job.config, dtype_name(job.dtype)
    check_memory(job)
    on = job.device.type if job.group is None else f"{job.group.ranks} x {job.device.type}"
    progress.phase(f"loading {config.model.path} in {dtype} on {on}")
    if job.device.type == "cpu" and (note := limit_threads()):
        progress.phase(note)
    for _, note in notes(job):
        progress.phase(note)
    lead = None if job.group is None else Lead(job.group.channel)
    if lead is not None:
        lead.send(load_message(job.device, None if job.dummy else job.folder, vision=job.spec.vision is not None))
    progress.start_up.done("earlier runs")
    target, weights = load_weights(job, summed=job.sums is not None)
    if job.sums is not None:
        job.sums.check(target.weight_sums)
    progress.start_up.done("weights")
    if job.spec.has_kv_scales:
        source = give_scales(
            target, job.kv_scales, config.cache.scales, None if job.dummy else job.folder, job.tokenizer,
            tell=lambda prompts: None if lead is None else lead.send(Calibrate(prompts)),
        )
        if lead is not None and target.all_kv_scales is not None:
            lead.send(Scales(target.all_kv_scales.tolist()))
        progress.phase(f"K and V in e4m3, scales {source}")
    return _engine_of(
        job, target, weights, demand, progress, survey, lead=lead, defers_text=defers_text, most_rounds=most_rounds
    )


def build_beside(job: Job, target: Target, demand: Demand, progress: ProgressBar, survey: Survey) -> Engine:
    """As `load_engine`, of a job that decodes nothing, with the weights of an engine that is in use already."""
    return _engine_of(job, target, None, demand, progress, survey)


def _engine_of(
    job: Job, target: Target, weights: Any, demand: Demand, progress: ProgressBar, survey: Survey, *, lead: Lead | None = None,
    defers_text: bool = False, most_rounds: int | None = None,
) -> Engine:
    """The engine of a job with its weights, as `load_engine`. weights: the drafter's"""
    config = job.config
    batch = plan_batch(job, demand, device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises), loaded=True)
    drafter = job.drafter.build(weights, target, slots=batch.num_slots)
    progress.phase(
        f"{counted(batch.num_slots, 'row')} at a time, up to {batch.max_len} tokens each; "
        f"K/V cache of {batch.num_pages} pages of {batch.page_size} tokens"
    )
    if job.admission.task.decodes:  # else there are no rounds
        chosen = f" (draft=auto: {job.why_drafter})" if job.why_drafter else ""
        progress.phase(f"draft={drafter.name}{chosen}: {round_of(drafter.draft_len)}")
    if lead is not None:
        lead.send(Build(batch, vocabulary_of(job), config.output.logprobs))
    engine = build_engine(
        config, target, drafter, batch, tokenizer=job.tokenizer, lead=lead, vocabulary=vocabulary_of(job),
        expanding=expanding_of(job), defers_text=defers_text, call_parser=job.admission.call_parser,
        token_ids=job.token_ids,
    )
    engine.features.expect(survey.take_first())  # while kernels are compiled and graphs captured
    if job.device.type == "cuda":
        progress.phase("compiling kernels and capturing the graphs of the rounds")
        progress.start_up.done("batch and drafter")
        shard_rows = job.layout.last_shard_rows
        window_rows = shard_rows * window_shards(batch.num_slots, shard_rows)
        prepare_engine(engine, usual_mode(job), survey, job.source.num_rows, window_rows, most_rounds=most_rounds)
        progress.start_up.done("other preparations", engine.planner.seconds)
    return engine


def round_of(most_drafts: int) -> str:
    """What a round does, for the first line that names one. most_drafts: K of the drafter."""
    if most_drafts:
        return f"a round drafts up to {most_drafts} tokens for each row, and the model verifies them at once"
    return "a round adds one token to each row"


def prepare_engine(
    engine: Engine, mode: SamplingMode, survey: Survey, num_rows: int, window_rows: int, *, most_rounds: int | None = None
) -> None:
    """On a GPU, compile the kernels and capture and time the graphs that rows like the surveyed ones will most likely need.

    survey       if it is empty, only its `shares_prefix` counts
    num_rows     number of input rows of the job
    window_rows  number of them that are ordered together, by predicted output
    most_rounds  after the job's last row began, its rows end within this many rounds; None: unknown
    """
    if engine.target.device.type == "cuda":
        expected = survey.expected_rows(num_rows, window_rows)
        engine.prepare(mode, shared=survey.shares_prefix, most_rounds=most_rounds, expected=expected)


def load_weights(job: JobModel, *, summed: bool = False) -> tuple[Target, Any]:
    """The target, and the drafter's weights, both in the device's memory. summed: compute the target's `weight_sums` too."""
    ranks = None if job.group is None else job.group.collectives
    target = Target.load(
        job.folder, job.spec, dtype=job.dtype, device=job.device, dummy=job.dummy, ranks=ranks, adapter=job.adapter,
        adapters=job.adapters, summed=summed,
    )
    return target, job.drafter.load(dtype=job.dtype, device=job.device)


def rewrite_weights(job: JobModel, target: Target, folder: Path) -> None:
    """Replace the target's weights, or a rank's part of them, in place by those of a folder. Raises as `Target.rewrite`."""
    with Checkpoint(folder, job.spec, dtype=job.dtype, device=job.device) as weights:
        target.rewrite(adapted(weights, job.adapter, job.spec))


def build_engine(
    config: RunConfig, target: Target, drafter: Drafter, batch: PackedBatch, *, tokenizer: Tokenizer | None = None,
    lead: Lead | None = None, vocabulary: TokenSymbols | None = None, expanding: Expanding | None = None,
    defers_text: bool = False, call_parser: CallParser | None = None, token_ids: tuple[int, ...] = (),
) -> Engine:
    """The engine for these settings, on the target's device; nothing is captured yet.

    lead         set if this process leads several ranks that compute the target together
    vocabulary   set if rows may have constraints
    expanding    set if rows may have lazy constraints
    defers_text  leave the decoding of text to the maker of the table (`Completion.num_undecoded`)
    call_parser  finds the tool calls in answers; None: calls stay text
    token_ids    of a task that reads logits: of these tokens
    """
    ablation, task, adaptive = config.ablation, task_of(config), config.draft.adaptive is not False
    assert batch.decodes is task.decodes, "the batch was planned for another job"
    workers = 1 if config.cluster.workers == AUTO else config.cluster.workers
    num_top = task.num_top(config.output)
    num_top = None if num_top is None else min(num_top, target.spec.vocab_size)
    encoder, prepared = target.image_encoder, prepared_images(target.spec, batch.max_len, workers)
    kept = kept_images(batch.prefill_tokens, batch.max_len)
    if task.decodes:
        features: Features = RowFeatures(
            decode=tokenizer.decode if tokenizer else None,
            defers_text=defers_text,
            num_top=num_top,
            symbols=vocabulary,
            expanding=expanding,
            call_parser=call_parser,
            image_encoder=encoder,
            kept_images=kept,
            prepared=prepared,
        )
    else:
        features = FEATURES[task.reads_of(config.output)](num_top or 0, token_ids)
        features = features if encoder is None or prepared is None else WithImages(features, encoder, kept, prepared)
    return Engine(
        target,
        drafter,
        batch,
        device=target.device,
        options=RoundOptions(
            coupled=config.draft.coupled is not False,
            synthetic=config.draft.synthetic_kinds,
            row_lengths=adaptive and config.draft.lengths == "auto" and target.device.type == "cuda",
            argmax=ablation.argmax,
            uniform_slots=ablation.uniform_slots,
        ),
        features=features,
        eos_ids=frozenset(target.spec.eos_ids) | frozenset(tokenizer.eos_ids if tokenizer else ()),
        refill_dead=ablation.dead_rows,
        adaptive=adaptive,
        prefill_graphs=ablation.prefill_graphs and target.image_encoder is None,  # what images bring to a pass has no fixed shape
        expert_correlation=config.packing.expert_correlation,
        lead=lead,
    )


def prepared_images(spec: ModelSpec, max_len: int, workers: int = 1) -> PreparedImages | None:
    """Makes the pixels of rows of at most max_len tokens; None without images. workers: of the run, which share the CPUs."""
    if spec.vision is None:
        return None
    row_bytes = 3 * max_len * spec.vision.processor.most_token_pixels
    return PreparedImages(longest_row=(max_len, row_bytes), num=num_processes(workers))


def expanding_of(job: Job) -> Expanding | None:
    """Computes states of lazy automata; None in a job without structured output."""
    if job.admission.constraints is None:
        return None
    return Expander(job.admission.constraints.compiler.job)


def vocabulary_of(job: Job) -> TokenSymbols | None:
    """The symbols of the vocabulary's tokens, which automata read; None in a job without structured output."""
    return None if job.admission.constraints is None else job.admission.constraints.compiler.vocabulary


def usual_mode(job: Job) -> SamplingMode:
    """The usual sampling mode of a job's rows, from its keys and its schema columns; rows that need more get their own graphs."""
    settings, constraints = job.admission.settings, job.admission.constraints
    params = settings.sampling(settings.values({}), {})
    constrained = asked_by(job.config, job.columns) is not None
    may_hold = constraints is not None and constraints.of_job_may_hold
    return SamplingMode.of(params, job.config.decode.min_new_tokens, constrained=constrained, may_hold=may_hold)
