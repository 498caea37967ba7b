"""Prefill passes beside the rounds, on a CUDA stream of lower priority: they use what of the card the rounds leave idle.

A round reads K/V and is bound by memory, a prefill multiplies and is bound by arithmetic: side by side they do about a tenth more
than in turn (H200, 80 rows x 9,000 tokens beside passes of 16,384: prefill at 0.86 of its speed, rounds at 0.24; a fixed split of
the SMs gives no more). A pass touches pages and lines of its own rows alone; its rows go live in the order of the rounds, once
the host has seen that the pass is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.engine.launched import event_now
from batchspec.engine.prefill import Prefilled

ROUNDS_PRIORITY, PREFILL_PRIORITY = -1, 0


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass to come: whose slots it fills (owner by slot, -1 elsewhere), and when its group began."""

    run: Callable[[], Prefilled]
    owners: NDArray[np.int64]
    began: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Landed:
    """A pass that is done: its rows may go live."""

    prefilled: Prefilled
    owners: NDArray[np.int64]
    began: torch.cuda.Event


class PrefillStream:
    """The passes to come, and the one on its way.

    One at a time: each has some hundred launches, and what a stream holds is bounded. A host that waits for room in the prefill's
    stream launches no rounds.
    """

    def __init__(self, device: torch.device) -> None:
        self.rounds = torch.cuda.Stream(device, priority=ROUNDS_PRIORITY)
        self._stream = torch.cuda.Stream(device, priority=PREFILL_PRIORITY)
        self._waiting: deque[Pass] = deque()
        self._running: tuple[Landed, torch.cuda.Event] | None = None

    def __bool__(self) -> bool:
        return self._running is not None or bool(self._waiting)

    @property
    def takes_more(self) -> bool:
        """No pass waits: another group may come."""
        return not self._waiting

    @property
    def num_rows(self) -> int:
        """Rows that are not live yet."""
        owners = [one.owners for one in self._waiting]
        if self._running is not None:
            owners.append(self._running[0].owners)
        return sum(int((one >= 0).sum()) for one in owners)

    def launch(self, passes: Sequence[tuple[Callable[[], Prefilled], NDArray[np.int64]]]) -> None:
        """Queue a group's passes, whose rows' tokens are on their way in the rounds' stream (the current one)."""
        began = event_now()
        self._waiting.extend(Pass(run, owners, began) for run, owners in passes)
        self._start()

    def landed(self, *, wait: bool) -> Landed | None:
        """The pass on its way if it is done, or with `wait` once it is; the current stream may then use what it left."""
        if self._running is None:
            return None
        landed, done = self._running
        if not (wait or done.query()):
            return None
        done.synchronize()
        torch.cuda.current_stream().wait_event(done)
        self._running = None
        self._start()
        return landed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is launched on the current stream within this block overlaps no prefill: it waits for the running pass, and the
        next pass waits for it.
        """
        rounds = torch.cuda.current_stream()
        if self._running is not None:
            rounds.wait_event(self._running[1])
        try:
            yield
        finally:
            self._stream.wait_stream(rounds)

    def call_off(self) -> None:
        """Forget the passes that have not begun."""
        self._waiting.clear()

    def clear(self) -> None:
        """Forget what an earlier run left, once it is off the card."""
        self._waiting.clear()
        self._stream.synchronize()
        self._running = None

    def _start(self) -> None:
        if self._running is not None or not self._waiting:
            return
        one, rounds = self._waiting.popleft(), torch.cuda.current_stream()
        self._stream.wait_event(one.began)  # behind the rows' tokens, not behind rounds that came later
        with torch.cuda.stream(self._stream):
            prefilled = one.run()
            prefilled.hold_for(rounds)
            self._running = Landed(prefilled, one.owners, one.began), event_now()
