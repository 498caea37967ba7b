"""The ways in which `batchspec bench` runs a workload - drafter, draft length, temperature, options - and the engine of each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from batchspec.commands.workloads import Workload
from batchspec.draft.base import Drafter, NoDrafter
from batchspec.draft.corpus import Corpus, usual_lengths
from batchspec.draft.eagle3 import Eagle3Drafter
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.tree import LOGPROB, PROB, TreeDrafter, TreeShape, usual_nodes
from batchspec.draft.weights import Head, dummy_head, dummy_spec, load_head
from batchspec.draft.window import WindowDrafter
from batchspec.engine.engine import Engine
from batchspec.engine.round import RoundOptions
from batchspec.errors import ConfigError
from batchspec.packing.planner import CPU_PREFILL, GPU_PREFILL, GPU_RUN_AHEAD, PAGE_SIZE, row_buckets
from batchspec.records import PackedBatch

OPTIONS = ("coupled", "dead_positions", "uniform_slots", "argmax", "dead_rows", "overlap", "sharing")
TREES = {"tree": LOGPROB, "tree-products": PROB}
HEAD_DRAFTERS = ("eagle3", "parallel", "hybrid", *TREES)
DRAFT_VOCAB = {"smol135m": 16384}
USUAL_DRAFT_VOCAB = 32000
LONGEST_DRAFT = 5
"""K of --k auto without --accept, at most."""


@dataclass(frozen=True, slots=True)
class Way:
    """Drafter, draft length (None: the engine chooses) and options that differ from the usual."""

    draft: str
    draft_len: int | None
    options: Mapping[str, bool]
    temperature: float = 0.0

    @property
    def name(self) -> str:
        length = "" if self.draft == "none" else f" K={'auto' if self.draft_len is None else self.draft_len}"
        heat = f" T={self.temperature:g}" if self.temperature else ""
        return self.draft + length + heat + "".join(f" {key}={str(value).lower()}" for key, value in self.options.items())


def ways(args: argparse.Namespace) -> Iterator[Way]:
    """Every drafter with every draft length and temperature, and that again with each set of --opt that says something to it."""
    for draft in args.draft:
        for length in [0] if draft == "none" else args.k:
            for temperature in args.temperature:
                for options in [{}, *args.opt]:
                    fits = draft in HEAD_DRAFTERS or "dead_positions" not in options
                    if fits and (temperature or "coupled" not in options):
                        yield Way(draft, length, options, temperature)


def parse_options(text: str) -> dict[str, bool]:
    """`argmax=false,dead_rows=false` -> a set of options. Raises ConfigError for others."""
    found = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in OPTIONS or value not in ("true", "false"):
            raise ConfigError(f"--opt {part} must be NAME=true or NAME=false with NAME one of {', '.join(OPTIONS)}")
        found[key] = value == "true"
    return found


@dataclass
class Bench:
    """What the engine variants of one process share: the target, the requests, and one head."""

    args: argparse.Namespace
    workload: Workload
    device: torch.device

    @cached_property
    def head(self) -> Head:
        """One for every drafter that has one; of noise with a mask, which a chain makes no use of."""
        target, args = self.workload.target, self.args
        if args.draft_path:
            return load_head(Path(args.draft_path), target.spec, dtype=target.dtype, device=self.device)
        spec = dummy_spec(target.spec, draft_vocab_size=DRAFT_VOCAB.get(args.shape, USUAL_DRAFT_VOCAB), parallel=True)
        return dummy_head(spec, dtype=target.dtype, device=self.device)

    def drafter(self, way: Way) -> Drafter:
        args = self.args
        length = max(1, way.draft_len) if way.draft_len is not None else len(args.accept or ()) or LONGEST_DRAFT
        if way.draft == "none":
            return NoDrafter()
        if way.draft == "lookup":
            return self._lookup(length)
        if way.draft == "window":
            return WindowDrafter(self.workload.target, length, slots=args.batch, window=args.window, sink=args.sink)
        on: dict[str, Any] = {key: way.options.get(key, True) for key in ("dead_positions", "argmax")}
        on |= {"slots": args.batch, "window": args.window, "sink": args.sink}
        if way.draft == "parallel":
            return ParallelDrafter(self.head, self.workload.target, length, **on)
        if way.draft in TREES:
            del on["argmax"]
            return self._tree(way.draft, length, on)
        uniform = way.options.get("uniform_slots", True)
        chain = Eagle3Drafter(self.head, self.workload.target, length, uniform_slots=uniform, **on)
        if way.draft == "hybrid":
            return HybridDrafter(chain, self._lookup(length), slots=args.batch, device=self.device)
        return chain

    def _lookup(self, length: int) -> LookupDrafter:
        """With the runs of a job's defaults."""
        drafter = LookupDrafter(length)
        if self.args.corpus_tokens:
            lengths = usual_lengths(drafter.min_ngram, drafter.max_ngram)
            drafter.corpus = Corpus(self.args.corpus_tokens, lengths=lengths, device=self.device)
        return drafter

    def _tree(self, draft: str, depth: int, on: dict[str, Any]) -> TreeDrafter:
        topk = self.args.topk
        nodes = self.args.nodes or usual_nodes(topk, depth)
        try:
            return TreeDrafter(
                self.head, self.workload.target, TreeShape(topk=topk, depth=depth, nodes=nodes, rank=TREES[draft]), **on
            )
        except ValueError as error:
            raise ConfigError(f"--draft {draft} with --k {depth}, --topk, --nodes: {error}") from None

    def engine(self, way: Way, buckets: tuple[int, ...] | None = None) -> Engine:
        """As a job would have it; `buckets` are the row buckets if not the usual ones."""
        drafter = self.drafter(way)
        accept = self.args.accept[: drafter.max_len] if self.args.accept and drafter.max_len else None
        batch = self.batch(drafter)
        return Engine(
            self.workload.target,
            drafter,
            batch if buckets is None else replace(batch, row_buckets=buckets),
            device=self.device,
            options=RoundOptions(
                coupled=way.options.get("coupled", True),
                synthetic=accept,
                argmax=way.options.get("argmax", True),
                uniform_slots=way.options.get("uniform_slots", True),
            ),
            refill_dead=way.options.get("dead_rows", True),
            adaptive=way.draft_len is None,
            overlap=way.options.get("overlap", False),
        )

    def batch(self, drafter: Drafter) -> PackedBatch:
        """A slot for each of --batch rows and pages for all of them to their end: nothing is ever short."""
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in self.workload.requests)
        on_cpu, num_lookahead_slots = (
            self.device.type == "cpu",
            drafter.shape.num_lookahead_slots if isinstance(drafter, TreeDrafter) else 0,
        )
        return PackedBatch(
            num_slots=self.args.batch,
            row_buckets=row_buckets(self.args.batch),
            num_pages=1 + self.args.batch * -(-(longest + num_lookahead_slots) // PAGE_SIZE),
            page_size=PAGE_SIZE,
            max_len=longest,
            draft_len=drafter.max_len,
            prefill_tokens=self.args.prefill_tokens or (CPU_PREFILL if on_cpu else GPU_PREFILL),
            run_ahead=0 if on_cpu else GPU_RUN_AHEAD,
        )
