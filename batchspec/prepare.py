"""A job before it runs: all checks, the shape of its batch, its engine. Nothing here writes to the output folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from batchspec.adapt.limits import check_head, check_weights, memory_bytes
from batchspec.batch.automata import AutomataRoom
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.config.schema import RunConfig
from batchspec.config.values import logit_bias
from batchspec.dataset.columns import ColumnMap, check_ids, map_columns
from batchspec.dataset.reader import Source, open_source
from batchspec.dataset.schema import output_schema
from batchspec.distributed.group import Group
from batchspec.draft.base import Drafter
from batchspec.draft.spec import DrafterSpec, open_drafter
from batchspec.engine.engine import Engine
from batchspec.engine.lockstep import Lead
from batchspec.engine.messages import Build, Calibrate, Load, Scales
from batchspec.engine.round import RoundOptions
from batchspec.errors import CapacityError, ConfigError
from batchspec.lazy_automaton import Expanding
from batchspec.model.blocks.base import Shard
from batchspec.model.files import ModelFiles
from batchspec.model.hub import find_model
from batchspec.model.kv_calibration import check_fp8_kv, give_scales
from batchspec.model.kv_scales import KVScales
from batchspec.model.lora import Adapter, adapted, open_adapter
from batchspec.model.lora_products import AdapterSet, AdapterSource
from batchspec.model.one_order import in_one_order
from batchspec.model.shard import part_of
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target, resolve_dtype
from batchspec.model.tokenizer import Tokenizer
from batchspec.model.weights import Checkpoint, judge_model
from batchspec.packing.admit import Admission
from batchspec.packing.constraints import Constraints, asked_by
from batchspec.packing.cost import Rates, device_rates
from batchspec.packing.planner import PAGE_SIZE, Demand, choose_batch, free_memory
from batchspec.packing.survey import Survey
from batchspec.records import Completion, PackedBatch, Request, SamplingParams
from batchspec.report.progress_bar import ProgressBar
from batchspec.runstate.job_folder import default_shard_rows
from batchspec.structured.expander import Expander
from batchspec.text import counted
from batchspec.token_automaton import TokenSymbols
from batchspec.tuning.table import table_in_use

SURVEY_ROWS = 512
"""Number of rows that are surveyed to choose the shape of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """The target and the drafter of a job, checked. No weight is read yet."""

    config: RunConfig
    files: ModelFiles
    spec: ModelSpec
    """Of the part that this process computes, if there is a group."""
    device: torch.device
    dtype: torch.dtype
    drafter: DrafterSpec[Any]
    """Its checkpoint is judged, its weights are not read."""
    group: Group | None = None
    """The processes that compute the target together; None: this one alone."""
    adapter: Adapter | None = None
    """The adapter of all rows: what fits is merged into the target's weights when they are loaded."""
    adapters: AdapterSource | None = None
    """The adapters that are not merged: of all rows, or of the rows that name one."""

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def named_adapters(self) -> Mapping[str, Adapter]:
        """Those of model.adapters."""
        own = self.adapters
        return dict(zip(own.names, own.adapters, strict=True)) if isinstance(own, AdapterSet) and own.names else {}

    @property
    def dummy(self) -> bool:
        """Weights are noise."""
        return self.config.model.load_format == "dummy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobModel):
    """A job whose checks have all passed."""

    source: Source
    columns: ColumnMap
    tokenizer: Tokenizer | None
    admission: Admission
    kv_scales: KVScales | None = None
    """Those that an earlier run kept in the output folder, with cache.dtype=fp8."""

    @property
    def shard_rows(self) -> int:
        return self.config.output.shard_rows or default_shard_rows(self.source.num_rows)


