"""`batchspec verify OUT`: decode rows of a job again, without speculation and one at a time, and compare the tokens.

batchspec promises equal tokens, up to rounding. For each row that differs, the first difference is printed with its gap: how far
apart the scores (logit + temperature * noise) of the two tokens are. A gap near the rounding error of the dtype is a tie resolved
the other way; a large gap is an error. --dtype and --device decode the rows in another precision or on another device: the share
of rows that differ then measures the effect of the precision. --files instead reads every output file and finds those that a disk
or a copy has changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from batchspec import terminal
from batchspec.arguments import ArgumentParser
from batchspec.batch.logits import LogitRows, apply_penalties, forbid_stop_ids
from batchspec.cache.page_tables import RowPages
from batchspec.config.schema import DraftConfig
from batchspec.config.typed import from_dict
from batchspec.engine.engine import Engine
from batchspec.engine.prefill import flat_batch
from batchspec.engine.step import Segment
from batchspec.errors import OutputError, StorageError
from batchspec.kernels.sampling.sample import gumbel_reference
from batchspec.packing.planner import PAGE_SIZE
from batchspec.prepare import Job, job_fingerprint, make_engine, open_job, survey_first
from batchspec.records import Request
from batchspec.report.progress_bar import ProgressBar
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.scan import scanning
from batchspec.text import MESSAGE_CHARS, one_line


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
    """Score of the plain token minus that of the written one, in logits; None if one of them is missing."""


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="batchspec verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="output folder of a job that wrote token_ids")
    parser.add_argument("--rows", type=_count, default=20, help="number of completions to decode again, evenly spread; 0: all")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], help="dtype of the decoding; default: the job's")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device of the decoding; default: the job's")
    parser.add_argument("--files", action="store_true", help="instead compare all output files with their checksums")
    args = parser.parse_args(argv)
    if args.files:
        return check_files(args.out)
    checked, differences = verify(args.out, args.rows, dtype=args.dtype, device=args.device)
    for d in differences:
        gap = "-" if d.gap is None else f"{d.gap:.3g}"
        where = f"{one_line(d.request_id)} sample {d.sample_index} token {d.token_index}"
        terminal.show(f"{where}: {d.written} in the output, {d.plain} by plain decoding, score gap {gap}")
    terminal.show(f"{checked} completions decoded again one at a time and without speculation: {len(differences)} differ")
    if differences:
        rounding = "about 1e-4 in float32, 0.1 in bfloat16"
        terminal.show(f"a gap up to the rounding error of the logits ({rounding}) is a tie resolved the other way")
    return 1 if differences else 0


def _count(text: str) -> int:
    if (count := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{count} must be a number of completions; 0: all")
    return count


def check_files(out: str | Path) -> int:
    """Print every damaged file of a job; returns the exit code."""
    output = OutputFolder(out)
    damage = list(output.damage())
    summary = f"{len(output.committed())} files compared with their checksums: {len(damage)} are damaged"
    terminal.show("\n".join([*(one_line(line, MESSAGE_CHARS) for line in damage), summary]))
    return StorageError.exit_code if damage else 0


def verify(
    out: str | Path, num_rows: int, *, dtype: str | None = None, device: str | None = None
) -> tuple[int, list[Difference]]:
    """The number of completions decoded again, and the differences. Raises OutputError without a job or token_ids.

    dtype, device  for the second decoding; None: those of the job
    """
    job = _job_of(out, dtype, device)
    written = _written_tokens(out, num_rows)
    engine = _plain_engine(job)
    differences = []
    for request in _requests(job, set(written)):
        key = (request.row_index, request.sample_index)
        (again,) = engine.run(iter([request]))
        plain = [] if again.token_ids is None else again.token_ids.tolist()
        if plain != written[key]:
            differences.append(_first_difference(engine, request, written[key], plain))
    return len(written), differences


def _job_of(out: str | Path, dtype: str | None, device: str | None) -> Job:
    output = OutputFolder(out)
    config = from_dict(output.manifest.config)
    as_run = open_job(config)
    output.check(
        fingerprint=job_fingerprint(as_run), num_rows=as_run.source.num_rows, shard_rows=config.output.shard_rows
    )  # fmt: skip
    config.draft = DraftConfig(name="none")
    config.model.dtype, config.device = dtype or config.model.dtype, device or config.device
    config.packing.max_num_seqs, config.packing.run_ahead = 1, None
    config.packing.pages = config.packing.memory_gb = None
    return open_job(config)


def _plain_engine(job: Job) -> Engine:
    with ProgressBar(0) as progress:
        engine = make_engine(job, survey_first(job), progress)
    assert engine.drafter.max_len == 0
    return engine


def _written_tokens(out: str | Path, num_rows: int) -> dict[tuple[int, int], list[int]]:
    table = OutputFolder(out).scan()
    if "token_ids" not in table.collect_schema().names():
        raise OutputError(f"{out} holds no token_ids, which verify needs; run the job with output.token_ids=true")
    with scanning(str(out)):
        rows = table.filter(pl.col("token_ids").is_not_null()).select("row_index", "sample_index", "token_ids").collect()
    if num_rows and rows.height > num_rows:
        rows = rows[[i * rows.height // num_rows for i in range(num_rows)]]
    return {(row, sample): tokens for row, sample, tokens in rows.iter_rows()}


def _requests(job: Job, wanted: set[tuple[int, int]]) -> Iterator[Request]:
    size = job.shard_rows
    shards = {row // size for row, _ in wanted}
    skip = set(range(-(-job.source.num_rows // size))) - shards
    for shard in job.source.shards(size, skip):
        for entry in job.admission.admit(shard):
            if isinstance(entry, Request) and (entry.row_index, entry.sample_index) in wanted:
                yield entry


def _first_difference(engine: Engine, request: Request, written: list[int], plain: list[int]) -> Difference:
    token_index = next((i for i, (a, b) in enumerate(zip(written, plain, strict=False)) if a != b), min(len(written), len(plain)))
    old = written[token_index] if token_index < len(written) else None
    new = plain[token_index] if token_index < len(plain) else None
    gap = None
    if old is not None and new is not None:
        scores = _scores(engine, request, plain[:token_index])
        gap = float(scores[new] - scores[old])
    return Difference(
        request_id=request.request_id, sample_index=request.sample_index, token_index=token_index, written=old, plain=new, gap=gap
    )  # fmt: skip


@torch.inference_mode()
def _scores(engine: Engine, request: Request, output: list[int]) -> Tensor:
    """The score [V] that the draw after `output` maximises: penalised logit + temperature * noise, before top-k, top-p, min-p."""
    rows, count = engine.executor.rows, len(request.prompt_ids) + len(output)
    pages = RowPages(engine.pools.groups.num_groups)
    engine.pools.grow(pages, -(-count // PAGE_SIZE))
    rows.begin([0], [request], [output])
    rows.grant([(0, 0, pages.columns())])
    batch, _ = flat_batch(rows, [Segment(0, 0, count, True)], PAGE_SIZE)
    hidden, _ = engine.executor.round.target.forward(batch, engine.executor.cache)
    engine.pools.release(pages)
    logits = engine.executor.round.target.logits(hidden[-1:])
    position = torch.tensor([count], device=logits.device)
    places = LogitRows(torch.zeros(1, dtype=torch.int32, device=logits.device), position)
    if rows.seen.shape[1]:
        apply_penalties(logits, places, rows)
    forbid_stop_ids(logits, places, rows)
    if request.sampling.temperature == 0:
        return logits[0]
    noise = gumbel_reference(rows.keys[:1], position, logits.shape[1])[0]
    return logits[0] + request.sampling.temperature * noise
