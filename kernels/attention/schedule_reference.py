"""The work list of verify attention in plain Python, as a loop over rows and groups: the reference of `split_kv_schedule.py`."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import triton
from torch import Tensor

from batchspec.kernels.attention.work_list import AttentionWork, WorkShape

FIELDS = 8
"""Number of fields of an item."""
WAVES = 5
"""Maximum number of times that the items fill the GPU: more and shorter items would not improve the balance."""


def split_kv_schedule_reference(work: AttentionWork, positions: Tensor, targets: tuple[int, int], min_chunk: int) -> None:
    """Fill items, group_items, counts and row_parts of `work`. targets: number of items in a wave, for rows and for groups."""
    shape, heads, shared = work.shape, work.shape.heads_per_kv, work.shared
    group_of, common, starts = [-1] * len(work.kv_len), list[int](), [0]
    if shared is not None:
        group_of, common, starts = shared.row_group.tolist(), shared.shared_len.tolist(), shared.group_start.tolist()
    if shape.part:
        common = [length // shape.part * shape.part for length in common]
    widths = [(stop - start) * shape.max_q * heads for start, stop in pairwise(starts)]
    group_tiles = [triton.cdiv(width, shape.group_tile) for width in widths]
    group_cuts = _cuts(shape, [0] * len(common), common, group_tiles, targets[1], min_chunk, shape.group_block)

    begins, lengths = work.cu_seqlens_q.tolist(), work.kv_len.tolist()
    places = [stop - begin for begin, stop in pairwise(begins)]
    lengths = [length if num_q else 0 for length, num_q in zip(lengths, places, strict=True)]
    first = [common[group] if group >= 0 and length else 0 for group, length in zip(group_of, lengths, strict=True)]
    if shape.window:
        lows = [int(positions[begin]) - shape.window + 1 if length else 0 for begin, length in zip(begins, lengths, strict=False)]
        align = shape.block if shape.part else shape.page_size
        lows = [max(low, 0) // align * align for low in lows]
        first = [low if low > shape.sink else 0 for low in lows]
    tiles = [triton.cdiv(num_q * heads, shape.tile) for num_q in places]
    keys = [length - low for length, low in zip(lengths, first, strict=True)]

    line = 0
    listed: list[list[tuple[int, ...]]] = []
    for row, cuts in enumerate(_cuts(shape, first, keys, tiles, targets[0], min_chunk, shape.block)):
        above = len(group_cuts[group_of[row]]) if group_of[row] >= 0 and lengths[row] else 0
        parts = above + len(cuts) if above + len(cuts) > 1 else 0
        work.row_parts[row] = torch.tensor((line, parts))
        line += parts * places[row] * heads
        part, sinks = above if parts else -1, shape.sink if shape.window and first[row] else 0
        owned = (begins[row], places[row])
        dead: list[tuple[int, ...]] = [(row, 0, 0, 0, -1, 0, *owned)] * min(places[row], 1)
        listed.append(_unit(row, tiles[row], first[row], cuts, part, sinks, owned) or dead)
    padding = len(positions) - begins[-1]
    listed.append([(len(places), 0, 0, 0, -1, 0, begins[-1], padding)] * min(padding, 1))
    groups = [
        _unit(group, group_tiles[group], 0, cuts, 0, 0, (starts[group], starts[group + 1] - starts[group]))
        for group, cuts in enumerate(group_cuts)
    ]
    for kind, (out, units) in enumerate(((work.items, listed), (work.group_items, groups))):
        if not shape.part:
            units.sort(key=lambda unit: -triton.cdiv(unit[0][3] - unit[0][2], shape.block) if unit else 0)
        lines = [item for unit in units for item in unit]
        if shape.part:
            lines.sort(key=partial(_rank, shape))
        out[: len(lines)] = torch.tensor(lines, dtype=torch.int32).view(-1, FIELDS)
        work.counts[kind] = len(lines)


def _rank(shape: WorkShape, item: tuple[int, ...]) -> tuple[bool, int]:
    """Sort key: whole parts first, in the order of rows, then the remainders of rows, longest first (in blocks)."""
    _, _, first, end, *_ = item
    whole = end > 0 and end % shape.part == 0
    return not whole, 0 if whole else -triton.cdiv(end - first, shape.block)


def _cuts(
    shape: WorkShape, first: list[int], keys: list[int], tiles: list[int], target: int, min_chunk: int, block: int
) -> list[list[tuple[int, int]]]:
    """For each unit, the (begin, end) of its items, counted from its first key."""
    if not shape.part:
        return _cut(keys, tiles, target, shape.chunk, min_chunk, block)
    cuts = []
    for low, num in zip(first, keys, strict=True):
        at = [low, *range(low // shape.part * shape.part + shape.part, low + num, shape.part), low + num]
        cuts.append([(begin - low, end - low) for begin, end in pairwise(at)] if num else [])
    return cuts


def _cut(keys: list[int], tiles: list[int], target: int, chunk: int, min_chunk: int, block: int) -> list[list[tuple[int, int]]]:
    """For each unit, the (begin, end) of its items."""
    share = triton.cdiv(sum(num * times for num, times in zip(keys, tiles, strict=True)), target)
    waves = min(max(share // chunk, 1), WAVES)
    length = triton.cdiv(max(triton.cdiv(share, waves), min_chunk), block) * block
    sizes = [triton.cdiv(triton.cdiv(num, max(num // length, 1)), block) * block for num in keys]
    return [
        [(begin, min(begin + size, num)) for begin in range(0, num, max(size, 1))] for num, size in zip(keys, sizes, strict=True)
    ]


def _unit(
    unit: int, tiles: int, first: int, cuts: list[tuple[int, int]], part: int, sinks: int, owned: tuple[int, int]
) -> list[tuple[int, ...]]:
    return [
        (unit, tile, first + begin, first + end, part if part < 0 else part + number, 0 if number else sinks, *owned)
        for number, (begin, end) in enumerate(cuts)
        for tile in range(tiles)
    ]