def open_job(
    config: RunConfig, source: Source | None = None, *, tokenizer: Tokenizer | None = None, fetch: bool = True, here: bool = True,
    group: Group | None = None,
) -> Job:  # fmt: skip
    """Check input, model and drafter, their weights by the files' headers. Raises ConfigError, InputError or CheckpointError.

    source     replaces the dataset at input.path
    tokenizer  replaces the model folder's own
    fetch      False: weights on the hub are not downloaded. All checks come before a download
    here       False: the job will run on another machine, whose devices are unknown
    group      the processes that compute the target together
    """
    source = source or open_source(config.input)
    columns = map_columns(source.schema, config.input.columns)
    output_schema(source.schema, columns, config.output)
    check_ids(source, columns)
    model = open_model(config, here=here, group=group)
    if config.model.adapters and columns.get("adapter") is None:
        raise ConfigError(
            f"model.adapters={{{','.join(config.model.adapters)}}}: the input has no column that names the adapter of each row; "
            "map one, input.columns.adapter=COLUMN, or give an adapter of all rows as model.adapter"
        )
    tokenizer = tokenizer or open_tokenizer(model.folder, config, columns)
    job = job_of(model, source, columns, tokenizer)
    if fetch:
        fetch_weights(model)
    return job


def job_of(
    model: JobModel, source: Source, columns: ColumnMap, tokenizer: Tokenizer | None, constraints: Constraints | None = None
) -> Job:
    """The job of this model over this input; constraints as of `Admission`. Raises ConfigError where their configurations do not
    fit each other.
    """
    config = model.config
    admission = Admission(config, source=source, columns=columns, spec=model.spec, tokenizer=tokenizer, constraints=constraints)
    output_schema(source.schema, columns, config.output, channels=admission.has_channels)
    of_model = {item.name: getattr(model, item.name) for item in fields(model)}
    return Job(**of_model, source=source, columns=columns, tokenizer=tokenizer, admission=admission)


def fetch_weights(model: JobModel) -> None:
    """Download what the hub has and this machine lacks. Raises CheckpointError."""
    if not model.dummy:
        model.files.fetch()
    model.drafter.fetch()


def open_model(config: RunConfig, *, here: bool = True, group: Group | None = None) -> JobModel:
    """Check model and drafter, arguments as of `open_job`. Raises ConfigError or CheckpointError."""
    assert config.model.path is not None
    model, dummy = find_model(config.model.path, config.model.revision), config.model.load_format == "dummy"
    spec = load_spec(model.folder) if dummy else judge_model(model)
    adapter, adapters = open_adapters(config, spec)
    device = choose_device(config.device if here else "cpu")
    if config.cache.dtype == "fp8":
        spec = spec.with_fp8_kv()
        check_fp8_kv("calibrate" if dummy else config.cache.scales, spec, model, device)
    if here and config.draft.adaptive and device.type == "cpu":
        raise ConfigError("draft.adaptive=true goes by times measured on a GPU, and this job runs on the CPU; remove the key")
    dtype = resolve_dtype(config.model.dtype, spec, device)
    spec = spec.on(device, dtype, config.model.activations)
    if config.decode.deterministic:
        spec = in_one_order(spec, device, dtype, here=here)
        if adapters is not None and dtype is not torch.float64:
            raise ConfigError(
                "decode.deterministic=true with LoRA adapters that are not merged (model.adapters, or FP8 and MXFP4 weights) is "
                "not built: their sums depend on the batch; remove one, or set model.dtype=float64"
            )
    drafter = open_drafter(config, spec)
    check_head(config.draft, drafter.head, spec)
    spec = part_of_group(spec.with_lora(None if adapters is None else adapters.shape), group)
    return JobModel(
        config=config, files=model, spec=spec, device=device, dtype=dtype, drafter=drafter, group=group, adapter=adapter,
        adapters=adapters,
    )  # fmt: skip


