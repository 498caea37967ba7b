"""The work list of verify attention as a record: what it is made of, how it is to be cut; `split_kv_schedule.py` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """Groups of rows that begin with the same pages. No group is read with a window."""

    row_group: Tensor
    """int32 [R] the group of each row, -1 for none"""
    row_order: Tensor
    """int32 [R] rows, the members of a group side by side"""
    group_start: Tensor
    """int32 [G+1] group g's members are row_order[group_start[g] : group_start[g+1]]; dead ones are skipped"""
    shared_len: Tensor
    """int32 [G] tokens in common: whole pages, none of them a query of a live member; 0 for an empty group"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShape:
    """What the host knows of a batch, and how it wants the work cut."""

    max_q: int
    """No row owns more places."""
    max_kv: int
    """No kv_len is larger."""
    kv_heads: int
    heads_per_kv: int
    page_size: int
    window: int = 0
    """Keys a query sees, itself included; 0: all."""
    sink: int = 0
    """With a window: the first keys, seen too."""
    tile: int
    """(query, head) pairs of one item."""
    block: int
    """Keys read at once."""
    group_tile: int = 64
    group_block: int = 64
    programs: int
    """Items * kv_heads that the card runs at once."""
    group_programs: int
    """The same of groups."""
    chunk: int = 1024
    """Keys of an item from which on the card is rather filled once more."""
    min_chunk: int = 256
    """Keys below which no row is cut."""
    short: int = 768
    """Keys up to which no row is cut if all are: a merge costs as much as it saves."""
    max_whole: int = 2048
    """Keys up to which no row is cut either, where there are enough rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionWork:
    """A work list and what it was made of. Good for every layer, and for later positions as long as kv_len bounds them."""

    shape: WorkShape
    cu_seqlens_q: Tensor
    kv_len: Tensor
    shared: SharedPrefixes | None
    items: Tensor
    """int32 [max items, 8]"""
    group_items: Tensor
    """int32 [max group items, 8]"""
    counts: Tensor
    """int32 [2] items and group items listed"""
    row_parts: Tensor
    """int32 [R, 2] the row's first line of partial results, and how many parts it comes in (0: written directly)"""
    num_lines: int
    """Lines of partial results that any such batch needs at most; 0: no row is ever cut."""
