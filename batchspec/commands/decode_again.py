"""Rows of a job decoded again, one at a time and without speculation: what `batchspec verify` compares the job's tokens with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from batchspec.automata.lazy_automaton import Expansion
from batchspec.automata.token_automaton import DEAD, ENDS, FORCED, MASK, TokenAutomaton
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import adjust_logits
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.page_tables import RowPages
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import CacheConfig
from batchspec.config.typed import from_dict
from batchspec.data.dataset.schema import DIGEST
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning
from batchspec.engine.features import RowFeatures
from batchspec.engine.loop.engine import Engine
from batchspec.engine.prefill.passes import flat_batch
from batchspec.engine.rounds.vocabulary import cutoffs
from batchspec.engine.step import Segment
from batchspec.errors import CheckpointError, OutputError
from batchspec.images.decode import decode
from batchspec.images.processor import Fit
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.prepare import Job, open_job, survey_first
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.runner.identity import job_fingerprint
from batchspec.job.runner.kv_scales import with_saved_scales
from batchspec.job.runner.run_monitor import RunMonitor
from batchspec.job.runner.weight_sums import with_kept_sums
from batchspec.kernels.sampling.sample import gumbel_reference
from batchspec.model.layers.attention.kv_scales import checkpoint_scales
from batchspec.packing.planner import PAGE_SIZE
from batchspec.process.out_of_memory import within_memory
from batchspec.records import Completion, Ids, Request
from batchspec.tasks.registry import task_of

Written = dict[tuple[int, int], tuple[list[int], str | None]]
"""(row, sample) -> output tokens and `Request.image_digest`, as a job wrote them."""
ADVICE = "decode on another device (--device cpu) or free memory"
"""Where memory runs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first output token of a row that differs from plain decoding."""

    request_id: str
    sample_index: int
    token_index: int
    """Index of the output token, from 0."""
    written: int | None
    """Token id in the output; None if the output ended before."""
    plain: int | None
    """Token id of plain decoding; None if that ended before."""
    gap: float | None
    """How much the logit of the written token would have to rise for plain decoding to choose it, at least 0; None if one of the
    two is missing. Infinite if the row's schema forbids the written token. See `_rises`."""


def summary(differences: Sequence[Difference], num_rows: int) -> str:
    """For people: how many of `num_rows` rows differ, at which token, and quantiles of the gaps there."""
    at = sorted(difference.token_index for difference in differences)
    gaps = sorted(difference.gap for difference in differences if difference.gap is not None)
    first = f"; first difference at token {at[len(at) // 2]} (median)" if at else ""
    half, most = len(gaps) // 2, len(gaps) * 9 // 10
    gap = f", score gap there {gaps[half]:.3g} (median), {gaps[most]:.3g} (90 %), {gaps[-1]:.3g} (largest)" if gaps else ""
    return f"{len(differences)} differ ({len(differences) / max(1, num_rows):.1%}){first}{gap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A row that was decoded again."""

    request: Request
    completion: Completion
    difference: Difference | None
    """None if the tokens are those that were written."""


def decode_again(loaded: LoadedEngine[Engine], written: Written) -> Iterator[Again]:
    """Decode the rows of `written` again, except those that admission now refuses or whose images have changed; shows the
    progress."""
    expected = sum(len(tokens) for tokens, _ in written.values()) / max(1, len(written))
    with within_memory("rows were decoded again", ADVICE), ProgressBar(len(written)) as progress:
        monitor = RunMonitor(progress, expected, loaded.totals)
        for request in requests_of(loaded.job, set(written)):
            tokens, digest = written[request.row_index, request.sample_index]
            if digest != request.image_digest:
                continue
            (again,) = loaded.run([request], on_round=monitor.after_round)
            monitor.finished(again)
            monitor.ended()
            plain = [] if again.token_ids is None else again.token_ids.tolist()
            difference = None if plain == tokens else first_difference(loaded.engine, request, tokens, plain)
            yield Again(request=request, completion=again, difference=difference)


