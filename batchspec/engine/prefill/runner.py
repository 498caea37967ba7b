"""Puts requests into their slots and runs their prefill passes between rounds. Results come in launch order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.prefill.passes import Prefilled
from batchspec.engine.rounds.results import PendingResult, now_on
from batchspec.engine.step import Prefill, Refill, Segment


class PrefillRunner:
    """Launches the passes of a `Prefill`."""

    def __init__(
        self, rows: DeviceBatch, launch: Callable[[Sequence[Segment], SamplingMode], Prefilled],
        copy_states: Callable[[Sequence[tuple[int, int]]], None],
    ) -> None:
        """
        launch       launches one pass, kernel by kernel or as a graph
        copy_states  as `KVCache.copy_states`
        """
        self._rows, self._launch, self._copy_states = rows, launch, copy_states

    def fill_slots(self, refills: Sequence[Refill]) -> None:
        """Put requests into their slots: their tokens and their pages."""
        rows = self._rows
        rows.begin([refill.slot for refill in refills], [r.request for r in refills], [r.tokens for r in refills])
        rows.grant([(refill.slot, 0, refill.pages) for refill in refills])

    def run(self, prefill: Prefill) -> list[PendingResult]:
        """Launch the passes of requests that are in their slots; their rows decode from the next round on."""
        began, results = now_on(self._rows.tokens.device), []
        for segments in prefill.passes:
            self._copy_states([(one.restores, one.slot) for one in segments if one.restores is not None])
            prefilled = self._launch(segments, prefill.mode)
            self._copy_states([(one.slot, one.saves) for one in segments if one.saves is not None])
            prefilled.activate(self._rows)
            if prefilled.result is not None:
                results.append(PendingResult.send(prefilled.result, began))
        return results
