"""Prefill passes beside the rounds, on a CUDA stream of lower priority: they use what of the card the rounds leave idle.

A round reads K/V and is bound by memory, a prefill multiplies and is bound by arithmetic: side by side they do about a tenth more
than in turn (H200, 80 rows x 9,000 tokens beside passes of 16,384: prefill at 0.86 of its speed, rounds at 0.24; a fixed split of
the SMs gives no more). A pass touches pages and lines of its own rows alone; its rows go live in the order of the rounds, once
the host has seen that the pass is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.decode.launched import event_now
from batchspec.decode.prefill import Prefilled

ROUNDS_PRIORITY, PREFILL_PRIORITY = -1, 0


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass on its way: whose slots it fills (owner by slot, -1 elsewhere), when its group began, when it is done."""

    prefilled: Prefilled
    owners: NDArray[np.int64]
    began: torch.cuda.Event
    done: torch.cuda.Event


class Beside:
    """The passes in flight, oldest first."""

    def __init__(self, device: torch.device) -> None:
        self.rounds = torch.cuda.Stream(device, priority=ROUNDS_PRIORITY)
        self._stream = torch.cuda.Stream(device, priority=PREFILL_PRIORITY)
        self._passes: deque[Pass] = deque()

    def __bool__(self) -> bool:
        return bool(self._passes)

    @property
    def num_rows(self) -> int:
        """Rows that are not live yet."""
        return sum(int((waiting.owners >= 0).sum()) for waiting in self._passes)

    def launch(self, passes: Sequence[tuple[Callable[[], Prefilled], NDArray[np.int64]]]) -> None:
        """Run a group's passes behind what the rounds' stream (the current one) holds now, their rows' tokens among it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            began = event_now()
            for run, owners in passes:
                prefilled = run()
                prefilled.hold_for(current)
                self._passes.append(Pass(prefilled, owners, began, event_now()))

    def landed(self, *, wait: bool) -> Pass | None:
        """The oldest pass if it is done, or with `wait` once it is; the current stream may then use what it left."""
        if not self._passes or not (wait or self._passes[0].done.query()):
            return None
        oldest = self._passes.popleft()
        oldest.done.synchronize()
        torch.cuda.current_stream().wait_event(oldest.done)
        return oldest

    def clear(self) -> None:
        """Forget what an earlier run left, once it is off the card."""
        self._stream.synchronize()
        self._passes.clear()
