"""The variants in which the engine launches the kernels of `kernels/norm_rope`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import PF32, PI64, Cases

CASES = Cases("norm_rope")
case = CASES.add
OF_ONE_AXIS = {"freqs": PF32, "axes": None}

for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    _acc, _values = "fp64" if _dtype == "fp64" else "fp32", f"*{_dtype}"
    for _residual, _aux in ((None, None), (_values, None), (_values, _values)):
        case(f"norm_kernel {_dtype}, residual {_residual}, aux {_aux}", "norm", 2, hidden=_values, residual=_residual,
             weight=_values, factor=None, out=_values, out_aux=_aux, EPS=1e-5, WIDTH=576, BLOCK=1024, ACC=_acc)
    case(f"norm_kernel {_dtype}, weight in fp32", "norm", 2, hidden=_values, residual=_values, weight=PF32, factor=_values,
         out=_values, out_aux=None, EPS=1e-5, WIDTH=576, BLOCK=1024, ACC=_acc)
    case(f"rope_write_kernel {_dtype}, no queries", "rope_write", 2, qkv=_values, **OF_ONE_AXIS, q_norm=_values, k_norm=_values,
         out_q=_values, kv=_values, scales=None, EPS=1e-6, FACTOR=1.0, NUM_HEADS=0, NUM_KV_HEADS=8, HALF=64, ROTARY_HALF=64,
         INTERLEAVED=False, V_NORM=False, SHARED_V=False, HEADS=8, BLOCKS_PER_PROGRAM=2, LANES=64, ACC=_acc, INTERPRETED=False)
    for _gains, _blocks in ((None, 1), (_values, 1), (None, 6)):
        case(f"rope_write_kernel {_dtype}, norms {_gains}, {_blocks} blocks", "rope_write", 2, qkv=_values, **OF_ONE_AXIS,
             q_norm=_gains, k_norm=_gains, out_q=_values, kv=_values, scales=None, EPS=1e-6, FACTOR=1.0, NUM_HEADS=32,
             NUM_KV_HEADS=8, HALF=64, ROTARY_HALF=64, INTERLEAVED=False, V_NORM=False, SHARED_V=False, HEADS=8,
             BLOCKS_PER_PROGRAM=_blocks, LANES=64, ACC=_acc, INTERPRETED=False)
    for _rotary_half, _interleaved in ((32, False), (32, True), (64, True)):
        case(f"rope_write_kernel {_dtype}, {_rotary_half} pairs, interleaved {_interleaved}", "rope_write", 2, qkv=_values,
             **OF_ONE_AXIS, q_norm=_values, k_norm=_values, out_q=_values, kv=_values, scales=None, EPS=1e-6, FACTOR=1.0,
             NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64, ROTARY_HALF=_rotary_half, INTERLEAVED=_interleaved, V_NORM=False,
             SHARED_V=False, HEADS=8, BLOCKS_PER_PROGRAM=1, LANES=64, ACC=_acc, INTERPRETED=False)
for _dtype, _gains, _blocks in (("bf16", "*bf16", 1), ("bf16", None, 6), ("fp64", None, 1)):
    _acc, _values = "fp64" if _dtype == "fp64" else "fp32", f"*{_dtype}"
    case(f"rope_write_kernel {_dtype} to e4m3, norms {_gains}, {_blocks} blocks", "rope_write", 2, qkv=_values, **OF_ONE_AXIS,
         q_norm=_gains, k_norm=_gains, out_q=_values, kv="*u8", scales=PF32, EPS=1e-6, FACTOR=1.0, NUM_HEADS=32, NUM_KV_HEADS=8,
         HALF=64, ROTARY_HALF=64, INTERLEAVED=False, V_NORM=False, SHARED_V=False, HEADS=8, BLOCKS_PER_PROGRAM=_blocks, LANES=64,
         ACC=_acc, INTERPRETED=False)
for _residual, _one, _scale, _factor in (
    (None, False, None, None), ("*bf16", False, None, "*bf16"), ("*bf16", True, None, None), (None, True, "fp32", None),
):
    case(f"norm_fp8_kernel residual {_residual}, whole {_one}, given {_scale}", "norm_fp8", 8, hidden="*bf16", residual=_residual,
         weight="*bf16" if _scale is None else PF32, factor=_factor, out="*fp8e4nv", out_scales=PF32, out_aux=_residual,
         given=_scale, EPS=1e-5, WIDTH=4000, BLOCK=4096, WHOLE=_one, GROUP=128, INTERPRETED=False)

# Gemma 4: heads of 256 and of 512, V normed, and on full layers what K is; late layers of the small models have queries alone.
for _kv_heads, _half, _shared, _blocks, _kv in (
    (16, 128, False, 1, "*bf16"), (4, 256, True, 1, "*bf16"), (4, 256, True, 5, "*u8"), (0, 256, False, 1, None),
):
    case(f"rope_write_kernel bf16 D={2 * _half}, {_kv_heads} K/V heads, {_blocks} blocks, to {_kv}", "rope_write",
         4 if _half == 256 else 2, qkv="*bf16", **OF_ONE_AXIS, q_norm=PF32, k_norm=PF32, out_q="*bf16", kv=_kv,
         scales=PF32 if _kv == "*u8" else None, slot_mapping=None if _kv is None else PI64, EPS=1e-6, FACTOR=1.0, NUM_HEADS=32,
         NUM_KV_HEADS=_kv_heads, HALF=_half, ROTARY_HALF=_half, INTERLEAVED=False, V_NORM=_kv is not None, SHARED_V=_shared,
         HEADS=8, BLOCKS_PER_PROGRAM=_blocks, LANES=_half, ACC="fp32", INTERPRETED=False)

case("rope_write_kernel bf16, positions of images", "rope_write", 2, qkv="*bf16", freqs=PF32, axes=PI64, q_norm="*bf16",
     k_norm="*bf16", out_q="*bf16", kv="*bf16", scales=None, EPS=1e-6, FACTOR=1.0, NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64,
     ROTARY_HALF=64, INTERLEAVED=False, V_NORM=False, SHARED_V=False, HEADS=8, BLOCKS_PER_PROGRAM=6, LANES=64, ACC="fp32",
     INTERPRETED=False)

CASES.seldom |= {
    "rope_write_kernel bf16 D=256, 16 K/V heads, 1 blocks, to *bf16",
    "rope_write_kernel bf16 D=512, 4 K/V heads, 5 blocks, to *u8",
    "rope_write_kernel bf16 to e4m3, norms None, 6 blocks",
    "rope_write_kernel bf16, norms None, 1 blocks",
    "rope_write_kernel bf16, norms *bf16, 1 blocks",
    "rope_write_kernel bf16, 32 pairs, interleaved False",
    "rope_write_kernel bf16, 64 pairs, interleaved True",
    "norm_fp8_kernel residual None, whole False, given None",
    "norm_fp8_kernel residual *bf16, whole True, given None",
}

for _dtype in ("bf16", "fp32"):
    for _norm, _angles in ((None, PF32), (PF32, PF32), (PF32, None)):
        case(f"rotate_heads_kernel {_dtype}, norm {_norm}, angles {_angles}", "rotate_heads", 4, heads=f"*{_dtype}", cos=_angles,
             sin=_angles, weight=_norm, EPS=1e-6, COUNT=32, HALF=36, LANES=64, BLOCK=32, ACC="fp32")
