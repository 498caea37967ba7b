"""How rows come into the batch: tokens and pages go to the device, prefill passes run between the rounds or beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.batch.device_batch import DeviceBatch
from batchspec.engine.launched import Launched, Moment, now_on
from batchspec.engine.output_processor import mode_of
from batchspec.engine.prefill import Prefilled, chunks, prefill_chunk
from batchspec.engine.prefill_stream import PrefillStream
from batchspec.engine.round import Round
from batchspec.engine.sampling import SamplingMode
from batchspec.engine.scheduler import Row
from batchspec.records import PackedBatch


class PrefillRunner:
    """What it launched is to be collected in the order in which it is returned."""

    def __init__(self, round_: Round, rows: DeviceBatch, batch: PackedBatch, *, overlap: bool) -> None:
        """overlap: prefill beside the rounds, not between them (GPU only)."""
        self._round, self._rows, self._batch = round_, rows, batch
        self._device = rows.tokens.device
        self._beside = PrefillStream(self._device) if overlap and self._device.type == "cuda" else None
        if self._beside is not None:
            self._beside.rounds.wait_stream(torch.cuda.current_stream(self._device))

    @property
    def busy(self) -> bool:
        """Passes are on their way beside the rounds."""
        return bool(self._beside)

    @property
    def takes_more(self) -> bool:
        """Another group may come."""
        return self._beside is None or self._beside.takes_more

    def holds_up(self, num_rows: int) -> bool:
        """A round of few rows costs nearly as much as one of many: those of the first groups wait for company.

        num_rows  in slots, live or on their way
        """
        return self._beside is not None and self.busy and 2 * (num_rows - self._beside.num_rows) < self._batch.num_slots

    def stream_of_rounds(self) -> AbstractContextManager[object]:
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside.rounds)

    def paused(self) -> AbstractContextManager[object]:
        """What is launched in the rounds' stream within this block overlaps no prefill."""
        return nullcontext() if self._beside is None else self._beside.paused()

    def clear(self) -> None:
        """Forget what an earlier run left, once it is off the card."""
        if self._beside is not None:
            self._beside.clear()

    def end(self) -> list[Launched]:
        """Begin no more passes; the one on its way."""
        if self._beside is not None:
            self._beside.call_off()
        return self.land(wait=True)

    def prefill(self, group: Sequence[Row], owner: NDArray[np.int64]) -> list[Launched]:
        """Begin with `group`, which has slots and pages; the passes that it launched between the rounds.

        owner  [slots] of the scheduler
        """
        slots, page_size = [row.slot for row in group], self._batch.page_size
        self._rows.begin(slots, [row.progress.request for row in group], [row.progress.tokens for row in group])
        self._rows.grant([(row.slot, 0, row.pages) for row in group])
        mode = SamplingMode.union([mode_of(row.progress.request) for row in group])
        spans = [(row.slot, row.num_shared * page_size, row.num_tokens) for row in group]
        passes: list[tuple[Callable[[], Prefilled], NDArray[np.int64]]] = []
        for segments in chunks(spans, self._batch.prefill_tokens):
            owners = np.full_like(owner, -1)
            ending = [segment.slot for segment in segments if segment.last]
            owners[ending] = owner[ending]
            passes.append((partial(prefill_chunk, self._round, self._rows, segments, mode), owners))
        if self._beside is not None and not mode.penalties:  # penalties keep account of all rows in one tensor
            self._beside.launch(passes)
            return []
        launched = []
        while self.busy:  # they may write pages that these rows share
            launched += self.land(wait=True)
        began = now_on(self._device)
        for run, owners in passes:
            launched += self._go_live(run(), owners, began)
        return launched

    def land(self, *, wait: bool) -> list[Launched]:
        """Let the rows of passes that are done decode; with `wait` at least those of the oldest one."""
        launched = []
        while self._beside is not None and (landed := self._beside.landed(wait=wait)) is not None:
            launched += self._go_live(landed.prefilled, landed.owners, landed.began)
            wait = False
        return launched

    def _go_live(self, prefilled: Prefilled, owners: NDArray[np.int64], began: Moment) -> list[Launched]:
        prefilled.go_live(self._rows, self._round.drafter)
        if prefilled.result is None:
            return []
        return [Launched(result=prefilled.result, owners=owners, num_rows=self._batch.num_slots, began=began).send()]
