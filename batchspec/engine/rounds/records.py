"""What rounds are given and what they give: options, drafts, the target's choices, results on the device, on their way to the
host (pending), and there (named columns).

R rows, K drafts, S = K + 1, T flat positions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.engine.rounds.vocabulary import Vocabulary
from batchspec.kernels.rounds.accept import HELD, HELD_AFTER_DRAFT


class LogitReader(Protocol):
    """Reads the target's logits before any rule changes them, for a feature of rows that writes what it reads."""

    def read(self, raw: Tensor, ids: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, ...]:
        """Tensors [T, ...] about raw logits [T, V] and the tokens ids int [T] that were chosen by them, or come next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """Options of the rounds, the same for a whole job."""

    reader: LogitReader | None = None
    """Reads the logits of every emitted token."""
    coupled: bool = True
    """Whether drafts of sampled rows are drawn with the noise of the target's draws."""
    synthetic: tuple[tuple[float, ...], ...] | None = None
    """Unconditional acceptance rates per position, of each kind of row; for benchmarks."""
    argmax: bool = True
    """Greedy tokens by an argmax; False: by softmax and top-k (`ablation.argmax`)."""
    row_lengths: bool = False
    """Rounds learn how likely drafts are accepted, and may verify more drafts of one row than of another."""
    uniform_slots: bool = True
    """Rows of equal draft length have a layout without a prefix sum; False: a ragged one (`ablation.uniform_slots`)."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The results of a round that the host reads, as tensors on the device or their copies on the host.

    log           int32 [R, 5+K] accepted_len (-1: dead row), draft_len, kept, finish, then the emitted tokens, -1 after them
    read          what the options' reader read of each emitted token, [R, S, ...]; a pass without choices: of each of its T
                  tokens; empty if nothing was emitted
    experts_read  int32 [layers with experts] number of experts that had tokens; only of rounds whose experts are counted
    levels        int32 [K, LEVELS] drafts by position and level of survival, those that were not verified too; only of rounds
                  with drafts whose chances are known
    """

    log: Tensor
    read: tuple[Tensor, ...] = ()
    experts_read: Tensor | None = None
    levels: Tensor | None = None

    def to_host(self) -> RoundResult:
        """Copies in pinned host memory, in stream order: complete only once an event recorded after this call has passed."""
        return RoundResult(
            _to_host(self.log), tuple(_to_host(tensor) for tensor in self.read),
            None if self.experts_read is None else _to_host(self.experts_read),
            None if self.levels is None else _to_host(self.levels),
        )


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts that a round verifies: ids int32 [R, K], length int32 [R], rates float32 [N, K] of simulated
    acceptance or None. Of a tree ids are those of the accepted path, once it is found; parents int32 [R, N+1] of its nodes."""

    ids: Tensor
    length: Tensor
    rates: Tensor | None = None
    parents: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's choices after the positions that a round verifies; of a tree, along the accepted path.

    batch              the positions, as chains
    target_ids         int32 [T]
    aux_hidden_states  [T, ...] of the layers that the drafter reads; None: it reads none
    logit_rows         None if all rows are greedy and no logits are read
    raw                float [T, V] raw logits if they are read
    levels             as in `RoundResult`
    nodes              the positions of a tree; None for chains
    """

    batch: FlatBatch
    target_ids: Tensor
    aux_hidden_states: Tensor | None
    logit_rows: LogitRows | None
    raw: Tensor | None
    levels: Tensor | None = None
    nodes: FlatBatch | None = None


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
