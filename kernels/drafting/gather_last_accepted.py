"""Prune dead positions from a catch-up, in one launch: of the flat tokens just verified, keep each row's last accepted one.

    t[r] = cu_seqlens_q[r] + accepted_len[r]      out_q[r] = q[t], out_residual[r] = residual[t], out_positions[r] = positions[t]
    out_slots[r] = slot_mapping[t]; 0 for dead rows
    kv_len[r] = num_tokens[r] - 1 after the commit: every key up to that position, itself included; 0 for dead rows

K/V of all verified positions are already written; the rest of the catch-up (attention, output, MLP, norms, lm_head) runs on
R tokens instead of R * (K + 1).
Bound by launch latency: two rows of H to 2H values each way; one launch for two gathers and five small operations.
Source: the dead positions of https://github.com/lightseekorg/tokenspeed/pull/217.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

VALUES_PER_THREAD = 16


@triton.jit(do_not_specialize=["num_flat_tokens"])
def gather_last_accepted_kernel(
    q, residual, cu_seqlens_q, accepted_len, positions, slot_mapping, num_tokens, live, out_q, out_residual, out_positions,
    out_slots, out_kv_len, num_flat_tokens, q_stride, residual_stride, out_q_stride, out_residual_stride,
    Q_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Program (r, 0) copies the query and writes position and kv_len; program (r, 1), if any, copies the residual stream."""
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    # In a packed batch, cu_seqlens_q of dead rows at the end may be past the last flat token.
    t = tl.minimum(tl.load(cu_seqlens_q + row) + tl.load(accepted_len + row), num_flat_tokens - 1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        values = tl.load(q + t * q_stride + lane, mask=lane < Q_WIDTH)
        tl.store(out_q + row * out_q_stride + lane, values, mask=lane < Q_WIDTH)
        tl.store(out_positions + row, tl.load(positions + t))
        alive = tl.load(live + row) != 0
        tl.store(out_kv_len + row, tl.where(alive, tl.load(num_tokens + row) - 1, 0))
        if slot_mapping is not None:
            tl.store(out_slots + row, tl.where(alive, tl.load(slot_mapping + t), 0))
    elif residual is not None:
        stream = tl.load(residual + t * residual_stride + lane, mask=lane < WIDTH)
        tl.store(out_residual + row * out_residual_stride + lane, stream, mask=lane < WIDTH)


def gather_last_accepted(
    q: Tensor,
    residual: Tensor | None,
    cu_seqlens_q: Tensor,
    accepted_len: Tensor,
    positions: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    *,
    out_q: Tensor,
    out_residual: Tensor | None,
    out_positions: Tensor,
    out_kv_len: Tensor,
    slot_mapping: Tensor | None = None,
    out_slots: Tensor | None = None,
    interpret: bool = False,
) -> None:
    """Copy the last accepted flat token of each of R rows, out of T flat tokens.

    q              fp32, bf16, fp16 or fp64 [T, A], T >= 1  rows of q, residual and their outputs may be slices of wider ones
    residual       [T, H] of the same dtype, or None with out_residual: q alone
    cu_seqlens_q   int32 [R+1]  first flat token of each row
    accepted_len   int32 [R]    0 for dead rows
    positions      int64 [T]
    num_tokens     int32 [R]    committed tokens, including those of this round
    live           int32 [R]    state after the commit
    out_q          [R, A] of q's dtype
    out_residual   [R, H] of q's dtype
    out_positions  int64 [R]
    out_kv_len     int32 [R]    0 for dead rows
    slot_mapping   int64 [T] K/V slots, copied to out_slots int64 [R], 0 for dead rows; or both None

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_flat_tokens, q_width), num_rows = q.shape, live.shape[0]
    width = 0 if residual is None else residual.shape[1]
    check("gather_last_accepted: q", q, (max(1, num_flat_tokens), q_width), *FLOATS, rows=True)
    if (residual is None) != (out_residual is None):
        raise ValueError("gather_last_accepted: residual and out_residual go together; give both or neither")
    if residual is not None:
        check("gather_last_accepted: residual", residual, (num_flat_tokens, width), q.dtype, rows=True)
    check("gather_last_accepted: cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32)
    for name, vector in (
        ("accepted_len", accepted_len), ("num_tokens", num_tokens), ("live", live), ("out_kv_len", out_kv_len),
    ):
        check(f"gather_last_accepted: {name}", vector, (num_rows,), torch.int32)
    check("gather_last_accepted: positions", positions, (num_flat_tokens,), torch.int64)
    check("gather_last_accepted: out_q", out_q, (num_rows, q_width), q.dtype, rows=True)
    if out_residual is not None:
        check("gather_last_accepted: out_residual", out_residual, (num_rows, width), q.dtype, rows=True)
    check("gather_last_accepted: out_positions", out_positions, (num_rows,), torch.int64)
    if (slot_mapping is None) != (out_slots is None):
        raise ValueError("gather_last_accepted: slot_mapping and out_slots go together; give both or neither")
    if slot_mapping is not None and out_slots is not None:
        check("gather_last_accepted: slot_mapping", slot_mapping, (num_flat_tokens,), torch.int64)
        check("gather_last_accepted: out_slots", out_slots, (num_rows,), torch.int64)
    if not (q.is_cuda or interpret):
        gather_last_accepted_reference(
            q, residual, cu_seqlens_q, accepted_len, positions, num_tokens, live,
            out_q=out_q, out_residual=out_residual, out_positions=out_positions, out_kv_len=out_kv_len,
            slot_mapping=slot_mapping, out_slots=out_slots,
        )
    elif num_rows:
        block = triton.next_power_of_2(max(q_width, width))
        strides = (0, 0) if residual is None or out_residual is None else (residual.stride(0), out_residual.stride(0))
        gather_last_accepted_kernel[(num_rows, 2 if width else 1)](
            q, residual, cu_seqlens_q, accepted_len, positions, slot_mapping, num_tokens, live, out_q, out_residual,
            out_positions, out_slots, out_kv_len, num_flat_tokens, q.stride(0), strides[0], out_q.stride(0), strides[1],
            Q_WIDTH=q_width, WIDTH=width, BLOCK=block, num_warps=min(16, max(1, block // (32 * VALUES_PER_THREAD))),
            **launch_args(q),
        )


def gather_last_accepted_reference(
    q: Tensor,
    residual: Tensor | None,
    cu_seqlens_q: Tensor,
    accepted_len: Tensor,
    positions: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    *,
    out_q: Tensor,
    out_residual: Tensor | None,
    out_positions: Tensor,
    out_kv_len: Tensor,
    slot_mapping: Tensor | None = None,
    out_slots: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    t = (cu_seqlens_q[:-1] + accepted_len).clamp_(max=q.shape[0] - 1)
    for out, values in ((out_q, q), (out_residual, residual), (out_positions, positions)):
        if out is not None and values is not None:
            out.copy_(values.index_select(0, t))
    out_kv_len.copy_((num_tokens - 1) * (live != 0))
    if slot_mapping is not None and out_slots is not None:
        out_slots.copy_(slot_mapping.index_select(0, t) * (live != 0))