def job_of(out: str | Path, dtype: str | None, device: str | None, *, other_kv: bool = False) -> Job:
    """The job of an output folder, to decode one row at a time without speculation, with the K/V scales that it keeps.

    dtype, device  to decode with; None: those of the job
    other_kv       with the other cache.dtype: the model's for a job in fp8, fp8 for any other
    Each of the three also decodes without decode.deterministic, whose bits are those of the job's own dtype, device and cache.
    Raises OutputError if there is no job, it scored rows, or the input or the model have changed; of weights, those that
    samples do not show are found when they are loaded.
    """
    output = OutputFolder(out)
    config = from_dict(output.manifest.config)
    if not (task := task_of(config)).decodes:
        raise OutputError(f"{out} holds {task.written} and no output tokens, so there is nothing to decode again")
    if config.device == "cuda":
        config.device = "auto"  # this machine may have no GPU
    config.model.dtype = json.loads(output.manifest.fingerprint["model.dtype"])  # auto may be another one here
    as_run = open_job(config)
    output.check(
        fingerprint=job_fingerprint(as_run),
        num_rows=as_run.source.num_rows,
        shard_rows=config.output.shard_rows,
        files=as_run.source.files,
    )
    config.draft = DraftConfig(name="none")
    config.model.dtype, config.device = dtype or config.model.dtype, device or config.device
    config.packing.max_num_seqs, config.packing.run_ahead = 1, None
    config.packing.pages = config.packing.memory_gb = None
    if other_kv or dtype is not None or device is not None:
        config.decode.deterministic = False
    if other_kv:
        config.cache = other_cache(as_run)
    return with_kept_sums(with_saved_scales(open_job(config), output), output)


def other_cache(job: Job) -> CacheConfig:
    """The K/V cache to compare with: the model's data type for a job with FP8 K/V, else FP8, with calibrated scales where the
    checkpoint's cannot be used."""
    own = job.config.cache
    if job.spec.fp8_kv:
        return replace(own, dtype="auto", scales="auto")
    if not replace(job.spec, fp8_kv=True).has_kv_scales:
        return replace(own, dtype="fp8", scales="auto")
    if job.adapter is not None or job.adapters is not None:  # the checkpoint's are those of the model without them
        return replace(own, dtype="fp8", scales="calibrate")
    try:
        if job.config.model.load_format != "dummy":
            checkpoint_scales(job.folder, job.spec)
    except CheckpointError:
        return replace(own, dtype="fp8", scales="calibrate")
    return replace(own, dtype="fp8", scales="auto")


def load_plain(job: Job) -> LoadedEngine[Engine]:
    """The engine of a job without a drafter."""
    with within_memory("the model was loaded", ADVICE), ProgressBar(0) as progress:
        loaded = LoadedEngine.load(job, survey_first(job), progress)
    assert loaded.engine.drafter.draft_len == 0
    return loaded


