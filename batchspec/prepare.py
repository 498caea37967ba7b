"""A job before it runs: every check, the shape of its batch, its engine. Nothing here writes."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from batchspec import __version__
from batchspec.adapt.limits import check_spec, check_weights, memory_bytes
from batchspec.config import RunConfig
from batchspec.decode.engine import Engine
from batchspec.decode.round import RoundOptions
from batchspec.decode.sampling import SamplingMode
from batchspec.draft.base import Drafter, NoDrafter
from batchspec.draft.corpus import Corpus, corpus_bytes, usual_lengths
from batchspec.draft.eagle3 import Eagle3Drafter
from batchspec.draft.formats import HeadSpec
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec, load_pard, read_pard
from batchspec.draft.tree import TreeDrafter, TreeShape, usual_nodes
from batchspec.draft.weights import Head, dummy_head, dummy_spec, head_bytes, load_head, read_head_spec
from batchspec.draft.window import WindowDrafter
from batchspec.errors import ConfigError
from batchspec.io.columns import ColumnMap, check_ids, map_columns
from batchspec.io.folder import default_shard_rows
from batchspec.io.manifest import fingerprint
from batchspec.io.reader import Source, open_source
from batchspec.io.schema import output_schema
from batchspec.model.hub import resolve_model
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target, resolve_dtype
from batchspec.model.tokenizer import Tokenizer
from batchspec.model.weights import weight_files
from batchspec.packing.admit import Admission
from batchspec.packing.cost import Rates, device_rates, weight_bytes
from batchspec.packing.planner import Demand, choose_batch, free_memory
from batchspec.packing.survey import Survey
from batchspec.records import PackedBatch, SamplingParams
from batchspec.report.progress import Progress

SURVEY_ROWS = 512
"""Rows looked at to choose the shape of the batch."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job whose checks have all passed. Nothing is written, no weight is read."""

    config: RunConfig
    source: Source
    columns: ColumnMap
    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer | None
    device: torch.device
    dtype: torch.dtype
    admission: Admission
    head: HeadSpec | PardSpec | None
    """Of draft=eagle3, hybrid and pard: the checkpoint at draft.path, or with model.load=dummy the usual head."""

    @property
    def shard_rows(self) -> int:
        return self.config.output.shard_rows or default_shard_rows(self.source.num_rows)


def open_job(config: RunConfig, source: Source | None = None, *, tokenizer: Tokenizer | None = None, weights: bool = True) -> Job:
    """Look at the input and at the folders of model and drafter; ConfigError, InputError, CheckpointError for what cannot run.

    source     instead of the dataset at input.path
    tokenizer  instead of the model folder's own
    weights    False: the folder need not hold weights
    """
    source = source or open_source(config.input)
    columns = map_columns(source.schema, config.input.columns)
    output_schema(source.schema, columns, config.output)
    check_ids(source, columns)
    assert config.model.path is not None
    folder = resolve_model(config.model.path, config.model.revision)
    spec = load_spec(folder)
    if weights and config.model.load != "dummy":
        weight_files(folder)
    device = choose_device(config.device)
    if config.draft.adaptive and device.type == "cpu":
        raise ConfigError("draft.adaptive=true goes by times measured on a GPU, and this job runs on the CPU; remove the key")
    dtype = resolve_dtype(config.model.dtype, spec, device)
    head = open_head(config, spec)
    tokenizer = tokenizer or open_tokenizer(folder, config, columns)
    admission = Admission(config, source=source, columns=columns, spec=spec, tokenizer=tokenizer)
    return Job(config, source, columns, folder, spec, tokenizer, device, dtype, admission, head)


