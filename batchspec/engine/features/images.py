"""Images of prompts: their pixels are made ahead, by processes, and go to the device when the row enters its slot.

A row waits for its pixels, and others go ahead. An image that cannot be decoded fails its row. Rows that enter together bring at
most MOST_BYTES of pixels, or one row's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.images import ImageEncoder, ImagesOnDevice
from batchspec.batch.row_commands import RowCommands
from batchspec.cache.page_tables import PagePools
from batchspec.console.text import quoted
from batchspec.engine.prefill.passes import PrefillPass
from batchspec.engine.rounds.records import LogitReader
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import Features, RowFeature
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.images.decode import Rgb
from batchspec.images.header import BadImage
from batchspec.images.prepared_images import PreparedImages
from batchspec.packed_batch import ExampleRow
from batchspec.records import Completion, Request, RowError

MOST_BYTES = 64 << 20
"""The host takes pixels before it launches the prefill that reads them, a photo's of 2 MB in 1 to 3 ms, mostly for fresh memory.
If many rows entered at once, the device would wait for the pixels of all of them. With this limit it computes a prefill and a
round while the host takes the pixels of the next rows. With a lower one it would compute more rounds before all slots have
rows."""


class WithImages(Features):
    """The features of a job that decodes nothing, for rows that may have images.

    encoder    encodes images; kept: embeddings of them that stay on the device
    prepared   where their pixels come from
    """

    def __init__(self, own: Features, encoder: ImageEncoder, kept: int, prepared: PreparedImages) -> None:
        self._own, self._encoder, self._kept, self._prepared = own, encoder, kept, prepared

    @property
    def reader(self) -> LogitReader | None:
        return self._own.reader

    @property
    def prefill_pass(self) -> PrefillPass:
        return self._own.prefill_pass

    @property
    def padded_pass(self) -> None:
        """None: what images bring to a pass has no fixed shape."""

    def allocate(self, rows: DeviceBatch) -> None:
        self._own.allocate(rows)
        rows.images = ImagesOnDevice(self._encoder, rows.live.device, most_rows=self._kept)

    def expect(self, requests: Iterable[Request]) -> None:
        expect(self._prepared, requests)

    def examples(self, rows: DeviceBatch, most_tokens: int) -> Iterable[ExampleRow]:
        return examples(rows, most_tokens)

    def begin(self, slots: SlotTable, pools: PagePools) -> tuple[RowFeature, ...]:
        return (*self._own.begin(slots, pools), RowImages(self._prepared))


def expect(prepared: PreparedImages, requests: Iterable[Request]) -> None:
    """As `Features.expect`: the first pixels are begun. The run drops these asks, and finds what was made by its digest."""
    for request in requests:
        prepared.ask(request, request.images)


def examples(rows: DeviceBatch, most_tokens: int) -> Iterable[ExampleRow]:
    """As `Features.examples`: rows with images, if the engine reads some."""
    return () if rows.images is None else rows.images.examples(most_tokens)


class RowImages(RowFeature):
    """The images of all rows of a run that have some."""

    def __init__(self, prepared: PreparedImages) -> None:
        """prepared: of the engine; what rows of earlier runs have asked for is dropped."""
        prepared.drop_all()
        self._prepared = prepared
        self._has_hurried = False
        """Whether a row has waited for pixels since the last step. The first one is the next to enter."""
        self._failed: list[RequestState] = []
        self._made: tuple[RequestState, tuple[Rgb, ...]] | None = None
        """The row that was ready last and has not entered: others that could not enter take their pixels again."""
        self._entered: list[tuple[int, tuple[Rgb, ...]]] = []
        """Slot and pixels of each row that has entered since the last commands."""
        self._entered_bytes = 0

    def arrive(self, state: RequestState) -> bool:
        """Its pixels are begun: a request arrives when a slot is free or will be soon (`SlotAllocator.take_ahead`)."""
        if state.request.images and state.finish_reason is None:
            self._prepared.ask(state.request, state.request.images)
        return bool(state.request.images)

    def ready(self, state: RequestState) -> bool:
        """Whether its pixels are made; a row that needs a slot takes them here."""
        if state.slot >= 0 or state.finish_reason is not None:
            return True
        images = state.request.images
        if self._entered and self._entered_bytes + sum(one.num_bytes for one in images) > MOST_BYTES:
            return False
        if self._made is not None and self._made[0] is state:
            return True
        self._made = None
        self._prepared.ask(state.request, images)  # again, if it was preempted or had taken them
        try:
            made = self._prepared.take(state.request)
        except BadImage as error:
            message = f"row {state.request.row_index} (id {quoted(state.request.request_id)}): {error}"
            state.fail(RowError(code=error.code, stage="decode", message=message, retryable=error.retryable))
            self._failed.append(state)
            return False
        if made is not None:
            self._made = (state, made)
        elif not self._has_hurried:
            self._has_hurried = True
            self._prepared.hurry(state.request)
        return made is not None

    def enter(self, state: RequestState) -> None:
        if self._made is None or self._made[0] is not state:  # it goes on in its slot
            return
        (_, pixels), self._made = self._made, None
        self._entered.append((state.slot, pixels))
        self._entered_bytes += sum(one.nbytes for one in pixels)

    def finish(self, state: RequestState, done: Completion) -> Completion:
        self._prepared.drop(state.request)
        if self._made is not None and self._made[0] is state:
            self._made = None
        return done

    def pending(self) -> Iterator[Future[None]]:
        return self._prepared.pending()

    def poll(self) -> Iterable[RequestState]:
        self._has_hurried = False
        self._prepared.check()
        failed, self._failed = self._failed, []
        return failed

    def take_commands(self) -> RowCommands:
        entered, self._entered, self._entered_bytes = tuple(self._entered), [], 0
        return RowCommands(images=entered)
