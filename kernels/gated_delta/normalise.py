"""Inputs of FlashInfer's delta rule from those of `delta_chunks`: q and k of length 1, decays and beta in tensors of their own.

    x = x / sqrt(sum(x^2) + 1e-6) for each head of q and k, in place;   alpha = exp(g),   beta

fp32 inside (fp64 for fp64), q and k rounded once.
FlashInfer's kernel takes 64 tokens at a time from a row's first on. In the chunk in which the row ends it multiplies the tokens
that follow, which are other rows', by zeros. NaN and infinity times zero are NaN, and a row must not end by numbers of another.
So a head of k, or of v within the 63 tokens that another row may reach, becomes zero if it has such a number, and its alpha NaN,
which its own row alone reads.
Bound by memory (bytes: 4 * T * HK * DK * itemsize and 16 T HV).
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gated_delta.chunk_products import CHUNK
from batchspec.kernels.gated_delta.layout import L2_EPS, DeltaBatch, DeltaInputs, check_batch, l2_normalised, wide


@triton.jit
def unit_heads(x, at, within, ACC: tl.constexpr):
    value = tl.load(x + at, mask=within, other=0.0).to(ACC)
    return value * tl.rsqrt(tl.sum(value * value, 1) + L2_EPS)[:, None]


@triton.jit
def normalise_kernel(
    q, k, v, gates, cu_seqlens, row_ids, out_alpha, out_beta,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """Program: a token. HEADS, GROUP, LANES: powers of two, not fewer than HK, HV / HK, and DK and DV."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head, member, lane = tl.arange(0, HEADS), tl.arange(0, GROUP), tl.arange(0, LANES)
    key_at = ((token * HK + head) * DK)[:, None] + lane[None, :]
    within = (head < HK)[:, None] & (lane < DK)[None, :]
    value_head = head[:, None] * (HV // HK) + member[None, :]
    exists = (head < HK)[:, None] & (member < HV // HK)[None, :]
    gate = gates + (token * HV + value_head) * 2
    await_earlier(PDL)
    tl.store(q + key_at, unit_heads(q, key_at, within, ACC).to(DTYPE), mask=within)
    key = unit_heads(k, key_at, within, ACC)
    lost = tl.max((key != key).to(tl.int32), 1) > 0  # infinity divided by itself is NaN too
    tl.store(k + key_at, tl.where(lost[:, None], 0.0, key).to(DTYPE), mask=within)
    alpha = tl.where(lost[:, None], float("nan"), tl.exp(tl.load(gate, mask=exists, other=0.0)))
    if token - tl.load(cu_seqlens + tl.load(row_ids + token)) < CHUNK - 1:
        for one in tl.static_range(HV // HK):
            value_at = ((token * HV + head * (HV // HK) + one) * DV)[:, None] + lane[None, :]
            of_value = (head < HK)[:, None] & (lane < DV)[None, :]
            size = tl.abs(tl.load(v + value_at, mask=of_value, other=0.0).to(ACC))
            gone = tl.max(1 - (size < float("inf")).to(tl.int32), 1) > 0
            tl.store(v + value_at, tl.zeros_like(size).to(DTYPE), mask=of_value & gone[:, None])
            alpha = tl.where(gone[:, None] & (member == one)[None, :], float("nan"), alpha)
    tl.store(out_alpha + token * HV + value_head, alpha, mask=exists)
    tl.store(out_beta + token * HV + value_head, tl.load(gate + 1, mask=exists, other=0.0), mask=exists)


def normalise(inputs: DeltaInputs, batch: DeltaBatch, *, interpret: bool = False) -> tuple[Tensor, Tensor]:
    """alpha and beta, fp32 (fp64 for fp64) [T, HV]; q, k and, where it is not finite, v are changed in place.

    inputs  of the T tokens of the batch, from `convolve`; bf16, fp16 or fp32, in the interpreter and on a CPU also fp64

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, key_heads, key_dim), (_, value_heads, value_dim), dtype = inputs.k.shape, inputs.v.shape, inputs.q.dtype
    if value_heads % key_heads:
        raise ValueError(f"normalise: {value_heads} value heads are no multiple of {key_heads} key heads")
    check("normalise: q", inputs.q, (num_tokens, key_heads, key_dim), *FLOATS)
    check("normalise: k", inputs.k, (num_tokens, key_heads, key_dim), dtype)
    check("normalise: v", inputs.v, (num_tokens, value_heads, value_dim), dtype)
    check("normalise: gates", inputs.gates, (num_tokens, value_heads, 2), wide(dtype))
    check_batch("normalise", batch, num_tokens)
    if not (inputs.q.is_cuda or interpret):
        return normalise_reference(inputs, batch)
    alpha, beta = (inputs.gates.new_empty(num_tokens, value_heads) for _ in range(2))
    if num_tokens:
        normalise_kernel[(num_tokens,)](
            inputs.q, inputs.k, inputs.v, inputs.gates, batch.cu_seqlens, batch.row_ids, alpha, beta, HK=key_heads,
            HV=value_heads, DK=key_dim, DV=value_dim, HEADS=triton.next_power_of_2(key_heads),
            GROUP=triton.next_power_of_2(value_heads // key_heads), LANES=triton.next_power_of_2(max(key_dim, value_dim)),
            ACC=tl.float64 if dtype == torch.float64 else tl.float32, num_warps=4, **launch_args(inputs.q),
        )
    return alpha, beta


def normalise_reference(inputs: DeltaInputs, batch: DeltaBatch) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    acc, group = wide(inputs.q.dtype), inputs.v.shape[1] // inputs.k.shape[1]
    g, beta = inputs.gates.unbind(2)
    inputs.q.copy_(l2_normalised(inputs.q.to(acc)))
    key = l2_normalised(inputs.k.to(acc))
    lost = key.isnan().any(2)
    inputs.k.copy_(key.masked_fill(lost[..., None], 0.0))
    place = torch.arange(len(g), device=g.device) - batch.cu_seqlens[batch.row_ids.long()]
    gone = ~inputs.v.isfinite().all(2) & (place < CHUNK.value - 1)[:, None]
    inputs.v.masked_fill_(gone[..., None], 0.0)
    return g.exp().masked_fill(lost.repeat_interleave(group, 1) | gone, torch.nan), beta.contiguous()


def main() -> None:
    bench = Bench("normalise")
    for (rows, per_row), heads in product(((1, 8192), (8, 1024), (64, 8192)) if bench.on_gpu else ((2, 64),), (32, 48)):
        bench.num_copies = 1 if rows * per_row > 65536 else bench.num_copies  # gigabytes of inputs
        batch = rows_of(rows, per_row, bench.device, first=0)
        given = [inputs_of(rows * per_row, heads, bench.device) for _ in range(bench.num_copies)]
        bench.row(
            f"{rows} x {per_row} HV={heads}",
            [partial(normalise, inputs, batch) for inputs in given],
            [partial(normalise_reference, inputs, batch) for inputs in given],
            num_bytes=4 * given[0].q.nbytes + 2 * given[0].gates.nbytes,
        )


if __name__ == "__main__":
    from itertools import product

    from batchspec.kernels.benchmarks.gated_delta_bench import inputs_of, rows_of
    from batchspec.kernels.benchmarks.timing import Bench

    main()
