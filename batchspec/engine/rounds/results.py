"""Results of passes and rounds on the host: pending during the copies, then named columns."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.engine.rounds.records import RoundResult
from batchspec.kernels.rounds.accept import HELD, HELD_AFTER_DRAFT

Moment = float | torch.cuda.Event
"""Seconds of the host's clock, or an event of the device."""
Slots = NDArray[np.intp]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RoundLog:
    """One line per row, of the log that the kernel `accept` writes.

    accepted_len  int32 [n] draft tokens that the row accepted
    draft_len     int32 [n] draft tokens that were verified
    num_kept      int32 [n] committed tokens: accepted_len + 1, less those after a stop id or a failure
    finish        int32 [n] 0 running, else STOPPED, FULL, FAILED or HELD of `kernels/rounds/accept.py`
    after_draft   bool [n] the row is held, and its last token equals the next draft, which accepted_len does not count
    tokens        int32 [n, S] the emitted tokens, -1 after them
    """

    accepted_len: Ints
    draft_len: Ints
    num_kept: Ints
    finish: Ints
    after_draft: NDArray[np.bool_]
    tokens: Ints

    @staticmethod
    def of(log: Ints) -> RoundLog:
        """log int32 [n, 4+S], columns as in `accept`."""
        finish = log[:, 3]
        return RoundLog(
            log[:, 0], log[:, 1], log[:, 2], np.minimum(finish, HELD), finish == HELD_AFTER_DRAFT, log[:, 4:]
        )

    def __getitem__(self, lines: NDArray[np.bool_]) -> RoundLog:
        return RoundLog(
            self.accepted_len[lines], self.draft_len[lines], self.num_kept[lines], self.finish[lines], self.after_draft[lines],
            self.tokens[lines],
        )


@dataclass(slots=True)
class PendingResult:
    """A result that is being copied to the host."""

    result: RoundResult
    began: Moment | None = None
    """When the group of a prefill pass began; None for a round."""
    arrived: torch.cuda.Event | None = None

    @staticmethod
    def send(result: RoundResult, began: Moment | None = None) -> PendingResult:
        """Start the copies, in stream order: the next round may overwrite the device's tensors."""
        if not result.log.is_cuda:
            return PendingResult(result, began)
        return PendingResult(result.to_host(), began, event_now())

    @property
    def has_arrived(self) -> bool:
        """Whether the copies are complete. Does not wait."""
        return self.arrived is None or self.arrived.query()

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def rows_of(self, owners: NDArray[np.int64], now: NDArray[np.int64]) -> tuple[Slots, RoundLog]:
        """The slots whose row took part, alive, and still owns the slot, and their lines of the log. Only after `wait`.

        owners  int64 [slots] the owner of each slot at launch, -1 if the slot took no part; now: the present owners
        """
        log: Ints = self.result.log.numpy()
        count = len(log)
        slots = np.flatnonzero((owners[:count] >= 0) & (owners[:count] == now[:count]) & (log[:, 0] >= 0))
        return slots, RoundLog.of(log[slots])

    def seconds_since(self, began: Moment) -> float:
        """Seconds from `began` until the result arrived. Only after `wait`."""
        if isinstance(began, torch.cuda.Event):
            assert self.arrived is not None
            return float(began.elapsed_time(self.arrived)) / 1e3
        return time.perf_counter() - began


def event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def now_on(device: torch.device) -> Moment:
    return event_now() if device.type == "cuda" else time.perf_counter()
