"""`batchspec bench OUT.jsonl NAME`: tokens per second of the engine alone, one JSON line a variant.

Two workloads. A shape (--shape) runs dummy weights on random prompts, EOS ignored: decode_tok_s = (tokens - rows) /
(total_s - prefill_s), where prefill_s is a run that emits one token a row. A model (--model) runs real weights on real
prompts (--input). Several --draft values, and transformers' `generate` with --against-transformers, take turns within one
process; ratios are of one turn, and the median of the turns is reported with its spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from batchspec.commands.workloads import SHAPES, make_workload
from batchspec.decode.engine import Engine, EngineTotals
from batchspec.decode.round import RoundOptions
from batchspec.draft.base import Drafter, NoDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.errors import ConfigError
from batchspec.model.target import Target
from batchspec.packing.planner import PAGE_SIZE, row_buckets
from batchspec.records import PackedBatch, Request


@dataclass(slots=True)
class Variant:
    """One way to run the workload; `run` takes an output cap or None (the workload's own) and returns seconds and tokens."""

    name: str
    run: Callable[[int | None], tuple[float, int]]
    totals: EngineTotals | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    prefill_s: float = 0.0


def main(argv: list[str]) -> int:
    args = _parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    target, folder, requests = make_workload(args, device)
    variants = [_engine_variant(args, draft, target, requests, device) for draft in args.draft]
    if args.against_transformers:
        variants.insert(0, _transformers_variant(folder, target, requests, args.batch, device))
    for variant in variants:
        variant.run(2)  # warm-up
    if not args.requests and not args.model:
        for variant in variants:
            variant.prefill_s, _ = variant.run(1)
    for turn in range(args.runs):
        for variant in variants:
            seconds, variant.tokens = variant.run(None)
            variant.seconds.append(seconds)
            print(
                f"turn {turn + 1} of {args.runs}  {variant.name:<14} {seconds:8.2f} s  {variant.tokens / seconds:10.1f} tok/s",
                flush=True,
            )
    rows = [_row(args, variant, len(requests), device) for variant in variants]
    with open(args.out, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    _print(variants, rows)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="batchspec bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="JSON lines file, appended to")
    parser.add_argument("name", help="written into each line")
    parser.add_argument("--shape", default="smol135m", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--model", help="folder, hub id or smollm2-135m: real weights instead of a shape")
    parser.add_argument("--input", default="pkg://demo", help="with --model: prompts, as input.path")
    parser.add_argument("--kind", default="", help="with --model: comma-separated values of the prompts' `kind` column")
    parser.add_argument("--batch", type=int, default=8, help="slots")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a random prompt")
    parser.add_argument("--gen", type=int, default=128, help="output tokens a request (with --requests: the cap)")
    parser.add_argument(
        "--requests", type=int, default=0, help="this many requests; with --shape their output is lognormal, as in a job"
    )
    parser.add_argument("--draft", nargs="+", default=["none"], choices=["none", "lookup"])
    parser.add_argument("--k", type=int, default=8, help="draft tokens a round")
    parser.add_argument("--accept", default="", help="synthetic acceptance by position, unconditional: .6,.28,.12")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu"])
    parser.add_argument("--runs", type=int, default=1, help="turns; ratios are medians over them")
    parser.add_argument(
        "--against-transformers", action="store_true", help="with --model: transformers' generate in batches of --batch"
    )
    args = parser.parse_args(argv)
    args.accept = tuple(float(rate) for rate in args.accept.split(",")) if args.accept else None
    if args.accept and len(args.accept) != args.k:
        raise ConfigError(f"--accept has {len(args.accept)} rates, --k is {args.k}; give one rate a draft token")
    if args.against_transformers and not args.model:
        raise ConfigError("--against-transformers needs --model: dummy weights exist only inside batchspec")
    return args


def _engine_variant(
    args: argparse.Namespace, draft: str, target: Target, requests: list[Request], device: torch.device
) -> Variant:
    drafter: Drafter = NoDrafter() if draft == "none" else LookupDrafter(args.k)
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    batch = PackedBatch(
        slots=args.batch,
        row_buckets=row_buckets(args.batch),
        num_pages=1 + args.batch * -(-longest // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_len=longest,
        draft_len=drafter.max_len,
        prefill_tokens=1024 if device.type == "cpu" else 16384,
        run_ahead=0,
    )
    options = RoundOptions(synthetic=args.accept if draft != "none" else None)
    engine = Engine(target, drafter, batch, device=device, options=options)

    def run(cap: int | None) -> tuple[float, int]:
        capped = [r if cap is None else replace(r, max_new_tokens=cap) for r in requests]
        engine.totals = variant.totals = EngineTotals()
        began = _clock(device)
        tokens = sum(len(done.token_ids) for done in engine.run(iter(capped)) if done.token_ids is not None)
        return _clock(device) - began, tokens

    variant = Variant(draft, run)
    return variant


def _transformers_variant(folder: Path, target: Target, requests: list[Request], batch: int, device: torch.device) -> Variant:
    """transformers' `generate` in static batches of `batch`, left-padded, greedy, EOS ignored."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
    model.to(device).eval()
    groups = [requests[i : i + batch] for i in range(0, len(requests), batch)]

    @torch.inference_mode()
    def run(cap: int | None) -> tuple[float, int]:
        began, tokens = _clock(device), 0
        for group in groups:
            width = max(len(request.prompt_ids) for request in group)
            ids = torch.zeros(len(group), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for line, request in enumerate(group):
                ids[line, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
                mask[line, width - len(request.prompt_ids) :] = 1
            count = group[0].max_new_tokens if cap is None else cap
            out = model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            tokens += (out.shape[1] - width) * len(group)
        return _clock(device) - began, tokens

    return Variant("transformers", run)


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _row(args: argparse.Namespace, variant: Variant, num_requests: int, device: torch.device) -> dict[str, Any]:
    total = statistics.median(variant.seconds)
    row: dict[str, Any] = {
        "name": args.name, "variant": variant.name, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "shape": args.model or args.shape, "dtype": args.dtype, "batch": args.batch, "requests": num_requests,
        "prompt": None if args.model else args.prompt, "gen": args.gen,
        "k": args.k if variant.name not in ("none", "transformers") else 0,
        "accept": args.accept, "runs": len(variant.seconds), "total_s": round(total, 3),
        "seconds": [round(s, 3) for s in variant.seconds],
        "tokens": variant.tokens, "total_tok_s": round(variant.tokens / total, 1),
    }  # fmt: skip
    if variant.prefill_s:
        row.update(
            prefill_s=round(variant.prefill_s, 3),
            decode_tok_s=round((variant.tokens - num_requests) / (total - variant.prefill_s), 1),
        )
    if variant.totals is not None and variant.totals.row_rounds:
        row.update(
            mean_acceptance_length=round(1 + variant.totals.accepted / variant.totals.row_rounds, 3), rounds=variant.totals.rounds
        )
    return row


def _print(variants: Sequence[Variant], rows: Sequence[dict[str, Any]]) -> None:
    first = variants[0]
    print(f"{'variant':<14}{'tok/s':>10}{'decode tok/s':>14}{'accept len':>12}   ratio to {first.name} (median, spread)")
    for variant, row in zip(variants, rows, strict=True):
        ratios = sorted(base / own for base, own in zip(first.seconds, variant.seconds, strict=True))
        cells = [_cell(row.get(key)) for key in ("total_tok_s", "decode_tok_s", "mean_acceptance_length")]
        spread = f"{statistics.median(ratios):.3f}  [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        print(f"{variant.name:<14}{cells[0]:>10}{cells[1]:>14}{cells[2]:>12}   {spread}")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}" if value < 100 else f"{value:,.1f}"
