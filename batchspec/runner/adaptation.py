"""Online adaptation in a run: the adapter of its engine, the completions it is trained on, and the head that it saves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from batchspec.adapt import stored
from batchspec.adapt.adapter import Adapter
from batchspec.adapt.budget import Budget
from batchspec.adapt.learner import Learner
from batchspec.adapt.limits import slice_tokens, steps_learnt
from batchspec.engine.engine import Engine
from batchspec.errors import CheckpointError, OutputError, StorageError
from batchspec.model.hub import resolve_model
from batchspec.model.weight_files import weight_files
from batchspec.prepare import Job
from batchspec.records import Completion
from batchspec.report.progress_bar import ProgressBar
from batchspec.runstate.output_folder import OutputFolder
from batchspec.train.data import Numbers
from batchspec.train.head import published_network
from batchspec.train.network import HeadNetwork

SAVE_S, SAVE_SHARE = 60.0, 0.02
"""Minimum number of seconds between two saves, and maximum share of the run's time for saving."""


class Adaptation:
    """Does nothing in a job without draft.adapt.every_shards."""

    def __init__(self, job: Job, output: OutputFolder, progress: ProgressBar) -> None:
        self._job, self._output, self._progress = job, output, progress
        self._adapter: Adapter | None = None
        self._engine: Engine | None = None
        self._num_saved, self._save_at, self._where = 0, 0.0, ""
        self.on = job.config.draft.adapt.every_shards > 0
        if self.on:
            assert job.config.draft.path is not None
            folder = resolve_model(job.config.draft.path, key="draft.path")
            self._folder, self._files = folder, output.head(weight_files(folder).fingerprint[:16])

    def serve(self, engine: Engine) -> None:
        """Train the head of this engine from now on, starting from the one that an earlier run saved, if any."""
        if not self.on:
            return
        draft, target = self._job.config.draft, engine.target
        head = engine.rewritable_head
        assert head is not None, "draft.adapt is read by drafters with a head alone"
        self._progress.phase(f"draft.adapt: making a copy of {draft.path} that learns")
        found = None if self._output.begins_anew(self._job.config.output.overwrite) else self._earlier(engine)
        network, ids = found or published_network(self._folder, target, aux_layers=draft.aux_layers, mask_id=None, seed=0)
        tokens = slice_tokens(self._job.device, engine.batch.max_len)
        try:
            learner = Learner(
                network, ids, target, head, lr=draft.adapt.lr, steps=steps_learnt(draft), batch_tokens=tokens, lead=engine.lead
            )  # fmt: skip
            learner.rehearse()
        except torch.OutOfMemoryError as error:
            self._end(error)
            return
        if found is not None:
            learner.adopt()
        self._adapter = Adapter(
            learner,
            device=self._job.device,
            every_shards=draft.adapt.every_shards,
            batch_tokens=tokens,
            budget=Budget(draft.adapt.time_share),
            say=self._progress.phase,
            changing=engine.changing_drafter,
        )
        self._engine, self._num_saved = engine, 0
        engine.hook.call = self._turn

    def _earlier(self, engine: Engine) -> tuple[HeadNetwork, Numbers] | None:
        try:
            found = stored.load(self._files, engine.target)
        except CheckpointError as error:
            self._progress.phase(f"draft.adapt: the head of an earlier run is left alone: {error}")
            return None
        if found is not None:
            self._progress.phase(f"draft.adapt: going on from {self._files.folder}, which an earlier run left")
        return found

    def _turn(self) -> bool:
        assert self._adapter is not None
        try:
            return self._adapter.turn()
        except torch.OutOfMemoryError as error:
            self._end(error)
            return True

    def _end(self, error: Exception) -> None:
        self.leave()
        self.on = False
        self._progress.phase(f"draft.adapt: {str(error).splitlines()[0]}: the head stays as it is now")

    def leave(self) -> None:
        """Save the head and release the engine and all memory; `serve` may follow with another engine."""
        self.save()
        if self._engine is not None:
            self._engine.hook.call = None
        self._adapter = self._engine = None

    def committed(self, completions: Iterable[Completion]) -> None:
        """A shard is committed: queue its completions for training, and save the head if it is time."""
        if self._adapter is not None:
            self._adapter.learn(completions)
            if time.monotonic() >= self._save_at:
                self.save()

    def save(self) -> None:
        """Save the head that drafts if it is new. A failure is only reported: no row of the job depends on it."""
        if self._adapter is None or self._engine is None or self._adapter.num_swaps == self._num_saved:
            return
        began = time.monotonic()
        try:
            self._output.check_own()
            stored.save(self._files, self._adapter.learner, self._engine.target)
            self._where = f"; it is in {self._files.folder} of the output folder"
        except (StorageError, OutputError) as error:
            self._progress.phase(f"draft.adapt: the head is not saved: {error}")
        took = time.monotonic() - began
        self._num_saved, self._save_at = self._adapter.num_swaps, time.monotonic() + max(SAVE_S, took / SAVE_SHARE)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within this block the run works; the head is saved at its end, however it ends."""
        try:
            yield
        finally:
            adapter = self._adapter
            self.leave()
            if adapter is not None:
                self._progress.phase(
                    f"draft.adapt: learnt from {adapter.num_learnt:,} completions, changed the head {adapter.num_swaps} times"
                    f"{self._where}"
                )
