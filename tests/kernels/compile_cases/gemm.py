"""The variants in which the engine launches the kernels of `kernels/gemm`."""

from __future__ import annotations

from batchspec.kernels.gemm.four_bit_linear import REGISTERS
from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("gemm")
case = CASES.add

for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    _acc, _values = "fp64" if _dtype == "fp64" else "fp32", f"*{_dtype}"
    for _gelu in (0.0, 1.6):
        case(f"silu_and_mul_kernel {_dtype}, gelu {_gelu}", "activation", 8, gate_up=_values, out=_values, WIDTH=14336,
             BLOCK=2048, GELU=_gelu, ACC=_acc)
    case(f"relu_squared_kernel {_dtype}", "activation", 8, up=_values, num_values=I32, BLOCK=2048, ACC=_acc)
for _op, _dtype, _tma, _m, _n, _warps, _split, _even in (
    ("linear", "bf16", True, 128, 256, 8, False, True), ("linear", "bf16", True, 128, 256, 8, True, True),
    ("linear", "bf16", False, 64, 128, 4, True, False), ("linear", "fp32", False, 32, 64, 4, True, True),
    ("swiglu", "bf16", True, 128, 128, 8, True, True), ("swiglu", "bf16", False, 64, 64, 4, False, True),
    ("norm_linear", "bf16", True, 64, 64, 4, False, True), ("norm_swiglu", "bf16", False, 64, 64, 4, False, False),
):
    _ptr, _norm, _gated = f"*{_dtype}", _op.startswith("norm"), _op.endswith("swiglu")
    _x, _w = (f"tensordesc<{_dtype}[{rows}, 64]>" if _tma else _ptr for rows in (_m, _n))
    case(f"linear_kernel {_op} {_dtype}, TMA {_tma}, split {_split}", "linear", _warps, x=_x, w=_w, bias=_ptr,
         norm=_ptr if _norm else None, residual=_ptr if _op == "linear" else None, out=_ptr, partials=PF32 if _split else None,
         arrived=PI32 if _split else None, n=I32, k=I32, units_per_program=I32, eps="fp32", BLOCK_M=_m, BLOCK_N=_n, BLOCK_K=64,
         TMA=_tma, EVEN_K=_even, GATED=_gated, SPLIT=_split, INTERPRETED=False)
for _out, _tma, _m, _n, _warps, _segments, _split, _gated in (
    ("bf16", True, 64, 64, 4, 2, True, False), ("fp32", False, 256, 128, 8, 1, False, False),
    ("bf16", False, 128, 128, 8, 2, False, False), ("bf16", True, 128, 128, 8, 1, False, True),
):
    _x, _w = (f"tensordesc<bf16[{rows}, 64]>" if _tma else "*bf16" for rows in (_m, _n))
    case(f"ordered_kernel bf16, out {_out}, {_segments} segments, split {_split}, gated {_gated}", "ordered", _warps, x=_x, w=_w,
         bias=None if _gated else "*bf16", out=f"*{_out}", partials=PF32 if _split else None, arrived=PI32 if _split else None,
         n=I32, k=I32, segment_blocks=I32, BLOCK_M=_m, BLOCK_N=_n, BLOCK_K=64, SEGMENTS=_segments, SPLIT=_split, GROUP=16,
         TMA=_tma, EVEN_K=True, GATED=_gated, INTERPRETED=False)
for _dtype, _tma in (("bf16", True), ("bf16", False), ("fp32", False)):
    _x = f"tensordesc<{_dtype}[64, 64]>" if _tma else f"*{_dtype}"
    for _masks, _totals in ((None, None), (PI32, None), (None, PF32)):
        case(f"lm_head_kernel {_dtype}, TMA {_tma}, masks {_masks}, totals {_totals}", "lm_head", 4, x=_x, w=_x, masks=_masks,
             mask_rows=_masks, top=PF32, totals=_totals, k=I32, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, WORDS=2, TMA=_tma,
             EVEN_K=True, FLAG=True, INTERPRETED=False)
for _map, _totals in ((None, None), (PI32, None), (PI64, None), (None, PF32), (PI32, PF32)):
    case(f"first_top_kernel map {_map}, totals {_totals}", "lm_head", 4, top=PF32, totals=_totals, map_ids=_map,
         out_confidence=_totals and PI32, FLAG=_map is None, BLOCK=1024)
