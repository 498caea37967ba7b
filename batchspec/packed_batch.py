"""The shape of the static batch, which packing chooses and the engine fills, and what both expect of its rows.

The planner computes the memory of a shape, so it must know the limits here. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from batchspec.records import Ids

SCORED_TOKENS = 512
"""Maximum number of positions whose logits are in memory at once while prompts are scored."""
MOST_ROUNDS_BEFORE_REFILL = 2
"""Maximum number of further rounds that are launched before the host prepares a refill. The device decodes them meanwhile; the
free slots stay empty that long."""
PREFIX_STATES = 8
"""Number of prefixes whose row states are kept for rows that begin with them."""
PREFILL_GRAPHS = 16
"""Maximum number of shapes of prefill passes that are captured as CUDA graphs; more would take too much memory."""
KEYS_PER_TOKEN = 4
"""A captured prefill pass has at most this many keys per token of the largest one: its rows may share prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """The shape of the static batch through which requests stream: planned once, then fixed."""

    num_slots: int
    """Number of rows that decode concurrently."""
    row_buckets: tuple[int, ...]
    """Ascending row counts (row buckets) with which a round may run; the last equals num_slots."""
    num_pages: int
    """K/V pages of the first K/V group, including the scratch page: the layers that read most keys; in most models all layers."""
    page_size: int
    """Tokens in a page."""
    max_len: int
    """Maximum prompt + output length of a row, in tokens."""
    num_verified: int
    """Maximum number of draft tokens of a row that a round verifies: K, or the number of a tree's nodes."""
    prefill_tokens: int
    """Maximum number of tokens in one prefill pass."""
    run_ahead: int
    """Number of rounds that the host launches before it reads the results of the first."""
    longest_prompt: int | None = None
    """Longest prompt in tokens among the surveyed rows, for which prefill is prepared; None: any that fits."""
    longest_row: int | None = None
    """Longest prompt + max_new_tokens among the surveyed rows, for which rounds are prepared; None: max_len."""
    graph_tokens: int | None = None
    """Maximum number of tokens, padding included, of a prefill pass that is a CUDA graph; None: prefill_tokens."""
    decodes: bool = True
    """Whether rows have room for output tokens. If none has, all end with their prefill, and there are no rounds."""
    more_pages: tuple[int, ...] = ()
    """K/V pages of the other K/V groups, layers with narrower windows; (): num_pages each."""

    @property
    def most_graph_tokens(self) -> int:
        """Tokens of the largest prefill pass that is a CUDA graph, padding included."""
        return self.prefill_tokens if self.graph_tokens is None else min(self.graph_tokens, self.prefill_tokens)

    def group_pages(self, num_groups: int) -> tuple[int, ...]:
        """K/V pages of each group."""
        more = self.more_pages or (self.num_pages,) * (num_groups - 1)
        assert len(more) == num_groups - 1, (self.more_pages, num_groups)
        return (self.num_pages, *more)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedRows:
    """What the survey predicts of a job's rows before the first of them enters a slot."""

    prompt_lens: Ids
    """int32 [surveyed requests] tokens of the prompts, approximately in the order in which they will enter slots."""
    common_tokens: int
    """Number of tokens of the longest prefix that the first surveyed prompts share."""
    output_tokens: float
    """Mean predicted number of tokens of an output."""
    num_rows: int
    """Number of requests of the job."""

    def rounds(self, num_slots: int) -> float:
        """Number of rounds that decode the job without drafts: of full slots, in which each row emits one token a round."""
        return self.num_rows * self.output_tokens / num_slots


class ExampleRow(NamedTuple):
    """A row that brings more than text to a prefill pass, to compile and rehearse the pass with. No row may be live."""

    num_tokens: int
    in_slot_0: Callable[[], AbstractContextManager[None]]
    """Within this block slot 0 holds it. Nothing of it stays."""
