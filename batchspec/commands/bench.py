"""`batchspec bench OUT.jsonl NAME`: tokens per second of the engine alone, one JSON line a variant.

Two workloads. A shape (--shape) runs dummy weights on random prompts, EOS ignored: decode_tok_s = (tokens - rows) /
(total_s - prefill_s), where prefill_s is a run that emits one token a row. A model (--model) runs real weights on real
prompts (--input). Every --draft with every --k, that again with each --opt, and transformers' `generate` with
--against-transformers, take turns within one process; ratios are of one turn, and the median of the turns is reported with
its spread. `--rounds N` times N single rounds of each way instead, over rows with a made-up past of --prompt tokens.
`--make-job DIR` writes a job for `batchspec run`, with the same prompts and output lengths, and `batchspec bench --job-layer
DIR --rows N` measures what a job costs besides its model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from batchspec import terminal
from batchspec.arguments import ArgumentParser
from batchspec.commands import bench_job, bench_rounds
from batchspec.commands.bench_engines import DRAFTS, OPTIONS, TREES, Bench, parse_options
from batchspec.commands.bench_variants import Record, TransformersVariant, Variant, engine_variants
from batchspec.commands.doctor import versions
from batchspec.commands.shapes import SHAPES
from batchspec.commands.workloads import make_job, make_workload
from batchspec.config.values import violation
from batchspec.errors import ConfigError

JOB_ROWS = 192


def main(argv: list[str]) -> int:
    if argv[:1] == ["--job-layer"]:
        return bench_job.main(argv[1:])
    args = _parse(argv)
    if args.make_job:
        _make_job(args)
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    bench = Bench(args, make_workload(args, device), device)
    if args.rounds is not None:
        _write(
            args,
            [
                (way.name, record, _head(args, argv, way.name, device) | row)
                for way, row, record in bench_rounds.time_rounds(bench)
            ],
        )
        return 0
    variants: list[Variant] = [*engine_variants(bench)]
    if args.against_transformers:
        variants.insert(0, TransformersVariant(bench))
    for turn in range(args.runs):
        for variant in variants:
            variant.open()
            record = variant.record
            if not turn and not args.requests and not args.model:
                record.prefill_s, _ = variant.run(1)
            seconds, record.tokens = variant.run()
            record.seconds.append(seconds)
            speed = record.tokens / seconds
            terminal.show(f"turn {turn + 1} of {args.runs}  {variant.name:<24} {seconds:8.2f} s  {speed:10.1f} tok/s")
            if args.profile and turn == args.runs - 1:
                variant.profile()
            variant.close()
    rows = [_row(args, argv, variant, len(bench.workload.requests), device) for variant in variants]
    _write(args, [(variant.name, variant.record, row) for variant, row in zip(variants, rows, strict=True)])
    _print(variants, rows)
    return 0


def _write(args: argparse.Namespace, found: Sequence[tuple[str, Record, dict[str, Any]]]) -> None:
    with open(args.out, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for _, _, row in found)
    if args.profile:
        with open(args.profile, "a", encoding="utf-8") as file:
            file.writelines(record.profile.text(f"{args.name} {way}") + "\n" for way, record, _ in found if record.profile)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="batchspec bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", nargs="?", help="JSON lines file, appended to")
    add("name", nargs="?", help="written into each line")
    add("--make-job", metavar="DIR", type=Path, help="write model/, known.parquet and hidden.parquet there, and stop")
    add("--shape", default="smol135m", help=f"{', '.join(SHAPES)}, or a config.json")
    add("--model", help="folder, hub id or smollm2-135m: real weights instead of a shape")
    add("--input", default="pkg://demo", help="with --model: prompts, as input.path")
    add("--chat", action="store_true", help="with --model: the column `prompt` is a user's turn, as input.chat=true")
    add("--eos", action="store_true", help="with --model: rows end where the model ends them; without it, at --gen tokens")
    add("--kind", default="", help="with --model: comma-separated values of the prompts' `kind` column")
    add("--batch", type=int, default=8, help="slots")
    add("--prompt", type=int, default=512, help="tokens of a random prompt")
    add("--gen", type=int, default=128, help="output tokens a request (with --requests and --make-job: the cap)")
    add(
        "--rounds",
        type=int,
        help="time so many rounds over rows with a past of --prompt noise tokens, and no prefill; --k 0 keeps K/V warm",
    )
    add("--requests", type=int, default=0, help="this many requests; with --shape their output is lognormal, as in a job")
    add("--samples", type=int, default=1, help="with --shape: requests that have one prompt in common")
    add("--draft", nargs="+", default=["none"], choices=DRAFTS)
    add("--draft-path", help="folder or hub id of the head, or of pard's model; without it a head is noise of the shape's size")
    add("--k", nargs="+", default=[8], type=_draft_len, help="draft tokens a round; auto: the engine chooses, 0 included")
    add("--topk", type=int, default=10, help="branches of a draft tree, whose levels are --k")
    add("--nodes", type=int, help="nodes of a draft tree that are verified; 60, or all that grow")
    add("--temperature", nargs="+", default=[0.0], type=float, help="of the draws; 0 is greedy")
    add("--accept", default="", help="synthetic acceptance by position, unconditional: .6,.28,.12; cut to each --k")
    add("--window", type=int, help="newest keys that the head reads (all without it), or the drafting model")
    add("--corpus-tokens", type=int, default=0, help="lookup, hybrid: newest tokens of ended rows that drafts are copied from")
    add("--sink", type=int, default=0, help="number of first keys that it reads besides its window")
    add("--opt", nargs="+", default=[], help=f"variants with NAME=false,...: {', '.join(OPTIONS)}")
    add("--prefill-tokens", type=int, default=0, help="tokens of a prefill pass; 0: as a job")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    add("--kv", default="auto", choices=["auto", "fp8"], help="cache.dtype: fp8 stores K and V as e4m3, scales calibrated")
    add("--device", default="auto", choices=["auto", "cpu"])
    add("--runs", type=int, default=1, help="turns; ratios are medians over them")
    add("--profile", metavar="FILE", help="append a table of the kernels of some rounds of each variant (needs a GPU)")
    add("--against-transformers", action="store_true", help="with --model: transformers' generate in batches of --batch")
    args = parser.parse_args(argv)
    args.accept = tuple(float(rate) for rate in args.accept.split(",")) if args.accept else None
    args.opt = [parse_options(text) for text in args.opt]
    _check(args)
    return args


def _draft_len(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _check(args: argparse.Namespace) -> None:
    if not args.make_job and args.name is None:
        raise ConfigError("bench needs OUT.jsonl and NAME, or --make-job DIR")
    if "window" in args.draft and args.window is None:
        raise ConfigError("--draft window needs --window: how many newest keys the model drafts with")
    if "pard" in args.draft and args.draft_path is None:
        raise ConfigError("--draft pard needs --draft-path: a small model with the target's tokenizer")
    if args.topk < 2 and not TREES.keys().isdisjoint(args.draft):
        raise ConfigError(f"--topk {args.topk} must be at least 2 for a tree; --draft eagle3 is a chain")
    if any(k is not None and k < (0 if args.rounds else 1) for k in args.k):
        raise ConfigError("--k counts from 1, with --rounds from 0; --draft none is the way without drafts")
    if args.accept is not None and list(args.accept) != sorted(args.accept, reverse=True):
        raise ConfigError(f"--accept {args.accept} must be non-increasing: a draft token is accepted only after accepted ones")
    if any(violation("decode.temperature", heat) for heat in args.temperature):
        raise ConfigError(f"--temperature {args.temperature} must be in 0 .. 100; 0 is greedy")
    if args.against_transformers and not args.model:
        raise ConfigError("--against-transformers needs --model: dummy weights exist only inside batchspec")
    if args.against_transformers and importlib.util.find_spec("transformers") is None:
        raise ConfigError("--against-transformers: transformers is not installed; pip install transformers")
    if (args.chat or args.eos) and not args.model:
        raise ConfigError("--chat and --eos need --model: random prompts are no chats and dummy weights end nothing")
    if args.eos and args.against_transformers:
        raise ConfigError("--eos with --against-transformers: a static batch waits for its longest row; leave one out")
    if args.rounds is not None:
        bench_rounds.check(args)
        args.gen = bench_rounds.tokens_needed(args)
    if args.samples > 1 and args.model:
        raise ConfigError("--samples needs --shape; with --model repeat the prompts with --requests")
    if args.samples == 1 and any("sharing" in options for options in args.opt):
        raise ConfigError("--opt sharing=... needs --samples above 1: nothing is shared otherwise")
    if args.profile and not torch.cuda.is_available():
        raise ConfigError("--profile needs a GPU: it lists kernels; leave it out")


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
    args: argparse.Namespace, argv: Sequence[str], variant: Variant, num_requests: int, device: torch.device
) -> dict[str, Any]:
    record = variant.record
    total = statistics.median(record.seconds)
    row: dict[str, Any] = _head(args, argv, variant.name, device) | {
        "requests": num_requests, "samples": args.samples, "prompt": None if args.model else args.prompt, "gen": args.gen,
        "runs": len(record.seconds), "total_s": round(total, 3), "seconds": [round(s, 3) for s in record.seconds],
        "tokens": record.tokens, "total_tok_s": round(record.tokens / total, 1),
    }  # fmt: skip
    if record.prefill_s:
        decode_s = total - record.prefill_s
        row |= {
            "prefill_s": round(record.prefill_s, 3),
            "decode_tok_s": round((record.tokens - num_requests) / decode_s, 1),
            **_per_round(record, decode_s),
        }
    if record.totals is not None and record.totals.row_rounds:
        row |= {
            "mean_acceptance_length": round(1 + record.totals.accepted / record.totals.row_rounds, 3),
            "rounds": record.totals.rounds,
            "mean_live_rows": round(record.totals.row_rounds / record.totals.rounds, 2),
            "cached_tokens": record.totals.cached_tokens,
        }
    row |= _of_requests(record)
    if record.peak_bytes:
        row["peak_gb"] = round(record.peak_bytes / 1e9, 2)
    if record.profile is not None:
        row["profile"] = record.profile.summary()
    return row


def _head(args: argparse.Namespace, argv: Sequence[str], variant: str, device: torch.device) -> dict[str, Any]:
    """What every line begins with."""
    return {
        "name": args.name, "variant": variant, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "shape": args.model or args.shape, "dtype": args.dtype, "batch": args.batch, "accept": args.accept,
        "command": shlex.join(["batchspec", "bench", *argv]), "versions": versions(),
    }  # fmt: skip


def _of_requests(record: Record) -> dict[str, Any]:
    """By depth of the draft, unconditional; then means over requests, each of which counts the same."""
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
    rounds = record.totals.rounds if record.totals else 0
    return {"round_us": round(decode_s / rounds * 1e6, 1)} if rounds else {}


def _print(variants: Sequence[Variant], rows: Sequence[dict[str, Any]]) -> None:
    first = variants[0]
    width = max(len(variant.name) for variant in variants) + 2
    columns = {
        "tok/s": "total_tok_s", "decode tok/s": "decode_tok_s", "prefill s": "prefill_s", "us/round": "round_us",
        "accept len": "mean_acceptance_length", "by request": "mean_acceptance_length_of_requests",
        "live rows": "mean_live_rows", "1st token ms": "first_token_ms",
    }  # fmt: skip
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
