"""The variants in which the engine launches the kernels of `kernels/mamba2`: Nemotron 3 Nano (8 groups), Granite 4 H (one),
Nemotron Nano 9B (heads of 80 values), the states of 256 values that Granite has unless its file says otherwise, and Falcon-H1 7B
(heads of 128 values)."""

from __future__ import annotations

import torch

from batchspec.kernels.gated_delta.delta_steps import REGISTERS
from batchspec.kernels.mamba2.scan_chunks import TILE, stages_of
from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("mamba2")
case = CASES.add

HEADS = 64
SHAPES = {
    "8 groups": {"D": 64, "G": 8, "N": 128}, "1 groups": {"D": 64, "G": 1, "N": 128}, "heads of 80": {"D": 80, "G": 8, "N": 128},
    "256 values": {"D": 64, "G": 8, "N": 256}, "heads of 128": {"D": 128, "G": 1, "N": 256},
}
"""256 values in fp32 are left out: the chunks of B and C alone take more shared memory than an L40S has."""
for _dtype, _shape in (*(("bf16", shape) for shape in SHAPES), ("fp32", "8 groups"), ("fp32", "1 groups")):
    _values, _sizes = f"*{_dtype}", {"NH": HEADS, **SHAPES[_shape]}
    _inputs = {"xbc": _values, "dt": _values, "a_log": PF32, "dt_bias": PF32, "d": PF32}
    _rows = {"cu_seqlens": PI32, "positions": PI64, "slots": PI32, "live": PI32}
    for _state, _bytes in ((PF32, 4), ("*bf16", 2)):
        if (_shape, _bytes) == ("heads of 128", 2):
            continue  # for an A100 (sm_80) Triton rounds 64 numbers of a state one by one in scan_chunks: right, but slow
        case(f"scan_steps_kernel {_dtype}, {_shape}, states of {_bytes} bytes", "scan_steps", 1, stages=3, registers=REGISTERS,
             **_inputs, state=_state, inputs=_values, steps=_values, folded=PI32, **_rows, out=_values, commits=I32, **_sizes,
             RING=8, PARTS=_sizes["N"] * _bytes // 128, LANES=128 // _bytes, ACC="fp32", INTERPRETED=False)
        case(f"scan_chunks_kernel {_dtype}, {_shape}, states of {_bytes} bytes", "scan_chunks", 4,
             stages=stages_of(torch.float32 if _dtype == "fp32" else torch.bfloat16), **_inputs, state=_state, **_rows,
             out=_values, **_sizes, DIM=_sizes["N"], TILE=TILE, ACC="fp32", INTERPRETED=False)
    if _sizes["D"] * _sizes["N"] == 64 * 128:
        _groups = _sizes["G"]
        _size = HEADS * _sizes["D"] // _groups
        case(f"gated_group_norm_kernel {_dtype}, {_groups} groups", "gated_group_norm", min(8, _size // 256), y=_values,
             z=_values, weight=_values, out=_values, NORMS=True, EPS=1e-5, GROUPS=_groups, SIZE=_size, LANES=_size, ACC="fp32")
        case(f"gated_group_norm_kernel {_dtype}, {_groups} groups, no norm", "gated_group_norm", min(8, _size // 256), y=_values,
             z=_values, weight=_values, out=_values, NORMS=False, EPS=1e-5, GROUPS=_groups, SIZE=_size, LANES=_size, ACC="fp32")

CASES.seldom |= {
    name for name in CASES if "fp32" in name.split(",")[0] or "1 groups, states" in name or "80, states of 2" in name
    or "1 groups, no norm" in name
}
