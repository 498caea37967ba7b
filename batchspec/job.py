"""run_job: read -> admit -> plan -> decode -> write. The page to read first.

job = open_job(config)          every check; nothing is written before all have passed
output = open_output(job)       the output folder, new or resumed
for shard, completions in decode_job(job, ...):
    output.commit(...)          one file a shard, exactly once
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from batchspec import __version__
from batchspec.config import RunConfig
from batchspec.decode.engine import Engine, EngineTotals
from batchspec.decode.round import RoundOptions
from batchspec.draft.base import Drafter, NoDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.errors import ConfigError, Interrupted, TooManyErrors
from batchspec.io.columns import ColumnMap, check_ids, map_columns
from batchspec.io.manifest import fingerprint
from batchspec.io.reader import InputShard, Source, open_source
from batchspec.io.schema import output_schema
from batchspec.io.shards import OutputFolder, default_shard_rows
from batchspec.io.writer import build_table
from batchspec.model.hub import resolve_model
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target, resolve_dtype
from batchspec.model.tokenizer import Tokenizer
from batchspec.model.weights import weight_files, weights_fingerprint
from batchspec.packing.admit import Admission
from batchspec.packing.cost import Rates, device_rates, weight_bytes
from batchspec.packing.planner import Demand, choose_batch, free_memory, order_requests
from batchspec.packing.survey import Survey
from batchspec.records import Completion, PackedBatch, Request
from batchspec.report.card import dataset_card
from batchspec.report.progress import Progress
from batchspec.report.stats import job_stats

WINDOW_SHARDS = 4
"""Shards in flight: requests are ordered inside a window of this many."""
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

    @property
    def shard_rows(self) -> int:
        return self.config.output.shard_rows or default_shard_rows(self.source.num_rows)


def open_job(config: RunConfig, source: Source | None = None, *, tokenizer: Tokenizer | None = None, weights: bool = True) -> Job:
    """Look at the input and the model folder and refuse what cannot run (ConfigError, InputError, CheckpointError).

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
    dtype = resolve_dtype(config.model.dtype, spec, device)
    tokenizer = tokenizer or open_tokenizer(folder, config, columns)
    admission = Admission(config, source=source, columns=columns, spec=spec, tokenizer=tokenizer)
    return Job(config, source, columns, folder, spec, tokenizer, device, dtype, admission)


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


def run_job(config: RunConfig, source: Source | None = None) -> None:
    """Run a job to its end, or go on with it where an earlier run of the same command stopped.

    `source` replaces the dataset at input.path.
    """
    job = open_job(config, source)
    output = open_output(job)
    committed = output.committed()
    if len(committed) == output.num_shards:
        say(f"{output.path}: already complete: {job.source.num_rows} rows in {output.num_shards} shards")
    else:
        compute(job, output, committed)
        say(f"{output.path}: done, {job.source.num_rows} rows in {output.num_shards} shards")
    # A run may have died between the last commit and the card.
    if len(committed) < output.num_shards or not output.has_card():
        output.finish(dataset_card(output.manifest, job_stats(output.path)))
    say(f"look at it:  batchspec stats {output.path}")
    say(f"             python -c \"import polars; print(polars.read_parquet('{output.path}/data'))\"")


def compute(job: Job, output: OutputFolder, committed: set[int]) -> None:
    """Decode and commit every shard that is not committed yet. Raises Interrupted at Ctrl-C."""
    seen = survey_first(job)
    done_rows = sum(len(output.rows_of(index)) for index in committed)
    errors = ErrorBudget(job.config.input.max_error_fraction, job.source.num_rows)
    with Progress(seen.num_outputs(job.source.num_rows), done=seen.num_outputs(done_rows)) as progress:
        if committed:
            progress.phase(f"{len(committed)} of {output.num_shards} shards are committed already; the rest is computed")
        try:
            for shard, completions in decode_job(job, seen, progress, skip=committed):
                output.commit(shard.index, shard_table(job, shard, completions, output.attempt))
                errors.add(completions)
        except KeyboardInterrupt:
            count = f"{len(output.committed())} of {output.num_shards} shards are committed"
            raise Interrupted(f"interrupted; {count}; run the same command again to go on") from None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def open_output(job: Job) -> OutputFolder:
    """The output folder with its manifest: made now, or that of the job being resumed. Raises OutputError for another job's."""
    output_config = job.config.output
    assert output_config.dir is not None
    output = OutputFolder(output_config.dir)
    output.create(
        fingerprint=job_fingerprint(job),
        config=asdict(job.config),
        recorded=recorded_facts(job),
        num_rows=job.source.num_rows,
        shard_rows=output_config.shard_rows,
        files=job.source.files,
        overwrite=output_config.overwrite,
    )
    return output


