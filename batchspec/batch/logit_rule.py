"""What a rule that masks or biases logits is, and which rows and positions the logits are of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.slot_field import SlotField
from batchspec.records import Request

if TYPE_CHECKING:
    from batchspec.batch.device_batch import DeviceBatch

PROMPT = -2
"""In place of every token of the prompt, where tokens of the output alone count."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """Which batch row and position each of T rows of logits belongs to.

    row_ids      int32 [T]
    positions    int64 [T] position of the token being drawn
    drafts       int32 [., K] draft tokens; None if nothing was drafted before the position, or no rule needs them
    num_drafted  int64 [T] how many of `drafts` come before the position; arbitrary for dead rows and padding
    draft_rows   int32 or int64 [T] row of `drafts`, for a tree one per node; None: that of `row_ids`
    tokens       the tokens whose logits these are, on a rank that has a part of the vocabulary; None: all tokens

    Tokens before the drafts are committed: rules find them, and values computed from them, in `DeviceBatch`.
    """

    row_ids: Tensor
    positions: Tensor
    drafts: Tensor | None = None
    num_drafted: Tensor | None = None
    draft_rows: Tensor | None = None
    tokens: slice | None = None

    def drafts_before(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Draft by draft, in order: its token for each of T rows, int64 [T], and whether it precedes the position, bool [T]."""
        if self.drafts is None or self.num_drafted is None:
            return
        draft_rows = self.row_ids if self.draft_rows is None else self.draft_rows
        for j in range(self.drafts.shape[1]):
            yield self.drafts[:, j][draft_rows].long(), self.num_drafted > j

    def newest_output(self, rows: DeviceBatch, count: int) -> Tensor:
        """int32 [T, count] output tokens and drafts before each position, the newest last; PROMPT for those of the prompt or
        before it."""
        back = torch.arange(count, 0, -1, device=self.positions.device)
        places = self.positions.unsqueeze(1) - back
        row_ids = self.row_ids.long().unsqueeze(1)
        found = rows.tokens[row_ids, places.clamp(0, rows.tokens.shape[1] - 1)]
        if self.drafts is not None and self.num_drafted is not None and self.drafts.shape[1]:
            drafted = self.num_drafted.unsqueeze(1) - back  # the place among the drafts; negative: committed
            draft_rows = row_ids if self.draft_rows is None else self.draft_rows.long().unsqueeze(1)
            of_drafts = self.drafts[draft_rows, drafted.clamp(0, self.drafts.shape[1] - 1)]
            found = torch.where(drafted >= 0, of_drafts, found)
        return torch.where(places >= rows.prompt_len.long()[row_ids], found, PROMPT)


@dataclass(frozen=True, slots=True)
class LogitRule:
    """One way to change logits [T, V] in place, and what else keeps to it in a round."""

    wanted: Callable[[SamplingMode], bool]
    """Whether some row of the pass needs it; otherwise nothing is launched."""
    apply: Callable[[Tensor, LogitRows, DeviceBatch, Tensor | None], None]
    """Arguments: logits, their rows, the batch, and the token of each column int [V], None for the target: the column's index."""
    reads_drafts: bool = False
    """Whether it needs `LogitRows.drafts`, because tokens drafted before the position count. A draft may be a forbidden token."""
    of_drafters: bool = False
    """Whether drafters with logits follow it too: they propose no token that it forbids, as long as they have another one."""
    masks: Callable[[LogitRows, DeviceBatch], tuple[Tensor, Tensor]] | None = None
    """All masks, and the row int32 [T] of each position's mask: for a rule that does nothing but mask."""
    check_drafts: Callable[[DeviceBatch, Tensor, Tensor], None] | None = None
    """Changes draft_ids int32 [R, K] and draft_len int32 [R] of a drafter without logits to what the rule allows."""
    commit: Callable[[DeviceBatch, Tensor, Tensor], None] | None = None
    """Brings the rows' state up to date with the tokens of a log int32 [R, L], as of `accept`; live int32 [R] is 0 for rows
    that ended with them. It may fail a row: it changes both."""
    mark_undecided: Callable[[Tensor, LogitRows, DeviceBatch], None] | None = None
    """Replaces choices int32 [T] by UNDECIDED where the device lacks what the rule needs for them (`SamplingMode.may_hold`)."""
    hold_undecided: Callable[[DeviceBatch, Tensor, Tensor], None] | None = None
    """Holds rows that lack it after their newest token: live int32 [R] becomes 0, and `finish` in the log HELD."""
    state: Mapping[str, SlotField] = field(default_factory=dict)
    """State of slots that it alone reads (`DeviceBatch.options`), which is empty until a pass needs the rule."""
    forbids: Callable[[Request, Sequence[int]], Iterable[int]] | None = None
    """The tokens that it forbids after these output tokens, for the host, which tells rows whose constraint leaves no other."""
    name: str = ""
    """Of the option, for the same message."""
    leaves: str = ""
    """Which tokens it leaves, as the end of "a token that ...": for the error of a row without any. Empty: it leaves some."""


def asked(option: str) -> Callable[[SamplingMode], bool]:
    """`LogitRule.wanted` of a rule that rows ask for by this option of `SamplingParams`."""
    return lambda mode: option in mode.options
