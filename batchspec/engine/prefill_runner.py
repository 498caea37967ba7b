"""Puts groups of requests into their slots and runs their prefill passes between rounds. Results come in launch order."""

from __future__ import annotations

from functools import partial

from batchspec.batch.device_batch import DeviceBatch
from batchspec.engine.prefill import prefill_chunk
from batchspec.engine.prefill_graphs import PrefillGraphs
from batchspec.engine.results import PendingResult, now_on
from batchspec.engine.round import Round
from batchspec.engine.step import Prefill


class PrefillRunner:
    """Launches the passes of a `Prefill`, kernel by kernel or as graphs."""

    def __init__(self, round_: Round, rows: DeviceBatch, graphs: PrefillGraphs | None = None) -> None:
        self._round, self._rows = round_, rows
        self._launch = partial(prefill_chunk, round_, rows) if graphs is None else graphs.run

    def run(self, prefill: Prefill) -> list[PendingResult]:
        """Put a group into its slots and launch its passes; their rows decode from the next round on."""
        self.place(prefill)
        began, results = now_on(self._rows.tokens.device), []
        for segments in prefill.passes:
            prefilled = self._launch(segments, prefill.mode)
            prefilled.activate(self._rows, self._round.drafter)
            if prefilled.result is not None:
                results.append(PendingResult.send(prefilled.result, began))
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