def open_head(config: RunConfig, spec: ModelSpec) -> HeadSpec | PardSpec | None:
    """The head or model that draft=eagle3, hybrid or pard drafts with, checked, its weights not read; None for other drafters."""
    if config.draft.name not in ("eagle3", "hybrid", "pard"):
        return None
    folder = head_folder(config)
    if config.draft.name == "pard":
        assert folder is not None
        return _open_pard(config, folder, spec)
    if folder is None:
        return dummy_spec(spec, parallel=config.draft.parallel is True)
    head = read_head_spec(folder, spec, aux_layers=config.draft.aux_layers)
    if config.draft.tree.topk > head.draft_vocab_size:
        raise ConfigError(
            f"draft.tree.topk={config.draft.tree.topk} exceeds the {head.draft_vocab_size} draft tokens of the head "
            f"{config.draft.path}; lower it"
        )
    if config.draft.parallel is True and head.mask_token_id is None:
        raise ConfigError(
            f"draft.parallel=true, but the head {config.draft.path} has no mask token: it drafts a chain; use draft.parallel=auto"
        )
    check_spec(config.draft, head, spec)
    return head


def _open_pard(config: RunConfig, folder: Path, spec: ModelSpec) -> PardSpec:
    pard = read_pard(folder, spec)
    if config.draft.parallel is True and pard.mask_token_id is None:
        raise ConfigError(
            f"draft.parallel=true, but {config.draft.path} names no mask token (pard_token): it drafts a chain; use "
            "draft.parallel=auto"
        )
    return pard


def head_folder(config: RunConfig) -> Path | None:
    """The folder of draft.path; None where there is none, which model.load=dummy allows."""
    return None if config.draft.path is None else resolve_model(config.draft.path, key="draft.path")


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no GPU on this machine; use device=auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def open_tokenizer(folder: Path, config: RunConfig, columns: ColumnMap) -> Tokenizer | None:
    """The folder's tokenizer; None where it has none and prompt_ids input needs none."""
    if columns.prompt_kind == "prompt_ids" and not (folder / "tokenizer.json").is_file():
        return None
    template = config.model.chat_template
    return Tokenizer(folder, Path(template) if template else None)


def job_fingerprint(job: Job) -> dict[str, str]:
    """What changes results. Drafter, slots, pages and versions do not, and may differ between the runs of one job."""
    config, decode = job.config, asdict(job.config.decode)
    del decode["opt"]
    schema, think = output_schema(job.source.schema, job.columns, config.output), job.admission.think
    return fingerprint(
        {
            "model.config": (job.folder / "config.json").read_text(encoding="utf-8"),
            "model.weights": "dummy" if config.model.load == "dummy" else weight_files(job.folder).fingerprint,
            "model.tokenizer": None if job.tokenizer is None else job.tokenizer.fingerprint,
            "model.dtype": str(job.dtype).removeprefix("torch."),
            "model.max_len": job.admission.max_len,
            "model.end_ids": sorted(job.admission.end_ids),
            "model.think_tokens": None if think is None else (think.begin_id, think.end_id),
            **{f"decode.{key}": value for key, value in decode.items()},
            "draft.synthetic": config.draft.synthetic,
            "input.files": [(file.name, file.size_bytes, file.num_rows, file.digest) for file in job.source.files],
            "input.columns": dict(sorted(job.columns.names.items())),
            **{f"input.{key}": getattr(config.input, key) for key in ("chat", "overlong", "limit", "template_kwargs")},
            "output.schema": [(field.name, str(field.type)) for field in schema],
            "output.messages": config.output.messages,
            "output.reasoning_in_messages": config.output.reasoning_in_messages,
            "output.logprobs": config.output.logprobs,
        }
    )


def recorded_facts(job: Job) -> dict[str, Any]:
    return {
        "batchspec": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        "model": str(job.config.model.path),
        "drafter": job.config.draft.name,
    }


def load_drafter(job: Job) -> Head | PardModel | None:
    """The weights of a drafter that has some."""
    if job.head is None:
        return None
    folder = head_folder(job.config)
    if isinstance(job.head, PardSpec):
        assert folder is not None
        dummy = job.config.model.load == "dummy"
        return load_pard(folder, job.head, dtype=job.dtype, device=job.device, dummy=dummy)
    if folder is None:
        return dummy_head(job.head, dtype=job.dtype, device=job.device)
    head = load_head(folder, job.spec, dtype=job.dtype, device=job.device, aux_layers=job.config.draft.aux_layers)
    check_weights(job.config.draft, head)
    return head


