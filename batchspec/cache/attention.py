"""Attention over paged K/V: the batch of flat tokens that one forward reads, and the attention itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class FlatBatch:
    """Tokens of several rows laid end to end: T tokens of R rows, what one forward of a model reads.

    Row r owns the flat places q_start[r] .. q_start[r+1]-1, at consecutive positions that end at kv_len[r]-1; its keys
    are positions 0 .. kv_len[r]-1 in the pages of page_table[r]. A row may own no place (a dead row). Places behind
    q_start[R] are padding of a fixed budget: row 0, position 0, scratch slot.
    """

    token_ids: Tensor
    """int32 [T]"""
    row_ids: Tensor
    """int32 [T] the row each token belongs to"""
    positions: Tensor
    """int64 [T] position in the row, which is also its RoPE position"""
    slots: Tensor
    """int64 [T] cache location page * page_size + offset where its K/V is written; page 0 is scratch"""
    q_start: Tensor
    """int32 [R+1]"""
    kv_len: Tensor
    """int32 [R] keys that the row's last token sees, itself included; 0 for a dead row"""
    page_table: Tensor
    """int32 [R, max pages a row]"""
    max_q: int
    """No row owns more places than this (host bound)."""
    max_kv: int
    """No kv_len is larger than this (host bound)."""
