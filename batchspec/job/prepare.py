"""A job before its weights are read: all its checks. Nothing here writes to the output folder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from batchspec.checkpoint.config_values import has_file
from batchspec.checkpoint.files import ModelFiles
from batchspec.checkpoint.hub import find_model
from batchspec.checkpoint.reranker import compared_ids
from batchspec.checkpoint.sentence_transformers import read_embedding_files, text_limit
from batchspec.checkpoint.weight_sums import SumsOfJob
from batchspec.config.checks import AUTO
from batchspec.config.draft_auto import with_drafter
from batchspec.config.schema import InputConfig, RunConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.data.dataset.files import MemoryFile
from batchspec.data.dataset.input_paths import check_not_into
from batchspec.data.dataset.job_rows import JobOutput, JobRows, open_job_files, rows_of_job
from batchspec.data.dataset.reader import Source, open_source
from batchspec.data.dataset.row_ids import NUMBER_THEM, OF_SAMPLES, check_ids
from batchspec.data.dataset.schema import columns_read, output_schema
from batchspec.data.dataset.shard_layout import ShardLayout
from batchspec.data.runstate.finished_job import FinishedJob
from batchspec.data.runstate.manifest import default_shard_rows
from batchspec.distributed.group import Group
from batchspec.draft.spec import DrafterSpec, open_drafter
from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.images import with_images, with_vision
from batchspec.kernels.common.card import assumed_card, card_of
from batchspec.model.deterministic import in_one_order
from batchspec.model.dtype import DTYPES, resolve_dtype
from batchspec.model.kv_calibration import check_e4m3, check_fp8_kv
from batchspec.model.layers.attention.kv_scales import KVScales
from batchspec.model.layers.base import Shard
from batchspec.model.lora import Adapter, open_adapter
from batchspec.model.lora_products import AdapterSet, AdapterSource
from batchspec.model.shard import part_of
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.weights import judge_model
from batchspec.packing.admit import Admission
from batchspec.packing.constraints import Constraints
from batchspec.packing.input_notes import input_notes
from batchspec.packing.model_notes import model_notes
from batchspec.packing.row_logprobs import with_logprobs_of_rows
from batchspec.packing.row_templates import RowTemplates
from batchspec.packing.survey import Survey
from batchspec.packing.unused import (
    check_columns,
    check_keys_of_engine,
    check_keys_of_input,
    check_keys_of_model,
    check_samples,
)
from batchspec.process.load_progress import count_step
from batchspec.process.out_of_memory import admitting_rows
from batchspec.records import Completion, Request
from batchspec.tasks.auto import may_embed, with_task
from batchspec.tasks.base import EmbeddingFiles, ModelFacts, Needs
from batchspec.tasks.registry import task_of
from batchspec.text.tokenizer import Tokenizer
from batchspec.tuning.cards import check_card

SURVEY_ROWS = 512
"""Number of rows that are surveyed to choose the shape of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """The target and the drafter of a job, checked. No weight has been read."""

    config: RunConfig
    """Its draft.name is a drafter, also where the job's is auto."""
    files: ModelFiles
    spec: ModelSpec
    """The target's spec; with a group, the part that this process computes."""
    device: torch.device
    dtype: torch.dtype
    drafter: DrafterSpec[Any]
    """The drafter's spec: its checkpoint is checked, its weights are not read."""
    why_drafter: str = ""
    """Why draft=auto took this drafter; empty if the configuration named it."""
    embedding: EmbeddingFiles = field(default_factory=EmbeddingFiles)
    """What its files say about embeddings, for task=embed."""
    token_ids: tuple[int, ...] = ()
    """The tokens whose logits are read, for task=rerank."""
    why_task: str = ""
    """Why task=auto took the task; empty if the configuration named it, or an answer is decoded."""
    group: Group | None = None
    """The processes that compute the target together; None: this one alone."""
    adapter: Adapter | None = None
    """The adapter of all rows; what fits is merged into the target's weights when they are loaded."""
    adapters: AdapterSource | None = None
    """The adapters that are not merged, of all rows or of the rows that name one."""

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def named_adapters(self) -> Mapping[str, Adapter]:
        """The adapters of model.adapters, by name."""
        own = self.adapters
        return dict(zip(own.names, own.adapters, strict=True)) if isinstance(own, AdapterSet) and own.names else {}

    @property
    def dummy(self) -> bool:
        """Whether weights are random (model.load_format=dummy)."""
        return self.config.model.load_format == "dummy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobModel):
    """A job whose checks have all passed."""

    source: Source
    columns: ColumnMap
    tokenizer: Tokenizer | None
    admission: Admission
    kv_scales: KVScales | None = None
    """With cache.dtype=fp8: the scales that an earlier run wrote to the output folder."""
    layout: ShardLayout
    """Which rows each shard holds: those of a new job, or of the job in the output folder (runner/job_run.py)."""
    note_of_rows: str = ""
    """Which rows of an earlier job are the input (input.from_job); empty: the input is another one."""
    sums: SumsOfJob | None = None
    """What every load of the weights is compared with; None: nothing is compared."""


