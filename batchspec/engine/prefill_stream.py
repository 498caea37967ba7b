"""Concurrent prefill: passes on a CUDA stream of lower priority, which use what the decode rounds leave idle.

A round reads K/V and is bound by memory; a prefill multiplies and is bound by arithmetic. Run concurrently they do about a tenth
more than one after the other (H200, rounds of 80 rows x 9,000 tokens with passes of 16,384: prefill runs at 0.86 of its speed,
rounds at 0.24; a fixed split of the SMs gives no more). A pass accesses pages and state of its own rows only. Its rows are
activated on the rounds' stream, once the host knows that the pass is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from batchspec.engine.prefill import Prefilled
from batchspec.engine.results import event_now

ROUNDS_PRIORITY, PREFILL_PRIORITY = -1, 0


@dataclass(frozen=True, slots=True)
class WaitingPass:
    """A pass that has not been launched, and when its group began."""

    run: Callable[[], Prefilled]
    began: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class RunningPass:
    """A pass that was launched: its rows may be activated after `done`."""

    prefilled: Prefilled
    began: torch.cuda.Event
    done: torch.cuda.Event


class PrefillStream:
    """A queue of passes, of which only the oldest runs.

    One at a time: a pass has some hundred launches, and a stream queues a bounded number. If the host had to wait for space in
    the prefill's stream, it could launch no rounds meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self.rounds = torch.cuda.Stream(device, priority=ROUNDS_PRIORITY)
        self.rounds.wait_stream(torch.cuda.current_stream(device))
        self._stream = torch.cuda.Stream(device, priority=PREFILL_PRIORITY)
        self._waiting: deque[WaitingPass] = deque()
        self._running: RunningPass | None = None

    def launch(self, passes: Sequence[Callable[[], Prefilled]]) -> None:
        """Queue a group's passes. The tokens of their rows are uploaded on the rounds' stream, which must be the current one."""
        began = event_now()
        self._waiting.extend(WaitingPass(run, began) for run in passes)
        self._start()

    def oldest_done(self) -> bool:
        """Whether the running pass has ended. Does not wait."""
        return self._running is not None and self._running.done.query()

    def take_oldest(self) -> RunningPass:
        """Wait for the running pass and start the next one; returns the finished pass, whose results the current stream may
        use."""
        running = self._running
        assert running is not None
        running.done.synchronize()
        torch.cuda.current_stream().wait_event(running.done)
        self._running = None
        self._start()
        return running

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is launched on the current stream within this block overlaps no prefill: it waits for the running pass, and the
        next pass waits for it.
        """
        rounds = torch.cuda.current_stream()
        if self._running is not None:
            rounds.wait_event(self._running.done)
        try:
            yield
        finally:
            self._stream.wait_stream(rounds)

    def cancel_waiting(self) -> None:
        """Drop the passes that have not begun."""
        self._waiting.clear()

    def clear(self) -> None:
        """Drop the passes of an earlier run, after waiting for the device."""
        self._waiting.clear()
        self._stream.synchronize()
        self._running = None

    def _start(self) -> None:
        if self._running is not None or not self._waiting:
            return
        one, rounds = self._waiting.popleft(), torch.cuda.current_stream()
        self._stream.wait_event(one.began)  # after the upload of the rows' tokens; waits for no later round
        with torch.cuda.stream(self._stream):
            prefilled = one.run()
            prefilled.record_stream(rounds)
            self._running = RunningPass(prefilled, one.began, event_now())