def job_fingerprint(job: Job) -> dict[str, str]:
    """What changes results. Drafter, slots, pages and versions do not, and may differ between the runs of one job."""
    config, decode = job.config, asdict(job.config.decode)
    del decode["opt"]
    schema = output_schema(job.source.schema, job.columns, config.output)
    return fingerprint(
        {
            "model.config": (job.folder / "config.json").read_text(encoding="utf-8"),
            "model.weights": "dummy" if config.model.load == "dummy" else weights_fingerprint(job.folder),
            "model.tokenizer": None if job.tokenizer is None else job.tokenizer.fingerprint,
            "model.dtype": str(job.dtype).removeprefix("torch."),
            "model.max_len": job.admission.max_len,
            **{f"decode.{key}": value for key, value in decode.items()},
            "draft.synthetic": config.draft.synthetic,
            "input.files": [(file.name, file.size_bytes, file.num_rows) for file in job.source.files],
            "input.columns": dict(sorted(job.columns.names.items())),
            **{f"input.{key}": getattr(config.input, key) for key in ("chat", "overlong", "limit", "template_kwargs")},
            "output.schema": [(field.name, str(field.type)) for field in schema],
            "output.messages": config.output.messages,
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


def make_drafter(config: RunConfig) -> Drafter:
    draft = config.draft
    if draft.name == "none":
        return NoDrafter()
    return LookupDrafter(draft.max_len, min_ngram=draft.min_ngram, max_ngram=draft.max_ngram)


def plan_batch(job: Job, drafter: Drafter, demand: Demand, rates: Rates) -> PackedBatch:
    """The shape for the job on this machine; CapacityError where not one row fits."""
    return choose_batch(
        job.config.packing,
        job.spec,
        rates,
        demand,
        device=job.device,
        dtype=job.dtype,
        draft_len=drafter.max_len,
        num_kv_layers=job.spec.num_layers + drafter.num_kv_layers,
        free_bytes=free_memory(job.device, weights=weight_bytes(job.spec, job.dtype)),
    )


def survey_first(job: Job) -> Survey:
    """The first rows, taken for all."""
    seen = Survey()
    for shard in job.source.shards(job.shard_rows):
        seen.add(shard.table.num_rows, job.admission.admit(shard))
        if seen.num_rows >= SURVEY_ROWS:
            break
    return seen


def make_engine(job: Job, demand: Demand, progress: Progress) -> Engine:
    """Load the target, choose the shape, set up the engine; says each step on the progress line."""
    config = job.config
    drafter = make_drafter(config)
    batch = plan_batch(job, drafter, demand, device_rates(job.device, job.dtype))
    dtype = str(job.dtype).removeprefix("torch.")
    progress.phase(f"loading {config.model.path} in {dtype} on {job.device.type}")
    target = Target.load(job.folder, job.spec, dtype=job.dtype, device=job.device, dummy=config.model.load == "dummy")
    progress.phase(
        f"{batch.slots} slots, {batch.num_pages} pages of {batch.page_size} tokens, rows of at most {batch.max_len} tokens, "
        f"draft={drafter.name} K={drafter.max_len}"
    )
    opt, decode = config.decode.opt, config.decode
    return Engine(
        target,
        drafter,
        batch,
        device=job.device,
        options=RoundOptions(
            logprobs=config.output.logprobs,
            synthetic=tuple(config.draft.synthetic) if config.draft.synthetic else None,
            argmax=opt.argmax,
            uniform_slots=opt.uniform_slots,
        ),
        decode=job.tokenizer.decode if job.tokenizer else None,
        eos_ids=frozenset(job.spec.eos_ids) | frozenset(job.tokenizer.eos_ids if job.tokenizer else ()),
        penalties=decode.repetition_penalty != 1 or decode.presence_penalty != 0,
        refill_dead=opt.dead_rows,
    )


def decode_job(
    job: Job, seen: Survey, progress: Progress, *, skip: Container[int] = ()
) -> Iterator[tuple[InputShard, list[Completion]]]:
    """Every shard that is not in `skip` with its completions, as soon as its last row is done."""
    feed = Feed(job.source.shards(job.shard_rows, skip), job.admission, progress)
    demand = seen.demand(job.source.num_rows, job.admission.max_len)
    engine = make_engine(job, demand, progress)
    engine.on_round = Reporter(progress, demand)
    with closing(engine.run(feed.requests())) as completions:
        for completion in completions:
            job.admission.observe(completion)
            feed.add(completion)
            progress.update(completions=1)
            yield from feed.complete()
    yield from feed.complete()  # shards without one good row


class Reporter:
    """Hands the engine's running totals to the progress bar as what happened since the last call."""

    def __init__(self, progress: Progress, demand: Demand) -> None:
        self._progress, self._before = progress, EngineTotals()
        self._expected = round((progress.total - progress.done) * demand.output_tokens)

    def __call__(self, totals: EngineTotals) -> None:
        self._progress.update(
            tokens=totals.tokens - self._before.tokens,
            accepted=totals.accepted - self._before.accepted,
            rounds=totals.row_rounds - self._before.row_rounds,
            live_rows=totals.live_rows,
            remaining_tokens=max(0, self._expected - totals.tokens),
        )
        self._before = replace(totals)


class Feed:
    """Admits shards a window at a time, hands out their requests longest first, and knows what each shard still owes."""

    def __init__(self, shards: Iterator[InputShard], admission: Admission, progress: Progress) -> None:
        self._shards, self._admission, self._progress = shards, admission, progress
        self._open: dict[int, tuple[InputShard, int, list[Completion]]] = {}

    def requests(self) -> Iterator[Request]:
        """Requests in decoding order. The next window is read when the last one's requests are all handed out."""
        while window := list(itertools.islice(self._shards, WINDOW_SHARDS)):
            requests: list[Request] = []
            for shard in window:
                entries = list(self._admission.admit(shard))
                self._open[shard.index] = (shard, len(entries), [e for e in entries if isinstance(e, Completion)])
                requests += [e for e in entries if isinstance(e, Request)]
            yield from order_requests(requests)

    def add(self, completion: Completion) -> None:
        self._open[completion.shard][2].append(completion)

    def complete(self) -> Iterator[tuple[InputShard, list[Completion]]]:
        """Shards whose every row is there; each comes once."""
        for index in [index for index, (_, count, done) in self._open.items() if len(done) == count]:
            shard, _, completions = self._open.pop(index)
            self._progress.update(completions=sum(completion.stats is None for completion in completions))
            yield shard, completions


class ErrorBudget:
    """Ends the job when more rows than the allowed share turned out bad."""

    def __init__(self, fraction: float, num_rows: int) -> None:
        self._allowed, self._num_rows, self._errors = fraction * num_rows, num_rows, 0

    def add(self, completions: list[Completion]) -> None:
        self._errors += sum(completion.status == "error" for completion in completions)
        if self._errors > self._allowed:
            raise TooManyErrors(
                f"{self._errors} of {self._num_rows} rows are error rows, more than input.max_error_fraction allows "
                f"({self._allowed:g}); look at the `error` column of the output, then mend the input or raise the fraction"
            )


def shard_table(job: Job, shard: InputShard, completions: list[Completion], attempt: str) -> pa.Table:
    return build_table(shard, completions, columns=job.columns, input=job.config.input, output=job.config.output, attempt=attempt)