def open_job(
    config: RunConfig, source: Source | JobRows | None = None, *, tokenizer: Tokenizer | None = None, fetch: bool = True,
    on_this_machine: bool = True, group: Group | None = None,
) -> Job:
    """Check input, model and drafter, their weights by the files' headers. Raises ConfigError, InputError or CheckpointError.

    source           replaces the dataset at input.path, or of input.from_job
    tokenizer        replaces the model folder's own
    fetch            False: do not download weights from the hub. All checks come before a download
    on_this_machine  False: the job will run on another machine, whose devices are unknown
    group            the processes that compute the target together
    """
    source, input, note = open_input(config, source)
    templates = RowTemplates(input, task_of(config).texts)
    columns = templates.map_columns(source.schema, requests=source.filled_by_requests is not None)
    output_schema(source.schema, columns, config.output, task=task_of(config))
    source = source.reading(columns_read(source.schema, columns, config.output))
    check_ids(source, columns, NUMBER_THEM if input.from_job is None else OF_SAMPLES)
    config, logprobs_of_all = with_logprobs_of_rows(config, columns, source)
    config, columns = with_images(config, columns)
    model = open_model(config, on_this_machine=on_this_machine, group=group)
    config = model.config
    if config.model.adapters and columns.get("adapter") is None:
        raise ConfigError(
            f"model.adapters={{{','.join(config.model.adapters)}}}: the input has no column that names the adapter of each row; "
            "map one, input.columns.adapter=COLUMN, or give an adapter of all rows as model.adapter"
        )
    tokenizer = tokenizer or open_tokenizer(model.folder, config, columns)
    job = job_of(model, source, columns, tokenizer, templates=templates, logprobs_of_all=logprobs_of_all)
    check_keys_of_input(config, columns, source)
    check_keys_of_engine(config)
    check_samples(config, columns, source)
    if fetch:
        fetch_weights(model)
    return replace(job, note_of_rows=note)


def open_input(config: RunConfig, given: Source | JobRows | None) -> tuple[Source, InputConfig, str]:
    """The input's rows, the keys of `input` with the columns of these rows, and a note for the user.

    given  replaces what the keys name
    Raises ConfigError, InputError, OutputError for an earlier job that cannot be read, and StorageError.
    """
    if given is None and config.input.from_job is not None:
        given = _rows_of_folder(config.input.from_job, task_of(config).with_chats(config.input), config.output.dir)
    if isinstance(given, JobRows):
        return given.source, given.input, given.note
    return given or open_source(config.input, config.output.dir), config.input, ""


def open_output(output: JobOutput, config: RunConfig) -> JobRows:
    """The rows of an earlier job for a job of this configuration. Raises as `open_input`."""
    input = output.keys(task_of(config).with_chats(config.input))
    if output.folder is None:
        return rows_of_job([MemoryFile(output.table())], {}, input)
    return _rows_of_folder(output.folder, input, config.output.dir)


def _rows_of_folder(folder: str, input: InputConfig, output_dir: str | None) -> JobRows:
    finished = FinishedJob(folder, "input.from_job")
    if output_dir is not None:
        check_not_into(folder, output_dir)
    rows = rows_of_job(open_job_files(finished.files), finished.config, input)
    finished.check_unchanged()
    return rows


def job_of(
    model: JobModel, source: Source, columns: ColumnMap, tokenizer: Tokenizer | None, constraints: Constraints | None = None,
    templates: RowTemplates | None = None, *, logprobs_of_all: bool = True,
) -> Job:
    """The job of this model over this input. Raises ConfigError where their configurations do not fit each other, and InputError
    for a column that no row can use.

    constraints  compiler to share with another job of the same configuration and model; None: make one
    templates    those that mapped the columns; None: make them
    logprobs_of_all  whether rows that do not ask for log-probabilities have some too, if the configuration says so
    """
    config = model.config
    check_columns(config, columns, source)
    facts = ModelFacts(
        hidden_size=model.spec.hidden_size, labels=model.spec.labels, pad_ids=model.spec.pad_ids, embedding=model.embedding,
        token_ids=model.token_ids,
    )
    admission = Admission(
        config, task_of(config).of_model(config, facts), source=source, columns=columns, spec=model.spec, tokenizer=tokenizer,
        constraints=constraints, templates=templates, logprobs_of_all=logprobs_of_all,
    )
    check_keys_of_model(config, model.spec, thinks=admission.settings.think is not None)
    admission.schema_of(source.schema, columns, config.output)  # raises for columns that have no place
    of_model = {item.name: getattr(model, item.name) for item in fields(model)}
    layout = ShardLayout.even(source.num_rows, config.output.shard_rows or default_shard_rows(source.num_rows))
    return Job(**of_model, source=source, columns=columns, tokenizer=tokenizer, admission=admission, layout=layout)


