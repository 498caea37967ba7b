"""Kernels over the hidden states of tokens that are bound by memory: norms, activations, quantisation, RoPE and K/V."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.case import Benchmark, Case, copies, into, noise, unwritten
from batchspec.kernels.common.e4m3 import E4M3, LARGEST
from batchspec.kernels.common.graph_clock import Call
from batchspec.kernels.gated_delta.gated_norm import gated_norm, gated_norm_reference
from batchspec.kernels.gated_delta.layout import split_columns
from batchspec.kernels.gemm.activation import silu_and_mul, silu_and_mul_reference
from batchspec.kernels.gemm.fp8_tokens import (
    Fp8Form,
    quantise_activation,
    quantise_activation_reference,
    quantise_tokens,
)
from batchspec.kernels.kv_cache.kv_gather import kv_gather, kv_gather_reference
from batchspec.kernels.kv_cache.kv_write import kv_write, kv_write_reference
from batchspec.kernels.moe.quantise import quantise_rows, quantise_rows_reference
from batchspec.kernels.norm_rope.norm import add_norm, add_norm_reference, rms_norm, rms_norm_reference
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8
from batchspec.kernels.norm_rope.rope_write import rope_write, rope_write_reference

EPS = 1e-5
FORMS = {"groups": Fp8Form(whole=False), "rows": Fp8Form(whole=True)}


def rms_norm_case(tokens: int, width: int) -> Case:
    inputs, weight = copies(lambda: noise(tokens, width)), noise(width)
    out, expected = unwritten(inputs[0]), unwritten(inputs[0])
    return Case(
        calls=[into(out, partial(rms_norm, x, weight, EPS, out=out)) for x in inputs],
        reference=into(expected, partial(rms_norm_reference, inputs[0], weight, EPS, out=expected)), num_bytes=2 * out.nbytes,
    )


def add_norm_case(tokens: int, width: int, aux: bool) -> Case:
    """aux: a drafter's copy of the residual is written too."""
    pairs, weight = copies(lambda: (noise(tokens, width), noise(tokens, width))), noise(width)
    out, expected = unwritten(pairs[0][0]), unwritten(pairs[0][0])
    out_aux = noise(tokens, 3 * width)[:, width : 2 * width] if aux else None
    before = pairs[0][1].clone()
    return Case(
        calls=[into(out, partial(add_norm, x, residual, weight, EPS, out=out, out_aux=out_aux)) for x, residual in pairs],
        reference=into(expected, partial(add_norm_reference, pairs[0][0], before, weight, EPS, out=expected)),
        num_bytes=(5 if aux else 4) * out.nbytes,
    )


def norm_fp8_case(tokens: int, width: int) -> Case:
    """Its reference are the two launches that it replaces, which have the same bits."""
    pairs, weight, form = copies(lambda: (noise(tokens, width), noise(tokens, width))), noise(width), FORMS["groups"]

    def fused(x: Tensor, residual: Tensor) -> Tensor:
        return norm_fp8(x, residual, weight, EPS, form).rows.values[:tokens]

    def apart(x: Tensor, residual: Tensor) -> Tensor:
        out = torch.empty_like(x)
        add_norm(x, residual, weight, EPS, out=out)
        return quantise_tokens(out, form).rows.values[:tokens]

    return Case(
        calls=[partial(fused, *pair) for pair in pairs], reference=partial(apart, pairs[0][0], pairs[0][1].clone()),
        num_bytes=7 * tokens * width,
    )


def silu_and_mul_case(tokens: int, width: int) -> Case:
    inputs = copies(lambda: noise(tokens, 2 * width))
    out, expected = (unwritten(inputs[0][:, :width]) for _ in range(2))
    return Case(
        calls=[into(out, partial(silu_and_mul, x, out=out)) for x in inputs],
        reference=into(expected, partial(silu_and_mul_reference, inputs[0], out=expected)), num_bytes=3 * out.nbytes,
    )


def quantise_tokens_case(tokens: int, width: int, scales: str) -> Case:
    inputs, form = copies(lambda: noise(tokens, width)), FORMS[scales]

    def quantised(x: Tensor) -> Tensor:
        return quantise_tokens(x, form).rows.values[:tokens]

    return Case(
        calls=[partial(quantised, x) for x in inputs],
        reference=lambda: quantise_rows_reference(inputs[0], whole=form.whole).values, num_bytes=3 * tokens * width,
    )


def quantise_activation_case(tokens: int, width: int, scales: str) -> Case:
    inputs, form = copies(lambda: noise(tokens, 2 * width)), FORMS[scales]

    def call(run: Any, x: Tensor) -> Call:
        return lambda: run(x, form, gelu=False).rows.values[:tokens]

    return Case(
        calls=[call(quantise_activation, x) for x in inputs], reference=call(quantise_activation_reference, inputs[0]),
        num_bytes=5 * tokens * width,
    )


def quantise_rows_case(rows: int, width: int) -> Case:
    inputs = copies(lambda: noise(rows, width))

    def call(run: Any, x: Tensor) -> Call:
        return lambda: run(x).values

    return Case(
        calls=[call(quantise_rows, x) for x in inputs], reference=call(quantise_rows_reference, inputs[0]),
        num_bytes=3 * rows * width + rows * width // 32,
    )


