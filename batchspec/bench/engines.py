"""The variants in which `batchspec bench` runs a workload: drafter, draft length, temperature and options, as a job's config.

Drafters and engines are made and prepared as a job makes them (`draft/spec.py`, `build_engine` and `prepare_engine` of
`job/load/build.py`), and fed by `LoadedEngine.run`. Only the shape of the batch comes from the arguments and not from the
planner, so that no row waits for memory if there is enough.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.bench.schemas import compiled, symbols_of
from batchspec.bench.workloads import Workload, survey_of
from batchspec.config.draft_schema import DraftConfig, TreeConfig
from batchspec.config.drafters import DRAFTERS, named
from batchspec.config.schema import AblationConfig, ModelConfig, RunConfig
from batchspec.distributed.group import Group
from batchspec.draft.base import Drafter
from batchspec.draft.block_head import dummy_block_spec
from batchspec.draft.spec import DEFAULT_DRAFT_VOCAB, DrafterSpec, open_drafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.ranks.lead import Lead
from batchspec.errors import ConfigError
from batchspec.job.load.build import build_engine
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.load.memory import free_after_loading
from batchspec.model.families.shapes import DRAFT_VOCAB
from batchspec.packed_batch import PackedBatch
from batchspec.packing.kv_memory import KVMemory, kv_bytes
from batchspec.packing.memory import graph_tokens
from batchspec.packing.planner import CPU_PREFILL, GPU_PREFILL, GPU_RUN_AHEAD, PAGE_SIZE, most_uncommitted, row_buckets
from batchspec.records import NgramRule

OPTIONS = (
    "coupled", "lengths", "dead_positions", "uniform_slots", "argmax", "dead_rows", "prefill_graphs", "sharing", "sharded_draft",
)
TREE, DFLASH2 = "tree", "dflash2"
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"parallel": False},
    "hybrid": {"parallel": False},
    "parallel": {"name": "eagle3", "parallel": True},
    TREE: {"name": "eagle3", "parallel": False},
    DFLASH2: {"name": "block"},
}
"""Names of --draft -> keys of `draft` that they set; a drafter without an entry is its own name."""
DRAFTS = tuple(dict.fromkeys([*named(), *SETTINGS]))
"""Choices of --draft."""
ROOM_BYTES = 12 * 10**9
"""Bytes left free beside the pages of all rows, and if several engines are in one card's memory."""
LONGEST_DRAFT = 5
"""The largest K for --k auto without --accept."""


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One variant: drafter, draft length (None: the engine chooses) and options that differ from the defaults."""

    draft: str
    draft_len: int | None
    options: Mapping[str, bool]
    temperature: float = 0.0
    schemas: int = 0
    """Number of distinct schemas that its rows follow, one each; 0: none."""
    ngrams: NgramRule | None = None
    """The n-grams that its rows do not repeat."""

    @property
    def name(self) -> str:
        length = "" if self.draft == "none" else f" K={'auto' if self.draft_len is None else self.draft_len}"
        heat = f" T={self.temperature:g}" if self.temperature else ""
        heat += f" schemas={self.schemas}" if self.schemas else ""
        heat += f" ngrams={self.ngrams[0]}" if self.ngrams else ""
        return self.draft + length + heat + "".join(f" {key}={str(value).lower()}" for key, value in self.options.items())


def variant_specs(args: argparse.Namespace) -> Iterator[VariantSpec]:
    """Every drafter with every draft length, temperature, number of schemas and size of n-grams, and again with each set of
    --opt that applies to it.
    """
    for draft in args.draft:
        for length in [0] if draft == "none" else args.k:
            for temperature, schemas, size in product(args.temperature, args.schemas, args.ngrams):
                for options in [{}, *args.opt]:
                    rule = (size, args.ngram_window, ()) if size else None
                    variant = VariantSpec(draft, length, options, temperature, schemas, rule)
                    if all(_applies(key, variant) for key in options):
                        yield variant


def _applies(option: str, variant: VariantSpec) -> bool:
    """Whether an option of OPTIONS may change what the variant does."""
    if option == "lengths":  # `none` and trees have no draft lengths to choose
        return variant.draft_len is None and variant.draft != TREE
    reads = DRAFTERS[SETTINGS.get(variant.draft, {}).get("name", variant.draft)].reads
    if option == "coupled":
        return variant.temperature > 0 and "draft.coupled" in reads
    return option not in ("dead_positions", "sharded_draft") or f"ablation.{option}" in reads


def parse_options(text: str) -> dict[str, bool]:
    """`argmax=false,dead_rows=false` -> a set of options. Raises ConfigError for others."""
    found = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in OPTIONS or value not in ("true", "false"):
            raise ConfigError(f"--opt {part} must be NAME=true or NAME=false with NAME one of {', '.join(OPTIONS)}")
        found[key] = value == "true"
    return found


def config_of(args: argparse.Namespace, variant: VariantSpec) -> RunConfig:
    """The configuration of a job that would run the workload in this variant."""
    on, length = variant.options, _draft_len(args, variant)
    accept = None
    if args.accept and variant.draft != "none":
        accept = [rate for kind in args.accept for rate in (kind + [0.0] * length)[:length]]
    tree = TreeConfig()
    if variant.draft == TREE:
        tree = TreeConfig(topk=args.topk, depth=length, nodes=args.nodes)
    draft = DraftConfig(
        **{"name": variant.draft, **SETTINGS.get(variant.draft, {})},
        path=args.draft_path,
        num_speculative_tokens=length,
        vocab_size=args.draft_vocab,
        corpus_tokens=args.corpus_tokens,
        window=args.window,
        sink_tokens=args.sink or None,
        cache_dtype=args.draft_kv,
        tree=tree,
        synthetic=accept,
        coupled=on.get("coupled", True),
        adaptive=variant.draft_len is None,
        lengths="auto" if on.get("lengths", True) else "fixed",
    )
    ablation = AblationConfig(
        dead_rows=on.get("dead_rows", True),
        argmax=on.get("argmax", True),
        uniform_slots=on.get("uniform_slots", True),
        dead_positions=on.get("dead_positions", True),
        prefill_graphs=on.get("prefill_graphs", True),
        sharded_draft=on.get("sharded_draft"),
    )
    stored = args.draft_path or (args.model and variant.draft == "mtp")
    model = ModelConfig(path=args.model, load_format="auto" if stored else "dummy")
    return RunConfig(model=model, draft=draft, ablation=ablation)


def _draft_len(args: argparse.Namespace, variant: VariantSpec) -> int:
    """K of the drafter; a variant without drafts still keeps the drafter's K/V up to date."""
    return max(1, variant.draft_len) if variant.draft_len is not None else len(args.accept[0]) if args.accept else LONGEST_DRAFT


