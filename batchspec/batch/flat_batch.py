"""The flat tokens that one forward pass reads, and the pages of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.image_inputs import AxisPositions, ImageInputs
from batchspec.kernels.attention.work_list import SharedPrefixes
from batchspec.kernels.kv_cache.group_slot_mapping import group_slot_mapping

Tokens = Literal["prompt", "outputs", "drafts"]
"""What the tokens of a batch are. prompt: of prompts; outputs: those that rows had before they were preempted; drafts: each row's
newest token and its drafts, which may be rejected later."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPages:
    """The pages in which one K/V group keeps the keys of a batch."""

    page_table: Tensor
    """int32 [R, max pages a row]"""
    slot_mapping: Tensor
    """int64 [T]"""


@dataclass(slots=True, kw_only=True)
class FlatBatch:
    """Concatenated tokens of several rows: T tokens of R rows, the input of one forward pass.

    Row r owns the flat indices cu_seqlens_q[r] .. cu_seqlens_q[r+1]-1, at consecutive positions that end at kv_len[r]-1; its keys
    are positions 0 .. kv_len[r]-1 in the pages of page_table[r]. A row may own no index (a dead row). Indices from
    cu_seqlens_q[R] on are padding: row 0, position 0, scratch slot.
    """

    token_ids: Tensor
    """int32 [T]"""
    row_ids: Tensor
    """int32 [T] the row each token belongs to"""
    positions: Tensor
    """int64 [T] position in the row"""
    slot_mapping: Tensor
    """int64 [T] cache location page * page_size + offset where its K/V is written; page 0 is scratch. Tokens of dead rows and
    padding write to slot 0, which marks them as dead: their results are not used"""
    cu_seqlens_q: Tensor
    """int32 [R+1]"""
    kv_len: Tensor
    """int32 [R] number of keys that the row's last token attends to, itself included; 0 for a dead row"""
    page_table: Tensor
    """int32 [R, max pages a row]"""
    max_q: int
    """No row has more tokens than this (host bound)."""
    max_kv: int
    """No kv_len is larger than this (host bound)."""
    shared: SharedPrefixes | None = None
    """Rows that begin with the same pages, for attention that reads these once; None if unknown."""
    host: HostLayout | None = None
    """What the host knows of the rows: everything for a prefill, None for a round and for a padded prefill."""
    max_keys: int | None = None
    """For a padded prefill: upper bound of the sum of kv_len (host bound)."""
    slots: Tensor | None = None
    """int64 [R] the slot of each row; None: row r is in slot r"""
    tokens: Tokens = "prompt"
    row_adapters: Tensor | None = None
    """int32 [R] the LoRA adapter of each row, 0 is none; None if the model has no adapters of single rows"""
    tree: TreeTail | None = None
    """Set if the last keys of each row are nodes of a tree: a key's index is its node's, its position the depth, so several
    queries may have the same position."""
    rope: Tensor | AxisPositions | None = None
    """RoPE positions of tokens of rows that may have images, int64 [T] or along several axes; None: `positions`"""
    images: ImageInputs | None = None
    """None: no token is one of an image"""
    next_images: ImageInputs | None = None
    """What tokens read whose next token is one of an image, for drafters that read the next token; None: there is none"""
    last_keys: Tensor | None = None
    """int32 [T] index of the last key that a token attends to, in layers where tokens of an image attend to each other
    (`whole_images`): for these tokens that of the image's last one, else the token's own. None: all their own"""
    more_groups: tuple[GroupPages, ...] = ()
    """For K/V groups 1, 2, ...; page_table and slot_mapping are those of group 0, which has the widest window."""

    @property
    def rope_positions(self) -> Tensor | AxisPositions:
        """What rotary embedding turns q and k by."""
        return self.positions if self.rope is None else self.rope

    def slot_ids(self) -> Tensor:
        """int32 [R] the slot of each row."""
        slots = self.slots
        if slots is None:
            slots = torch.arange(self.kv_len.shape[0], device=self.kv_len.device)
        return slots.int()

    @property
    def commits(self) -> bool:
        """Whether all of its tokens are known to be the row's."""
        return self.tokens != "drafts"

    def read_rows(self, rows: DeviceBatch, slot_ids: Tensor | None = None) -> FlatBatch:
        """This batch, with what layers read of the rows besides their tokens. slot_ids int64 [R]: the slot of each row; None:
        row r is in slot r."""
        self.row_adapters = rows.adapter if slot_ids is None else rows.adapter[slot_ids]
        self.slots = slot_ids
        if rows.images is not None:
            self.rope = rows.rope_positions(self.positions, self.row_ids if slot_ids is None else slot_ids[self.row_ids])
        return self

    def of_group(self, group: int) -> FlatBatch:
        """The same tokens in the pages of one K/V group."""
        if group == 0:
            return self
        pages = self.more_groups[group - 1]
        # Shared prefixes are known for group 0 only; no other group reads all keys.
        return replace(self, page_table=pages.page_table, slot_mapping=pages.slot_mapping, shared=None, more_groups=())

    def ends(self, places: Tensor) -> FlatBatch:
        """The batch of each row's last token, at flat index int64 [R], which attends to all of the row's keys."""
        count = torch.arange(len(places) + 1, dtype=torch.int32, device=places.device)
        return replace(
            self,
            token_ids=self.token_ids.index_select(0, places),
            row_ids=count[:-1],
            positions=self.positions.index_select(0, places),
            rope=None if self.rope is None else self.rope_at(places),
            images=None,
            next_images=None,
            last_keys=None,
            slot_mapping=self.slot_mapping.index_select(0, places),
            cu_seqlens_q=count,
            max_q=1,
            host=None,
            more_groups=tuple(replace(own, slot_mapping=own.slot_mapping.index_select(0, places)) for own in self.more_groups),
        )

    def rope_at(self, places: Tensor) -> Tensor | AxisPositions:
        """`rope_positions` of the tokens at these flat indices, int64."""
        found = self.rope_positions
        return found.select(places) if isinstance(found, AxisPositions) else found.index_select(0, places)

    def add_groups(self, page_tables: Sequence[Tensor], page_size: int) -> FlatBatch:
        """This batch with the page tables [R, max pages a row] of groups 1, 2, ...: one launch for each slot mapping."""
        more = []
        for page_table in page_tables:
            slot_mapping = torch.empty_like(self.slot_mapping)
            group_slot_mapping(
                self.cu_seqlens_q, self.kv_len, self.positions, page_table, page_size=page_size, out_slot_mapping=slot_mapping
            )
            more.append(GroupPages(page_table, slot_mapping))
        self.more_groups = tuple(more)
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeTail:
    """Which of a row's last keys a query attends to if these are nodes of a tree. All keys before them are attended to."""

    ancestors: Tensor
    """int64 [T] bit j: the query attends to key start[row] + j, its own or that of a node above it"""
    start: Tensor
    """int32 [R] index of the key of node 0; its position is that of depth 0"""
    max_depth: int
    """Maximum depth of a node (host bound)."""
    depths: Tensor | None = None
    """int64 [S] depth of each node, the same in all rows; None: the batch's own tokens are the nodes, S per row."""

    def within(self, window: int | None, batch: FlatBatch) -> Tensor:
        """The ancestors int64 [T] that are within a window."""
        if window is None or window > self.max_depth:
            return self.ancestors
        depth = batch.positions - self.start[batch.row_ids]
        depths = depth.view(self.start.shape[0], -1)[batch.row_ids] if self.depths is None else self.depths
        near = depths > (depth - window).unsqueeze(1)
        return self.ancestors & (near.long() << torch.arange(near.shape[1], device=near.device)).sum(1)


@dataclass(frozen=True, slots=True)
class HostLayout:
    """q_len and kv_len of each row of a FlatBatch."""

    q_len: Sequence[int]
    kv_len: Sequence[int]
