"""The variants in which the engine launches the kernels of `kernels/gated_delta`: Qwen3.5-27B and 35B-A3B, Qwen3-Next."""

from __future__ import annotations

from batchspec.kernels.gated_delta.delta_chunks import STAGES
from batchspec.kernels.gated_delta.delta_steps import REGISTERS
from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("gated_delta")
case = CASES.add

KEY_HEADS, DIM = 16, 128
for _dtype in ("bf16", "fp32"):
    _values = f"*{_dtype}"
    for _heads, _live in ((32, None), (48, PI32)) if _dtype == "bf16" else ((32, None),):
        _keys, _group = KEY_HEADS * DIM, _heads // KEY_HEADS * DIM
        _columns = {"Q": (0, DIM), "K": (_keys, DIM), "V": (2 * _keys, _group)}
        _sizes = {"HK": KEY_HEADS, "HV": _heads, "DK": DIM, "DV": DIM}
        _rows = {"cu_seqlens": PI32, "positions": PI64}
        _slots = {"slots": PI32, "live": _live}
        for _keeps, _raw in ((False, False), (False, True), (True, True)):
            case(f"convolve_kernel {_dtype}, {_heads} heads, keeps {_keeps}, raw {_raw}", "convolve", 4, x=_values, ba=_values,
                 weight=_values, a_log=PF32, dt_bias=_values, conv_inputs=_values, keys=_values, values=_values, ring_gates=PF32,
                 **_rows, **_slots, out_q=_values, out_k=_values, out_v=_values, out_gates=PF32, **_columns,
                 B=(0, _heads // KEY_HEADS), A=(_heads, _heads // KEY_HEADS), **_sizes, TAPS=4, RING=8, KEEPS_INPUTS=_keeps,
                 KEEPS_RAW=_raw, TOKENS=16, LANES=DIM, ACC="fp32")
        case(f"keep_raw_kernel {_dtype}, {_heads} heads", "convolve", 4, x=_values, conv_inputs=_values, **_rows, **_slots,
             **_columns, **_sizes, RING=8, PLACES=8, LANES=DIM)
        for _state, _bytes in ((PF32, 4), ("*bf16", 2)):
            case(f"delta_steps_kernel {_dtype}, {_heads} heads, states of {_bytes} bytes", "delta_steps", 1, stages=3,
                 registers=REGISTERS, q=_values, k=_values, v=_values, gates=PF32, state=_state, keys=_values, values=_values,
                 ring_gates=PF32, folded=PI32, **_rows, **_slots, out=_values, commits=I32, **_sizes, RING=8,
                 PARTS=DIM * _bytes // 128, LANES=128 // _bytes, ACC="fp32", INTERPRETED=False)
            case(f"delta_chunks_kernel {_dtype}, {_heads} heads, states of {_bytes} bytes", "delta_chunks", 4, stages=STAGES,
                 q=_values, k=_values, v=_values, solve=_values, attend=_values, factors=PF32, state=_state, **_rows, **_slots,
                 out=_values, **_sizes, DIM=DIM, TILE=32, ACC="fp32", INTERPRETED=False)
        case(f"chunk_products_kernel {_dtype}, {_heads} heads", "chunk_products", 4, q=_values, k=_values, gates=PF32, **_rows,
             **_slots, out_solve=_values, out_attend=_values, out_factors=PF32, HK=KEY_HEADS, HV=_heads, DK=DIM, ROWS=64, DIM=DIM,
             ACC="fp32", INTERPRETED=False)
    for _weight in (_values, PF32) if _dtype == "bf16" else (_values,):
        case(f"gated_norm_kernel {_dtype}, weight {_weight}", "gated_norm", 4, o=_values, x=_values, weight=_weight, out=_values,
             EPS=1e-6, VALUE_HEADS=32, GROUP=2, DV=DIM, Z=(8192, 256), HEADS=16, LANES=DIM, ACC="fp32")

CASES.seldom |= {name for name in CASES if "fp32" in name.split(",")[0]}