def open_adapters(config: RunConfig, spec: ModelSpec) -> tuple[Adapter | None, AdapterSet | None]:
    """The adapter of all rows (model.adapter) or None, and the adapters that are not merged into the weights or None.

    Raises ConfigError or CheckpointError.
    """
    model = config.model
    if model.adapter is not None:
        own = open_adapter(model.adapter, spec)
        if own.kept and config.draft.adapt.every_shards:
            raise ConfigError(
                f"model.adapter={model.adapter} changes FP8 or MXFP4 weights and is not merged, and draft.adapt.every_shards="
                f"{config.draft.adapt.every_shards} with such an adapter is not built; remove one"
            )
        return own, AdapterSet((own,)) if own.kept else None
    if not model.adapters:
        return None, None
    several = (open_adapter(path, spec, key=f"model.adapters.{name}", per_row=True) for name, path in model.adapters.items())
    return None, AdapterSet(tuple(several), names=tuple(model.adapters))


def part_of_group(spec: ModelSpec, group: Group | None) -> ModelSpec:
    """What this process computes of a model; without a group all of it. Raises ConfigError for a model that cannot be cut so."""
    return spec if group is None else part_of(spec, Shard(group.rank, group.ranks))


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no GPU on this machine; use device=auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def open_tokenizer(folder: Path, config: RunConfig, columns: ColumnMap) -> Tokenizer | None:
    """The folder's tokenizer; None if it has none and the input is prompt_ids."""
    if columns.prompt_kind == "prompt_ids" and not (folder / "tokenizer.json").is_file():
        return None
    template = config.model.chat_template
    return Tokenizer(folder, Path(template) if template else None, date=config.input.template_date)


def device_facts(device: torch.device) -> str:
    """What decides how a kernel is launched: the kind of device, and the software."""
    kind = "cpu"
    if device.type == "cuda":
        own = torch.cuda.get_device_properties(device)
        kind = f"{own.name} with {own.multi_processor_count} SMs"
    return f"{kind}, torch {torch.__version__}"


def load_message(device: torch.device) -> Load:
    """What the leader of a group tells the others once the model's files are there. Raises ConfigError as `table_in_use`."""
    return Load(device_facts(device), table_in_use(device))


def weight_bytes(job: JobModel) -> int:
    """Bytes of the weights of target and drafter in the device's memory."""
    return job.spec.weight_bytes(job.dtype) + job.drafter.weight_bytes(dtype=job.dtype, device=job.device)


def learning_bytes(job: Job, max_len: int) -> int:
    """Bytes that the drafter needs to learn while the job runs, whose rows have up to `max_len` tokens."""
    adapting = memory_bytes(
        job.config.draft, job.drafter.head, job.spec, device=job.device, dtype=job.dtype, max_len=max_len
    )  # fmt: skip
    return job.drafter.state_bytes() + adapting


def automata_bytes(job: Job) -> int:
    """Bytes of the device's tables and masks of automata; 0 in a job without structured output."""
    return 0 if job.admission.constraints is None else AutomataRoom(num_tokens=job.spec.vocab_size).nbytes


def free_bytes(job: JobModel, *, loaded: bool = False) -> int:
    """Bytes of memory for K/V pages and all else besides the weights; in a group those of the rank that has least.

    loaded  the weights, the drafter's included, are in memory already
    """
    if loaded and job.device.type == "cuda":
        torch.cuda.empty_cache()  # memory that loading used and released counts as free
    own = free_memory(job.device, weights=0 if loaded else weight_bytes(job))
    return own if job.group is None else job.group.least(own)


def plan_batch(job: Job, demand: Demand, rates: Rates, *, loaded: bool = False) -> PackedBatch:
    """The shape of the batch on this machine. Raises CapacityError if not even one row fits.

    loaded  the weights, the drafter's included, are in memory already
    """
    shape, taken = job.drafter.shape, learning_bytes(job, demand.max_tokens) + automata_bytes(job)
    return choose_batch(
        job.config.packing,
        job.spec,
        rates,
        demand,
        device=job.device,
        dtype=job.dtype,
        draft_len=shape.num_verified,
        num_lookahead_slots=shape.num_lookahead_slots,
        draft_layers=job.drafter.kv_layers(job.dtype, PAGE_SIZE),
        free_bytes=max(0, free_bytes(job, loaded=loaded) - taken),
    )


