"""`batchspec verify OUT`: decode rows of a job again, without speculation and one at a time, and compare the tokens.

batchspec promises equal tokens, up to rounding. For each row that differs, the first difference is printed with its gap: how
much the logit of the written token would have to rise for plain decoding to choose it, never negative. In a sampled row its
score (logit + temperature * noise) must reach the best one, and its logit must pass top-k, top-p and min-p. The gap is infinite
for a token that the row's schema forbids. The last line has the share of rows that differ and the quantiles of the gaps. A gap
near the rounding error of the dtype is a tie resolved the other way; a large gap is an error, and with decode.deterministic
every difference is one. If the job wrote logprobs, their largest difference is printed too, and one that is not rounding counts
as a difference. --dtype and --device decode the rows in another precision or on another device (without decode.deterministic):
the share of rows that differ then measures the effect of the precision. --kv decodes them with the other K/V cache (the model's
data type for a job with cache.dtype=fp8, fp8 for any other) and adds the mean KL divergence of the next token between the two
caches, over the written tokens. --files instead reads every output file and finds those that a disk or a copy has changed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from batchspec.commands.decode_again import Difference, decode_again, job_of, load_plain, summary, written_tokens
from batchspec.commands.verify_kv import compare_kv
from batchspec.commands.verify_logprobs import ROUNDING, Gap, gap_of, written_logprobs
from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.console.text import MESSAGE_CHARS, counted, for_shell, one_line
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import OutputError, StorageError
from batchspec.model.dtype import dtype_name


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="batchspec verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="output folder of a job that wrote token_ids")
    parser.add_argument("--rows", type=_count, default=20, help="completions to decode again, evenly spread; 0: all; default 20")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], help="dtype of the decoding; default: the job's")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device of the decoding; default: the job's")
    parser.add_argument("--kv", action="store_true", help="decode with the other K/V cache: fp8, or the model's data type")
    parser.add_argument("--files", action="store_true", help="instead compare all output files with their checksums")
    args = parser.parse_args(argv)
    if args.files:
        parser.refuse(args, ("rows", "dtype", "device", "kv"), "is not read with --files, which decodes nothing")
        return check_files(args.out)
    if args.kv:
        report = compare_kv(args.out, args.rows, dtype=args.dtype, device=args.device)
        terminal.show("\n".join([*map(line_of, report.differences), *report.lines()]))
        return 0
    found = verify(args.out, args.rows, dtype=args.dtype, device=args.device)
    for difference in found.differences:
        terminal.show(line_of(difference))
    said = summary(found.differences, found.num_rows)
    terminal.show(f"{counted(found.num_rows, 'completion')} decoded again one at a time and without speculation: {said}")
    if found.num_refused:
        why = "the job refuses their rows now (after a retry, or without their images), or their images have changed"
        terminal.show(f"{found.num_refused} more were not: {why}")
    if found.logprobs is not None:
        terminal.show(one_line(found.logprobs.line(found.num_rows), MESSAGE_CHARS))
    if found.exact and found.differs:
        terminal.show("the job has decode.deterministic=true: every difference is an error of batchspec; please report it")
    elif found.differs:
        rounding = "about 1e-4 in float32, 0.1 in bfloat16"
        terminal.show(f"a gap up to the rounding error of the logits ({rounding}) is a tie resolved the other way")
    return 1 if found.differs else 0


def _count(text: str) -> int:
    if (count := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{count} must be a number of completions; 0: all")
    return count


def line_of(difference: Difference) -> str:
    gap = "-" if difference.gap is None else f"{difference.gap:.3g}"
    where = f"{one_line(difference.request_id)} sample {difference.sample_index} token {difference.token_index}"
    return f"{where}: {difference.written} in the output, {difference.plain} by plain decoding, score gap {gap}"


def check_files(out: str | Path) -> int:
    """Print every damaged file of a job; returns the exit code."""
    output = OutputFolder(out)
    damage = list(output.damage())
    summary = f"{counted(len(output.committed()), 'file')} compared with their checksums: {len(damage)} damaged"
    terminal.show("\n".join([*(one_line(line, MESSAGE_CHARS) for line in damage), summary]))
    return StorageError.exit_code if damage else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Completions that were decoded again."""

    num_rows: int
    num_refused: int
    """Completions that could not be decoded again."""
    differences: list[Difference]
    logprobs: Gap | None
    """The largest difference of logprobs; None if the job wrote none."""
    most_nats: float
    """The largest difference of logprobs that rounding may cause."""
    exact: bool
    """Whether nothing may differ (decode.deterministic)."""

    @property
    def differs(self) -> bool:
        """Tokens differ, or logprobs by more than rounding."""
        return bool(self.differences) or (self.logprobs is not None and self.logprobs.nats > self.most_nats)


def verify(out: str | Path, num_rows: int, *, dtype: str | None = None, device: str | None = None) -> Verified:
    """Decode completions again, and compare their tokens and logprobs. Raises OutputError without a job or token_ids, and if no
    completion can be decoded again.

    dtype, device  for the second decoding; None: those of the job
    """
    job, written = job_of(out, dtype, device), written_tokens(out, num_rows)
    logprobs, differences, gaps, count = written_logprobs(out, written.keys()), list[Difference](), list[Gap](), 0
    for again in decode_again(load_plain(job), written):
        count += 1
        differences += [] if again.difference is None else [again.difference]
        if found := logprobs.get((again.request.row_index, again.request.sample_index)):
            gaps.append(gap_of(found, again))
    if not count:
        why = "its rows are error rows, or images of them changed"
        raise OutputError(f"{out} has no completion that can be decoded again: {why}; see batchspec stats {for_shell(out)}")
    exact = job.config.decode.deterministic
    dtypes = (json.loads(OutputFolder(out).manifest.fingerprint["model.dtype"]), dtype_name(job.dtype))
    return Verified(
        num_rows=count, num_refused=len(written) - count, differences=differences, exact=exact,
        logprobs=max(gaps, key=lambda gap: gap.nats, default=None),
        most_nats=0.0 if exact else max(map(ROUNDING.__getitem__, dtypes)),
    )