for _gated, _one, _scale in ((False, False, None), (True, True, None), (False, True, "fp32")):
    case(f"quantise_tokens_kernel gated {_gated}, whole {_one}, given {_scale}", "fp8_tokens", 8, x="*bf16", out="*fp8e4nv",
         out_scales=PF32, given=_scale, k=I32, GATED=_gated, GELU=0.0, WHOLE=_one, GROUP=128, GROUPS=16, INTERPRETED=False)
# (blocked, split, tokens, rows of W, warps, TMA)
for _blocked, _split, _t, _n, _warps, _tma in (
    (True, True, 64, 64, 4, True), (True, False, 16, 128, 4, True), (False, True, 32, 64, 4, True),
    (True, False, 128, 64, 4, True), (True, False, 64, 64, 4, True), (False, False, 128, 64, 4, True),
    (False, False, 64, 64, 4, True), (False, False, 64, 128, 4, False), (True, True, 64, 128, 8, True),
):
    case(f"fp8_linear_kernel blocked {_blocked}, split {_split}, {_t} tokens x {_n}, {_warps} warps", "fp8_linear", _warps,
         x=f"tensordesc<fp8e4nv[{_t}, 128]>" if _tma else "*fp8e4nv", x_scales=PF32,
         w=f"tensordesc<fp8e4nv[{_n}, 128]>" if _tma else "*fp8e4nv", w_scales=PF32, bias=None if _blocked else "*bf16",
         out="*bf16", partials=PF32 if _split else None, arrived=PI32 if _split else None, n=I32, k=I32, BLOCKED=_blocked,
         SPLIT=_split, BLOCK_T=_t, BLOCK_N=_n, GROUP=8, TMA=_tma, EVEN_K=_tma, STAGES=4, INTERPRETED=False)