@dataclass
class Bench:
    """What the engine variants of one process share: the target, the requests, and the drafters' weights."""

    args: argparse.Namespace
    workload: Workload
    device: torch.device
    group: Group | None = None
    """The processes that compute the target together; None: this one alone."""
    lead: Lead | None = None
    """Set on the leader of a group if the other ranks follow its engines."""
    free_bytes: int = field(init=False)
    """Free memory beside the target, before any engine is made: the same number for all variants and on all ranks."""
    _weights: dict[Any, Any] = field(default_factory=dict)
    _automata: tuple[int, list[TokenAutomaton]] = (0, [])

    def __post_init__(self) -> None:
        """Ranks make the buffers of their exchanges once: enlarging them would make the graphs of other engines invalid."""
        self.free_bytes, target = min(free_after_loading(self.device, self.group)), self.workload.target
        if target.ranks is not None:
            longest = max(
                self._drafter_spec(variant, config_of(self.args, variant)).shape.num_verified
                for variant in variant_specs(self.args)
            )
            target.ranks.reserve(self.args.batch * (longest + 1) * target.spec.hidden_size * target.dtype.itemsize)

    def _drafter_spec(self, variant: VariantSpec, config: RunConfig) -> DrafterSpec[Any]:
        spec, vocab = self.workload.target.spec, DRAFT_VOCAB.get(self.args.shape, DEFAULT_DRAFT_VOCAB)
        made = open_drafter(config, spec.whole or spec, draft_vocab=vocab).of_rank(spec.shard)
        if variant.draft == DFLASH2 and config.draft.path is None:
            made.checkpoint = dummy_block_spec(made.target, block_size=max(8, config.draft.draft_len), dflash2=True)
        return made

    def drafter(self, variant: VariantSpec, config: RunConfig) -> Drafter:
        """The drafter that a job would have; drafters with the same checkpoint share its weights.

        Raises ConfigError if the options do not fit the drafter.
        """
        target, args = self.workload.target, self.args
        try:
            spec = self._drafter_spec(variant, config)
            if spec.checkpoint not in self._weights:
                self._weights[spec.checkpoint] = spec.load(dtype=target.dtype, device=self.device)
            return spec.build(self._weights[spec.checkpoint], target, slots=args.batch)
        except ValueError as error:
            length = config.draft.num_speculative_tokens
            raise ConfigError(f"--draft {variant.draft} with --k {length}, --topk, --nodes: {error}") from None

    def engine(self, variant: VariantSpec, buckets: tuple[int, ...] | None = None) -> LoadedEngine[Engine]:
        """The engine that a job would have; `buckets`: row buckets that replace the default ones."""
        config = config_of(self.args, variant)
        drafter = self.drafter(variant, config)
        batch = self.batch(drafter)
        batch = batch if buckets is None else replace(batch, row_buckets=buckets)
        vocabulary = self._symbols if variant.schemas else None
        return LoadedEngine(build_engine(config, self.workload.target, drafter, batch, lead=self.lead, vocabulary=vocabulary))

    @cached_property
    def _symbols(self) -> TokenSymbols:
        return symbols_of(self.workload.tokenizer, self.workload.target.spec.vocab_size)

    def automata(self, variant: VariantSpec) -> list[TokenAutomaton]:
        """The automata that the rows follow, in turn; none without schemas."""
        if variant.schemas and self._automata[0] != variant.schemas:
            end_ids = self.workload.requests[0].stop_ids
            self._automata = variant.schemas, compiled(self._symbols, variant.schemas, end_ids)
        return self._automata[1] if variant.schemas else []

    def batch(self, drafter: Drafter) -> PackedBatch:
        """A slot for each of --batch rows, and pages for all of them up to their end, so that no row waits or is preempted.

        If memory is too small for that, layers with a window have pages for the windows and one prefill pass, as in a job. Then
        rows may wait for others to be prefilled, and `mean_live_rows` is smaller.
        """
        requests = self.workload.requests
        demand = survey_of(requests).demand(len(requests), max_len=0)
        target, num_verified, on_cpu = self.workload.target, drafter.shape.num_verified, self.device.type == "cpu"
        prefill_tokens = self.args.prefill_tokens or (CPU_PREFILL if on_cpu else GPU_PREFILL)
        run_ahead = 0 if on_cpu else GPU_RUN_AHEAD
        layers = drafter.layer_states(PAGE_SIZE)
        memory = KVMemory.of(
            target.spec, target.dtype, layers, page_size=PAGE_SIZE, max_len=demand.max_tokens,
            max_tokens=demand.max_tokens + drafter.shape.num_lookahead_slots,
            lookahead=most_uncommitted(run_ahead, num_verified), pass_tokens=prefill_tokens, num_verified=num_verified,
        )
        prefilled_together = replace(memory, pass_tokens=self.args.batch * memory.max_tokens)
        pages, *more_pages = prefilled_together.num_pages(sys.maxsize, self.args.batch)
        batch = PackedBatch(
            num_slots=self.args.batch,
            row_buckets=row_buckets(self.args.batch),
            num_pages=pages,
            more_pages=tuple(more_pages),
            page_size=PAGE_SIZE,
            max_len=demand.max_tokens,
            longest_prompt=demand.longest_prompt,
            longest_row=demand.longest_row,
            num_verified=num_verified,
            prefill_tokens=prefill_tokens,
            run_ahead=run_ahead,
            graph_tokens=graph_tokens(target.spec, prefill_tokens),
        )
        if kv_bytes(batch, target.spec, target.dtype, layers) + ROOM_BYTES < self.free_bytes:
            return batch
        pages, *more_pages = memory.num_pages(sys.maxsize, self.args.batch)
        return replace(batch, num_pages=pages, more_pages=tuple(more_pages))