def make_drafter(config: RunConfig, head: Head | PardModel | None, target: Target, *, slots: int) -> Drafter:
    """The job's drafter for that many slots; `head` from `load_drafter`."""
    draft, opt = config.draft, config.decode.opt
    if draft.name == "none":
        return NoDrafter()
    if draft.name == "lookup":
        return make_lookup(config, target.device)
    if draft.name == "window":
        assert draft.window is not None
        return WindowDrafter(target, draft.max_len, slots=slots, window=draft.window, sink=draft.sink or 0)
    if isinstance(head, PardModel):
        parallel = draft.parallel is not False and head.spec.mask_token_id is not None
        return PardDrafter(head, target.spec, draft.max_len, slots=slots, parallel=parallel)
    assert head is not None
    options: dict[str, Any] = {
        "slots": slots,
        "window": draft.window,
        "sink": draft.sink or 0,
        "dead_positions": opt.dead_positions is not False,
        "argmax": opt.argmax,
    }
    shape = tree_shape(config)
    if shape is not None:
        del options["argmax"]
        return TreeDrafter(head, target, shape, **options)
    own: Eagle3Drafter | ParallelDrafter
    max_len = draft.max_len if draft.name != "hybrid" else min(draft.head_len or draft.max_len, draft.max_len)
    if draft.parallel is not False and head.spec.mask_token_id is not None:
        own = ParallelDrafter(head, target, max_len, **options)
    else:
        own = Eagle3Drafter(head, target, max_len, uniform_slots=opt.uniform_slots, **options)
    if draft.name == "hybrid":
        return HybridDrafter(own, make_lookup(config, target.device), slots=slots, device=target.device)
    return own


def make_lookup(config: RunConfig, device: torch.device) -> LookupDrafter:
    draft, corpus = config.draft, None
    if draft.corpus_tokens:
        lengths = usual_lengths(draft.min_ngram, draft.max_ngram)
        corpus = Corpus(draft.corpus_tokens, num_entries=draft.table_entries, lengths=lengths, device=device)
    return LookupDrafter(draft.max_len, min_ngram=draft.min_ngram, max_ngram=draft.max_ngram, growth=draft.growth, corpus=corpus)


def tree_shape(config: RunConfig) -> TreeShape | None:
    """How the job's draft trees grow; None where it drafts none."""
    draft, tree = config.draft, config.draft.tree
    if tree.topk == 1:
        return None
    depth = tree.depth or draft.max_len
    return TreeShape(topk=tree.topk, depth=depth, nodes=tree.nodes or usual_nodes(tree.topk, depth), rank=tree.rank)


def draft_len(config: RunConfig) -> int:
    """K; of a tree its nodes."""
    shape = tree_shape(config)
    if shape is not None:
        return shape.nodes
    return 0 if config.draft.name == "none" else config.draft.max_len


def draft_kv_width(head: HeadSpec | PardSpec | None) -> int:
    """Numbers of K that the drafter keeps of a token, over its layers."""
    shape = head.model if isinstance(head, PardSpec) else head
    return 0 if shape is None else shape.num_layers * shape.num_kv_heads * shape.head_dim


def drafter_bytes(head: HeadSpec | PardSpec | None, dtype: torch.dtype) -> int:
    """Bytes of the drafter's weights in memory."""
    if isinstance(head, PardSpec):
        return weight_bytes(head.model, dtype)
    return 0 if head is None else head_bytes(head, dtype)


def learnt_bytes(job: Job, max_len: int) -> int:
    """Bytes of what a drafter learns with while the job runs, whose rows have up to `max_len` tokens."""
    draft = job.config.draft
    index = corpus_bytes(draft.corpus_tokens, draft.table_entries)
    if not isinstance(job.head, HeadSpec):
        return index
    return index + memory_bytes(draft, job.head, job.spec, device=job.device, dtype=job.dtype, max_len=max_len)