# (tokens, rows of W, warps, TMA, gated, group, zero points, split, whole blocks of K). The first five are those of the rule for
# Llama-3.1-8B and the dense products of Qwen3-30B-A3B at 1 to 16, 32, 64, 256 and, gated, at 16 tokens. Groups of 16: NVFP4.
for _t, _n, _warps, _tma, _gated, _group, _zeros, _split, _even in (
    (16, 128, 4, False, False, 128, False, True, True), (32, 128, 4, False, False, 128, False, False, True),
    (64, 128, 8, True, False, 128, False, True, True), (128, 128, 8, True, False, 128, False, True, True),
    (16, 64, 4, False, True, 128, False, False, True), (64, 64, 8, True, True, 0, False, True, True),
    (16, 256, 8, False, False, 128, False, True, True), (64, 256, 8, True, False, 128, False, False, True),
    (128, 256, 8, True, False, 128, False, False, True), (256, 128, 8, True, False, 128, False, False, True),
    (128, 128, 8, True, False, 128, True, False, True), (128, 64, 8, True, True, 128, True, False, True),
    (128, 128, 8, True, False, 64, False, False, True), (128, 64, 8, True, True, 32, True, False, True),
    (16, 64, 4, False, False, 32, True, True, False), (16, 128, 4, True, False, 64, True, False, True),
    (16, 128, 4, False, False, 16, False, True, True), (32, 128, 4, False, False, 16, False, False, True),
    (64, 128, 8, True, False, 16, False, True, True), (128, 128, 8, True, False, 16, False, True, True),
    (16, 64, 4, False, True, 16, False, False, True), (64, 64, 8, True, True, 16, False, True, False),
    (16, 256, 8, False, False, 16, False, True, True), (256, 128, 8, True, False, 16, False, False, True),
):
    _w = f"tensordesc<i16[{'2, ' if _gated else ''}{_n}, 32]>" if _tma else "*i16"
    _name = f"four_bit_linear_kernel {_t} tokens x {_n}, {_warps} warps, TMA {_tma}, gated {_gated}, groups of {_group}"
    _name += ", zero points" if _zeros else ""
    _limit = REGISTERS if (_t, _n * (2 if _gated else 1), _warps) == (128, 128, 8) else None
    case(_name, "four_bit_linear", _warps, registers=_limit, x=f"tensordesc<bf16[{_t}, 128]>" if _tma else "*bf16", w=_w,
         words="*i16", scales=PI32, shifts=PI32 if _zeros else None, row_scales=PF32 if _group == 16 else None,
         bias="*bf16" if _gated else None, out="*bf16", partials=PF32 if _split else None, arrived=PI32 if _split else None,
         n=I32, k=I32, GROUP=_group, GATED=_gated, TWO=_n >= (16 if _gated else 32) * _warps, SPLIT=_split, BLOCK_T=_t,
         BLOCK_N=_n, FETCHED=1024 // _n // (2 if _gated else 1), TMA=_tma, EVEN_K=_even, INTERPRETED=False)
    CASES[_name] = CASES[_name]._replace(stages=2 if _t == 256 else 3)
# (tokens, rows of W, warps, TMA, gated, group, zero points, parts, whole pairs of blocks of K). The first four are those of the
# rule for Llama-3.1-8B at 1 to 16, 32, 64 and, gated, at 16 tokens.
for _t, _n, _warps, _tma, _gated, _group, _zeros, _parts, _even in (
    (16, 128, 8, False, False, 128, False, 8, True), (32, 128, 8, False, False, 128, False, 4, True),
    (64, 128, 8, True, False, 128, False, 4, True), (16, 64, 4, False, True, 128, False, 1, True),
    (16, 128, 8, False, False, 16, False, 8, True), (128, 128, 8, True, False, 16, False, 4, True),
    (16, 64, 4, False, False, 32, True, 4, False), (16, 64, 4, False, True, 64, True, 4, True),
    (64, 64, 4, True, False, 0, True, 1, True), (64, 128, 4, True, False, 128, False, 1, True),
):
    _name = f"four_bit_direct_kernel {_t} tokens x {_n}, {_warps} warps, TMA {_tma}, gated {_gated}, groups of {_group}"
    case(_name, "four_bit_direct", _warps, x=f"tensordesc<bf16[{_t}, 128]>" if _tma else "*bf16", w=PI32, scales=PI32,
         shifts=PI32 if _zeros else None, row_scales=PF32 if _group == 16 else None, bias="*bf16" if _gated else None,
         out="*bf16", partials=PF32 if _parts > 1 else None, arrived=PI32 if _parts > 1 else None, n=I32, k=I32, part_blocks=I32,
         GROUP=_group, GATED=_gated, TWO=_n >= (16 if _gated else 32) * _warps, PARTS=_parts, BLOCK_T=_t, WARPS=_warps, TMA=_tma,
         EVEN_K=_even, INTERPRETED=False)
for _group, _zeros in ((128, False), (32, True), (64, False), (0, False), (16, False)):
    case(f"four_bit_dequantise_kernel groups of {_group}", "four_bit_dequantise", 4, w="*i16", scales=PI32,
         shifts=PI32 if _zeros else None, row_scales=PF32 if _group == 16 else None, out="*bf16", n=I32, k=I32, GROUP=_group,
         BLOCK_N=64, INTERPRETED=False)

CASES.seldom |= {
    "four_bit_linear_kernel 32 tokens x 128, 4 warps, TMA False, gated False, groups of 128",
    "four_bit_linear_kernel 128 tokens x 128, 8 warps, TMA True, gated False, groups of 128",
    "four_bit_linear_kernel 16 tokens x 256, 8 warps, TMA False, gated False, groups of 128",
    "four_bit_linear_kernel 128 tokens x 256, 8 warps, TMA True, gated False, groups of 128",
    "four_bit_dequantise_kernel groups of 64",
    "first_top_kernel map *i32, totals None",
    "linear_kernel linear bf16, TMA True, split False",
    "linear_kernel linear bf16, TMA True, split True",
    "linear_kernel linear bf16, TMA False, split True",
    "linear_kernel swiglu bf16, TMA False, split False",
    "fp8_linear_kernel blocked True, split False, 128 tokens x 64, 4 warps",
    "fp8_linear_kernel blocked True, split False, 16 tokens x 128, 4 warps",
    "fp8_linear_kernel blocked False, split False, 128 tokens x 64, 4 warps",
    "fp8_linear_kernel blocked False, split False, 64 tokens x 64, 4 warps",
    "fp8_linear_kernel blocked True, split True, 64 tokens x 128, 8 warps",
}
