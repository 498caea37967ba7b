"""The variants in which the engine launches the kernels of `kernels/mamba2`: Nemotron 3 Nano (8 groups) and Granite 4 H (one)."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("mamba2")
case = CASES.add

HEADS, DIM, STATE = 64, 64, 128
for _dtype in ("bf16", "fp32"):
    _values = f"*{_dtype}"
    for _groups in (8, 1):
        _sizes = {"NH": HEADS, "D": DIM, "G": _groups, "N": STATE}
        _inputs = {"xbc": _values, "dt": _values, "a_log": PF32, "dt_bias": PF32, "d": PF32}
        _rows = {"cu_seqlens": PI32, "positions": PI64, "slots": PI32, "live": PI32}
        for _state, _bytes in ((PF32, 4), ("*bf16", 2)):
            case(f"scan_steps_kernel {_dtype}, {_groups} groups, states of {_bytes} bytes", "scan_steps", 1, **_inputs,
                 state=_state, inputs=_values, steps=_values, folded=PI32, **_rows, out=_values, commits=I32, xbc_stride=I32,
                 dt_stride=I32, state_stride=I32, inputs_stride=I32, steps_stride=I32, **_sizes, RING=8,
                 PARTS=STATE * _bytes // 128, LANES=128 // _bytes, ACC="fp32")
            case(f"scan_chunks_kernel {_dtype}, {_groups} groups, states of {_bytes} bytes", "scan_chunks", 4, **_inputs,
                 state=_state, **_rows, out=_values, xbc_stride=I32, dt_stride=I32, state_stride=I32, **_sizes, DIM=STATE,
                 TILE=32, ACC="fp32", INTERPRETED=False)
        _size = HEADS * DIM // _groups
        case(f"gated_group_norm_kernel {_dtype}, {_groups} groups", "gated_group_norm", min(8, _size // 256), y=_values,
             z=_values, weight=_values, out=_values, z_stride=I32, EPS=1e-5, GROUPS=_groups, SIZE=_size, LANES=_size, ACC="fp32")

CASES.seldom |= {name for name in CASES if "fp32" in name.split(",")[0] or "1 groups, states" in name}
