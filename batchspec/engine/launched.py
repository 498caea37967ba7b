"""A result between its launch and its arrival on the host: what was launched, for whom, and when it was there."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.engine.round import RoundResult

Moment = float | torch.cuda.Event
"""Of the host's clock in seconds, or an event of the card."""


@dataclass(slots=True, kw_only=True)
class Launched:
    """A round's or a prefill pass's result on its way to the host."""

    result: RoundResult
    owners: NDArray[np.int64]
    """The owner of each slot at launch, -1 where it was not part of it."""
    num_rows: int
    """Row bucket of a round."""
    draft_len: int = 0
    prepare_next: bool = True
    """The round prepared a draft for the next one."""
    context_tokens: int = 0
    beside: bool = False
    """Prefill ran beside this round when it was launched, or it waited for other work: its time says nothing of others."""
    began: Moment | None = None
    """Of a prefill: when its group began. None for a round."""
    arrived: torch.cuda.Event | None = None

    @property
    def is_prefill(self) -> bool:
        return self.began is not None

    def send(self) -> Launched:
        """Start the copies to the host, in stream order: the next round may then write over the device's tensors."""
        if self.result.log.is_cuda:
            self.result = self.result.to_host()
            self.arrived = event_now()
        return self

    def read(self, owner: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Wait for the copies; slots whose row took part alive and is the slot's owner still, and their lines of the log."""
        if self.arrived is not None:
            self.arrived.synchronize()
        log: NDArray[np.int32] = self.result.log.numpy()
        launched, now = self.owners[: len(log)], owner[: len(log)]
        slots = np.flatnonzero((launched >= 0) & (launched == now) & (log[:, 0] >= 0))
        return slots, log[slots]

    def seconds_since(self, began: Moment) -> float:
        """From `began` until it arrived, once it has."""
        if isinstance(began, torch.cuda.Event):
            assert self.arrived is not None
            return float(began.elapsed_time(self.arrived)) / 1e3
        return time.perf_counter() - began


class RoundClock:
    """What rounds take, one behind the other."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def seconds_of(self, launched: Launched) -> float | None:
        """From the arrival of the round before it; results come in the order of their launches.

        None for a prefill, for the round behind one, and for rounds and their successors that had other work beside them.
        """
        if launched.is_prefill or launched.beside:
            self._last = None
            return None
        last, self._last = self._last, launched.arrived
        return None if last is None else launched.seconds_since(last)


def event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def now_on(device: torch.device) -> Moment:
    return event_now() if device.type == "cuda" else time.perf_counter()