def plan_batch(job: Job, demand: Demand, rates: Rates, *, loaded: bool = False) -> PackedBatch:
    """The shape for the job on this machine; CapacityError where not one row fits.

    loaded  the weights, a drafter's too, lie in memory already
    """
    weights, shape = weight_bytes(job.spec, job.dtype) + drafter_bytes(job.head, job.dtype), tree_shape(job.config)
    beside = learnt_bytes(job, demand.max_tokens)
    if loaded and job.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading used and gave back counts as free
    return choose_batch(
        job.config.packing,
        job.spec,
        rates,
        demand,
        device=job.device,
        dtype=job.dtype,
        draft_len=draft_len(job.config),
        beyond=0 if shape is None else shape.beyond,
        draft_kv_width=draft_kv_width(job.head),
        free_bytes=free_memory(job.device, weights=beside + (0 if loaded else weights)),
    )


def survey_first(job: Job) -> Survey:
    """The first rows, taken for all."""
    seen = Survey()
    for shard in job.source.shards(job.shard_rows):
        seen.add(shard.table.num_rows, job.admission.admit(shard))
        if seen.num_rows >= SURVEY_ROWS:
            break
    return seen


def make_engine(job: Job, seen: Survey, progress: Progress) -> Engine:
    """Load the weights, choose the shape from the memory that is left, set up the engine; says each step on the progress line."""
    config = job.config
    demand = seen.demand(job.source.num_rows, job.admission.max_len)
    dtype = str(job.dtype).removeprefix("torch.")
    progress.phase(f"loading {config.model.path} in {dtype} on {job.device.type}")
    target = Target.load(job.folder, job.spec, dtype=job.dtype, device=job.device, dummy=config.model.load == "dummy")
    head = load_drafter(job)
    batch = plan_batch(job, demand, device_rates(job.device, job.dtype), loaded=True)
    drafter = make_drafter(config, head, target, slots=batch.slots)
    progress.phase(
        f"{batch.slots} slots, {batch.num_pages} pages of {batch.page_size} tokens, rows of at most {batch.max_len} tokens, "
        f"draft={drafter.name} K={drafter.max_len}"
    )
    opt, decode = config.decode.opt, config.decode
    engine = Engine(
        target,
        drafter,
        batch,
        device=job.device,
        options=RoundOptions(
            logprobs=None if config.output.logprobs is None else min(config.output.logprobs, job.spec.vocab_size),
            coupled=config.draft.coupled is not False,
            synthetic=tuple(config.draft.synthetic) if config.draft.synthetic else None,
            argmax=opt.argmax,
            uniform_slots=opt.uniform_slots,
        ),
        decode=job.tokenizer.decode if job.tokenizer else None,
        eos_ids=frozenset(job.spec.eos_ids) | frozenset(job.tokenizer.eos_ids if job.tokenizer else ()),
        penalties=decode.repetition_penalty != 1 or decode.presence_penalty != 0,
        refill_dead=opt.dead_rows,
        adaptive=config.draft.adaptive is not False,
        overlap=opt.overlap,
    )
    if job.device.type == "cuda":
        progress.phase("compiling kernels and capturing the graphs of the rounds")
        engine.prepare(usual_mode(config), shared=config.decode.n > 1)
    return engine


def usual_mode(config: RunConfig) -> SamplingMode:
    """How the job's rows choose tokens; a row whose own columns ask for more gets graphs of its own."""
    decode = config.decode
    params = SamplingParams(
        temperature=decode.temperature,
        top_k=decode.top_k,
        top_p=decode.top_p,
        min_p=decode.min_p,
        repetition_penalty=decode.repetition_penalty,
        presence_penalty=decode.presence_penalty,
    )
    return SamplingMode.of(params, decode.min_new_tokens)
