"""Work list of verify attention: which program reads which keys for which queries, built on the device once a round.

An item is (unit, tile, first, end, part, sinks, begin, count): the queries of one tile of a unit attend to keys first .. end-1,
and also to 0 .. sinks-1. A unit is a row with `count` flat tokens from `begin` on, or a group of rows whose shared prefix is read
once for all of them: its members are `count` entries of row_order from `begin` on. The keys of a unit are split as follows:

    share = sum of keys * tiles / (programs / KVH)                           keys of a program if the GPU is filled once
    waves = share / chunk, at least 1 and at most WAVES                      ... or several times, as long as items stay long
    item  = a unit's keys in floor(keys / (share / waves)) equal parts       in whole blocks; at least one, at least min_chunk

This way, few rows fill the GPU exactly once (a second, partial wave of programs would double the time); many rows are split into
items long enough to hide the start and end of a program; and many short rows are one item each, which needs no merge. Items are
listed by falling length: the GPU starts them in that order, so that the last ones to finish are short. A windowed row lists only
the keys that its first query still attends to. Dead rows and padding get an item without keys, which zeroes their output.
With `WorkShape.part` items end at its multiples instead, so that the order of sums depends on the row alone: a window
begins at a multiple of the block, and only whole parts of a shared prefix are read once. Whole parts are listed first, then the
remainder of each row, longest first.
Bound by launch latency: each program ranks its unit among all others, one launch, no host read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.attention.schedule_reference import FIELDS, WAVES, split_kv_schedule_reference
from batchspec.kernels.attention.work_list import AttentionWork, SharedPrefixes, WorkShape
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

WHOLE = 1 << 30  # a chunk longer than any row
LANES = 64
LEAST_ROWS = 64
"""All smaller numbers of rows use the same compiled kernel, because prefill passes have any number of rows."""


@triton.jit
def chunk_of(keys, tiles, target, chunk, min_chunk, WAVES: tl.constexpr, BLOCK: tl.constexpr):
    share = tl.cdiv(tl.sum(keys.to(tl.int64) * tiles, 0), target).to(tl.int32)
    waves = tl.minimum(tl.maximum(share // chunk, 1), WAVES)
    return tl.cdiv(tl.maximum(tl.cdiv(share, waves), min_chunk), BLOCK) * BLOCK


@triton.jit
def item_len(keys, chunk, BLOCK: tl.constexpr):
    """Number of keys of each item if `keys` are split evenly; 0 without keys."""
    return tl.cdiv(tl.cdiv(keys, tl.maximum(keys // chunk, 1)), BLOCK) * BLOCK


@triton.jit
def pick(values, at_index):
    return tl.sum(tl.where(at_index, values, 0), 0)


@triton.jit
def list_items(out_items, index, unit, num_items, tiles, first, low, length, end, first_part, sinks, start, count,
               LANES: tl.constexpr):
    """Write the items of one unit, from `index` on: keys from `low` on, cut at first, first + length, ... The tiles of a part are
    adjacent, so that the later ones find the keys in the cache."""
    for at in range(0, num_items, LANES):
        lane = at + tl.arange(0, LANES)
        exists = lane < num_items
        part = lane // tl.maximum(tiles, 1)
        begin = first + part * length
        item = out_items + (index + lane) * 8
        tl.store(item, tl.zeros([LANES], tl.int32) + unit, mask=exists)
        tl.store(item + 1, lane - part * tiles, mask=exists)
        tl.store(item + 2, tl.maximum(begin, low), mask=exists)
        tl.store(item + 3, tl.minimum(begin + length, end), mask=exists)
        tl.store(item + 4, tl.where(first_part < 0, -1, first_part + part), mask=exists)
        tl.store(item + 5, tl.where(part == 0, sinks, 0), mask=exists)
        tl.store(item + 6, tl.zeros([LANES], tl.int32) + start, mask=exists)
        tl.store(item + 7, tl.zeros([LANES], tl.int32) + count, mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "num_flat_tokens", "target", "group_target", "chunk", "min_chunk"])
def split_kv_schedule_kernel(
    cu_seqlens_q, kv_len, positions, row_group, group_start, shared_len, out_items, out_group_items, out_counts, out_row_parts,
    num_rows, num_groups, num_flat_tokens, target, group_target, chunk, min_chunk,
    HEADS: tl.constexpr, MAX_Q: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, GROUP_TILE: tl.constexpr, GROUP_BLOCK: tl.constexpr, WAVES: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):
    """Program r < num_rows lists the items of row r, program num_rows the padding after the last row, each other program a
    group."""
    await_earlier(PDL)
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    exists = rows < num_rows
    begin = tl.load(cu_seqlens_q + rows, mask=rows <= num_rows, other=0)
    finish = tl.where(rows == num_rows, num_flat_tokens, tl.load(cu_seqlens_q + rows + 1, mask=exists, other=0))
    places = tl.maximum(finish - begin, 0)
    length = tl.load(kv_len + rows, mask=exists, other=0)
    alive = (length > 0) & (places > 0)

    first = tl.zeros([ROWS], tl.int32)
    shared_parts = tl.zeros([ROWS], tl.int32)
    if WINDOW > 0:
        low = tl.load(positions + begin, mask=alive, other=0).to(tl.int32) - (WINDOW - 1)
        ALIGN: tl.constexpr = BLOCK if PART > 0 else PAGE_SIZE
        low = tl.maximum(low, 0) // ALIGN * ALIGN
        first = tl.where(low > SINK, low, 0)
    if GROUPS > 0:
        groups = tl.arange(0, GROUPS)
        common = tl.load(shared_len + groups, mask=groups < num_groups, other=0)
        member = tl.load(group_start + groups, mask=groups < num_groups, other=0)
        members = tl.load(group_start + groups + 1, mask=groups < num_groups, other=0) - member
        group_tiles = tl.cdiv(members * (MAX_Q * HEADS), GROUP_TILE)
        if PART > 0:
            common = common // PART * PART
            group_chunk = PART
        else:
            group_chunk = chunk_of(common, group_tiles, group_target, chunk, min_chunk, WAVES, GROUP_BLOCK)
        if program > num_rows:
            unit = program - num_rows - 1
            group_size = item_len(common, group_chunk, GROUP_BLOCK)
            listed = tl.cdiv(common, tl.maximum(group_size, 1)) * group_tiles
            unit_size = pick(group_size, groups == unit)
            longer = (group_size > unit_size) | ((group_size == unit_size) & (groups < unit))
            list_items(
                out_group_items, tl.sum(tl.where(longer, listed, 0), 0), unit, pick(listed, groups == unit),
                pick(group_tiles, groups == unit), 0, 0, unit_size, pick(common, groups == unit), 0, 0,
                pick(member, groups == unit), pick(members, groups == unit), LANES,
            )
            if unit == 0:
                tl.store(out_counts + 1, tl.sum(listed, 0))
        group = tl.load(row_group + rows, mask=exists, other=-1)
        first = tl.load(shared_len + group, mask=alive & (group >= 0), other=0)
        if PART > 0:
            first = first // PART * PART
        shared_parts = tl.cdiv(first, tl.maximum(item_len(first, group_chunk, GROUP_BLOCK), 1))

    keys = tl.where(alive, length - first, 0)
    tiles = tl.where(alive, tl.cdiv(places * HEADS, TILE), tl.minimum(places, 1))
    whole = tl.zeros([ROWS], tl.int32)
    if PART > 0:
        origin = first // PART * PART
        whole = tl.where(alive, (length - origin) // PART, 0)
        size = tl.cdiv(tl.where(whole > 0, length - origin - whole * PART, keys), BLOCK)  # of what is left, to rank it
        parts = tl.where(alive, tl.cdiv(length - origin, PART), 1)
    else:
        origin = first
        size = item_len(keys, chunk_of(keys, tiles, target, chunk, min_chunk, WAVES, BLOCK), BLOCK)
        parts = tl.where(alive, tl.cdiv(keys, tl.maximum(size, 1)), 1)
    all_parts = parts + shared_parts
    if program <= num_rows:
        mine = rows == program
        my_size = pick(size, mine)
        ahead = (size > my_size) | ((size == my_size) & (rows < program))
        my_parts = pick(all_parts, mine)
        lines = tl.where(all_parts > 1, all_parts * places * HEADS, 0)
        my_first = pick(first, mine)
        first_part = tl.where(my_parts > 1, pick(shared_parts, mine), -1)
        sinks = 0
        if WINDOW > 0:
            sinks = tl.where(my_first > 0, SINK, 0)
        index = tl.sum(tl.where(ahead, (parts - whole) * tiles, 0), 0)
        my_origin, my_tiles, my_begin, my_places = pick(origin, mine), pick(tiles, mine), pick(begin, mine), pick(places, mine)
        my_end = pick(tl.where(alive, length, 0), mine)
        listed = pick(parts * tiles, mine)
        if PART > 0:
            my_whole = pick(whole, mine)
            list_items(
                out_items, tl.sum(tl.where(rows < program, whole * tiles, 0), 0), program, my_whole * my_tiles, my_tiles,
                my_origin, my_first, PART, my_end, first_part, sinks, my_begin, my_places, LANES,
            )
            index += tl.sum(whole * tiles, 0)
            listed -= my_whole * my_tiles
            my_origin += my_whole * PART
            my_size = PART
            first_part = tl.where(my_parts > 1, first_part + my_whole, -1)
            sinks = tl.where(my_whole > 0, 0, sinks)
        list_items(
            out_items, index, program, listed, my_tiles, my_origin, my_first, my_size, my_end, first_part, sinks, my_begin,
            my_places, LANES,
        )
        if program < num_rows:
            tl.store(out_row_parts + 2 * program, tl.sum(tl.where(rows < program, lines, 0), 0))
            tl.store(out_row_parts + 2 * program + 1, tl.where(my_parts > 1, my_parts, 0))
        else:
            tl.store(out_counts, tl.sum(parts * tiles, 0))
            if GROUPS == 0:
                tl.store(out_counts + 1, 0)


def split_kv_schedule(
    cu_seqlens_q: Tensor,
    kv_len: Tensor,
    positions: Tensor,
    *,
    shape: WorkShape,
    shared: SharedPrefixes | None = None,
    interpret: bool = False,
) -> AttentionWork:
    """The work list of a flat batch of R rows and T flat tokens.

    cu_seqlens_q  int32 [R+1]  row r's flat tokens are cu_seqlens_q[r] .. cu_seqlens_q[r+1]-1, at most shape.max_q of them
    kv_len        int32 [R]    number of keys; 0 for a dead row
    positions     int64 [T]    read with a window only: a row's first query must have its smallest position
    shared        groups of rows that begin with the same pages, or None

    Allocates its outputs. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides, and for shared
    prefixes under a window.
    """
    num_rows, num_flat_tokens = kv_len.shape[0], positions.shape[0]
    check("split_kv_schedule: cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32)
    check("split_kv_schedule: kv_len", kv_len, (num_rows,), torch.int32)
    check("split_kv_schedule: positions", positions, (num_flat_tokens,), torch.int64)
    if shared is not None:
        _check_shared(shared, num_rows, shape.window)
    num_groups = shared.shared_len.shape[0] if shared is not None else 0
    target, group_target = (max(1, programs // shape.kv_heads) for programs in (shape.programs, shape.group_programs))
    max_items, max_group_items, num_lines = _bounds(shape, num_rows, num_flat_tokens, target, group_target, num_groups)
    min_chunk = shape.min_chunk if num_lines else WHOLE

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=kv_len.device)

    work = AttentionWork(
        shape=shape, cu_seqlens_q=cu_seqlens_q, kv_len=kv_len, shared=shared, num_lines=num_lines, counts=empty(2),
        items=empty(max_items, FIELDS), row_parts=empty(num_rows, 2),
        group_items=empty(max_group_items, FIELDS),
    )
    if not (kv_len.is_cuda or interpret):
        split_kv_schedule_reference(work, positions, (target, group_target), min_chunk)
        return work
    groups = (shared.row_group, shared.group_start, shared.shared_len) if shared is not None else (kv_len, kv_len, kv_len)
    # Without groups their constants, which depend on the number of rows, are not read: other values would compile kernels for
    # nothing.
    of_groups = (shape.max_q, shape.group_tile, shape.group_block) if num_groups else (1, 1, 1)
    split_kv_schedule_kernel[(num_rows + 1 + num_groups,)](
        cu_seqlens_q, kv_len, positions, *groups, work.items, work.group_items, work.counts, work.row_parts,
        num_rows, num_groups, num_flat_tokens, target, group_target, shape.chunk, min_chunk,
        HEADS=shape.heads_per_kv, MAX_Q=of_groups[0], WINDOW=shape.window, SINK=shape.sink,
        PAGE_SIZE=shape.page_size, TILE=shape.tile, BLOCK=shape.block, GROUP_TILE=of_groups[1],
        GROUP_BLOCK=of_groups[2], WAVES=WAVES, PART=shape.part, ROWS=max(LEAST_ROWS, triton.next_power_of_2(num_rows + 1)),
        GROUPS=triton.next_power_of_2(num_groups) if num_groups else 0, LANES=LANES, num_warps=4,
        **launch_args(kv_len),
    )
    return work


def _check_shared(shared: SharedPrefixes, num_rows: int, window: int) -> None:
    num_groups = shared.shared_len.shape[0]
    check("split_kv_schedule: shared.row_group", shared.row_group, (num_rows,), torch.int32)
    check("split_kv_schedule: shared.row_order", shared.row_order, (num_rows,), torch.int32)
    check("split_kv_schedule: shared.group_start", shared.group_start, (num_groups + 1,), torch.int32)
    check("split_kv_schedule: shared.shared_len", shared.shared_len, (num_groups,), torch.int32)
    if window:
        raise ValueError(f"split_kv_schedule: shared prefixes with window={window}; pass shared=None, a window reads no prefix")


def _bounds(
    shape: WorkShape, num_rows: int, num_flat_tokens: int, target: int, group_target: int, num_groups: int
) -> tuple[int, int, int]:
    """Maximum numbers of items (padding included), of group items, and of lines of partial results (0 if no row is to be split).

    Many rows, none of them much longer than a chunk, fill the GPU without a split, which saves the launch of a merge.
    """
    lanes = num_flat_tokens * shape.heads_per_kv
    if shape.part:
        return _part_bounds(shape, num_rows, lanes, num_groups)
    tiles = min(num_rows * triton.cdiv(shape.max_q * shape.heads_per_kv, shape.tile), lanes // shape.tile + num_rows)
    read = min(shape.max_kv, shape.window + shape.max_q + shape.page_size) if shape.window else shape.max_kv
    whole = shape.max_whole if num_rows * shape.kv_heads * 3 >= shape.programs * 2 else shape.short
    cuts = min(WAVES * target, tiles * triton.cdiv(shape.max_kv, max(shape.min_chunk, shape.block)))
    if not num_groups:
        return (tiles + 1, 0, 0) if read <= whole else (tiles + 1 + cuts, 0, cuts * shape.tile + lanes)
    group_tiles = triton.cdiv(num_rows * shape.max_q * shape.heads_per_kv, shape.group_tile) + num_groups
    group_cuts = min(WAVES * group_target, group_tiles * triton.cdiv(shape.max_kv, max(shape.min_chunk, shape.group_block)))
    num_lines = cuts * shape.tile + group_cuts * shape.group_tile + 2 * lanes
    return tiles + 1 + cuts, group_tiles + group_cuts, num_lines


def _part_bounds(shape: WorkShape, num_rows: int, lanes: int, num_groups: int) -> tuple[int, int, int]:
    """`_bounds` of a shape with parts: these numbers depend on the longest row alone."""
    tiles = min(num_rows * triton.cdiv(shape.max_q * shape.heads_per_kv, shape.tile), lanes // shape.tile + num_rows)
    parts = triton.cdiv(shape.max_kv, shape.part)
    if shape.window:
        parts = min(parts, (shape.window + shape.max_q + shape.block) // shape.part + 2)
    shared = shape.max_kv // shape.part
    group_tiles = triton.cdiv(num_rows * shape.max_q * shape.heads_per_kv, shape.group_tile) + num_groups
    return tiles * parts + 1, group_tiles * shared if num_groups else 0, lanes * parts if parts > 1 else 0
