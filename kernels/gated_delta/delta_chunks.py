"""The gated delta rule by chunks of 64 positions: prefill. The formula is that of `delta_steps.py`.

    seen = from_state K S';   V' = solve (V - seen);   O = from_state Q S' + attend V';   S = decay S + (to_state V')' K

Chunks lie on multiples of 64 from position 0, and after each chunk S is rounded to the dtype in which it is stored (which is
nothing for fp32). So a prefill that is cut at such multiples has the bits of one pass.
Two launches: `chunk_products.py` computes, for all chunks at once, what does not depend on the state; then each program takes the
chunks of one row, value head and TILE columns of V in order, with its part of the state in registers, and five products a chunk.
Other kernels (FLA) compute the outputs in a third launch, from a state of each chunk, with several times the scratch memory.
Operands of products are bf16 where the inputs are: copies of the state, `solve`, `attend`, V - seen and V' are rounded to it.
Sums, and the state itself within a chunk, are fp32. fp32 inputs are multiplied in fp32, on CUDA cores, which takes long. Nothing
is added up by atomics, so the bits are the same in every run.
Bound by latency with few rows: a row's chunks follow each other, in HV * DV / TILE programs. With many by tensor cores.
Source: Yang et al. 2024 (arXiv 2406.06484, arXiv 2412.06464).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.common.rounding import as_stored
from batchspec.kernels.gated_delta.chunk_products import CHUNK, FACTORS, chunk_products_kernel
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState, check_inputs, row_of, wide

TILE, WARPS, STAGES = 32, 4, 2


@triton.jit
def delta_chunks_kernel(
    q, k, v, solve, attend, factors, state, cu_seqlens, positions, slots, live, out, state_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """Program (row, value head, TILE columns of V). The state is turned, [DIM, TILE]."""
    DOT: tl.constexpr = ACC if INTERPRETED else q.dtype.element_ty
    TILES: tl.constexpr = (DV + TILE - 1) // TILE
    head = tl.program_id(0) // TILES % HV
    await_earlier(PDL)
    begin, count, first, slot = row_of(tl.program_id(0) // (TILES * HV), cu_seqlens, positions, slots, live)
    if count <= 0:
        return
    lane = tl.arange(0, CHUNK)
    dim = tl.arange(0, DIM)
    column = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    at = state + slot * state_stride + head * (DV * DK) + (column * DK)[None, :] + dim[:, None]
    known = (column < DV)[None, :] & (dim < tl.where(first > 0, DK, 0))[:, None]
    s = tl.load(at, mask=known, other=0.0).to(ACC)
    for chunk in range(first // CHUNK, tl.cdiv(first + count, CHUNK)):
        index = chunk * CHUNK + lane - first
        exists = (index >= 0) & (index < count)
        token = (begin + index).to(tl.int64)
        key_at = ((token * HK + head // (HV // HK)) * DK)[:, None] + dim[None, :]
        within = exists[:, None] & (dim < DK)[None, :]
        place = token * HV + head
        value_at = (place * DV)[:, None] + column[None, :]
        valued = exists[:, None] & (column < DV)[None, :]
        key = tl.load(k + key_at, mask=within, other=0.0).to(DOT)
        query = tl.load(q + key_at, mask=within, other=0.0).to(DOT)
        value = tl.load(v + value_at, mask=valued, other=0.0).to(ACC)
        pair_at = (place * CHUNK)[:, None] + lane[None, :]
        solved = tl.load(solve + pair_at, mask=exists[:, None], other=0.0).to(DOT)
        attended = tl.load(attend + pair_at, mask=exists[:, None], other=0.0).to(DOT)
        from_state = tl.load(factors + place * FACTORS, mask=exists, other=0.0)
        to_state = tl.load(factors + place * FACTORS + 1, mask=exists, other=0.0)
        one = (begin + tl.maximum(chunk * CHUNK - first, 0)).to(tl.int64) * HV + head  # any token of the chunk
        decay = tl.load(factors + one * FACTORS + 2)
        before = s.to(DOT)
        seen = tl.dot(key, before, input_precision="ieee", out_dtype=ACC) * from_state[:, None]
        new = tl.dot(solved, (value - seen).to(DOT), input_precision="ieee", out_dtype=ACC)
        o = tl.dot(query, before, input_precision="ieee", out_dtype=ACC) * from_state[:, None]
        o = tl.dot(attended, new.to(DOT), o, input_precision="ieee", out_dtype=ACC)
        s = tl.dot(tl.trans(key), (new * to_state[:, None]).to(DOT), s * decay, input_precision="ieee", out_dtype=ACC)
        s = as_stored(s, state.dtype.element_ty, INTERPRETED)
        tl.store(out + value_at, o.to(out.dtype.element_ty), mask=valued)
    tl.store(at, s.to(state.dtype.element_ty), mask=(column < DV)[None, :] & (dim < DK)[:, None])


def delta_chunks(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, out: Tensor, *, interpret: bool = False) -> None:
    """Write o of a prefill pass's T tokens, and store the state of each of its rows after its last token.

    inputs  of the T tokens, from `convolve`; bf16, fp16 or fp32, in the interpreter and on a CPU also fp64
    state   the state after each row's tokens before this pass; that of a row that begins at position 0 is zero, whatever the slot
            holds. `folded` and the rings are not read
    out     [T, HV, DV] of the inputs' dtype, contiguous; not written for padding and dead rows

    Allocates T * HV * (2 * 64 * itemsize + 12) bytes of scratch memory (fp64: + 24). Does not synchronise on a GPU. Raises
    ValueError for other shapes, dtypes or strides.
    """
    check_inputs("delta_chunks", inputs, state, batch, out)
    if not (out.is_cuda or interpret):
        delta_chunks_reference(inputs, state, batch, out)
        return
    (num_tokens, value_heads, value_dim), (_, key_heads, key_dim) = out.shape, inputs.k.shape
    num_rows = batch.slots.numel()
    if not num_tokens or not num_rows:
        return
    acc, dim = tl.float64 if out.dtype == torch.float64 else tl.float32, max(16, triton.next_power_of_2(key_dim))
    solve, attend = (out.new_empty(num_tokens, value_heads, CHUNK.value) for _ in range(2))
    factors = out.new_empty(num_tokens, value_heads, FACTORS.value, dtype=wide(out.dtype))
    rows = batch.cu_seqlens, batch.positions, batch.slots, batch.live
    chunk_products_kernel[((num_tokens // CHUNK.value + 2 * num_rows) * value_heads,)](
        inputs.q, inputs.k, inputs.gates, *rows, solve, attend, factors, num_rows, HK=key_heads, HV=value_heads, DK=key_dim,
        ROWS=triton.next_power_of_2(max(num_rows, len(state.state))), DIM=dim, ACC=acc,
        INTERPRETED=not out.is_cuda, num_warps=WARPS, **launch_args(out),
    )
    delta_chunks_kernel[(num_rows * value_heads * triton.cdiv(value_dim, TILE),)](
        inputs.q, inputs.k, inputs.v, solve, attend, factors, state.state, *rows, out, state.state.stride(0), HK=key_heads,
        HV=value_heads, DK=key_dim, DV=value_dim, DIM=dim, TILE=TILE, ACC=acc, INTERPRETED=not out.is_cuda, num_warps=WARPS,
        num_stages=STAGES, **launch_args(out),
    )


def delta_chunks_reference(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, out: Tensor) -> None:
    """The same in plain torch, row by row and chunk by chunk, with all operands in fp32 (fp64 for fp64)."""
    group, acc, size = state.state.shape[1] // state.keys.shape[2], wide(out.dtype), CHUNK.value
    for slot, own, first in batch.rows():
        s = state.state[slot].to(acc) if first else torch.zeros_like(state.state[slot], dtype=acc)
        last = first + own.stop - own.start
        for begin in [first, *range(first - first % size + size, last, size)]:
            end = min(last, begin - begin % size + size)
            chunk = slice(own.start + begin - first, own.start + end - first)
            q, k, v = (x[chunk].to(acc).transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))  # [heads, n, ...]
            q, k = (x.repeat_interleave(group, 0) for x in (q, k))
            g, beta = inputs.gates[chunk].permute(2, 1, 0)[..., None]  # [HV, n, 1]
            total = g.cumsum(1)
            decay = (total - total.mT).tril().exp().tril()
            matrix = (beta * k @ k.mT * decay).tril(-1)
            seen = total.exp() * (k @ s.mT)
            new = torch.linalg.solve_triangular(matrix, beta * (v - seen), upper=False, unitriangular=True)
            o = total.exp() * (q @ s.mT) + (q @ k.mT * decay) @ new
            out[chunk] = o.transpose(0, 1)
            s = total[:, -1:].exp() * s + ((total[:, -1:] - total).exp() * new).mT @ k
            s = s.to(state.state.dtype).to(acc)
        state.state[slot] = s
