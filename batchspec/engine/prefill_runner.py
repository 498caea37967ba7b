"""Runs prefill passes between decode rounds or concurrently with them. Their results come in launch order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from batchspec.batch.device_batch import DeviceBatch
from batchspec.engine.prefill import Prefilled, prefill_chunk
from batchspec.engine.prefill_graphs import PrefillGraphs
from batchspec.engine.prefill_stream import PrefillStream
from batchspec.engine.results import Moment, PendingResult, now_on
from batchspec.engine.round import Round
from batchspec.engine.step import Prefill


class PrefillRunner:
    """Launches the passes of a `Prefill`, or queues them if they overlap rounds."""

    def __init__(self, round_: Round, rows: DeviceBatch, *, overlap: bool, graphs: PrefillGraphs | None = None) -> None:
        """overlap: passes may run concurrently with rounds (GPU only); graphs: only without it."""
        self._round, self._rows = round_, rows
        self._launch = partial(prefill_chunk, round_, rows) if graphs is None else graphs.run
        self._device = rows.tokens.device
        self._stream = PrefillStream(self._device) if overlap and self._device.type == "cuda" else None

    @property
    def can_overlap(self) -> bool:
        """Whether prefill may run concurrently with rounds."""
        return self._stream is not None

    def stream_of_rounds(self) -> AbstractContextManager[object]:
        """The current stream within this block is that of the rounds."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream.rounds)

    def paused(self) -> AbstractContextManager[object]:
        """Within this block no prefill overlaps what is launched in the rounds' stream."""
        return nullcontext() if self._stream is None else self._stream.paused()

    def clear(self) -> None:
        """Drop the passes of an earlier run, after waiting for the device."""
        if self._stream is not None:
            self._stream.clear()

    def run(self, prefill: Prefill) -> list[PendingResult]:
        """Put a group into its slots and launch its passes, or queue them if they overlap; returns the results of launched
        passes."""
        self.place(prefill)
        passes = [partial(self._launch, segments, prefill.mode) for segments in prefill.passes]
        if prefill.overlaps:
            assert self._stream is not None
            self._stream.launch(passes)
            return []
        began, results = now_on(self._device), []
        for launch in passes:
            results += self._activate(launch(), began)
        return results

    def place(self, prefill: Prefill) -> None:
        """Put a group into its slots: its tokens, the places of its automata, and its pages."""
        refills, rows = prefill.refills, self._rows
        if prefill.uploads:
            assert rows.automata is not None
            rows.automata.upload(prefill.uploads)
        rows.begin([refill.slot for refill in refills], [r.request for r in refills], [r.tokens for r in refills])
        if constraints := [(refill.slot, refill.constraint) for refill in refills if refill.constraint is not None]:
            rows.constrain(constraints)
        rows.grant([(refill.slot, 0, refill.pages) for refill in refills])

    def oldest_done(self) -> bool:
        """Whether the oldest overlapping pass has ended. Does not wait."""
        return self._stream is not None and self._stream.oldest_done()

    def activate_oldest(self) -> list[PendingResult]:
        """Wait for the oldest overlapping pass: its rows decode from the next round on."""
        assert self._stream is not None
        running = self._stream.take_oldest()
        return self._activate(running.prefilled, running.began)

    def cancel_waiting(self) -> None:
        """Drop the overlapping passes that have not begun."""
        if self._stream is not None:
            self._stream.cancel_waiting()

    def _activate(self, prefilled: Prefilled, began: Moment) -> list[PendingResult]:
        prefilled.activate(self._rows, self._round.drafter)
        return [] if prefilled.result is None else [PendingResult.send(prefilled.result, began)]
