"""What `delta_chunks.py` needs of each chunk of CHUNK positions and value head that does not depend on the state.

    G = cumsum(g) in the chunk;  D[i, j] = exp(G_i - G_j) for j <= i, else 0
    solve  = (I + strictly lower part of (beta_i (k_i . k_j) D[i, j]))^-1 diag(beta)
    attend = (q_i . k_j) D[i, j]
    factors: from_state exp(G_i),  to_state exp(G_last - G_i),  decay exp(G_last)

The inverse: that of the diagonal blocks of 16 by forward substitution, all at once. The rest M = inverse * (the blocks below the
diagonal) is nilpotent, M^4 = 0, so (I + M)^-1 = (I - M) (I + M^2). Powers of the whole matrix would do without substitution, but
where keys repeat they grow beyond what fp32 can subtract again; those of M do not.
Bound by tensor cores and latency; bytes of a token and value head: 2 * CHUNK * itemsize and 12 written.
Source: the UT transform of Yang et al. 2024 (arXiv 2406.06484), with decay (arXiv 2412.06464).
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.common.pdl import await_earlier
from batchspec.kernels.gated_delta.layout import row_of

CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)
"""Diagonal blocks, of which a chunk has four."""
FACTORS = tl.constexpr(3)
"""Factors of a token and value head."""


@triton.jit
def inverse_of_unit_lower(a, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [CHUNK, CHUNK]."""
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    block = tl.arange(0, BLOCKS)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    at = tl.arange(0, BLOCK)
    inner = tl.sum(tl.where(same, tl.reshape(a, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0), 2)  # [block, row, column]
    x = -inner
    for row in range(2, BLOCK):
        is_row = (at == row)[None, :, None]
        own = tl.sum(tl.where(is_row, x, 0.0), 1)  # [block, column]: -a, whose columns are rows that are finished
        x = tl.where(is_row, (own + tl.sum(own[:, :, None] * x, 1))[:, None, :], x)
    x = x + (at[:, None] == at[None, :])[None, :, :].to(ACC)
    x = tl.reshape(tl.where(same, x[:, :, None, :], 0.0), (CHUNK, CHUNK))
    whole = tl.arange(0, CHUNK)
    below = tl.where((whole[:, None] // BLOCK) > (whole[None, :] // BLOCK), a, 0.0)
    one = (whole[:, None] == whole[None, :]).to(ACC)
    m = tl.dot(x, below, input_precision=PRECISION, out_dtype=ACC)
    squared = tl.dot(m, m, input_precision=PRECISION, out_dtype=ACC)
    inverse = tl.dot(one - m, one + squared, input_precision=PRECISION, out_dtype=ACC)
    return tl.dot(inverse, x, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def chunk_of(program, num_rows, cu_seqlens, ROWS: tl.constexpr):
    """(row, number of its chunk, counted from its first). Row r has programs cu_seqlens[r] // CHUNK + 2 r on, at least as many as
    chunks; so a launch needs T // CHUNK + 2 R programs, and no work list. ROWS: not fewer than rows, a power of two."""
    rows = tl.arange(0, ROWS)
    begins = tl.load(cu_seqlens + rows, mask=rows < num_rows, other=0) // CHUNK + 2 * rows
    row = tl.sum(((begins <= program) & (rows < num_rows)).to(tl.int32), 0) - 1
    return row, program - tl.sum(tl.where(rows == row, begins, 0), 0)


@triton.jit(do_not_specialize=["num_rows"])
def chunk_products_kernel(
    q, k, gates, cu_seqlens, positions, slots, live, out_solve, out_attend, out_factors, num_rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """Program (chunk, value head). Places of the chunk that are not the pass's tokens count as g = 0, beta = 0, k = 0."""
    DOT: tl.constexpr = ACC if INTERPRETED else q.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == ACC else "tf32x3"
    head = tl.program_id(0) % HV
    await_earlier(PDL)
    row, number = chunk_of(tl.program_id(0) // HV, num_rows, cu_seqlens, ROWS)
    begin, count, first, _ = row_of(row, cu_seqlens, positions, slots, live)
    chunk = first // CHUNK + number
    if chunk * CHUNK >= first + count:
        return
    lane = tl.arange(0, CHUNK)
    index = chunk * CHUNK + lane - first
    exists = (index >= 0) & (index < count)
    token = (begin + index).to(tl.int64)
    dim = tl.arange(0, DIM)
    key_at = ((token * HK + head // (HV // HK)) * DK)[:, None] + dim[None, :]
    within = exists[:, None] & (dim < DK)[None, :]
    key = tl.load(k + key_at, mask=within, other=0.0)
    query = tl.load(q + key_at, mask=within, other=0.0)
    gate = gates + (token * HV + head) * 2
    total = tl.cumsum(tl.load(gate, mask=exists, other=0.0), 0)
    beta = tl.load(gate + 1, mask=exists, other=0.0)
    last = tl.sum(tl.where(lane == CHUNK - 1, total, 0.0), 0)
    lower = lane[:, None] >= lane[None, :]
    decays = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
    turned = tl.trans(key.to(DOT))
    place = token * HV + head
    pair_at = (place * CHUNK)[:, None] + lane[None, :]
    attend = tl.dot(query.to(DOT), turned, input_precision="ieee", out_dtype=ACC) * decays
    tl.store(out_attend + pair_at, attend.to(out_attend.dtype.element_ty), mask=exists[:, None])
    factor = out_factors + place * FACTORS
    tl.store(factor, tl.exp(total), mask=exists)
    tl.store(factor + 1, tl.exp(last - total), mask=exists)
    tl.store(factor + 2, tl.zeros_like(total) + tl.exp(last), mask=exists)
    a = tl.dot(key.to(DOT), turned, input_precision="ieee", out_dtype=ACC) * decays * beta[:, None]
    solve = inverse_of_unit_lower(tl.where(lane[:, None] > lane[None, :], a, 0.0), PRECISION, ACC) * beta[None, :]
    tl.store(out_solve + pair_at, solve.to(out_solve.dtype.element_ty), mask=exists[:, None])
