"""Where dead positions leave a catch-up, in one launch: of the places just verified, each row's last standing one goes on.

    place[r] = cu_seqlens_q[r] + accepted_len[r]      out_q[r] = q[place], out_residual[r] = residual[place], positions likewise
    kv_len[r] = num_tokens[r] - 1                behind the commit: every key up to and with that place's; 0 for dead rows

K/V of all places stand already; what follows (attention, output, MLP, norms, lm_head) runs on R rows instead of R * (K + 1).
Bound by launch latency: two rows of H to 2H values each way; one launch for two gathers and five small operations.
Source: the dead positions of https://github.com/lightseekorg/tokenspeed/pull/217.
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
from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

VALUES_PER_THREAD = 16


@triton.jit(do_not_specialize=["num_places"])
def live_rows_kernel(
    q, residual, cu_seqlens_q, accepted_len, positions, num_tokens, live, out_q, out_residual, out_positions, out_kv_len,
    num_places, q_stride, residual_stride, out_q_stride, out_residual_stride,
    Q_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, 0) copies the query and writes the row's numbers, program (r, 1), if there is one, the residual stream."""
    await_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    # Packed rows: dead ones at the end may begin behind the last place.
    place = tl.minimum(tl.load(cu_seqlens_q + row) + tl.load(accepted_len + row), num_places - 1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        values = tl.load(q + place * q_stride + lane, mask=lane < Q_WIDTH)
        tl.store(out_q + row * out_q_stride + lane, values, mask=lane < Q_WIDTH)
        tl.store(out_positions + row, tl.load(positions + place))
        tl.store(out_kv_len + row, tl.where(tl.load(live + row) != 0, tl.load(num_tokens + row) - 1, 0))
    elif residual is not None:
        stream = tl.load(residual + place * residual_stride + lane, mask=lane < WIDTH)
        tl.store(out_residual + row * out_residual_stride + lane, stream, mask=lane < WIDTH)


def live_rows(
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
    interpret: bool = False,
) -> None:
    """Write the one place of each of R rows that goes on, out of T places.

    q              fp32, bf16, fp16 or fp64 [T, A], T >= 1  rows may be slices of wider ones, here and of the next three
    residual       [T, H] of the same dtype, or None with out_residual: q alone
    cu_seqlens_q        int32 [R+1]  first place of each row
    accepted_len   int32 [R]    0 for dead rows
    positions      int64 [T]
    num_tokens     int32 [R]    committed tokens, those of this round included
    live           int32 [R]    behind the commit
    out_q          [R, A] of q's dtype
    out_residual   [R, H] of q's dtype
    out_positions  int64 [R]
    out_kv_len     int32 [R]    0 for dead rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_places, q_width), num_rows = q.shape, live.shape[0]
    width = 0 if residual is None else residual.shape[1]
    check("live_rows: q", q, (max(1, num_places), q_width), *FLOATS, rows=True)
    if (residual is None) != (out_residual is None):
        raise ValueError("live_rows: residual and out_residual go together; give both or neither")
    if residual is not None:
        check("live_rows: residual", residual, (num_places, width), q.dtype, rows=True)
    check("live_rows: cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32)
    for name, vector in (
        ("accepted_len", accepted_len), ("num_tokens", num_tokens), ("live", live), ("out_kv_len", out_kv_len),
    ):  # fmt: skip
        check(f"live_rows: {name}", vector, (num_rows,), torch.int32)
    check("live_rows: positions", positions, (num_places,), torch.int64)
    check("live_rows: out_q", out_q, (num_rows, q_width), q.dtype, rows=True)
    if out_residual is not None:
        check("live_rows: out_residual", out_residual, (num_rows, width), q.dtype, rows=True)
    check("live_rows: out_positions", out_positions, (num_rows,), torch.int64)
    if not (q.is_cuda or interpret):
        live_rows_reference(
            q, residual, cu_seqlens_q, accepted_len, positions, num_tokens, live,
            out_q=out_q, out_residual=out_residual, out_positions=out_positions, out_kv_len=out_kv_len,
        )  # fmt: skip
    elif num_rows:
        block = triton.next_power_of_2(max(q_width, width))
        strides = (0, 0) if residual is None or out_residual is None else (residual.stride(0), out_residual.stride(0))
        live_rows_kernel[(num_rows, 2 if width else 1)](
            q, residual, cu_seqlens_q, accepted_len, positions, num_tokens, live, out_q, out_residual, out_positions, out_kv_len,
            num_places, q.stride(0), strides[0], out_q.stride(0), strides[1],
            Q_WIDTH=q_width, WIDTH=width, BLOCK=block, num_warps=min(16, max(1, block // (32 * VALUES_PER_THREAD))),
            **launch_args(q),
        )  # fmt: skip


def live_rows_reference(
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
) -> None:
    """The same in plain torch."""
    place = (cu_seqlens_q[:-1] + accepted_len).clamp_(max=q.shape[0] - 1)
    for out, values in ((out_q, q), (out_residual, residual), (out_positions, positions)):
        if out is not None and values is not None:
            out.copy_(values.index_select(0, place))
    out_kv_len.copy_((num_tokens - 1) * (live != 0))


def main() -> None:
    bench = Bench("live_rows")
    for rows, width, q_width, hidden in ((64, 4, 4096, 4096), (256, 2, 4096, 4096), (1024, 4, 576, 576)):
        with attempt(f"R={rows} S={width} H={hidden}"):
            bench_shape(bench, rows, width, q_width, hidden)


def bench_shape(bench: Bench, rows: int, width: int, q_width: int, hidden: int) -> None:
    device, places = bench.device, rows * width
    ints = partial(torch.randint, dtype=torch.int32, device=device)
    where = (
        torch.arange(0, places + 1, width, dtype=torch.int32, device=device), ints(0, width, (rows,)),
        torch.randint(0, 8000, (places,), device=device), ints(1, 8000, (rows,)), ints(0, 2, (rows,)),
    )  # fmt: skip
    inputs = [
        (torch.randn(places, q_width, device=device).bfloat16(), torch.randn(places, hidden, device=device).bfloat16())
        for _ in range(bench.num_copies)
    ]
    outs: list[dict[str, Any]] = [
        {
            "out_q": torch.full((rows, q_width), float("nan"), dtype=torch.bfloat16, device=device),
            "out_residual": torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device=device),
            "out_positions": torch.full((rows,), -7, device=device),
            "out_kv_len": torch.full((rows,), -7, dtype=torch.int32, device=device),
        }
        for _ in range(2)
    ]
    bench.same_row(
        f"R={rows} S={width} H={hidden} bfloat16", live_rows, live_rows_reference, [(*x, *where) for x in inputs], outs,
        num_bytes=4 * rows * (q_width + hidden),
    )  # fmt: skip


if __name__ == "__main__":
    main()
