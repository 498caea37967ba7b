"""The text of `batchspec plan`: lines of numbers about the input, the batch and the time that a run would take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from batchspec.commands.card_text import about, fp8_weights, launches, paths
from batchspec.commands.plan_output import FoundOutput
from batchspec.console.text import MESSAGE_CHARS, bytes_text, counted, duration, one_line
from batchspec.errors import BatchspecError, TooManyErrors
from batchspec.job.load.memory import automata_bytes, image_bytes, padded_prefill_bytes
from batchspec.job.prepare import Job, notes
from batchspec.job.runner.head.planned import PlannedHead
from batchspec.kernels.common.card import assumed
from batchspec.model.dtype import dtype_name
from batchspec.model.quant.fp8 import Fp8
from batchspec.packed_batch import PackedBatch
from batchspec.packing.cost import num_multiplied
from batchspec.packing.device_memory import free_memory
from batchspec.packing.image_cost import NO_IMAGES, ImageTimes
from batchspec.packing.kv_memory import kv_bytes, row_tensor_bytes
from batchspec.packing.planner import Forecast, held_back_bytes
from batchspec.packing.predict import SHORT_TOKENS
from batchspec.packing.rates import Rates
from batchspec.packing.replicas import GpuLayout, best
from batchspec.packing.survey import Survey
from batchspec.records import Ids
from batchspec.tasks.base import Task
from batchspec.tuning.cards import KnownCard

COST = "0 to 5 % of decoding in bf16 and 18 % in FP8 (8B) on an H200, long prefill in bf16 not measured"
"""The cost of decode.deterministic, see jobs/pages/resume.md, "The same tokens in bf16 too"."""
BAR = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers that the text shows. batch and forecast are None if no row can run, and `lacks_gpu`."""

    job: Job
    survey: Survey
    num_completions: int
    rates: Rates | None = None
    batch: PackedBatch | None = None
    forecast: Forecast | None = None
    images: ImageTimes = NO_IMAGES
    """Times of the images of all rows."""
    layouts: Sequence[GpuLayout] = ()
    """Ways to divide the GPUs of this machine, if it has several."""
    head: PlannedHead | None = None
    """Of a job that trains a head for its model."""
    output: FoundOutput | None = None
    """What a run would find in output.dir; None: there is none, or it holds a job and `lacks_gpu`."""
    card: KnownCard | None = None
    """The card for which the job is planned, if not for this machine's."""
    lacks_gpu: bool = False
    """Whether the job is for a GPU and this machine has none: neither shape nor times are known, nor whether a job in output.dir
    is the same."""

    @property
    def exit_code(self) -> int:
        """That of a run, as far as it can be known: by its checks, and by the error rows among those that were read."""
        return 0 if self.error is None else self.error.exit_code

    @property
    def error(self) -> BatchspecError | None:
        """With which a run would end, as far as it can be known."""
        if self.output is not None and self.output.error is not None:
            return self.output.error
        return self._too_many_errors

    @property
    def expected_tokens(self) -> float:
        """Tokens that all rows are expected to get, or to have in their prompts if these are scored."""
        counted_by = "predicted_tokens" if self._task.decodes else "prompt_tokens"
        return float(self.survey.lengths(counted_by).mean()) * self.num_completions

    def text(self) -> str:
        with nullcontext() if self.card is None else assumed(self.card.card):
            return "\n".join(
                [*self._input(), *self._lengths(), *self._thinking(), *self._structured(), *self._shape(), *self._gpus()]
            )

    def _input(self) -> list[str]:
        files, rows, read = self.job.source.files, self.job.source.num_rows, self.survey.num_rows
        name = one_line(files[0].name) if len(files) == 1 else f"{len(files):,} files"
        lines = [
            f"input        {rows:,} rows in {name}, {bytes_text(sum(file.size_bytes for file in files))}; "
            + ("all read" if read == rows else f"{read:,} read, `--full` reads all"),
            f"completions  {self.num_completions:,}{'' if read == rows else ' (estimated)'}",
            *self._output(),
            f"bad rows     {self.survey.num_bad:,} of {read:,}",
        ]
        bad = ((code, count, one_line(example, MESSAGE_CHARS)) for code, (count, example) in sorted(self.survey.bad.items()))
        lines += [f"  {code:<15}{count:>7,}  {example}" for code, count, example in bad]
        if self._too_many_errors is not None:
            lines.append(f"  {self._too_many_errors}")
        return lines

    def _output(self) -> list[str]:
        line = "" if self.output is None else self.output.line()
        return [f"output       {one_line(line, MESSAGE_CHARS)}; what follows is about all rows"] if line else []

    @property
    def _too_many_errors(self) -> TooManyErrors | None:
        """If a run over the rows that were read would have them, even if no row failed later."""
        if self.output is not None and self.output.is_complete:  # it would read no row
            return None
        errors, read, rows = self.survey.num_errors, self.survey.num_rows, self.job.source.num_rows
        if not errors or (errors < read and self.job.config.input.allows(errors, read)):
            return None
        key = f"input.max_error_fraction={self.job.config.input.max_error_fraction:g}"
        rest = "" if read == rows else f", sampled from {read:,} of {rows:,} rows, if the others are like these"
        return TooManyErrors(f"a run ends with exit code 3{rest}: more than {key} of these rows are error rows, or all")

    def _lengths(self) -> list[str]:
        lengths = self.survey.lengths("prompt_tokens")
        if not len(lengths):
            return ["nothing to run: no row was admitted"]
        mean, median, most = lengths.mean(), np.median(lengths), lengths.max()
        what = self._task.prompts
        lines = [f"{what} {mean:,.0f} tokens on average, median {median:,.0f}, longest {most:,}", *histogram(lengths)]
        return lines if self.job.spec.vision is None else [*lines, self._images()]

    def _images(self) -> str:
        images, tokens = self.survey.num_images, self.survey.image_tokens
        share = tokens / self.survey.lengths("prompt_tokens").sum()
        return f"images       {images:,}, {tokens / max(1, images):,.0f} tokens on average, {share:.0%} of all prompt tokens"

    def _encoder(self) -> str:
        images, num = self.images, self.images.num_processes
        work = "1 process decodes and resizes" if num == 1 else f"{num} processes decode and resize"
        return f"{duration(images.encoder_s)}; meanwhile {work} images, {duration(images.worker_s / num)}"

    def _thinking(self) -> list[str]:
        think, decode = self.job.admission.settings.think, self.job.config.decode
        if think is None:
            return []
        closing = [*self.job.admission.settings.closing, *think.closing]
        begin = "every answer" if think.begin_id is None else f"{think.begin} ({think.begin_id})"
        opened, count = self.survey.num_opened, len(self.survey.prompt_tokens)
        budget = decode.thinking_token_budget
        limit = "no budget of its own" if budget is None else f"at most {budget:,} tokens, then {len(closing)} forced"
        return [
            f"thinking     from {begin} to {think.end} ({think.end_id}); {opened:,} of {count:,} prompts end inside one; {limit}"
        ]

    def _structured(self) -> list[str]:
        constraints = self.job.admission.constraints
        if constraints is None:
            return []
        stats = constraints.compiler.stats
        if not stats.num_compiled and not stats.lazy:
            return ["structured   no admitted row asks for it"]
        lazy = [
            f"lazy         {counted(count, 'distinct constraint')}, states computed while rows wait for them: {one_line(reason)}"
            for reason, count in sorted(stats.lazy.items())
        ]
        if stats.num_weaker:
            schemas = counted(stats.num_weaker, "distinct schema")
            where = "(jobs/pages/structured.md)"
            lazy.append(f"checked      {schemas} obeyed in part; finished answers are checked by the whole {where}")
        if not stats.num_compiled:
            return [line.replace("lazy      ", "structured", 1) for line in lazy]
        return [
            f"structured   {counted(stats.num_compiled, 'distinct constraint')}; compiling one took "
            f"{stats.seconds / stats.num_compiled:.2f} s of CPU time on average, {stats.longest_s:.2f} s at most; the largest "
            f"has {stats.most_states:,} states, {bytes_text(stats.largest_bytes)} on the device",
            *lazy,
        ]

    def _shape(self) -> list[str]:
        batch, ahead, job = self.batch, self.forecast, self.job
        if self.lacks_gpu:
            return [
                *_notes(job),
                *self._drafter(),
                "GPU          device=cuda, and torch sees no GPU on this machine; for slots, memory and times run plan on a "
                "machine with the job's GPU, or with device=cpu for those of this CPU",
            ]
        if batch is None or ahead is None or self.rates is None:
            return []
        spec = job.spec
        layers = job.drafter.layer_states(job.dtype, batch.page_size)
        pages_bytes = kv_bytes(batch, spec, job.dtype, layers)
        pages = " + ".join(f"{count:,}" for count in (batch.num_pages, *batch.more_pages))
        dtype = dtype_name(job.dtype)
        tokens = self.expected_tokens
        assumed = (
            f"outputs half as long as max_new_tokens (all of it up to {SHORT_TOKENS}, and where nothing else ends a row), "
            f"{_accepted(ahead)}, "
        ) * self._task.decodes
        about = spec.about(spec.computing(job.dtype, batch.page_size, draft_len=batch.num_verified))
        total_s = self.images.with_rest(ahead.prefill_s + ahead.decode_s)
        kept = f"({spec.formats.kept}, the rest {dtype})" if spec.formats.kept else f"in {dtype}"
        return [
            *self._card(),
            f"model        {spec.family}, {spec.num_layers} layers, {num_multiplied(spec) / 1e6:,.0f} M weights per token, "
            f"{bytes_text(spec.weight_bytes(job.dtype))} {kept} on {job.device.type}",
            *_notes(job),
            *_lines(line for own in about for line in own.model),
            *self._adapters(),
            *self._drafter(),
            f"shape        {counted(batch.num_slots, 'slot')}, rows up to {batch.max_len:,} tokens, "
            f"drafter {job.config.draft.name} ({job.drafter.shape}), prefill passes of {batch.prefill_tokens:,} tokens",
            f"pages        {pages} of {batch.page_size} tokens, {bytes_text(pages_bytes)}{self._stored}",
            *_lines(line for own in about for line in own.memory),
            self._memory(batch, pages_bytes, row_tensor_bytes(batch, spec, job.dtype, layers)),
            *self._rounds(ahead),
            f"prefill      {duration(ahead.prefill_s)}",
            *([] if spec.vision is None else [f"encoder      {self._encoder()}"]),
            *([f"deterministic  bf16 sums of one order; these times leave out its cost: {COST}"] if spec.ordered else []),
            f"together     {duration(total_s)}, {tokens:,.0f} {self._task.tokens} tokens, {tokens / total_s:,.0f} tok/s",
            f"assumed      {assumed}no common prefixes; device: {self.rates.name}",
            *(["computed     not measured: slots, memory and times follow from the card's sizes and rates"] if self.card else []),
        ]

    @property
    def _stored(self) -> str:
        """What pages hold in e4m3."""
        return f", {'K and V' if self.job.spec.has_kv_scales else 'latents'} in e4m3" if self.job.spec.fp8_kv else ""

    def _card(self) -> list[str]:
        """The card of --card, and by which paths this job runs on it."""
        if self.card is None:
            return []
        card, formats = self.card.card, self.job.spec.formats
        ways = [fp8_weights(card)] if isinstance(formats.quantised, Fp8) else []
        ways += [f"FP8 K/V {dict(paths(self.card))['FP8 K/V']}"] if self.job.spec.fp8_kv else []
        ways += [f"products {dict(paths(self.card))['products']}", f"launches {launches(card)}"]
        return [f"card         {about(self.card)}", f"paths        {'; '.join(ways)}"]

    def _drafter(self) -> list[str]:
        """What draft=auto took, and why; and the head that the job trains."""
        name, why = self.job.config.draft.name, self.job.why_drafter
        lines = [f"drafter      {name}, taken by draft=auto: {why}"] if why else []
        return lines if self.head is None else [*lines, f"head         {one_line(self.head.line, MESSAGE_CHARS)}"]

    def _rounds(self, ahead: Forecast) -> list[str]:
        if not self._task.decodes:
            return [f"rounds       none: {self._task.what}, nothing is decoded"]
        return [
            f"rounds       {ahead.rounds:,} of {ahead.round_s * 1e3:.1f} ms, the last ones with fewer rows shorter, "
            f"{duration(ahead.decode_s)}; a full one reads {bytes_text(ahead.weights_read_bytes)} of weights and "
            f"{bytes_text(ahead.kv_read_bytes)} of K/V"
            + f", and reads and writes {bytes_text(ahead.state_bytes / 2)} of states" * bool(ahead.state_bytes)
        ]

    @property
    def _task(self) -> Task:
        return self.job.admission.task

    def _adapters(self) -> list[str]:
        spec, dtype = self.job.spec, self.job.dtype
        if spec.lora is None:
            return []
        ranks = sorted({spec.lora.rank_of(prefix, own) for prefix, block in spec.blocks() for own in block.products} - {0})
        of = "of all rows" if spec.lora.of_all_rows else "of rows that name one"
        return [
            f"adapters     {counted(spec.lora.num_adapters, 'LoRA adapter')} {of}, not merged: "
            f"{bytes_text(spec.lora_bytes(dtype))} of the weights, ranks padded to {' and '.join(map(str, ranks))}; rounds and "
            "prefill assume that every row has one"
        ]

    def _memory(self, batch: PackedBatch, pages_bytes: int, slots_bytes: int) -> str:
        """What the run will allocate, and what is free now. On a CPU the memory of passes and rounds is not planned."""
        job = self.job
        demand = self.survey.demand(job.source.num_rows, job.admission.max_len, job.admission.task)
        parts = {
            "weights": job.spec.weight_bytes(job.dtype),
            "drafter": job.drafter.weight_bytes(dtype=job.dtype, device=job.device),
            "corpus of the drafter": job.drafter.corpus_bytes(),
            "tables of structured output": automata_bytes(job),
            "graphs of prefill": padded_prefill_bytes(job),
            "images": image_bytes(job),
            "K/V": pages_bytes,
            "states of rows": slots_bytes,
            "passes, rounds and graphs": held_back_bytes(batch, job.spec, job.dtype, demand) if job.device.type == "cuda" else 0,
        }
        text = " + ".join(f"{bytes_text(size)} {name}" for name, size in parts.items() if size)
        return f"memory       {text} = {bytes_text(sum(parts.values()))} of {bytes_text(free_memory(job.device))} that are free"

    def _gpus(self) -> list[str]:
        """Several copies of the model or one cut over several GPUs, and which the cost model chooses."""
        if not self.layouts:
            return []
        taken = best(self.layouts)
        lines = [
            f"GPUs         {self.layouts[0].replicas * self.layouts[0].ranks}; cluster.tensor_parallel={taken.ranks} is fastest"
        ]
        for layout in self.layouts:
            name = f"  {layout.replicas} {'copy' if layout.replicas == 1 else 'copies'} on {counted(layout.ranks, 'GPU')}"
            if layout.seconds is None or layout.batch is None:
                lines.append(f"{name}: {layout.reason}")
            else:
                lines.append(f"{name}: {duration(layout.seconds)}, {counted(layout.batch.num_slots, 'slot')} a copy")
        return lines


def _accepted(ahead: Forecast) -> str:
    """What rounds are assumed to accept."""
    if not ahead.num_drafts:
        return "no drafts"
    return f"{ahead.accepted:.2g} of {counted(ahead.num_drafts, 'draft')} accepted per row and round"


def _notes(job: Job) -> list[str]:
    return [f"{label:12} {note}" for label, note in notes(job)]


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


def _lines(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of a label and a text."""
    return [f"{label:<12} {text}" for label, text in pairs]
