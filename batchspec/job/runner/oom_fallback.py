"""The engine of a run. It may be replaced: by one with a smaller batch, once, if memory runs out; by one with another drafter."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from batchspec.checkpoint.weight_sums import SumsOfJob
from batchspec.config.schema import PackingConfig
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import CapacityError, CheckpointError, ConfigError
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.load.memory import plan_batch, rank_out_of_memory
from batchspec.job.prepare import Job
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.model.layers.attention.kv_scales import KVScales
from batchspec.packed_batch import PackedBatch
from batchspec.packing.planner import PAGE_SIZE
from batchspec.packing.rates import device_rates
from batchspec.packing.survey import Survey
from batchspec.process.out_of_memory import OutOfMemoryGuard

LoadEngine = Callable[[Job, Survey, ProgressBar], LoadedEngine[Engine]]
Without = Callable[[Job, str], Job | None]
"""The job without a head that it can do without, and tells why it does; None: it has none."""
FEWEST_PREFILL = 512


class EngineWithFallback:
    """Loads the engine; if it does not fit, loads a smaller one, once. Raises CapacityError if that does not fit either.

    A job that can do without its head loses it before an error of loading, or a second lack of memory, ends the run.

    `loaded` is the engine with its model and tokenizer, which runs rows; `current` the `Engine` in it, for its counts.
    """

    loaded: LoadedEngine[Engine]
    """The present engine; the one before it is gone when another one is made."""

    def __init__(
        self, job: Job, survey: Survey, progress: ProgressBar, load: LoadEngine = LoadedEngine.load,
        without: Without = lambda job, why: None,
    ) -> None:
        self._job, self._survey, self._progress, self._load, self._without = job, survey, progress, load, without
        self._shrunk = self._stopping = False
        self._totals: EngineTotals | None = None
        """Of the engines before the present one."""
        self._make()

    def stop(self) -> None:
        """`Engine.stop` of the present engine and of any later one. A signal handler may call it."""
        self._stopping = True
        if hasattr(self, "loaded"):
            self.current.stop()

    @property
    def current(self) -> Engine:
        """The present engine itself."""
        return self.loaded.engine

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def shrink(self, message: str) -> None:
        """Replace the engine, which ran out of memory, by one with a smaller batch. Its totals are kept."""
        batch = self.current.batch
        self.unload()
        self._fall_back(batch, message)
        self._make()

    def unload(self) -> None:
        """Free the memory of the engine. `change` must follow, or the end of the run."""
        self._totals = self.current.totals
        del self.loaded
        self._free()

    def change(self, changed: Callable[[Job], Job]) -> None:
        """Load the engine of the changed job, after `unload`. Totals are kept. Raises as the first load does."""
        self._job = changed(self._job)
        self._make()

    def adopt_kv_scales(self, scales: KVScales) -> None:
        """Use these scales in the present engine, which holds no K/V of a row yet, and in any later one."""
        self._job = replace(self._job, kv_scales=scales)
        self.current.use_kv_scales(scales.values)

    def adopt_sums(self, sums: SumsOfJob) -> None:
        """Compare the weights of any later engine with these. Raises OutputError where the present engine has others."""
        sums.check(self.current.target.weight_sums)
        self._job = replace(self._job, sums=sums)

    def _make(self) -> None:
        plain = None
        with OutOfMemoryGuard() as guard:
            try:
                self.loaded = self._load(self._job, self._survey, self._progress)
            except (CapacityError, CheckpointError, ConfigError) as error:
                plain = self._without(self._job, str(error))
                if plain is None:
                    raise
        if plain is not None:  # the error is gone now, and with its traceback the model that was loaded
            self._free()
            self._job = plain
            self._make()
            return
        if guard.message and self._job.group is not None:
            raise rank_out_of_memory(self._job.group.rank, guard.message)
        if guard.message:
            self._free()
            job = self._job
            demand = self._survey.demand(job.source.num_rows, job.admission.max_len, job.admission.task)
            self._fall_back(
                plan_batch(job, demand, device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises)), guard.message
            )
            self._make()
            return
        if self._totals is not None:
            self.current.totals = self._totals
        if self._stopping:
            self.current.stop()

    def _free(self) -> None:
        gc.collect()  # tensors of an engine are held by reference cycles
        if self._job.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fall_back(self, batch: PackedBatch, message: str) -> None:
        shape = f"{batch.num_slots} slots, {batch.num_pages} pages, prefill passes of {batch.prefill_tokens} tokens"
        if self._shrunk and (plain := self._without(self._job, f"out of memory with {shape} ({message})")) is not None:
            self._job = plain
            return
        if self._job.group is not None:  # other ranks may be in an exchange
            raise rank_out_of_memory(self._job.group.rank, message)
        if self._shrunk:
            raise CapacityError(
                f"out of memory again, with {shape} ({message}); free the machine's memory or set packing.memory_gb, "
                "packing.max_num_seqs or packing.max_num_batched_tokens lower, and run the same command again: finished rows stay"
            )
        self._shrunk = True
        packing = smaller(self._job.config.packing, batch, self._job.drafter.shape.num_lookahead_slots)
        self._job = replace(self._job, config=replace(self._job.config, packing=packing))
        self._progress.phase(f"out of memory with {shape} ({message}): going on with a smaller batch")


def smaller(packing: PackingConfig, batch: PackedBatch, num_lookahead_slots: int = 0) -> PackingConfig:
    """Half the slots, three quarters of the pages, prefill passes half as long; the longest row still fits, with the
    num_lookahead_slots K/V positions after its last token that a round may write."""
    pages = max(batch.num_pages * 3 // 4, -(-(batch.max_len + num_lookahead_slots) // PAGE_SIZE) + 1)
    prefill = max(batch.prefill_tokens // 2, min(batch.prefill_tokens, FEWEST_PREFILL))
    return replace(
        packing, max_num_seqs=max(1, batch.num_slots // 2), pages=pages, memory_gb=None, max_num_batched_tokens=prefill
    )
