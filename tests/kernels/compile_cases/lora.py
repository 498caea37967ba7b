"""The variants in which the engine launches the kernels of `kernels/lora`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PF32, Cases

CASES = Cases("lora")
case = CASES.add

for _dtype, _parts, _rank, _block, _k in (("bf16", 3, 16, 16, 128), ("bf16", 1, 64, 64, 128), ("fp32", 2, 32, 64, 64)):
    case(f"lora_shrink_kernel {_dtype}, {_parts} parts, rank {_rank}", "lora_shrink", 4, x=f"*{_dtype}", a=f"*{_dtype}",
         scales=PF32, out=PF32, steps=I32, k=I32, PARTS=_parts, RANK=_rank, BLOCK_T=_block, BLOCK_K=_k, EVEN=_parts == 3,
         INTERPRETED=False)
    _shrink = f"lora_shrink_kernel {_dtype}, {_parts} parts, rank {_rank}"
    CASES[_shrink] = CASES[_shrink]._replace(stages=4 if _dtype == "bf16" else 2)
    case(f"lora_expand_kernel {_dtype}, {_parts} parts, rank {_rank}", "lora_expand", 4, h=PF32, b=f"*{_dtype}", scales=PF32,
         out=f"*{_dtype}", splits=I32, rows_0=I32, rows_1=I32, rows_2=I32, PARTS=_parts, RANK=_rank, BLOCK_T=_block, BLOCK_N=128,
         INTERPRETED=False)