def rope_write_case(tokens: int, heads: int, kv_heads: int, dim: int, rotary_dim: int, interleaved: bool) -> Case:
    inputs = copies(lambda: noise(tokens, (heads + 2 * kv_heads) * dim))
    positions, slots = torch.randint(0, 131072, (tokens,)), torch.randperm(tokens) + 16
    freqs = 500000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)

    def call(run: Any, x: Tensor, q: Tensor) -> Call:
        pages = torch.zeros(2, tokens // 16 + 2, 16, kv_heads, dim, dtype=torch.bfloat16)
        return into(q, partial(
            run, x, positions, freqs, pages, slots, attention_factor=1.0, out_q=q, interleaved=interleaved
        ))

    out, expected = (unwritten(noise(tokens, heads, dim)) for _ in range(2))
    return Case(
        calls=[call(rope_write, x, out) for x in inputs], reference=call(rope_write_reference, inputs[0], expected),
        num_bytes=2 * inputs[0].nbytes,
    )


def kv_write_case(tokens: int, kv_heads: int, dim: int) -> Case:
    inputs, slots = copies(lambda: noise(tokens, 3, kv_heads, dim)), torch.randperm(tokens) + 16
    pages, expected = (torch.zeros(2, tokens // 16 + 2, 16, kv_heads, dim, dtype=torch.bfloat16) for _ in range(2))
    return Case(
        calls=[into(pages, partial(kv_write, x[:, 1], x[:, 2], pages, slots)) for x in inputs],
        reference=into(expected, partial(kv_write_reference, inputs[0][:, 1], inputs[0][:, 2], expected, slots)),
        num_bytes=4 * tokens * kv_heads * dim * 2,
    )


def kv_gather_case(tokens: int, kv_heads: int, dim: int) -> Case:
    """From e4m3 to bf16."""
    pages = noise(2, tokens // 16 + 2, 16, kv_heads, dim, scale=100.0).clamp(-LARGEST, LARGEST).to(E4M3)
    scales, orders = torch.rand(2, kv_heads) + 0.5, copies(lambda: torch.randperm(tokens) + 16)

    def call(run: Any, slots: Tensor) -> Call:
        return lambda: run(pages, scales, slots, dtype=torch.bfloat16)[0]

    return Case(
        calls=[call(kv_gather, slots) for slots in orders], reference=call(kv_gather_reference, orders[0]),
        num_bytes=6 * tokens * kv_heads * dim,
    )


def gated_norm_case(tokens: int, heads: int) -> Case:
    """Value heads of 128, with 16 key heads beside them."""
    columns, values = split_columns(16, heads, 128, 128), noise(tokens, heads, 128)
    inputs, weight = copies(lambda: noise(tokens, 32 * 128 + 2 * heads * 128)), torch.ones(128, dtype=torch.bfloat16)
    return Case(
        calls=[partial(gated_norm, values, x, columns, weight, 1e-6) for x in inputs],
        reference=partial(gated_norm_reference, values, inputs[0], columns, weight, 1e-6), num_bytes=3 * values.nbytes,
    )


LLAMA8B, SMOL135M, MINIMAX, GLM4 = (
    (32, 8, 128, 128, False), (9, 3, 64, 64, False), (48, 8, 128, 64, False), (32, 2, 128, 64, True),
)
STATES = ((64, 4096), (256, 4096), (16384, 4096), (256, 576), (1024, 576))

ROWS = (
    Benchmark("rms_norm", rms_norm_case, "tokens width", STATES, (3, 64)),
    Benchmark(
        "add_norm", add_norm_case, "tokens width aux", tuple((*size, aux) for size in STATES for aux in (False, True)),
        (3, 64, True),
    ),
    Benchmark("norm_fp8", norm_fp8_case, "tokens width", ((64, 4096), (256, 4096), (8192, 4096), (8192, 8192)), (3, 128)),
    Benchmark(
        "silu_and_mul", silu_and_mul_case, "tokens width",
        ((64, 14336), (256, 14336), (16384, 14336), (256, 1536), (1024, 1536)), (3, 64),
    ),
    *(
        Benchmark(
            name, make, "tokens width scales",
            tuple(
                (*size, scales)
                for scales in FORMS for size in ((64, 4096), (64, 14336), (256, 4096), (8192, 4096), (8192, 14336))
            ),
            (3, 128, "groups"),
        )
        for name, make in (("quantise_tokens", quantise_tokens_case), ("quantise_activation", quantise_activation_case))
    ),
    Benchmark(
        "quantise_rows", quantise_rows_case, "rows width", ((64, 2048), (512, 768), (256, 3072), (2048, 1536), (65536, 2048)),
        (3, 128),
    ),
    Benchmark(
        "rope_write", rope_write_case, "tokens heads kv_heads dim rotary_dim interleaved",
        tuple(
            (tokens, *model)
            for model, counts in (
                (LLAMA8B, (64, 256, 16384)), (SMOL135M, (256, 1024)), (MINIMAX, (256, 16384)), (GLM4, (256, 16384)),
            )
            for tokens in counts
        ),
        (3, 4, 2, 32, 16, False),
    ),
    Benchmark("kv_write", kv_write_case, "tokens kv_heads dim", ((256, 8, 128), (8192, 8, 128), (1024, 3, 64)), (20, 2, 32)),
    Benchmark("kv_gather", kv_gather_case, "tokens kv_heads dim", ((16384, 8, 128), (16384, 8, 64), (2048, 4, 128)), (20, 2, 32)),
    Benchmark("gated_norm", gated_norm_case, "tokens heads", ((256, 32), (8192, 32), (8192, 48)), (2, 16)),
)
