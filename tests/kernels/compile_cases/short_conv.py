"""The variants in which the engine launches the kernel of `kernels/short_conv`: LFM2, and without gates Nemotron 3 Nano."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PI32, PI64, Cases

CASES = Cases("short_conv")

_TILES = {"one token": 1, "4 tokens": 4, "a pass": 8}
_KINDS = (("bf16", False, True), ("bf16", True, True), ("fp32", False, True), ("bf16", True, False), ("fp64", True, True))

for _tile, _tokens in _TILES.items():
    for _dtype, _bias, _gated in _KINDS:
        _values = f"*{_dtype}"
        CASES.add(
            f"short_conv_kernel {_dtype}, {_tile}, bias {_bias}, gates {_gated}", "short_conv", 4, inputs=_values, weight=_values,
            bias=_values if _bias else None, ring=_values, cu_seqlens=PI32, positions=PI64, slots=PI32, live=PI32, out=_values,
            inputs_stride=I32, ring_stride=I32, GATED=_gated, CHANNELS=2048 if _gated else 6144, TAPS=3 if _gated else 4,
            RING=6 if _gated else 8, TOKENS=_tokens, LANES={"bf16": 1024, "fp32": 512, "fp64": 256}[_dtype],
            WHOLE=_tokens < 8, ACC="fp64" if _dtype == "fp64" else "fp32",
        )
