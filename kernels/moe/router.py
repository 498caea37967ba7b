"""The router's logits in fp32: logits = x @ weight.T + bias, T tokens, E experts.

The logits are not rounded to the model's dtype, so that nearly equal experts keep their order. The order of each sum over H does
not depend on T: every launch uses blocks of one size and tiles of fewer than 64 rows, as Triton takes another instruction from 64
rows on. fp32 weights are split into two TF32 parts, which hold about 22 bits. Bound by launch latency at decode sizes.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

MANY_TOKENS = 256  # beyond, tiles are larger
FEW_STAGES = 8  # one warp has 8 KB per stage to load, so many must be on their way
BLOCK_K, BLOCK_K_WIDE = 128, 64  # WIDE: for fp32 operands, whose two TF32 parts take more registers


@triton.jit(do_not_specialize=["num_tokens"])
def router_kernel(
    x, w, bias, out, num_tokens, stride_x, NUM_EXPERTS: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WIDE: x or w is fp32, and products are fp32 made of three TF32 products."""
    expert_tiles: tl.constexpr = (NUM_EXPERTS + BLOCK_E - 1) // BLOCK_E
    token = tl.program_id(0) // expert_tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(0) % expert_tiles * BLOCK_E + tl.arange(0, BLOCK_E)
    depth = tl.arange(0, BLOCK_K)
    rows = x + (tl.minimum(token, num_tokens - 1).to(tl.int64) * stride_x)[:, None] + depth[None, :]
    columns = w + (tl.minimum(expert, NUM_EXPERTS - 1) * K)[None, :] + depth[:, None]
    await_earlier(PDL)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for at in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(rows + at)
            b = tl.load(columns + at)
        else:
            a = tl.load(rows + at, mask=(at + depth < K)[None, :], other=0.0)
            b = tl.load(columns + at, mask=(at + depth < K)[:, None], other=0.0)
        if INTERPRETED:
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        elif WIDE:
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
        else:
            acc = tl.dot(a, b, acc)
    if bias is not None:
        acc += tl.load(bias + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)[None, :]
    places = out + token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(places, acc, mask=(token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :])


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, interpret: bool = False) -> Tensor:
    """The router's logits [T, E], fp32; fp64 if x is fp64.

    x       bf16 or fp32 [T, H], on a CPU also fp64  rows may be slices of wider rows
    weight  bf16 or fp32 [E, H], on a CPU also fp64; contiguous
    bias    bf16 or fp32 [E], on a CPU also fp64; or None

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, k), num_experts = x.shape, weight.shape[0]
    floats = (torch.bfloat16, torch.float32) if x.is_cuda or interpret else (torch.bfloat16, torch.float32, torch.float64)
    check("router_logits: x", x, (num_tokens, k), *floats, rows=True)
    check("router_logits: weight", weight, (num_experts, k), *floats)
    if bias is not None:
        check("router_logits: bias", bias, (num_experts,), *floats)
    if not (x.is_cuda or interpret):
        return router_logits_reference(x, weight, bias)
    out = x.new_empty(num_tokens, num_experts, dtype=torch.float32)
    few, wide = num_tokens <= MANY_TOKENS, x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16
    block_t, block_e = (16, 16) if few else (32, 64)
    if num_tokens:
        router_kernel[(triton.cdiv(num_tokens, block_t) * triton.cdiv(num_experts, block_e),)](
            x, weight, bias, out, num_tokens, x.stride(0), NUM_EXPERTS=num_experts, K=k, BLOCK_T=block_t, BLOCK_E=block_e,
            BLOCK_K=BLOCK_K_WIDE if wide else BLOCK_K, WIDE=wide, INTERPRETED=not x.is_cuda,
            num_warps=1 if few else 4, num_stages=FEW_STAGES if few else 4, **launch_args(x),
        )  # fmt: skip
    return out


def router_logits_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`router_logits` in plain torch."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def main() -> None:
    bench = Bench("router")
    for tokens, experts, k, dtype in (
        (16, 128, 2880, torch.bfloat16), (64, 128, 2048, torch.bfloat16), (256, 128, 2048, torch.bfloat16),
        (64, 256, 3072, torch.float32), (16384, 128, 2048, torch.bfloat16), (16384, 256, 3072, torch.float32),
    ):  # fmt: skip
        shape = f"T={tokens} E={experts} H={k} {str(dtype).removeprefix('torch.')}"
        with continue_on_error(shape):
            inputs = [torch.randn(tokens, k, device=bench.device).bfloat16() for _ in range(bench.num_copies)]
            weight = (torch.randn(experts, k, device=bench.device) * k**-0.5).to(dtype)
            found = router_logits(inputs[0], weight)
            torch.testing.assert_close(found, router_logits_reference(inputs[0], weight), rtol=1e-4, atol=1e-4)
            assert torch.equal(router_logits(inputs[0][:7], weight), found[:7]), "bits depend on the number of tokens"
            bench.row(
                shape,
                [partial(router_logits, x, weight) for x in inputs],
                [partial(router_logits_reference, x, weight) for x in inputs],
                num_bytes=inputs[0].nbytes + weight.nbytes + found.nbytes,
            )


if __name__ == "__main__":
    main()
