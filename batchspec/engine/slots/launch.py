"""What the host keeps of launched rounds and prefill passes until it reads their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.slots.slot_table import FREE, SlotTable
from batchspec.engine.step import NO_DRAFTS, Prefill, RoundWidth, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadLaunch:
    """A round or a prefill pass whose result has not been read, as it was when it was launched."""

    owners: NDArray[np.int64]
    """The owner of each slot at launch, -1 if the slot took no part."""
    is_prefill: bool = False
    num_rows: int = 0
    """Row bucket of a round."""
    live_rows: int = 0
    """Rows of a round that were alive, as far as the host had read."""
    width: RoundWidth = NO_DRAFTS
    prepare_next: bool = True
    context_tokens: int = 0
    """Keys of all rows that one layer reads, on average over the layers; 0 if the round is not used as a measurement."""
    counts_experts: bool = False
    """Whether the result has the number of experts that the round read."""
    counts_drafts: bool = True
    """Whether the result of a round that knows its drafts' chances has how many survive."""
    trial_phase: int | None = None
    """`Turn.phase` of a round (`engine/rounds/part_trial.py`)."""
    num_prefilled: int = 0
    """Tokens of this prefill pass and of the passes just before it whose results are not sent, since no row ends in them."""
    segments: tuple[Segment, ...] = ()
    """Segments of a prefill pass, in order."""


class UnreadLaunches:
    """All launches of a run that the host still has to read, the oldest first."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._queue: deque[UnreadLaunch] = deque()
        self.num_launched = 0
        """Number of launches so far that have a result."""

    @property
    def num_read(self) -> int:
        """Number of launches whose results have been read."""
        return self.num_launched - len(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[UnreadLaunch]:
        return iter(self._queue)

    def take_oldest(self) -> UnreadLaunch:
        """The launch whose result is read now."""
        return self._queue.popleft()

    def add(self, launch: UnreadLaunch) -> None:
        """Note a launch that will have a result."""
        self._queue.append(launch)
        self.num_launched += 1

    def add_prefill(self, prefill: Prefill) -> None:
        """Note passes that are launched now. A pass has a result if the tokens of any of its rows end in it, or if it has a row
        that does not decode: of such a row all tokens are read."""
        num_tokens, decodes = 0, self._slots.decodes
        for segments in prefill.passes:
            slots = [segment.slot for segment in segments if segment.last or not decodes[segment.slot]]
            num_tokens += sum(segment.end - segment.begin for segment in segments)
            if slots:
                owners = np.full_like(self._slots.owner, FREE)
                owners[slots] = self._slots.owner[slots]
                self.add(UnreadLaunch(owners=owners, is_prefill=True, num_prefilled=num_tokens, segments=segments))
                num_tokens = 0
