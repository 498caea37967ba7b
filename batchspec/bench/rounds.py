"""`batchspec bench OUT.jsonl NAME --rounds N`: the time of one round, by drafter, draft length and option, without prefill.

All slots hold live rows with --prompt earlier tokens whose K/V are random: a round's time depends on how much it reads, not on
the values. Rows advance as --accept says, or as their drafts happen to be right. With K = 0 a drafter keeps what it needs to
draft later, and drafts nothing. With --schemas each row is at some point within the text of its schema;
with --ngrams the newest --ngram-window tokens of its past are output.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.bench.engines import Bench, VariantSpec, variant_specs
from batchspec.bench.profile import PROFILED_ROUNDS, profile_calls
from batchspec.bench.schemas import begin_anywhere
from batchspec.bench.variants import Record, clock
from batchspec.console import terminal
from batchspec.engine.loop.engine import Engine
from batchspec.engine.step import RoundShape
from batchspec.errors import ConfigError
from batchspec.kernels.common.e4m3 import E4M3, movable
from batchspec.records import SamplingParams

WARM_ROUNDS = 3
FIRST_ID = 3
"""Random tokens avoid the ids that end a row."""


def tokens_needed(args: argparse.Namespace) -> int:
    """Number of output tokens with which every row stays alive through all rounds, even if each round accepts all drafts."""
    longest: int = max(args.k)
    return (WARM_ROUNDS + int(args.rounds)) * (1 + longest) + 1


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not apply to single rounds."""
    if args.rounds < 1:
        raise ConfigError(f"--rounds {args.rounds} must be at least 1")
    if None in args.k:
        raise ConfigError("--rounds times each draft length by itself: give numbers to --k, not auto")
    if args.model or args.requests or args.samples > 1:
        raise ConfigError("--rounds has rows without prompts: leave out --model, --requests and --samples")


def time_rounds(
    bench: Bench, begin: Callable[[str], object] = lambda phase: None
) -> list[tuple[VariantSpec, dict[str, Any], Record]]:
    """A row of figures for each variant, and its profile with --profile; prints them as they are measured. begin: called with
    each phase.

    Nothing here depends on a clock or on the host: all ranks of a group call it, and need no leader.
    """
    found = []
    terminal.show(f"{'variant':<32}{'us/round':>12}{'no row live':>14}{'accept len':>12}{'tok/s':>12}")
    for variant in variant_specs(bench.args):
        begin(f"{variant.name}: preparing and timing {bench.args.rounds} rounds")
        record = Record()
        row = _time(bench, variant, record)
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        figures = (
            f"{row['round_us']:>12,.1f}{row['dead_rows_us']:>14,.1f}{row['mean_acceptance_length']:>12.3f}{row['tok_s']:>12,.1f}"
        )
        terminal.show(f"{variant.name:<32}{figures}")
        found.append((variant, row, record))
    return found


@torch.inference_mode()
def _time(bench: Bench, variant: VariantSpec, record: Record) -> dict[str, Any]:
    args = bench.args
    engine = bench.engine(variant, buckets=(args.batch,)).engine
    draft_len, rows = engine.drafter.draft_len if variant.draft_len else 0, engine.executor.rows
    sampling = SamplingParams(no_repeat_ngram=variant.ngrams)
    mode = SamplingMode.of(sampling, 0, constrained=variant.schemas > 0)
    shape = RoundShape(args.batch, draft_len, mode, prepare_next=draft_len > 0)
    if variant.ngrams is not None:
        asked = [replace(bench.workload.requests[0], sampling=sampling)] * args.batch
        rows.begin(range(args.batch), asked, [()] * args.batch)
    if args.adapters:
        rows.adapter.copy_(1 + torch.arange(len(rows.adapter), device=rows.adapter.device) % args.adapters)
    engine.executor.graphs.prepare([shape])
    with engine.executor.dead_tokens_routed():
        dead_s = engine.executor.graphs.seconds(shape)
    begin_rows(engine, args.prompt, num_output=args.ngram_window if variant.ngrams else 0)
    if automata := bench.automata(variant):
        begin_anywhere(engine, automata, bench.workload.requests[0])
    for _ in range(WARM_ROUNDS):
        engine.executor.graphs.run(shape)
    before, began = int(rows.num_tokens.sum()), clock(bench.device)
    for _ in range(args.rounds):
        engine.executor.graphs.run(shape)
    seconds = clock(bench.device) - began
    if bench.group is not None:
        bench.group.collectives.check()
    tokens = int(rows.num_tokens.sum()) - before
    assert bool(rows.live.all()), "a row ended: the rounds were not all alike"
    assert not automata or bool((rows.automaton_state > 0).all()), "a row has left its automaton"
    row = {
        "past": args.prompt, "rounds": args.rounds, "round_us": round(seconds / args.rounds * 1e6, 1),
        "dead_rows_us": round(dead_s * 1e6, 1), "mean_acceptance_length": round(tokens / args.rounds / args.batch, 3),
        "tok_s": round(tokens / seconds, 1),
    }
    if args.profile:
        begin_rows(engine, args.prompt, num_output=args.ngram_window if variant.ngrams else 0)
        profiled = min(args.rounds, PROFILED_ROUNDS)
        if bench.group is None or bench.group.rank == 0:
            record.profile = profile_calls(lambda: engine.executor.graphs.run(shape), profiled)
            row["profile"] = record.profile.summary()
        else:  # rank 0 profiles; a profiler on this rank too would slow its rounds
            for _ in range(profiled):
                engine.executor.graphs.run(shape)
    return row


def begin_rows(engine: Engine, past: int, *, num_output: int = 0) -> None:
    """Every slot's row gets `past` tokens, the last num_output of them as output; its pages are anywhere in the pool, and its
    states hold all tokens but the last."""
    rows, device = engine.executor.rows, engine.executor.rows.tokens.device
    noise = torch.Generator(device).manual_seed(0)
    rows.tokens.random_(FIRST_ID, engine.executor.round.target.spec.vocab_size, generator=noise)
    for table, num_pages in zip(rows.page_tables, engine.batch.group_pages(len(rows.page_tables)), strict=True):
        slots, columns = table.shape
        width = min(columns, (num_pages - 1) // slots)  # a window's pages take turns, as when a row gives back its oldest one
        pages = 1 + torch.randperm(slots * width, device=device, generator=noise).view(slots, width).int()
        table.copy_(pages[:, torch.arange(columns, device=device) % width])
    rows.keys.copy_(torch.arange(len(rows.keys), device=device))
    rows.limit.fill_(engine.batch.max_len)
    for layer in engine.executor.cache.layers:
        if layer.pages.dtype is E4M3:
            movable(layer.pages).random_(0, 0x48, generator=noise)  # bits of 0 .. 3.75
        else:
            layer.pages.normal_(generator=noise)
    for tensor in (tensor for own in engine.executor.cache.kept for tensor in own.rows):
        tensor.normal_(generator=noise)
    if engine.executor.cache.num_folded is not None:
        engine.executor.cache.num_folded.fill_(past - 1)
    rows.num_tokens.fill_(past)
    rows.prompt_len.fill_(max(1, past - num_output))
    rows.live.fill_(1)
