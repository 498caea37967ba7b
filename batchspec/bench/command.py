"""`batchspec bench OUT.jsonl NAME`: tokens per second of the engine alone, one JSON line a variant.

There are two workloads. A shape (--shape) runs dummy weights on random prompts and ignores EOS: decode_tok_s = (tokens - rows) /
(total_s - prefill_s), where prefill_s is the time of a run that emits one token per row. A model (--model) runs real weights on
real prompts (--input). Rows that end are replaced if there are more --requests than --batch slots; with --equal they have --gen
tokens each, so that rows of several kinds (--accept) stay mixed, and decode_tok_s is known. The variants are every --draft with
every --k, each of these with every --opt. They take turns within one process; a ratio compares two variants within one turn, and
the median over the turns is reported with its spread.
`--rounds N` instead times N single rounds of each variant, over rows whose --prompt earlier tokens are made up.
`--tensor-parallel N` does all this with a model that N processes compute together, one per GPU; speeds are those of the group.
`--make-job DIR` writes a job for `batchspec run` with the same prompts and output lengths.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from batchspec.bench import rounds
from batchspec.bench.arguments import device_of, parse
from batchspec.bench.engines import Bench
from batchspec.bench.ranks import lead
from batchspec.bench.variants import EngineVariant, Record, engine_variants
from batchspec.bench.workloads import make_job, make_workload
from batchspec.commands.doctor import versions
from batchspec.console import terminal
from batchspec.distributed.group import Group
from batchspec.engine.ranks.lead import Lead
from batchspec.job.report.start_up import age_clock
from batchspec.process.signals import program_does

JOB_ROWS = 192


def main(argv: list[str]) -> int:
    args = parse(argv, __doc__)
    if args.make_job:
        _make_job(args)
        return 0
    device = device_of(args)
    if args.tensor_parallel == 1:
        _measure(args, argv, device)
        return 0
    lead(args.tensor_parallel, argv, device, lambda group: _measure(args, argv, device, group))


class Phases:
    """Says on stderr what the command does until it has figures. Making 30 GB of weights, compiling some hundred kernels and
    capturing as many graphs takes a minute or two, in which a silent command would look like one that hangs."""

    def __init__(self) -> None:
        self._age_s = age_clock()

    def begin(self, name: str) -> None:
        program_does(f"during {name!r}, before anything was written")
        self.say(name)

    def say(self, what: str) -> None:
        """Print a line after the seconds since the process began."""
        terminal.say(f"{self._age_s():7.1f} s  {what}")


def _measure(args: argparse.Namespace, argv: Sequence[str], device: torch.device, group: Group | None = None) -> None:
    """group: the processes that compute the model together; this one is their leader. None: it computes alone."""
    phases = Phases()
    phases.begin(f"loading {args.model}" if args.model else f"making the weights of {args.shape}")
    bench = Bench(args, make_workload(args, device, group), device, group)
    if args.rounds is not None:
        found = rounds.time_rounds(bench, phases.begin)
        _write(args, [(variant.name, record, _head(args, argv, variant.name, device) | row) for variant, row, record in found])
        return
    bench.lead = None if group is None else Lead(group.channel)
    variants = engine_variants(bench)
    for turn in range(args.runs):
        for variant in variants:
            _take_turn(args, turn, variant, phases)
    rows = [_row(args, argv, variant, len(bench.workload.requests), device) for variant in variants]
    _write(args, [(variant.name, variant.record, row) for variant, row in zip(variants, rows, strict=True)])
    _print(variants, rows)


def _take_turn(args: argparse.Namespace, turn: int, variant: EngineVariant, phases: Phases) -> None:
    phases.begin(f"{variant.name}: preparing turn {turn + 1} of {args.runs}")
    if parts := variant.open():
        phases.say(f"{variant.name}: prepared, of it " + ", ".join(f"{part} {taken:.1f} s" for part, taken in parts.items()))
    record = variant.record
    if not turn and not args.model and (args.equal or not args.requests):
        phases.begin(f"{variant.name}: one token of each row")
        record.prefill_s, _ = variant.run(1)
    phases.begin(f"{variant.name}: turn {turn + 1} of {args.runs}")
    seconds, record.tokens = variant.run()
    record.seconds.append(seconds)
    speed = record.tokens / seconds
    terminal.show(f"turn {turn + 1} of {args.runs}  {variant.name:<24} {seconds:8.2f} s  {speed:10.1f} tok/s")
    if args.profile and turn == args.runs - 1:
        variant.profile()
    variant.close()


def _write(args: argparse.Namespace, found: Sequence[tuple[str, Record, dict[str, Any]]]) -> None:
    with open(args.out, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for _, _, row in found)
    if args.profile:
        with open(args.profile, "a", encoding="utf-8") as file:
            file.writelines(record.profile.text(f"{args.name} {name}") + "\n" for name, record, _ in found if record.profile)


def _make_job(args: argparse.Namespace) -> None:
    rows = args.requests or JOB_ROWS
    total, longest = make_job(args.make_job, shape=args.shape, num_requests=rows, prompt_len=args.prompt, cap=args.gen)
    common = (
        f"python -m batchspec.run +job=reasoning_8k model.path={args.make_job}/model model.load_format=dummy "
        f"model.max_len={args.prompt + args.gen} decode=greedy decode.ignore_eos=true decode.max_new_tokens={args.gen}"
    )
    terminal.show(f"{rows} prompts of {args.prompt} tokens, {total:,} output tokens, the longest {longest:,}")
    for name in ("known", "hidden"):
        terminal.show(f"{common} input.path={args.make_job}/{name}.parquet output.dir={args.make_job}/out-{name}")


def _row(
    args: argparse.Namespace, argv: Sequence[str], variant: EngineVariant, num_requests: int, device: torch.device
) -> dict[str, Any]:
    record = variant.record
    total = statistics.median(record.seconds)
    row: dict[str, Any] = _head(args, argv, variant.name, device) | {
        "requests": num_requests, "samples": args.samples, "prompt": None if args.model else args.prompt, "gen": args.gen,
        "runs": len(record.seconds), "total_s": round(total, 3), "seconds": [round(s, 3) for s in record.seconds],
        "tokens": record.tokens, "total_tok_s": round(record.tokens / total, 1),
    }
    if record.prefill_s:
        decode_s = total - record.prefill_s
        row |= {
            "prefill_s": round(record.prefill_s, 3),
            "decode_tok_s": round((record.tokens - num_requests) / decode_s, 1),
            **_per_round(record, decode_s),
        }
    if record.totals.row_rounds:
        row |= {
            "mean_acceptance_length": round(1 + record.totals.accepted / record.totals.row_rounds, 3),
            "rounds": record.totals.rounds,
            "mean_live_rows": round(record.totals.row_rounds / record.totals.rounds, 2),
            "cached_tokens": record.totals.cached_tokens,
        }
    row |= _of_requests(record)
    if record.padded_passes is not None:
        row["padded_passes"] = record.padded_passes
    if record.peak_bytes:
        row["peak_gb"] = round(record.peak_bytes / 1e9, 2)
    if record.profile is not None:
        row["profile"] = record.profile.summary()
    return row


def _head(args: argparse.Namespace, argv: Sequence[str], variant: str, device: torch.device) -> dict[str, Any]:
    """The first fields of every line."""
    name, ranks = torch.cuda.get_device_name() if device.type == "cuda" else "cpu", args.tensor_parallel
    return {
        "name": args.name, "variant": variant, "device": name if ranks == 1 else f"{ranks} x {name}", "ranks": ranks,
        "shape": args.model or args.shape, "dtype": args.dtype, "batch": args.batch,
        "accept": args.accept_given or None,
        "command": shlex.join(["batchspec", "bench", *argv]), "versions": versions(),
    }


def _of_requests(record: Record) -> dict[str, Any]:
    """Figures by position in the draft, unconditional; then means over requests, each with the same weight."""
    rows = [(stats, count) for stats, count in record.rows if stats.num_rounds]
    first_s = [stats.prefill_s for stats, _ in rows]
    found: dict[str, Any] = {"first_token_ms": round(1e3 * statistics.mean(first_s), 2)} if rows else {}
    if not any(stats.num_drafted for stats, _ in rows):
        return found
    rounds, depth = sum(stats.num_rounds for stats, _ in rows), max(len(stats.accepted_at) for stats, _ in rows)
    at = [sum(stats.accepted_at[j] for stats, _ in rows if j < len(stats.accepted_at)) / rounds for j in range(depth)]
    lengths = [1 + stats.num_accepted / stats.num_rounds for stats, _ in rows]
    speeds = [count / (stats.prefill_s + stats.decode_s) for stats, count in rows if stats.prefill_s + stats.decode_s > 0]
    return found | {
        "accepted_by_position": [round(rate, 4) for rate in at],
        "mean_acceptance_length_of_requests": round(statistics.mean(lengths), 3),
        "tok_s_of_requests": round(statistics.mean(speeds), 2) if speeds else None,
    }


def _per_round(record: Record, decode_s: float) -> dict[str, float]:
    rounds = record.totals.rounds
    return {"round_us": round(decode_s / rounds * 1e6, 1)} if rounds else {}


def _print(variants: Sequence[EngineVariant], rows: Sequence[dict[str, Any]]) -> None:
    first = variants[0]
    width = max(len(variant.name) for variant in variants) + 2
    columns = {
        "tok/s": "total_tok_s", "decode tok/s": "decode_tok_s", "prefill s": "prefill_s", "us/round": "round_us",
        "accept len": "mean_acceptance_length", "by request": "mean_acceptance_length_of_requests",
        "live rows": "mean_live_rows", "1st token ms": "first_token_ms",
    }
    titles = "".join(f"{title:>13}" for title in columns)
    terminal.show(f"{'variant':<{width}}{titles}   ratio to {first.name} (median, spread)")
    for variant, row in zip(variants, rows, strict=True):
        base, own = first.record.seconds, variant.record.seconds
        ratios = sorted(one / other for one, other in zip(base, own, strict=True))
        cells = "".join(f"{_cell(row.get(key)):>13}" for key in columns.values())
        spread = f"{statistics.median(ratios):.3f}  [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        at = " ".join(f"{rate:.2f}" for rate in row.get("accepted_by_position", ()))
        terminal.show(f"{variant.name:<{width}}{cells}   {spread}" + (f"   accepted by position {at}" if at else ""))


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,}"
