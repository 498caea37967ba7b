"""Grouped products of experts with MXFP4 weights on sorted rows: persistent programs, warps that load and warps that multiply.

As `sorted_mxfp4.py`, in Gluon, Triton's language with explicit layouts and barriers. One program per SM works on one tile after
another. One warp copies words and tokens by TMA into a ring of buffers, also those of the next tile while the others finish one.
Each of one or two groups of four warps waits for a buffer, unpacks its 64 rows of words and multiplies; groups do not wait for
each other, so one unpacks while another multiplies. Not interpretable: it runs on a GPU alone.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from batchspec.kernels.common.checks import check
from batchspec.kernels.moe.experts import check_launch
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.mxfp4 import BLOCK, Mxfp4Weight
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing


@gluon.jit
def scale_of(scales, PART: gl.constexpr):
    """Byte PART of each int32 as the exponent of both bf16 halves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 e, i; mov.b32 i, $2; prmt.b32 e, $1, 0, i; shr.u32 $0, e, 1; }", "=r,r,r",
        [scales, 0x0404 + PART * 0x1010], dtype=gl.int32, is_pure=True, pack=1,
    )[:, None]  # fmt: skip


@gluon.jit
def unpack_block(words, scales, BLOCK_N: gl.constexpr, A: gl.constexpr):
    """The 128 values of each row, as the first operand of wgmma: see `mxfp4.unpack`. No value moves between registers."""
    zero = gl.inline_asm_elementwise(
        "{ .reg .b32 v; and.b32 v, $1, 0x81C081C0; mul.rn.bf16x2 $0, v, $2; }",
        "=r,r,r,r", [words, scale_of(scales, 0)], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
    one = gl.inline_asm_elementwise(
        "{ .reg .b32 v; shl.b32 v, $1, 3; and.b32 v, v, 0x81C081C0; mul.rn.bf16x2 $0, v, $2; }",
        "=r,r,r,r", [words, scale_of(scales, 1)], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
    two = gl.inline_asm_elementwise(
        "{ .reg .b32 v; shl.b32 v, $1, 6; and.b32 v, v, 0x81C081C0; mul.rn.bf16x2 $0, v, $2; }",
        "=r,r,r,r", [words, scale_of(scales, 2)], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
    three = gl.inline_asm_elementwise(
        """{ .reg .b32 v; shr.u32 v, $1, 7; and.b32 v, v, 0x00D800D8; mul.lo.u32 v, v, 2081;
        and.b32 v, v, 0x81C081C0; mul.rn.bf16x2 $0, v, $2; }""",
        "=r,r,r,r", [words, scale_of(scales, 3)], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
    parts = gl.join(gl.join(zero, two), gl.join(one, three))
    return gl.convert_layout(parts.permute((0, 2, 3, 1)).reshape((BLOCK_N, 128)), A)


@gluon.jit
def place_of(item, num_units, tiles, GROUP: gl.constexpr):
    """Unit and tile of an item of work; see `units.program_place`."""
    first = item // (GROUP * tiles) * GROUP
    width = gl.minimum(num_units - first, GROUP)
    within = item % (GROUP * tiles)
    return first + within % width, within // width


@gluon.jit
def produce(
    x, w, units, tokens, gates, ups, full, empty, num_units, n, k, tiles, GATED: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    num_blocks = gl.cdiv(k, 128)
    w_rows = n * 2 if GATED else n
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), num_units * tiles, gl.num_programs(0)):
        unit, tile = place_of(item, num_units, tiles, GROUP)
        if gl.load(units + unit * 4 + 2) > 0:
            begin = gl.load(units + unit * 4 + 1)
            row = gl.load(units + unit * 4) * w_rows + tile * ROWS
            for block in range(num_blocks):
                at = step % STAGES
                ready = full.index(at)
                mbarrier.wait(empty.index(at), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(ready, x.block_type.nbytes + w.block_type.nbytes * (2 if GATED else 1))
                tma.async_copy_global_to_shared(w, [row, block * 32], ready, gates.index(at))
                if GATED:
                    tma.async_copy_global_to_shared(w, [row + n, block * 32], ready, ups.index(at))
                tma.async_copy_global_to_shared(x, [begin, block * 128], ready, tokens.index(at))
                step += 1


@gluon.jit
def multiply(
    scales, bias, pairs, units, out, tokens, gates, ups, full, empty, num_units, n, k, tiles, SCATTER: gl.constexpr,
    GATED: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SUMS: gl.constexpr, STORE: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """Group OWN of the warps that multiply: rows OWN * BLOCK_N to (OWN + 1) * BLOCK_N of a tile of ROWS rows."""
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    num_blocks = gl.cdiv(k, 128)
    w_rows = n * 2 if GATED else n
    step = gl.program_id(0) * 0
    for item in range(gl.program_id(0), num_units * tiles, gl.num_programs(0)):
        unit, tile = place_of(item, num_units, tiles, GROUP)
        count = gl.load(units + unit * 4 + 2)
        if count > 0:
            expert = gl.load(units + unit * 4)
            begin = gl.load(units + unit * 4 + 1)
            first = tile * ROWS + OWN * BLOCK_N
            rows = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, A))
            own = scales + (expert * num_blocks).to(gl.int64) * w_rows + gl.minimum(rows, w_rows - 1)
            own_up = scales + (expert * num_blocks).to(gl.int64) * w_rows + gl.minimum(n + rows, w_rows - 1)
            acc = gl.zeros((BLOCK_N, BLOCK_T), gl.float32, SUMS)
            up = gl.zeros((BLOCK_N, BLOCK_T), gl.float32, SUMS)
            next_scale = gl.load(own)
            next_up_scale = gl.load(own_up) if GATED else next_scale
            for block in range(num_blocks):
                at = step % STAGES
                scale = next_scale
                up_scale = next_up_scale
                ahead = gl.minimum(block + 1, num_blocks - 1) * w_rows
                next_scale = gl.load(own + ahead)
                if GATED:
                    next_up_scale = gl.load(own_up + ahead)
                mbarrier.wait(full.index(at), (step // STAGES) & 1)
                b = tokens.index(at).permute((1, 0))
                acc = warpgroup_mma(
                    unpack_block(gates.index(at).slice(OWN * BLOCK_N, BLOCK_N).load(A), scale, BLOCK_N, A), b, acc, is_async=True
                )
                if GATED:
                    up_words = unpack_block(ups.index(at).slice(OWN * BLOCK_N, BLOCK_N).load(A), up_scale, BLOCK_N, A)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    up = warpgroup_mma(up_words, b, up, is_async=True)
                    up = warpgroup_mma_wait(0, deps=[up])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(at), count=1)
                step += 1
            column = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
            if bias is not None:
                at_bias = bias + expert.to(gl.int64) * w_rows + column
                acc += gl.load(at_bias, mask=column < n, other=0.0).to(gl.float32)[:, None]
                if GATED:
                    up += gl.load(at_bias + n, mask=column < n, other=0.0).to(gl.float32)[:, None]
            if GATED:
                if LIMIT is None:
                    acc = acc / (1.0 + gl.exp(-acc)) * up
                else:  # NaN stays NaN: it marks damaged weights
                    acc = gl.where(acc > LIMIT, LIMIT, acc)
                    up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
                    acc = acc / (1.0 + gl.exp(-ALPHA * acc)) * (up + 1.0)
            y = gl.convert_layout(acc.to(out.dtype.element_ty), STORE)
            lane = gl.arange(0, BLOCK_T, gl.SliceLayout(0, STORE))
            columns = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORE))
            row = begin + lane
            if SCATTER:
                row = gl.load(pairs + row, mask=lane < count, other=0)
            places = out + row.to(gl.int64)[None, :] * n + columns[:, None]
            gl.store(places, y, mask=(lane < count)[None, :] & (columns < n)[:, None])


@gluon.jit(do_not_specialize=["num_units"])
def persistent_mxfp4_kernel(
    x, w, scales, bias, pairs, units, out, num_units, n, k, SCATTER: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
    ALPHA: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TEAMS: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """x [P, k] by blocks [BLOCK_T, 128]; w [E * rows, words of a row] by blocks [TEAMS * BLOCK_N, 32].

    TEAMS: groups of warps that multiply. REGISTERS: of each thread in these.
    """
    ROWS: gl.constexpr = TEAMS * BLOCK_N
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_T, 16])
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, num_warps], [0, 1])
    tiles = gl.cdiv(n, ROWS)
    tokens = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, 128], x.layout)
    gates = gl.allocate_shared_memory(gl.int16, [STAGES, ROWS, 32], w.layout)
    ups = gl.allocate_shared_memory(gl.int16, [STAGES, ROWS, 32], w.layout) if GATED else gates
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=TEAMS)
    if TEAMS == 1:
        gl.warp_specialize(
            [
                (multiply, (scales, bias, pairs, units, out, tokens, gates, ups, full, empty, num_units, n, k, tiles, SCATTER,
                            GATED, LIMIT, ALPHA, BLOCK_T, BLOCK_N, ROWS, STAGES, GROUP, SUMS, STORE, gl.constexpr(0))),
                (produce, (x, w, units, tokens, gates, ups, full, empty, num_units, n, k, tiles, GATED, ROWS, STAGES, GROUP)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (scales, bias, pairs, units, out, tokens, gates, ups, full, empty, num_units, n, k, tiles, SCATTER,
                            GATED, LIMIT, ALPHA, BLOCK_T, BLOCK_N, ROWS, STAGES, GROUP, SUMS, STORE, gl.constexpr(0))),
                (multiply, (scales, bias, pairs, units, out, tokens, gates, ups, full, empty, num_units, n, k, tiles, SCATTER,
                            GATED, LIMIT, ALPHA, BLOCK_T, BLOCK_N, ROWS, STAGES, GROUP, SUMS, STORE, gl.constexpr(1))),
                (produce, (x, w, units, tokens, gates, ups, full, empty, num_units, n, k, tiles, GATED, ROWS, STAGES, GROUP)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


def launch(
    kernel: str, x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, compile_only: bool = False, programs: int = 132,
) -> None:  # fmt: skip
    """As `sorted_mxfp4.launch`, with as many programs as the GPU has SMs.

    tile  stages: buffers of the ring; warps: of those that multiply, which divide block_n
    """
    num_pairs, (num_experts, w_rows, _), k = routing.expert_ids.numel(), weight.words.shape, x.shape[1]
    n = w_rows if gate is None else w_rows // 2
    check(f"{kernel}: x", x, (num_pairs, k), torch.bfloat16)
    check(f"{kernel}: out", out, (num_pairs, n), torch.bfloat16, torch.float32)
    check_launch(kernel, routing, tile, num_experts)
    if tile.warps not in (4, 8) or tile.block_k != BLOCK:
        raise ValueError(f"{kernel}: {tile}; 4 or 8 warps multiply blocks of {BLOCK} columns")
    if not len(routing.units):
        return
    flat, teams = weight.words.view(torch.int16).view(num_experts * w_rows, -1), tile.warps // 4
    tokens, words = [tile.block_t, BLOCK], [tile.block_n, BLOCK // 4]
    grid = (min(programs, len(routing.units) * triton.cdiv(n, tile.block_n)),)
    start = partial(persistent_mxfp4_kernel.warmup, grid=grid) if compile_only else persistent_mxfp4_kernel[grid]
    start(
        TensorDescriptor.from_tensor(x, tokens, gl.NVMMASharedLayout.get_default_for(tokens, gl.bfloat16)),
        TensorDescriptor.from_tensor(flat, words, gl.NVMMASharedLayout.get_default_for(words, gl.int16)),
        weight.scales.view(torch.int32), bias, routing.pairs, routing.units, out, len(routing.units), n, k,
        SCATTER=gate is None, GATED=gate is not None, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha,
        BLOCK_T=tile.block_t, BLOCK_N=tile.block_n // teams, STAGES=tile.stages, GROUP=tile.group,
        TEAMS=teams, REGISTERS=240, num_warps=4,
    )  # fmt: skip