def notes(job: Job) -> list[tuple[str, str]]:
    """(label, line) of each thing about the model's files and the input that the user should know."""
    of_model = model_notes(job.config.decode, job.spec, job.admission.settings.end_ids, job.admission.task)
    of_rows = [("input", job.note_of_rows)] if job.note_of_rows else []
    if job.drafter.note:
        of_rows.append(("draft", job.drafter.note))
    if job.why_task:
        said = job.admission.task.note()
        of_rows.append(("task", f"task={job.config.task}, taken by task=auto: {job.why_task}; {said}"))
    return [*of_rows, *of_model, *input_notes(job.config, job.admission, job.source, job.tokenizer)]


def fetch_weights(model: JobModel) -> None:
    """Download the files that this machine lacks. Raises CheckpointError."""
    if not model.dummy:
        model.files.fetch()
    model.drafter.fetch()


def open_model(config: RunConfig, *, on_this_machine: bool = True, group: Group | None = None) -> JobModel:
    """Check model and drafter. Raises ConfigError or CheckpointError.

    on_this_machine  False: the job will run on another machine, whose devices are unknown
    group            the processes that compute the target together
    """
    assert config.model.path is not None
    model, dummy = find_model(config.model.path, config.model.revision), config.model.load_format == "dummy"
    spec = load_spec(model.folder)
    embedding = read_embedding_files(model.folder, asked=config.task == "embed") if may_embed(config, spec.labels) else None
    config, why_task = with_task(
        config, spec.labels, embedding, has_output=spec.has_output, most_tokens=spec.max_len
    )
    embedding = replace(embedding or EmbeddingFiles(), text_tokens=text_limit(model.folder))
    token_ids = compared_ids(model.folder, spec.vocab_size, task_of(config).tokens_compared)
    if task_of(config).needs is Needs.STATES:
        spec = spec.without_output()
    if not dummy:
        spec = judge_model(model, spec)
    spec = spec.quantised(config.model.quantize)
    device = choose_device(config.device if on_this_machine else "cpu")
    spec = with_vision(config, spec, model)
    if config.draft.train.kind is not None and spec.vision is not None:
        raise ConfigError(
            f"draft.train.kind={config.draft.train.kind} in a job with images is not supported: a training reads none; choose "
            "another drafter, or leave the images out (input.columns.images, model.vision)"
        )
    config, why_drafter = with_drafter(config, has_mtp=spec.mtp is not None)
    adapter, adapters = open_adapters(config, spec)
    if config.cache.dtype == "fp8":
        spec = spec.with_fp8_kv()
        check_fp8_kv(config.cache.scales, spec, None if dummy else model, device)
    if config.draft.cache_dtype == "fp8":
        check_e4m3(device, "draft.cache_dtype")
    if on_this_machine and config.draft.adaptive and device.type == "cpu":
        raise ConfigError("draft.adaptive=true uses times measured on a GPU, and this job runs on the CPU; remove the key")
    dtype = resolve_dtype(config.model.dtype, spec, device)
    spec = with_states(spec.on(device, dtype, config.model.activations), config.cache.state_dtype, dtype)
    if config.decode.deterministic:
        spec = in_one_order(spec, device, dtype, on_this_machine=on_this_machine)
        if adapters is not None and dtype is not torch.float64:
            raise ConfigError(
                "decode.deterministic=true with LoRA adapters that are not merged (model.adapters; FP8, FP4 or INT4 weights) "
                "is not supported: their sums depend on the batch; remove one, or set model.dtype=float64"
            )
    drafter = open_chosen(config, spec, why_drafter)
    spec = spec.with_lora(None if adapters is None else adapters.shape)
    if group is None:
        check_cut(config, spec, drafter)
    spec = part_of_group(spec, group)
    drafter = drafter.of_rank(spec.shard)
    return JobModel(
        config=config, files=model, spec=spec, device=device, dtype=dtype, drafter=drafter, why_drafter=why_drafter,
        why_task=why_task, embedding=embedding, token_ids=token_ids, group=group,
        adapter=adapter, adapters=adapters,
    )


