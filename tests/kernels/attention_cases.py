"""Flat batches over pages in random order, for the tests of verify attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.verify_attention import verify_attention, verify_attention_reference
from batchspec.kernels.attention.work_list import AttentionWork, SharedPrefixes, WorkShape

PAGE_SIZE = 16
SMALL = {"tile": 16, "block": 16, "min_chunk": 16, "short": 16, "max_whole": 0, "group_tile": 32, "group_block": 32}
STALE_KEY, STALE_VALUE = float("nan"), 1e4
"""What lies after a row's last key: whatever a page held before, as `kv_write` leaves it. V is always finite."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of (queries, keys) laid end to end; a row with no key is dead."""

    q: Tensor
    kv: Tensor
    page_table: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    kv_len: Tensor
    shape: WorkShape
    shared: SharedPrefixes | None = None

    def work(self, *, interpret: bool, **changes: Any) -> AttentionWork:
        shape = replace(self.shape, **changes)
        return split_kv_schedule(
            self.cu_seqlens_q, self.kv_len, self.positions, shape=shape, shared=self.shared, interpret=interpret
        )

    def run(self, work: AttentionWork, *, interpret: bool, positions: Tensor | None = None, **tree: Any) -> Tensor:
        out = torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=self.q.device)
        partials = partials_of(work, self.q.shape[2])
        partials.out.fill_(float("nan"))
        partials.lse.fill_(float("nan"))
        positions = self.positions if positions is None else positions
        verify_attention(
            self.q, self.kv, self.page_table, positions, work, partials, scale=self.scale, out=out, interpret=interpret, **tree
        )
        return out

    def expected(self, work: AttentionWork, *, positions: Tensor | None = None, **tree: Any) -> Tensor:
        out = torch.empty_like(self.q, dtype=torch.float32)
        positions = self.positions if positions is None else positions
        verify_attention_reference(
            self.q.float(), self.kv.float(), self.page_table, positions, work, scale=self.scale, out=out, **tree
        )
        return out

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)


def make_case(
    rows: list[tuple[int, int]], *, heads: tuple[int, int] = (4, 2), head_dim: int = 64, dtype: torch.dtype = torch.float32,
    padding: int = 0, device: torch.device | None = None, programs: int = 16, fused: bool = False, **shape: Any,
) -> Case:
    """Small items, so that short rows come in parts too. `fused`: q is a slice of wider rows."""
    device = device or torch.device("cpu")
    num_heads, kv_heads = heads
    q_len, kv_len = [num for num, _ in rows], [keys for _, keys in rows]
    num_flat_tokens, per_row = sum(q_len) + padding, max(kv_len) // PAGE_SIZE + 2
    pages = (torch.randperm(len(rows) * per_row) + 1).int().view(len(rows), per_row)
    kv = torch.empty(2, len(rows) * per_row + 1, PAGE_SIZE, kv_heads, head_dim)
    kv[0], kv[1] = STALE_KEY, STALE_VALUE
    for row, keys in enumerate(kv_len):
        at = torch.arange(keys)
        kv[:, pages[row, at // PAGE_SIZE].long(), at % PAGE_SIZE] = torch.randn(2, keys, kv_heads, head_dim)
    ranges = [torch.arange(max(keys - num, 0), max(keys - num, 0) + num) for num, keys in rows]
    wide = torch.randn(num_flat_tokens, num_heads + 3 if fused else num_heads, head_dim).to(device, dtype)
    return Case(
        q=wide[:, :num_heads],
        kv=kv.to(device, dtype),
        page_table=pages.to(device),
        positions=torch.cat([*ranges, torch.zeros(padding, dtype=torch.int64)]).to(device),
        cu_seqlens_q=torch.tensor([0, *q_len]).cumsum(0).int().to(device),
        kv_len=torch.tensor(kv_len, dtype=torch.int32, device=device),
        shape=WorkShape(
            max_q=max(q_len), max_kv=max(kv_len), kv_heads=kv_heads, heads_per_kv=num_heads // kv_heads, page_size=PAGE_SIZE,
            programs=programs, **SMALL | {"group_programs": programs} | shape,
        ),
    )


def share(case: Case, groups: list[tuple[list[int], int]]) -> Case:
    """Groups of (members, shared tokens): the first pages of every member become the first member's."""
    table, group_of = case.page_table.clone(), torch.full((len(case.kv_len),), -1, dtype=torch.int32)
    order: list[int] = []
    start = [0]
    for group, (members, length) in enumerate(groups):
        if members:
            table[members, : length // PAGE_SIZE] = table[members[0], : length // PAGE_SIZE].clone()
        group_of[members] = group
        order += members
        start.append(len(order))
    order += [row for row in range(len(case.kv_len)) if row not in order]
    ints: dict[str, Any] = {"dtype": torch.int32, "device": table.device}
    shared = SharedPrefixes(
        row_group=group_of.to(table.device), row_order=torch.tensor(order, **ints), group_start=torch.tensor(start, **ints),
        shared_len=torch.tensor([length for _, length in groups], **ints),
    )
    return replace(case, page_table=table, shared=shared)
