"""What the scheduler decides and the executor does: one `ScheduledStep`, plain host data that can be pickled.

Every decision that depends on a clock, on free memory or on what the host has read is in the step. `Executor.execute` needs
only the step and the state on the device: a second process that executes the same steps has the same tokens and page tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from batchspec.batch.row_commands import NO_COMMANDS, RowCommands
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.page_tables import Columns
from batchspec.draft.base import DrafterUpdate
from batchspec.records import Ids, Request


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens begin .. end-1 of the row in `slot`; `last` if the row's known tokens end there."""

    slot: int
    begin: int
    end: int
    last: bool
    restores: int | None = None
    """Entry with the row tensors after the tokens before it, which are copied to the row's slot first; None: the row goes
    on with its own."""
    saves: int | None = None
    """Entry to which the row tensors are copied after it."""
    generated: bool = False
    """Whether its tokens are outputs of the row, which some layers take one after another, as in rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """A request that enters a slot."""

    slot: int
    request: Request
    tokens: tuple[int, ...]
    """Output tokens that it has already, from before a preemption or from an earlier run."""
    pages: Columns
    """Pages of all its tokens, in order, for every K/V group."""
    num_cached: int
    """Number of first tokens whose K/V are in its pages already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The passes that prefill a group of refills."""

    passes: tuple[tuple[Segment, ...], ...]
    mode: SamplingMode


@dataclass(frozen=True, slots=True)
class PageGrant:
    """New pages of a row: entries first_column, first_column + 1, ... of its page tables, one table a K/V group."""

    slot: int
    first_column: int
    pages: Columns


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows whose first `num_pages` pages are the same."""

    slots: tuple[int, ...]
    num_pages: int


class RoundWidth(NamedTuple):
    """How many drafts a round has, and how many of them it verifies."""

    draft_len: int
    """K: drafts of each row."""
    mean_len: float | None = None
    """Drafts per row that are verified, on average over the rows of the round: those that are most likely to be accepted. None:
    all K of every row."""

    @property
    def verified(self) -> float:
        """Drafts per row that are verified, on average."""
        return self.draft_len if self.mean_len is None else self.mean_len

    def num_positions(self, num_rows: int) -> int | None:
        """Positions that a round over so many rows verifies, newest tokens included; None: K + 1 of every row."""
        return None if self.mean_len is None else num_rows + math.ceil(num_rows * self.mean_len)


NO_DRAFTS = RoundWidth(0)


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What the kernels of a round depend on: a GPU captures a graph for each shape."""

    num_rows: int
    """Row bucket: the round is over as many slots, the first ones."""
    draft_len: int
    """K; 0: it drafts nothing."""
    mode: SamplingMode
    shared: bool = False
    """Some rows share a prefix: attention reads it once for all of them."""
    prepare_next: bool = True
    """The next round may draft; otherwise the drafter only keeps what a later round needs, and prepares no draft."""
    max_kv: int | None = None
    """Limit on the tokens of each row, drafts included; None: that of the batch. It matters because attention splits long rows
    over programs, and merging their parts is one more launch in every layer."""
    mean_len: float | None = None
    """As in `RoundWidth`."""

    @property
    def width(self) -> RoundWidth:
        return RoundWidth(self.draft_len, self.mean_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRound:
    """One draft-verify-accept round."""

    shape: RoundShape
    new_prefix_groups: tuple[PrefixGroup, ...] | None
    """All groups, to be written to the device's tables; None: the tables are up to date, or the round does not read them."""
    counts_experts: bool
    """The result says how many experts of each layer had tokens."""
    counts_drafts: bool
    """The result says how many drafts survive, if the round knows their chances."""
    drafter_update: DrafterUpdate
    """What the drafter does before the round with what it learnt from finished rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """What happens on the device, in the order of the fields. Most steps are one prefill or one round."""

    finished: tuple[tuple[Ids, Ids], ...] = ()
    """Prompt and output of rows that ended since the last step: the drafter may learn from them."""
    killed: tuple[int, ...] = ()
    """Slots whose rows the host has ended or holds."""
    moves: tuple[tuple[int, int], ...] = ()
    """Compaction: (source, destination) slots."""
    refills: tuple[Refill, ...] = ()
    """Requests that enter slots; the passes of `prefill` are theirs."""
    commands: RowCommands = NO_COMMANDS
    """What features of rows ask for, of these requests and of others."""
    resumed: tuple[int, ...] = ()
    """Slots of rows that were held and decode again from the next round on."""
    prefill: Prefill | None = None
    grants: tuple[PageGrant, ...] = ()
    round: ScheduledRound | None = None
    num_reads: int = 0
    """Number of results that the host reads, the oldest first, before it schedules the next step."""
