"""The variants that take turns in `batchspec bench`, the engine in each configuration, and their measurements."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.bench.engines import ROOM_BYTES, Bench, VariantSpec, variant_specs
from batchspec.bench.profile import Profile, profile_rounds
from batchspec.bench.schemas import following
from batchspec.bench.workloads import survey_of
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.ranks.messages import End
from batchspec.errors import InputError
from batchspec.job.load.build import prepare_engine
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.packing.kv_memory import kv_bytes
from batchspec.packing.order import order_requests
from batchspec.records import Completion, Request, RowStats, SamplingParams

WARM_ROWS, WARM_TOKENS = 8, 16


@dataclass(slots=True)
class Record:
    """What a variant measured."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    prefill_s: float = 0.0
    totals: EngineTotals = field(default_factory=EngineTotals)
    rows: list[tuple[RowStats, int]] = field(default_factory=list)
    """For each request of the last turn: its speculation statistics and tokens."""
    padded_passes: int | None = None
    """Number of prefill passes of the last turn that ran as CUDA graphs; None without ablation.prefill_graphs."""
    peak_bytes: int = 0
    profile: Profile | None = None


class EngineVariant:
    keeps = True
    """Stays in memory between turns."""

    def __init__(self, bench: Bench, variant: VariantSpec) -> None:
        self.name, self.record = variant.name, Record()
        self._bench, self._spec, self._loaded = bench, variant, None
        requests = bench.workload.requests if variant.options.get("sharing", True) else bench.workload.unshared()
        sampling = SamplingParams(temperature=variant.temperature, no_repeat_ngram=variant.ngrams)
        self._mode = SamplingMode.of(sampling, 0, constrained=variant.schemas > 0)
        self._requests = order_requests([replace(request, sampling=sampling) for request in requests])

    _loaded: LoadedEngine[Engine] | None

    def open(self) -> Mapping[str, float]:
        """Allocate memory and warm up, if that has not happened; the seconds of its parts, if they are known."""
        if self._loaded is not None:
            return {}
        engine, num_rows = self.build().engine, len(self._requests)
        # Without `most_rounds`: the engine runs all rows several times and needs the graphs of all row buckets.
        prepare_engine(engine, self._mode, survey_of(self._requests), num_rows, window_rows=num_rows)
        if automata := self._bench.automata(self._spec):
            self._requests = [following(one, automata[i % len(automata)]) for i, one in enumerate(self._requests)]
        self._decode(self._requests[:WARM_ROWS], WARM_TOKENS)
        return engine.planner.seconds

    def build(self) -> LoadedEngine[Engine]:
        """The engine; a new one is not warmed up."""
        if self._loaded is None:
            self._loaded = self._bench.engine(self._spec)
        return self._loaded

    def close(self) -> None:
        """Free the memory if not all variants fit together."""
        if self._bench.lead is not None:
            self._bench.lead.send(End())
        if not self.keeps:
            self._loaded = None
            gc.collect()
            torch.cuda.empty_cache()

    def run(self, cap: int | None = None) -> tuple[float, int]:
        """Seconds and tokens of the workload; outputs are cut to `cap` tokens if it is given."""
        if self._bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result = self._decode(self._requests, cap)
        if self._bench.device.type == "cuda":
            self.record.peak_bytes = max(self.record.peak_bytes, torch.cuda.max_memory_allocated())
        assert self._loaded is not None
        self.record.totals = self._loaded.totals
        return result

    def _decode(self, requests: list[Request], cap: int | None) -> tuple[float, int]:
        assert self._loaded is not None
        capped = [r if cap is None else replace(r, max_new_tokens=min(cap, r.max_new_tokens)) for r in requests]
        self._loaded.engine.totals = EngineTotals()
        graphs = self._loaded.engine.executor.prefill_graphs
        before = 0 if graphs is None else graphs.num_padded
        began = clock(self._bench.device)
        with closing(self._loaded.run(capped)) as completions:
            found = [(done.stats, len(done.token_ids)) for done in map(_whole, completions) if done.token_ids is not None]
        self.record.rows, tokens = [(stats, count) for stats, count in found if stats], sum(count for _, count in found)
        self.record.padded_passes = None if graphs is None else graphs.num_padded - before
        return clock(self._bench.device) - began, tokens

    def profile(self) -> None:
        """Trace some rounds into the record."""
        assert self._loaded is not None
        self.record.profile = profile_rounds(self._loaded, self._requests)


def _whole(done: Completion) -> Completion:
    """The completion. Raises InputError for a row that failed: speeds without it would be those of another workload."""
    if done.error is not None:
        raise InputError(f"row {done.request_id} of the benchmark failed: {done.error.code}: {done.error.message}")
    return done


def engine_variants(bench: Bench) -> list[EngineVariant]:
    """All engine variants; each frees its memory between turns if they do not fit together."""
    found = [EngineVariant(bench, variant) for variant in variant_specs(bench.args)]
    if bench.device.type == "cuda" and len(found) > 1:
        target = bench.workload.target
        needed = len(found) * kv_bytes(bench.batch(NoDrafter()), target.spec, target.dtype)
        for variant in found:
            variant.keeps = needed + ROOM_BYTES < bench.free_bytes
    return found


def clock(device: torch.device) -> float:
    """Seconds, after all launched work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
