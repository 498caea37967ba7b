"""The host's life of one row without an engine: tokens come as results of rounds, its features examine them, it is completed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from batchspec.engine.features import RowFeatures
from batchspec.engine.rounds.records import RoundLog
from batchspec.engine.slots.open_requests import completion_of
from batchspec.engine.slots.row_feature import RunFeatures
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.kernels.rounds.accept import FULL, STOPPED
from batchspec.records import Completion, Request


class OneRow:
    """A request in the only slot. features: as for `RowFeatures`."""

    def __init__(self, request: Request, *, draft_len: int = 3, **features: Any) -> None:
        self.request, self.draft_len, self.made = request, draft_len, features
        self.table = SlotTable(1, len(request.prompt_ids) + request.max_new_tokens + 64, draft_len)
        pools: Any = SimpleNamespace(page_size=16, pools=[SimpleNamespace(num_pages=2)])
        self.features = RunFeatures(RowFeatures(**features).begin(self.table, pools))
        self.state = self.features.arrive(request, draft_len)
        self.table.fill([self.state], [0], 0)

    def add_prefill(self, tokens: Sequence[int]) -> None:
        """A prefill has emitted this token, or none."""
        self._add(0, 0, tokens, is_prefill=True)

    def add_round(self, accepted: int, drafted: int, tokens: Sequence[int]) -> None:
        """A round has kept these of its accepted + 1 tokens."""
        self._add(accepted, drafted, tokens, is_prefill=False)

    def _add(self, accepted: int, drafted: int, tokens: Sequence[int], *, is_prefill: bool) -> None:
        line = np.full((1, 5 + self.draft_len), -1, np.int32)
        line[0, :4] = accepted, drafted, len(tokens), 0
        line[0, 4 : 4 + len(tokens)] = tokens
        slots = np.array([0])
        self.table.num_tokens[slots] += len(tokens)
        (self.table.add_prefill if is_prefill else self.table.add_round)(slots, RoundLog.of(line))
        self.table.flush(self.state)
        self.examine()
        if self.state.finish_reason is None and self.state.tokens and self.state.tokens[-1] in self.request.stop_ids:
            self.state.set_finish_reason(STOPPED)
        if self.state.finish_reason is None and len(self.state.tokens) >= self.request.device_limit:
            self.state.set_finish_reason(FULL)

    def examine(self) -> bool:
        """Let the features examine the tokens. Returns whether they have replaced some."""
        self.features.examine(self.state)
        replaced, self.state.replaced = self.state.replaced, False
        self.table.num_tokens[0] = self.state.num_tokens
        return replaced

    def completion(self, *, drafter: str = "lookup", eos_ids: frozenset[int] = frozenset(), now: float = 1.0) -> Completion:
        """The completion of the row, which has ended."""
        done = completion_of(self.state, drafter=drafter, eos_ids=eos_ids, slot=0, now=now)
        assert self.features.ready(self.state)
        return self.features.finish(self.state, done)
