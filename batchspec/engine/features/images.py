"""Images of prompts: their pixels are made when a row is about to enter its slot, and go to the device with it.

An image that cannot be decoded fails its row. Rows that enter together bring at most MOST_BYTES of pixels, or one row's.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchspec.batch.row_commands import RowCommands
from batchspec.console.text import quoted
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.images.decode import Rgb
from batchspec.images.header import BadImage
from batchspec.images.pixels import Pixels
from batchspec.records import Completion, RowError

MOST_BYTES = 1 << 30


class RowImages(RowFeature):
    """The images of all rows of a run that have some."""

    def __init__(self) -> None:
        self._pixels = Pixels()
        self._failed: list[RequestState] = []
        self._made: tuple[RequestState, tuple[Rgb, ...]] | None = None
        """The row that was ready last and has not entered: of others that could not enter pixels are made again."""
        self._entered: list[tuple[int, tuple[Rgb, ...]]] = []
        """Slot and pixels of each row that has entered since the last commands."""
        self._entered_bytes = 0

    def arrive(self, state: RequestState) -> bool:
        return bool(state.request.images)

    def ready(self, state: RequestState) -> bool:
        """Whether its pixels are made; of a row that needs a slot they are made here."""
        if state.slot >= 0 or state.finish_reason is not None:
            return True
        images = state.request.images
        if self._entered and self._entered_bytes + sum(3 * one.height * one.width for one in images) > MOST_BYTES:
            return False
        if self._made is not None and self._made[0] is state:
            return True
        self._made, made = None, list[Rgb]()
        for number, piece in enumerate(images, 1):
            try:
                made.append(self._pixels.of(piece))
            except BadImage as error:
                row = f"row {state.request.row_index} (id {quoted(state.request.request_id)})"
                message = f"{row}: image {number} of {len(images)}: {error}"
                state.fail(RowError(code=error.code, stage="decode", message=message, retryable=False))
                self._failed.append(state)
                return False
        self._made = (state, tuple(made))
        return True

    def enter(self, state: RequestState) -> None:
        """A row that was preempted enters again: its pixels are made again, unless they are kept."""
        if self._made is None or self._made[0] is not state:  # it goes on in its slot
            return
        (_, pixels), self._made = self._made, None
        self._entered.append((state.slot, pixels))
        self._entered_bytes += sum(one.nbytes for one in pixels)

    def finish(self, state: RequestState, done: Completion) -> Completion:
        if self._made is not None and self._made[0] is state:
            self._made = None
        return done

    def poll(self) -> Iterable[RequestState]:
        failed, self._failed = self._failed, []
        return failed

    def take_commands(self) -> RowCommands:
        entered, self._entered, self._entered_bytes = tuple(self._entered), [], 0
        return RowCommands(images=entered)
