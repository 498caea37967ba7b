"""`batchspec plan +job=demo`: what a run would do, without running it. Needs config.json and the tokenizer, no weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from batchspec.compose import launch
from batchspec.config import RunConfig
from batchspec.io.columns import check_ids, map_columns
from batchspec.io.reader import Source, open_source
from batchspec.job import choose_device, open_tokenizer
from batchspec.model.hub import resolve_model
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import resolve_dtype
from batchspec.model.tokenizer import Tokenizer
from batchspec.packing.admit import Admission, job_max_len
from batchspec.packing.cost import Rates, device_rates, num_multiplied, page_bytes, weight_bytes
from batchspec.packing.planner import Demand, Forecast, choose_batch, forecast, free_memory
from batchspec.packing.predict import SHORT_TOKENS
from batchspec.records import Completion, Ids, PackedBatch

SAMPLE_ROWS = 10_000
SHARD_ROWS = 500
BAR = 40
ASSUMED_ACCEPTED = {"none": 0.0, "lookup": 0.8}
"""Draft tokens kept a row and round: lookup with K=4 over 88 mixed prompts of a small model (Spec-Bench), replayed."""


def main(argv: Sequence[str]) -> int:
    """Hydra overrides as for `run`, and `--full` to tokenise every row; returns the exit code."""
    full = "--full" in argv
    overrides = [item for item in argv if item != "--full"]
    return launch(lambda config: print(plan(config, full=full).text()), overrides, require=("model.path", "input.path"))


@dataclass(slots=True, kw_only=True)
class Survey:
    """What admission says of the rows that were read: lengths only, 12 bytes a completion."""

    num_rows: int = 0
    prompt_tokens: array[int] = field(default_factory=lambda: array("i"))
    max_new_tokens: array[int] = field(default_factory=lambda: array("i"))
    predicted_tokens: array[int] = field(default_factory=lambda: array("i"))
    bad: dict[str, tuple[int, str]] = field(default_factory=dict)
    """code -> how many rows, and the first one's message"""

    def lengths(self, name: str) -> Ids:
        return np.frombuffer(getattr(self, name), dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers behind the text. batch and forecast are None where no row can run."""

    source: Source
    survey: Survey
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    drafter: str
    rates: Rates
    num_completions: int
    batch: PackedBatch | None
    forecast: Forecast | None
    num_kv_layers: int

    def text(self) -> str:
        return "\n".join([*self._input(), *self._lengths(), *self._shape()])

    def _input(self) -> list[str]:
        files, rows, read = self.source.files, self.source.num_rows, self.survey.num_rows
        name = files[0].name if len(files) == 1 else f"{len(files):,} files"
        num_bad = sum(count for count, _ in self.survey.bad.values())
        lines = [
            f"input        {rows:,} rows in {name}, {_bytes(sum(file.size_bytes for file in files))}; "
            + ("all read" if read == rows else f"{read:,} read, `--full` reads all"),
            f"completions  {self.num_completions:,}{'' if read == rows else ' (estimated)'}",
            f"bad rows     {num_bad:,} of {read:,}",
        ]
        return lines + [f"  {code:<15}{count:>7,}  {example}" for code, (count, example) in sorted(self.survey.bad.items())]

    def _lengths(self) -> list[str]:
        lengths = self.survey.lengths("prompt_tokens")
        if not len(lengths):
            return ["nothing to run: no row was admitted"]
        mean, median, most = lengths.mean(), np.median(lengths), lengths.max()
        return [f"prompts      {mean:,.0f} tokens on average, median {median:,.0f}, longest {most:,}", *histogram(lengths)]

    def _shape(self) -> list[str]:
        batch, ahead, spec = self.batch, self.forecast, self.spec
        if batch is None or ahead is None:
            return []
        kv_bytes = batch.num_pages * page_bytes(spec, batch.page_size, self.num_kv_layers, self.dtype)
        dtype = str(self.dtype).removeprefix("torch.")
        output = float(self.survey.lengths("predicted_tokens").mean()) * self.num_completions
        total_s = ahead.prefill_s + ahead.decode_s
        return [
            f"model        {spec.family}, {spec.num_layers} layers, {num_multiplied(spec) / 1e6:,.0f} M weights a token, "
            f"{_bytes(weight_bytes(spec, self.dtype))} in {dtype} on {self.device.type}",
            f"shape        {batch.slots} slots, rows up to {batch.max_len:,} tokens, drafter {self.drafter} "
            f"(K={batch.draft_len}), prefill passes of {batch.prefill_tokens:,} tokens",
            f"pages        {batch.num_pages:,} of {batch.page_size} tokens, {_bytes(kv_bytes)}",
            f"rounds       {ahead.rounds:,} of {ahead.round_s * 1e3:.1f} ms, {_duration(ahead.decode_s)}",
            f"prefill      {_duration(ahead.prefill_s)}",
            f"together     {_duration(total_s)}, {output:,.0f} output tokens, {output / total_s:,.0f} tok/s",
            f"assumed      outputs half as long as max_new_tokens (all of it up to {SHORT_TOKENS}), "
            f"{ASSUMED_ACCEPTED[self.drafter]:g} draft tokens kept a round, no common prefixes; device: {self.rates.name}",
        ]


def plan(config: RunConfig, *, tokenizer: Tokenizer | None = None, full: bool = False) -> Plan:
    """Read and admit a sample of about 10,000 rows spread over the input (`full`: every row), choose the shape, predict.

    tokenizer  instead of the model folder's own
    Raises InputError, CheckpointError, ConfigError or CapacityError as the run would.
    """
    assert config.model.path is not None
    source = open_source(config.input)
    columns = map_columns(source.schema, config.input.columns)
    check_ids(source, columns)
    folder = resolve_model(config.model.path, config.model.revision)
    spec = load_spec(folder)
    tokenizer = tokenizer or open_tokenizer(folder, config, columns)
    survey = survey_rows(source, Admission(config, source=source, columns=columns, spec=spec, tokenizer=tokenizer), full=full)
    device = choose_device(config.device)
    dtype = resolve_dtype(config.model.dtype, spec, device)
    rates = device_rates(device, dtype)
    num_completions = round(len(survey.prompt_tokens) * source.num_rows / survey.num_rows)
    batch, ahead = None, None
    if num_completions:
        demand = _demand(survey, num_completions, job_max_len(config, spec), all_read=survey.num_rows == source.num_rows)
        batch = choose_batch(
            config.packing, spec, rates, demand, device=device, dtype=dtype,
            draft_len=0 if config.draft.name == "none" else config.draft.max_len, num_kv_layers=spec.num_layers,
            free_bytes=free_memory(device, weights=weight_bytes(spec, dtype)),
        )  # fmt: skip
        ahead = forecast(batch, spec, rates, demand, dtype=dtype, accepted=ASSUMED_ACCEPTED[config.draft.name])
    return Plan(
        source=source, survey=survey, spec=spec, device=device, dtype=dtype, drafter=config.draft.name, rates=rates,
        num_completions=num_completions, batch=batch, forecast=ahead, num_kv_layers=spec.num_layers,
    )  # fmt: skip


def survey_rows(source: Source, admission: Admission, *, full: bool) -> Survey:
    """Admit every row, or every k-th stretch of 500 rows so that about 10,000 are read."""
    survey = Survey()
    stride = 1 if full else max(1, source.num_rows // SAMPLE_ROWS)
    for shard in source.shards(SHARD_ROWS, skip=_AllBut(stride)):
        survey.num_rows += shard.table.num_rows
        for item in admission.admit(shard):
            if isinstance(item, Completion):
                assert item.error is not None
                count, example = survey.bad.get(item.error.code, (0, item.error.message))
                survey.bad[item.error.code] = (count + 1, example)
            else:
                survey.prompt_tokens.append(len(item.prompt_ids))
                survey.max_new_tokens.append(item.max_new_tokens)
                survey.predicted_tokens.append(item.predicted_tokens)
    return survey


class _AllBut:
    """All shard numbers but every k-th."""

    def __init__(self, stride: int) -> None:
        self.stride = stride

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index % self.stride != 0


def _demand(survey: Survey, num_completions: int, max_len: int, *, all_read: bool) -> Demand:
    prompts, caps = survey.lengths("prompt_tokens"), survey.lengths("max_new_tokens")
    return Demand(
        num_completions=num_completions,
        prompt_tokens=float(prompts.mean()),
        output_tokens=float(survey.lengths("predicted_tokens").mean()),
        max_tokens=int((prompts + caps).max()) if all_read else max_len,
    )


def histogram(lengths: Ids) -> list[str]:
    """One line a power of two: range, count, bar."""
    powers = np.ceil(np.log2(lengths)).astype(int)
    counts = np.bincount(powers)
    first = int(powers.min())
    most = int(counts.max())
    lines = []
    for power in range(first, len(counts)):
        low, high, count = (1 << power >> 1) + 1, 1 << power, int(counts[power])
        lines.append(f"  {low if power else 1:>9,} .. {high:>9,} {count:>9,} {'#' * -(-BAR * count // most)}")
    return lines


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"
