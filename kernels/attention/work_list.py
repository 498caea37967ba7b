"""The records of verify attention's work list: its inputs, how the work is split, and the list, made by
`split_kv_schedule.py`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """Groups of rows that begin with the same pages. They are not used with a window."""

    row_group: Tensor
    """int32 [R] the group of each row, -1 for none"""
    row_order: Tensor
    """int32 [R] rows, the members of a group adjacent"""
    group_start: Tensor
    """int32 [G+1] group g's members are row_order[group_start[g] : group_start[g+1]]; dead ones are skipped"""
    shared_len: Tensor
    """int32 [G] length of the shared prefix: full pages that hold no query of a live member; 0 for an empty group"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShape:
    """The shape of a batch, as far as the host knows it, and how the work is to be split."""

    max_q: int
    """Maximum number of flat tokens of a row."""
    max_kv: int
    """Maximum kv_len."""
    kv_heads: int
    heads_per_kv: int
    page_size: int
    window: int = 0
    """Number of keys that a query attends to, itself included; 0: all."""
    sink: int = 0
    """With a window: number of first keys that every query attends to as well."""
    tile: int
    """(query, head) pairs of one item."""
    block: int
    """Keys read at once."""
    group_tile: int = 64
    group_block: int = 64
    programs: int
    """Items * kv_heads that the GPU runs at once."""
    group_programs: int
    """The same for groups."""
    chunk: int = 1024
    """Keys of an item above which the items are split further, to fill the GPU once more."""
    min_chunk: int = 256
    """Minimum number of keys of a part: shorter rows are not split."""
    short: int = 768
    """If no row is longer than this number of keys, none is split: a merge would cost as much as it saves."""
    max_whole: int = 2048
    """The same bound if there are enough rows to fill the GPU."""
    part: int = 0
    """Keys of an item if every row is cut at the multiples of this number, a multiple of block and group_block, whatever else
    is in the batch (`ordered_step.py`); 0: the length of items depends on the load."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionWork:
    """A work list and its inputs. It serves all layers, and later positions as long as they are below kv_len."""

    shape: WorkShape
    cu_seqlens_q: Tensor
    kv_len: Tensor
    shared: SharedPrefixes | None
    items: Tensor
    """int32 [max items, 8]"""
    group_items: Tensor
    """int32 [max group items, 8]"""
    counts: Tensor
    """int32 [2] number of items and of group items"""
    row_parts: Tensor
    """int32 [R, 2] the row's first line of partial results, and its number of parts (0: written directly)"""
    num_lines: int
    """Maximum number of lines of partial results of a batch of this shape; 0: no row is ever split."""

    @property
    def crowded(self) -> bool:
        """Whether every item is a whole row, and there are more than twice as many as the GPU runs at once."""
        return not self.num_lines and len(self.items) * self.shape.kv_heads > 2 * self.shape.programs