def survey_first(job: Job) -> Survey:
    """Admit the first SURVEY_ROWS rows, as a sample of all. Their automata are compiled while the model is loaded."""
    seen = Survey()
    for shard in job.source.shards(job.shard_rows):
        seen.add(shard.table.num_rows, _begun(job.admission, job.admission.admit(shard)))
        if seen.num_rows >= SURVEY_ROWS:
            break
    return seen


def _begun(admission: Admission, admitted: Iterable[Request | Completion]) -> Iterator[Request | Completion]:
    for entry in admitted:
        if isinstance(entry, Request):
            admission.begin(entry)
        yield entry


def make_engine(job: Job, seen: Survey, progress: ProgressBar) -> Engine:
    """The engine for a job whose first rows were seen: see `load_engine`. Texts are left to who makes the tables."""
    demand = seen.demand(job.source.num_rows, job.admission.max_len)
    return load_engine(job, demand, progress, shares_prefix=seen.shares_prefix, defers_text=True)


def load_engine(
    job: Job, demand: Demand, progress: ProgressBar, *, shares_prefix: bool = False, defers_text: bool = False
) -> Engine:
    """Load the weights, choose the shape from the memory that is left, set up the engine; says each step on the progress line.

    shares_prefix  rows share a prefix of many pages
    defers_text    as of `Engine`
    """
    config = job.config
    dtype = str(job.dtype).removeprefix("torch.")
    check_memory(job)
    on = job.device.type if job.group is None else f"{job.group.ranks} x {job.device.type}"
    progress.phase(f"loading {config.model.path} in {dtype} on {on}")
    lead = None if job.group is None else Lead(job.group.channel)
    if lead is not None:
        lead.send(load_message(job.device))
    progress.start_up.done("earlier runs")
    target, weights = load_weights(job)
    progress.start_up.done("weights")
    if job.spec.fp8_kv:
        source = give_scales(
            target, job.kv_scales, config.cache.scales, None if job.dummy else job.folder, job.tokenizer,
            tell=lambda prompts: None if lead is None else lead.send(Calibrate(prompts)),
        )  # fmt: skip
        if lead is not None and target.all_kv_scales is not None:
            lead.send(Scales(target.all_kv_scales.tolist()))
        progress.phase(f"K and V in e4m3, scales {source}")
    check_weights(config.draft, job.drafter.trainable(weights))
    batch = plan_batch(job, demand, device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises), loaded=True)
    drafter = job.drafter.build(weights, target, slots=batch.num_slots)
    progress.phase(
        f"{counted(batch.num_slots, 'slot')}, {batch.num_pages} pages of {batch.page_size} tokens, "
        f"rows of at most {batch.max_len} tokens, draft={drafter.name} K={drafter.max_len}"
    )
    if lead is not None:
        lead.send(Build(batch, vocabulary_of(job)))
    engine = build_engine(
        config, target, drafter, batch, tokenizer=job.tokenizer, lead=lead, vocabulary=vocabulary_of(job),
        expanding=expanding_of(job), defers_text=defers_text,
    )  # fmt: skip
    if job.device.type == "cuda":
        progress.phase("compiling kernels and capturing the graphs of the rounds")
        progress.start_up.done("batch and drafter")
        engine.prepare(usual_mode(job), shared=config.decode.n > 1 or shares_prefix)
        progress.start_up.done("other preparations", engine.planner.seconds)
    return engine


def load_weights(job: JobModel) -> tuple[Target, Any]:
    """The target, and the drafter's weights, both in the device's memory."""
    ranks = None if job.group is None else job.group.collectives
    target = Target.load(
        job.folder, job.spec, dtype=job.dtype, device=job.device, dummy=job.dummy, ranks=ranks, adapter=job.adapter,
        adapters=job.adapters,
    )  # fmt: skip
    return target, job.drafter.load(dtype=job.dtype, device=job.device)


