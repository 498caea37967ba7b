"""Where the nodes of draft trees stand, in one launch: positions by depth, cache locations by node, who sees whom.

    depth[0] = 0, depth[i] = depth[parent[i]] + 1      position = num_tokens - 1 + depth      location: that of num_tokens - 1 + i
    ancestors[i] = bit i and those of its parents       kv_len = num_tokens - 1 + S, what the last node sees

Nodes stand in the order of their numbers behind a row's last committed K/V, and a parent has a lower number than its children.
One program a row; dead rows get position 0, the scratch slot 0, their own bit and no keys. Bound by launch latency: some hundred
bytes a row.
Source: the tree masks of Li et al. 2024, EAGLE-2 (arXiv 2406.16858), as bits of ancestors in place of a matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.attempt import attempt
from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.slot_mapping import slot_of

MAX_NODES = 64
"""Of a row, its root included: bits of a mask."""


@triton.jit(do_not_specialize=["max_pages"])
def tree_places_kernel(
    parents, num_tokens, live, page_table, out_positions, out_slot_mapping, out_ancestors, out_kv_len, parents_stride, max_pages,
    NODES: tl.constexpr, DEPTH: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    alive = tl.load(live + row) != 0
    num = tl.load(num_tokens + row)
    lane = tl.arange(0, LANES)
    exists = lane < NODES
    one = tl.full([LANES], 1, tl.int64)
    mask = one << lane.to(tl.int64)
    parent = tl.load(parents + row * parents_stride + lane, mask=exists, other=-1)
    depth = tl.zeros([LANES], tl.int32)
    for _ in range(DEPTH):
        above = parent >= 0
        mask = tl.where(above, mask | (one << tl.maximum(parent, 0).to(tl.int64)), mask)
        depth += above.to(tl.int32)
        parent = tl.load(parents + row * parents_stride + parent, mask=above & exists, other=-1)
    start = tl.where(alive, num - 1, 0)
    place = row * NODES + lane
    inside = lane < tl.where(alive, NODES, 0)
    slot = slot_of(page_table, row, (start + lane).to(tl.int64), inside, max_pages, PAGE_SIZE)
    tl.store(out_positions + place, tl.where(inside, start + depth, 0).to(tl.int64), mask=exists)
    tl.store(out_slot_mapping + place, slot, mask=exists)
    tl.store(out_ancestors + place, tl.where(inside, mask, one << lane.to(tl.int64)), mask=exists)
    tl.store(out_kv_len + row, tl.where(alive, tl.minimum(num - 1 + NODES, max_pages * PAGE_SIZE), 0))


def tree_places(
    parents: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    max_depth: int,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_ancestors: Tensor,
    out_kv_len: Tensor,
    interpret: bool = False,
) -> None:
    """Write where S nodes of each of R rows stand, dead or not, S <= 64.

    parents        int32 [R, S]     the node above each, of a lower number; -1: nothing is above it. One line for all rows may be
                                    expanded
    num_tokens     int32 [R]        committed tokens; the newest, which node 0 is, is not in K/V yet
    live           int32 [R]
    page_table     int32 [R, max pages a row]
    max_depth      no node is deeper
    out_positions  int64 [R * S]
    out_slot_mapping      int64 [R * S]    0 for dead rows and for nodes past the page table
    out_ancestors  int64 [R * S]    bit j: node j is the node itself or above it
    out_kv_len     int32 [R]        keys up to the last node, at most those of the page table; 0 for dead rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, num_nodes = parents.shape
    if num_nodes > MAX_NODES:
        raise ValueError(f"tree_places: parents has {num_nodes} columns; at most {MAX_NODES} nodes a row are supported")
    check("tree_places: parents", parents, (num_rows, num_nodes), torch.int32, rows=True)
    for name, vector in (("num_tokens", num_tokens), ("live", live), ("out_kv_len", out_kv_len)):
        check(f"tree_places: {name}", vector, (num_rows,), torch.int32)
    check("tree_places: page_table", page_table, (num_rows, page_table.shape[1]), torch.int32)
    for name, vector in (
        ("out_positions", out_positions),
        ("out_slot_mapping", out_slot_mapping),
        ("out_ancestors", out_ancestors),
    ):
        check(f"tree_places: {name}", vector, (num_rows * num_nodes,), torch.int64)
    if not (parents.is_cuda or interpret):
        tree_places_reference(
            parents, num_tokens, live, page_table, page_size=page_size, max_depth=max_depth, out_positions=out_positions,
            out_slot_mapping=out_slot_mapping, out_ancestors=out_ancestors, out_kv_len=out_kv_len,
        )  # fmt: skip
    elif num_rows:
        tree_places_kernel[(num_rows,)](
            parents, num_tokens, live, page_table, out_positions, out_slot_mapping, out_ancestors, out_kv_len, parents.stride(0),
            page_table.shape[1], NODES=num_nodes, DEPTH=max_depth, PAGE_SIZE=page_size,
            LANES=triton.next_power_of_2(max(2, num_nodes)), num_warps=2, **launch_args(parents),
        )  # fmt: skip


