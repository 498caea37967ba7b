"""The variants in which the engine launches the kernels of `kernels/latent`: GLM-4.7-Flash, and Mistral-Small-4."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("latent")

# (dtype, e4m3, heads, R, slices, tile, keys' axis, block, warps, stages, window, early)
for _dtype, _fp8, _heads, _latent, _slices, _tile, _keys, _block, _warps, _stages, _window, _early in (
    ("bf16", False, 20, 128, 1, 32, 1, 32, 8, 2, 0, True), ("bf16", False, 20, 128, 1, 32, 1, 32, 8, 2, 512, False),
    ("bf16", True, 20, 128, 1, 32, 1, 32, 8, 2, 0, True),
    # as on Hopper alone
    ("bf16", False, 20, 128, 1, 32, 0, 64, 4, 2, 0, True), ("bf16", True, 20, 128, 1, 64, 1, 64, 8, 4, 0, True),
    ("bf16", False, 20, 512, 4, 32, 0, 64, 4, 2, 0, True), ("bf16", False, 16, 512, 4, 16, 0, 64, 4, 2, 512, False),
    ("bf16", False, 20, 512, 4, 64, 1, 64, 8, 2, 0, True), ("bf16", False, 32, 256, 2, 64, 1, 64, 8, 4, 512, False),
    ("bf16", True, 20, 512, 4, 64, 1, 64, 8, 2, 0, True), ("bf16", True, 32, 256, 2, 64, 1, 64, 8, 4, 512, False),
    ("fp32", False, 20, 512, 1, 16, 1, 16, 8, 2, 0, True),
):
    _name = (
        f"verify_latents_kernel {_dtype}{', e4m3' * _fp8} R={_latent}, tile {_tile}, keys {_keys}, window {_window}, "
        f"early {_early}"
    )
    CASES.add(
        _name, "verify_latents", _warps, stages=_stages, q_latent=f"*{_dtype}", q_rope=f"*{_dtype}",
        latents="*u8" if _fp8 else f"*{_dtype}", rotated=f"*{_dtype}" if _fp8 else None, scales=PF32 if _fp8 else None,
        page_table=PI32, positions=PI64, cu_seqlens_q=PI32, kv_len=PI32, items=PI32, num_items=PI32, row_parts=PI32,
        out=f"*{_dtype}", part_out=PF32, part_lse=PF32, scale="fp32", max_pages=I32, max_q=I32, latent_stride_t=I32,
        latent_stride_h=I32, rope_stride_t=I32, rope_stride_h=I32, page_stride=I32, rope_stride=I32, scale_stride=I32,
        HEADS=_heads, LATENT=_latent, SLICES=_slices, SLICE=_latent // _slices, ROPE=64, ROPE_DIM=64, PAGE_SIZE=16,
        WINDOW=_window, SINK=4 if _window else 0, TILE=_tile, BLOCK=_block, STAGES=_stages, KEYS=_keys, WIDE=False,
        INTERPRETED=False, EARLY=_early,
    )
    if _latent > 128:
        CASES.seldom.add(_name)
_wide = CASES["verify_latents_kernel fp32 R=512, tile 16, keys 1, window 0, early True"]
NARROW = "verify_latents_kernel fp32 R=24, tile 16, keys 1, window 20, early True"
CASES[NARROW] = _wide._replace(
    arguments=_wide.arguments | {
        "HEADS": 5, "LATENT": 24, "SLICE": 32, "ROPE": 6, "ROPE_DIM": 16, "WINDOW": 20, "SINK": 5, "BLOCK": 32,
    }
)
"""With rows of 120 bytes, as in tests: a copy of 16 bytes would be misaligned."""
for _dtype, _fp8, _weight, _interleaved in (
    ("bf16", False, "bf16", True), ("bf16", False, "fp32", False), ("bf16", True, "bf16", True), ("fp32", False, "fp32", True),
):
    CASES.add(
        f"write_latents_kernel {_dtype}{', e4m3' * _fp8}, weight {_weight}, interleaved {_interleaved}", "write_latents", 2,
        rows=f"*{_dtype}", q=f"*{_dtype}", positions=PI64, freqs=PF32, weight=f"*{_weight}",
        pages="*u8" if _fp8 else f"*{_dtype}", rotated=f"*{_dtype}" if _fp8 else None, scales=PF32 if _fp8 else None,
        slot_mapping=PI64, row_stride=I32, page_stride=I32, rope_stride=I32, scale_stride=I32, EPS=1e-6, FACTOR=1.0,
        NUM_HEADS=20, HEAD_DIM=256, LATENT=512, LATENT_DIM=512, HALF=32, HALF_DIM=32, INTERLEAVED=_interleaved, HEADS=16,
        ACC="fp32", PAGE_SIZE=16, INTERPRETED=False,
    )