def rewrite_weights(job: JobModel, target: Target, folder: Path) -> None:
    """Replace the target's weights, or a rank's part of them, in place by those of a folder. Raises as `Target.rewrite`."""
    with Checkpoint(folder, job.spec, dtype=job.dtype, device=job.device) as weights:
        target.rewrite(adapted(weights, job.adapter, job.spec))


def build_engine(
    config: RunConfig, target: Target, drafter: Drafter, batch: PackedBatch, *, tokenizer: Tokenizer | None = None,
    lead: Lead | None = None, vocabulary: TokenSymbols | None = None, expanding: Expanding | None = None,
    defers_text: bool = False,
) -> Engine:  # fmt: skip
    """The engine that these settings ask for, on the target's device; nothing is captured yet.

    lead, vocabulary, expanding, defers_text  as of `Engine`
    """
    ablation, scores = config.ablation, config.decode.max_new_tokens == 0
    num_top = config.output.prompt_logprobs if scores else config.output.logprobs
    return Engine(
        target,
        drafter,
        batch,
        device=target.device,
        options=RoundOptions(
            logprobs=None if num_top is None else min(num_top, target.spec.vocab_size),
            scores=scores,
            coupled=config.draft.coupled is not False,
            synthetic=tuple(config.draft.synthetic) if config.draft.synthetic else None,
            argmax=ablation.argmax,
            uniform_slots=ablation.uniform_slots,
        ),
        decode=tokenizer.decode if tokenizer else None,
        defers_text=defers_text,
        eos_ids=frozenset(target.spec.eos_ids) | frozenset(tokenizer.eos_ids if tokenizer else ()),
        refill_dead=ablation.dead_rows,
        adaptive=config.draft.adaptive is not False,
        overlap=ablation.overlap,
        expert_correlation=config.packing.expert_correlation,
        lead=lead,
        vocabulary=vocabulary,
        expanding=expanding,
    )


def expanding_of(job: Job) -> Expanding | None:
    """Computes states of lazy automata; None in a job without structured output."""
    if job.admission.constraints is None:
        return None
    return Expander(job.admission.constraints.compiler.job)


def vocabulary_of(job: Job) -> TokenSymbols | None:
    """The symbols of the vocabulary that automata read; None in a job without structured output."""
    return None if job.admission.constraints is None else job.admission.constraints.compiler.vocabulary


def check_memory(job: JobModel) -> None:
    """Raises CapacityError for weights that the device could not hold if it held nothing else."""
    weights = weight_bytes(job)
    on_gpu = job.device.type == "cuda"
    memory = torch.cuda.mem_get_info(job.device)[1] if on_gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights > memory:
        raise CapacityError(
            f"model.path={job.config.model.path}: the weights take {weights / 1e9:,.1f} GB as {job.dtype}, "
            f"and this {'GPU' if on_gpu else 'machine'} has {memory / 1e9:,.1f} GB of memory; "
            "use a smaller model, another model.dtype or more GPUs for it (cluster.tensor_parallel)"
        )


def usual_mode(job: Job) -> SamplingMode:
    """How the rows of a job choose tokens, by its keys and columns of schemas; rows that ask for more get graphs of their own."""
    decode, constraints = job.config.decode, job.admission.constraints
    params = SamplingParams(
        temperature=decode.temperature,
        top_k=decode.top_k,
        top_p=decode.top_p,
        min_p=decode.min_p,
        repetition_penalty=decode.repetition_penalty,
        presence_penalty=decode.presence_penalty,
        frequency_penalty=decode.frequency_penalty,
        logit_bias=tuple(logit_bias(decode.logit_bias).items()),
    )
    constrained = asked_by(job.config, job.columns) is not None
    waits = constraints is not None and constraints.of_job_waits
    return SamplingMode.of(params, decode.min_new_tokens, constrained=constrained, waits=waits)