def tree_places_reference(
    parents: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    max_depth: int,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_ancestors: Tensor,
    out_kv_len: Tensor,
) -> None:
    """The same in plain torch."""
    num_rows, num_nodes = parents.shape
    alive = (live != 0)[:, None]
    node = torch.arange(num_nodes, device=parents.device)
    own = torch.ones_like(node) << node
    masks, depth, above = own.repeat(num_rows, 1), torch.zeros_like(parents), parents.long()
    for _ in range(max_depth):
        there = above >= 0
        masks |= torch.where(there, own[above.clamp(min=0)], 0)
        depth += there
        above = torch.where(there, parents.gather(1, above.clamp(min=0)).long(), above)
    start = ((num_tokens - 1) * (live != 0))[:, None].long()
    place = start + node
    page = place // page_size
    known = alive & (page < page_table.shape[1])
    table = page_table.gather(1, page.clamp(max=page_table.shape[1] - 1)).long()
    out_positions.copy_(((start + depth) * alive).flatten())
    out_slot_mapping.copy_(torch.where(known, table * page_size + place % page_size, 0).flatten())
    out_ancestors.copy_(torch.where(alive, masks, own).flatten())
    out_kv_len.copy_((num_tokens - 1 + num_nodes).clamp(max=page_table.shape[1] * page_size) * (live != 0))


def main() -> None:
    bench = Bench("tree_places")
    for rows, nodes, depth in ((1, 61, 6), (32, 61, 6), (64, 17, 4)):
        with attempt(f"R={rows} S={nodes}"):
            bench_shape(bench, rows, nodes, depth)


def bench_shape(bench: Bench, rows: int, nodes: int, depth: int) -> None:
    device, branches = bench.device, -(-(nodes - 1) // depth)
    parents = torch.arange(nodes, dtype=torch.int32, device=device).sub_(branches).clamp_(min=0)
    parents[0] = -1
    ints = partial(torch.randint, dtype=torch.int32, device=device)
    inputs = (parents.repeat(rows, 1), ints(1, 900, (rows,)), ints(0, 2, (rows,)), ints(1, 1000, (rows, 64)))
    outs: list[dict[str, Any]] = []
    for _ in range(2):
        places = torch.full((3, rows * nodes), -7, dtype=torch.int64, device=device)
        outs.append(
            {
                "page_size": 16,
                "max_depth": depth,
                "out_positions": places[0],
                "out_slot_mapping": places[1],
                "out_ancestors": places[2],
                "out_kv_len": torch.full((rows,), -7, dtype=torch.int32, device=device),
            }
        )
    shape, num_bytes = f"R={rows} S={nodes} depth {depth}", rows * (12 + 32 * nodes)
    bench.same_row(shape, tree_places, tree_places_reference, [inputs], outs, num_bytes=num_bytes)


if __name__ == "__main__":
    main()
