"""What each result adds to the accounts of the rows in slots and to the engine's own, and which rows the host must look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.launched import Launched
from batchspec.engine.request_state import RequestState
from batchspec.engine.round import RoundResult
from batchspec.engine.sampling import SamplingMode
from batchspec.engine.scheduler import Row
from batchspec.engine.thinking_budget import ThinkingBudgets
from batchspec.engine.token_buffer import Log, Slots, TokenBuffer
from batchspec.records import Request


@dataclass(slots=True)
class EngineTotals:
    """Running sums over the engine's life, as far as the host has collected."""

    rounds: int = 0
    row_rounds: int = 0
    """Rounds times the rows that lived in them."""
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    """Of prefill passes, from the beginning of a group to its last result."""
    cached_tokens: int = 0
    preempted: int = 0
    live_rows: int = 0
    _group: object = None
    """When the group of the latest prefill result began: its passes share that moment."""
    _group_s: float = 0.0

    def add(self, launched: Launched, lines: NDArray[np.int32]) -> None:
        """A result that has arrived, with the lines of its log."""
        self.tokens += int(lines[:, 2].sum())
        if launched.began is not None:
            seconds = launched.seconds_since(launched.began)
            self.prefill_s += seconds - (self._group_s if launched.began is self._group else 0.0)
            self._group, self._group_s = launched.began, seconds
        else:
            self.row_rounds += len(lines)
            self.accepted += int(lines[:, 0].sum())
            self.drafted += int(lines[:, 1].sum())


class OutputProcessor:
    """Rows with stop strings are followed token by token (`RequestState`), the others in bulk (`TokenBuffer`)."""

    def __init__(self, slots: int, max_len: int, draft_len: int) -> None:
        self._ledger = TokenBuffer(slots, max_len, draft_len)
        self._budgets = ThinkingBudgets(slots)
        self._watched = np.zeros(slots, bool)
        self._modes: Counter[SamplingMode] = Counter()

    def enter(self, row: Row) -> None:
        """The row has a slot."""
        self._modes[mode_of(row.progress.request)] += 1
        self._watched[row.slot] = row.progress.finder is not None
        self._budgets.enter(row.slot, row.num_tokens, row.progress)

    def settle(self, row: Row) -> None:
        """Everything that is known of the row is on its own account now; it may go on."""
        self._ledger.close(row.slot, row.progress)

    def leave(self, row: Row) -> None:
        """It gives its slot up, settled."""
        self._modes[mode_of(row.progress.request)] -= 1
        self.settle(row)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Compaction: (source, destination) of each row that changes its slot; destinations are empty."""
        self._ledger.move(moves)
        self._budgets.move(moves)
        for source, destination in moves:
            self._watched[destination] = self._watched[source]

    @property
    def mode(self) -> SamplingMode:
        """The least that serves all rows in slots."""
        found = [mode for mode, count in self._modes.items() if count]
        return found[0] if len(found) == 1 else SamplingMode.union(found)

    def add(self, launched: Launched, slots: Slots, lines: Log, rows: Sequence[Row | None], now: float) -> None:
        """A result that has arrived: line i of its log is that of the row in slots[i]; rows by slot, now on the host's clock."""
        watched = self._watched[slots]
        add = self._ledger.add_prefill if launched.is_prefill else self._ledger.add_round
        add(slots[~watched], lines[~watched])
        for slot, line in zip(slots[watched].tolist(), lines[watched].tolist(), strict=True):
            progress = _progress(rows, slot)
            if launched.is_prefill:
                progress.add_prefill(line[4 : 4 + line[2]])
            else:
                progress.add_round(line[0], line[1], line[0] + 1, line[4 : 4 + line[2]])
        if launched.began is not None:
            elapsed = launched.seconds_since(launched.began)
            for slot in slots.tolist():
                _progress(rows, slot).note_prefill(elapsed, now)
        if launched.result.logprobs is not None:
            for slot, kept in zip(slots.tolist(), lines[:, 2].tolist(), strict=True):
                _keep_logprobs(_progress(rows, slot), launched.result, slot, kept)

    def over_budget(self, slots: Slots, num_tokens: NDArray[np.int64], lines: Log) -> list[int]:
        """Slots whose rows may have used their thinking budget; num_tokens [n] they have with these lines."""
        return self._budgets.due(slots, num_tokens, lines[:, 4:])

    def hold_to_budget(self, row: Row, num_tokens: int) -> bool:
        """Close a thought that has used its budget; whether the row, cut short, must be prefilled with its new tokens."""
        slot, progress = row.slot, row.progress
        self.settle(row)
        if not progress.hold_to_budget():
            self._budgets.enter(slot, num_tokens, progress)
            return False
        if progress.finish_reason is None:
            return True
        self._watched[slot] = True  # it has ended, whatever the device says
        return False

    def watched(self, slots: Slots) -> NDArray[np.bool_]:
        """bool [n]: rows that may have an end that the device does not know of: a stop string, or what a budget forced."""
        return self._watched[slots]


def mode_of(request: Request) -> SamplingMode:
    return SamplingMode.of(request.sampling, request.min_new_tokens)


def _progress(rows: Sequence[Row | None], slot: int) -> RequestState:
    row = rows[slot]
    assert row is not None
    return row.progress


def _keep_logprobs(progress: RequestState, result: RoundResult, slot: int, count: int) -> None:
    if result.logprobs is not None:
        progress.logprobs += result.logprobs[slot, :count].tolist()
    if result.top_ids is not None and result.top_logprobs is not None:
        ids, values = result.top_ids[slot].numpy(), result.top_logprobs[slot].numpy()
        progress.top += [(ids[j], values[j]) for j in range(count)]