def open_chosen(config: RunConfig, spec: ModelSpec, why: str) -> DrafterSpec[Any]:
    """The drafter of draft.name. Raises ConfigError or CheckpointError, which says so if draft=auto took it, and why."""
    try:
        return open_drafter(config, spec)
    except (ConfigError, CheckpointError) as error:
        if not why:
            raise
        said = f"draft=auto took {config.draft.name}, because {why}: {error}; correct it, or choose draft=lookup"
        raise type(error)(said) from None


def with_states(spec: ModelSpec, state_dtype: str, dtype: torch.dtype) -> ModelSpec:
    """The spec with cache.state_dtype. Raises ConfigError if it has no effect on this model in `dtype`."""
    if state_dtype == "auto":
        return spec
    found = spec.with_state_dtype(DTYPES[state_dtype])
    if found.layer_states(torch.float32, 1, draft_len=0) == spec.layer_states(torch.float32, 1, draft_len=0):
        raise ConfigError(
            f"cache.state_dtype={state_dtype} applies to recurrent layers, and {spec.family} has none; remove the key"
        )
    if dtype is torch.float64:
        raise ConfigError(
            f"cache.state_dtype={state_dtype} has no effect in float64, whose states are in float64 too; remove the key, or set "
            "model.dtype"
        )
    return found


def open_adapters(config: RunConfig, spec: ModelSpec) -> tuple[Adapter | None, AdapterSet | None]:
    """The adapter of all rows (model.adapter) or None, and the adapters that are not merged into the weights or None.

    Raises ConfigError or CheckpointError.
    """
    model = config.model
    if model.adapter is not None:
        own = open_adapter(model.adapter, spec)
        return own, AdapterSet((own,)) if own.kept else None
    if not model.adapters:
        return None, None
    several = (open_adapter(path, spec, key=f"model.adapters.{name}", per_row=True) for name, path in model.adapters.items())
    return None, AdapterSet(tuple(several), names=tuple(model.adapters))


def part_of_group(spec: ModelSpec, group: Group | None) -> ModelSpec:
    """The part of a model that this process computes; without a group all of it. Raises ConfigError if it cannot be cut."""
    return spec if group is None else part_of(spec, Shard(group.rank, group.ranks))


def check_cut(config: RunConfig, spec: ModelSpec, drafter: DrafterSpec[Any]) -> None:
    """Raises ConfigError for a model, or a draft head, that cannot be cut over cluster.tensor_parallel ranks.

    For `plan`, `submit` and warm engines, which have no group: they refuse it before they start a process for a part.
    """
    ranks = config.cluster.tensor_parallel
    if ranks not in (1, AUTO):
        part_of(spec, Shard(0, ranks))
        drafter.of_rank(Shard(0, ranks))


def choose_device(name: str) -> torch.device:
    """The device of `device=NAME`; auto is a GPU if torch sees one, or if a card is assumed.

    Raises ConfigError for a GPU that torch does not see, and for one that is not supported.
    """
    has_gpu = assumed_card() is not None or torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device=cuda: torch sees no GPU on this machine; use device=auto or cpu")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    device = torch.device("cuda")
    check_card(card_of(device))
    return device


def open_tokenizer(folder: Path, config: RunConfig, columns: ColumnMap) -> Tokenizer | None:
    """The folder's tokenizer; None if it has none and the input is prompt_ids."""
    if columns.prompt_kind == "prompt_ids" and not has_file(folder / "tokenizer.json"):
        return None
    template = config.model.chat_template
    return Tokenizer(folder, Path(template) if template else None, date=config.input.template_date)


def survey_first(job: Job, finished: Collection[int] = ()) -> Survey:
    """Admit the first SURVEY_ROWS rows, as a sample of all. Their automata are compiled while the model is loaded.

    finished  shards that need no work: the images of their rows are not begun
    Raises CapacityError if memory runs out.
    """
    survey = Survey(finished=finished)
    with admitting_rows():
        for shard in job.source.shards(job.layout):
            survey.add(shard.table.num_rows, _begun(job.admission, job.admission.admit(shard)))
            if survey.num_rows >= SURVEY_ROWS:
                break
    return survey


def _begun(admission: Admission, admitted: Iterable[Request | Completion]) -> Iterator[Request | Completion]:
    for entry in admitted:
        count_step()
        if isinstance(entry, Request):
            admission.begin(entry)
        yield entry
