"""The variants in which the engine launches the kernels of `kernels/kv_cache`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I64, PF32, PI32, PI64, Cases

CASES = Cases("kv_cache")
case = CASES.add

for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    case(f"kv_write_kernel {_dtype}", "kv_write", 4, k=f"*{_dtype}", v=f"*{_dtype}", kv=f"*{_dtype}", scales=None, NUM_HEADS=3,
         HEAD_DIM=64, HEADS=4, DIM=64, INTERPRETED=False)
for _rows in (2, 256):
    case(f"compute_slot_mapping_kernel R={_rows}", "slot_mapping", 4, start=PI32, q_len=PI32, PAGE_SIZE=16, ROWS=_rows, BLOCK=128)
case("group_slot_mapping_kernel", "group_slot_mapping", 1, PAGE_SIZE=16, BLOCK=128, PDL=True)
for _word, _width in (("i8", 1024), ("i16", 1024), ("i32", 192), ("i64", 8)):
    case(f"kv_move_kernel {_word}", "kv_move", 4, kv=f"*{_word}", tree_slots=PI64, path=PI32, chain_slots=PI64, stride_part=I64,
         NODES=61, DEPTH=6, WIDTH=_width, LEVELS=8, BLOCK=256)
for _dtype in ("bf16", "fp32"):
    case(f"kv_gather_kernel {_dtype}", "kv_gather", 8, kv="*fp8e4nv", scales=PF32, slots=PI64, out_k=f"*{_dtype}",
         out_v=f"*{_dtype}", NUM_HEADS=8, HEAD_DIM=128, ROWS=8, BLOCK=1024, INTERPRETED=False)
for _dtype, _gains, _blocks in (("bf16", "*bf16", 1), ("bf16", None, 6), ("fp64", None, 1)):
    _acc, _values = "fp64" if _dtype == "fp64" else "fp32", f"*{_dtype}"
    if _blocks == 1:
        case(f"kv_write_kernel {_dtype} to e4m3", "kv_write", 4, k=_values, v=_values, kv="*u8", scales=PF32, NUM_HEADS=3,
             HEAD_DIM=64, HEADS=4, DIM=64, INTERPRETED=False)

CASES.seldom |= {
    "kv_move_kernel i16",
}