def written_tokens(out: str | Path, num_rows: int) -> Written:
    """The output tokens of a job, of `num_rows` evenly spread completions; 0: of all. Raises OutputError."""
    table = OutputFolder(out).scan()
    if "token_ids" not in (names := table.collect_schema().names()):
        raise OutputError(f"{out} holds no token_ids, which verify needs; run the job with output.token_ids=true")
    with scanning(str(out)):
        rows = table.filter(pl.col("token_ids").is_not_null()).select(
            "row_index", "sample_index", "token_ids", pl.col(DIGEST) if DIGEST in names else pl.lit(None, pl.String)
        ).collect()
    if num_rows and rows.height > num_rows:
        rows = rows[[i * rows.height // num_rows for i in range(num_rows)]]
    return {(row, sample): (tokens, digest) for row, sample, tokens, digest in rows.iter_rows()}


def requests_of(job: Job, wanted: set[tuple[int, int]]) -> Iterator[Request]:
    """The requests of these (row, sample)."""
    skip = set(range(job.layout.num_shards)) - {job.layout.shard_of(row) for row, _ in wanted}
    for shard in job.source.shards(job.layout, skip):
        for entry in job.admission.admit_compiled(shard):
            if isinstance(entry, Request) and (entry.row_index, entry.sample_index) in wanted:
                yield entry


def first_difference(engine: Engine, request: Request, written: list[int], plain: list[int]) -> Difference:
    """The first difference between two outputs of a request, which must not be equal."""
    token_index = next((i for i, (a, b) in enumerate(zip(written, plain, strict=False)) if a != b), min(len(written), len(plain)))
    old = written[token_index] if token_index < len(written) else None
    new = plain[token_index] if token_index < len(plain) else None
    gap = None
    if old is not None and new is not None:
        # The plain token's own rise is 0 up to rounding. If it is not, something is wrong, which the gap must show too.
        gap = float(_rises(engine, request, plain[:token_index])[[old, new]].max())
    return Difference(
        request_id=request.request_id, sample_index=request.sample_index, token_index=token_index, written=old, plain=new, gap=gap
    )


@torch.inference_mode()
def _rises(engine: Engine, request: Request, output: list[int]) -> Tensor:
    """How much each token's penalised logit [V] would have to rise, the others staying, for the draw after `output` to choose it.

    The token's score (logit + temperature * noise) must reach the largest score of the tokens that top-k, top-p and min-p keep.
    The logit of a token that they leave out must also reach the smallest logit that they keep; with top-p and min-p this is
    approximate, because they depend on the token's own probability too. So the rise is 0 for the chosen token and never
    negative. It is infinite for tokens that the row's schema does not allow there. The logits are computed in one pass over the
    row, so they differ from those of plain decoding by rounding.
    """
    rows, count = engine.executor.rows, len(request.prompt_ids) + len(output)
    pages = RowPages(engine.pools.groups.num_groups)
    engine.pools.grow(pages, -(-count // PAGE_SIZE))
    rows.begin([0], [request], [output])
    if rows.images is not None:
        rows.images.place(0, tuple(decode(one.source, Fit(one.height, one.width)) for one in request.images))
    rows.grant([(0, 0, pages.columns())])
    batch, _ = flat_batch(rows, [Segment(0, 0, count, True)], PAGE_SIZE)
    hidden, _ = engine.executor.round.target.forward(batch, engine.executor.cache)
    engine.pools.release(pages)
    logits = engine.executor.round.target.logits(hidden[-1:])
    position = torch.tensor([count], device=logits.device)
    places = LogitRows(torch.zeros(1, dtype=torch.int32, device=logits.device), position)
    mode = SamplingMode.of(request.sampling, request.min_new_tokens)
    adjust_logits(logits, places, rows, mode)
    if (mask := _mask_after(engine, request, output)) is not None:
        words, only_ends = mask
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.shape[1]].astype(bool)
        if len(output) < request.min_new_tokens and not only_ends:
            allowed[list(request.stop_ids)] = False
        logits[0, torch.from_numpy(~allowed).to(logits.device)] = -torch.inf
    scores, low = logits[0], logits.new_full((), -torch.inf)
    if mode.random:
        scores = scores + request.sampling.temperature * gumbel_reference(rows.keys[:1], position, logits.shape[1])[0]
    if mode.filters:
        low = cutoffs(logits, places.row_ids, rows)[0]
    kept = logits[0] >= low
    to_best = scores[kept].max() - scores
    return torch.where(kept, to_best, torch.maximum(to_best, low - logits[0]))


def _mask_after(engine: Engine, request: Request, output: Sequence[int]) -> tuple[Ids, bool] | None:
    """Which tokens the row's automaton allows after `output`, as a row of `TokenAutomaton.masks`, and whether its text can only
    end there; None: it has no automaton, or its output has left it."""
    automaton = request.automaton
    if isinstance(automaton, TokenAutomaton):
        state = automaton.walk(request.automaton_state, output)
        mask, forced = automaton.table[state, [MASK, FORCED]]
        return None if state == DEAD else (automaton.masks[mask], bool(forced == ENDS))
    lazy = engine.features.lazy if isinstance(engine.features, RowFeatures) else None
    if automaton is None or lazy is None:
        return None
    found = lazy.after(request, output)
    return (found.mask, found.forced == ENDS) if isinstance(found, Expansion) and found.state != DEAD else None
