"""Makes int4_samples.safetensors: weights that the packages themselves packed, and what they dequantise them to.

    pip install --no-deps --target DIR compressed-tensors==0.20.0 gptqmodel==7.7.0 loguru psutil accelerate datasets ...
    PYTHONPATH=.:DIR python -m tests.int4_samples

In a throwaway environment: the packages need others, and GPTQModel need not be built (its source archive, unpacked, in PYTHONPATH
is enough). compressed-tensors packs with `PackedQuantizationCompressor`; GPTQModel with `TorchLinear`, whose zero points
`convert_gptq_v2_to_v1_format_module` makes those of format gptq, and AWQ with `pack_awq_columns`.
`test_int4.py` reads the file. Each sample has its layout's tensors and `expected`, fp16 or bf16 [N, K].
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).with_name("int4_samples.safetensors")
ROWS, COLUMNS = 32, 128
CASES: dict[str, tuple[int, bool]] = {
    "groups of 32, asymmetric": (32, False), "groups of 64": (64, True), "rows, asymmetric": (-1, False)
}
"""Name -> group size and whether zero points are 8."""


def random_codes(group_size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, K] and z [N, G] in 0 .. 15, s [N, G]; z of 0 and 15 too."""
    groups = 1 if group_size == -1 else COLUMNS // group_size
    q = torch.randint(0, 16, (ROWS, COLUMNS))
    z = torch.full((ROWS, groups), 8) if symmetric else torch.randint(0, 16, (ROWS, groups))
    return q, z, torch.rand(ROWS, groups) * 0.02 + 0.01


def of_compressed_tensors(group_size: int, symmetric: bool) -> dict[str, Tensor]:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    q, z, s = random_codes(group_size, symmetric)
    size = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, symmetric=symmetric, **size))
    scale = s.bfloat16()
    weight = (q - _of_columns(z)).bfloat16() * _of_columns(scale)
    state = {"weight": weight, "weight_scale": scale}
    state |= {} if symmetric else {"weight_zero_point": (z - 8).to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    return {**packed, "expected": PackedQuantizationCompressor.decompress(packed, scheme)["weight"]}


def of_gptqmodel(group_size: int, symmetric: bool, *, v1: bool, act_order: bool = False) -> dict[str, Tensor]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    q, z, s = random_codes(group_size, symmetric)
    s, groups = s.half().float(), torch.arange(COLUMNS) // (COLUMNS if group_size == -1 else group_size)
    groups = groups[torch.randperm(COLUMNS)] if act_order else groups
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = (q - z[:, groups]) * s[:, groups]
    sizes = {"bits": 4, "group_size": group_size, "in_features": COLUMNS, "out_features": ROWS}
    packed = TorchLinear(
        **sizes, sym=symmetric, desc_act=act_order, bias=False, pack_dtype=torch.int32, register_buffers=True
    )
    packed.pack_block(linear, s, z.float(), groups.int())
    packed.qzero_format(2)
    packed.optimized = False
    packed.post_init()
    expected = packed.dequantize_weight().t().contiguous().half()
    if v1:
        convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=4))
    return {**{name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}, "expected": expected}


def of_awq(group_size: int, symmetric: bool) -> dict[str, Tensor]:
    from gptqmodel.quantization.awq.utils.packing_utils import AWQ_ORDER, dequantize_gemm, pack_awq_columns

    q, z, s = random_codes(group_size, symmetric)
    weight, zeros = (pack_awq_columns(x.t().contiguous().int(), 4, order=AWQ_ORDER) for x in (q, z))
    scales = s.t().half().contiguous()
    size = COLUMNS if group_size == -1 else group_size
    expected = dequantize_gemm(weight, zeros, scales, 4, size).t().contiguous()
    return {"qweight": weight, "qzeros": zeros, "scales": scales, "expected": expected.half()}


def _of_columns(values: Tensor) -> Tensor:
    return values.repeat_interleave(COLUMNS // values.shape[1], 1)


def main() -> None:
    torch.manual_seed(0)
    samples: dict[str, dict[str, Tensor]] = {}
    for name, case in CASES.items():
        samples[f"pack-quantized {name}"] = of_compressed_tensors(*case)
        samples[f"gptq {name}"] = of_gptqmodel(*case, v1=True)
        samples[f"gptq_v2 {name}"] = of_gptqmodel(*case, v1=False)
        samples[f"awq {name}"] = of_awq(*case)
    samples["gptq in act order"] = of_gptqmodel(32, False, v1=True, act_order=True)
    save_file({f"{name}/{key}": value.contiguous() for name, own in samples.items() for key, value in own.items()}, FILE)
    FILE.chmod(0o644)  # safetensors makes it readable by its owner only


if __name__ == "__main__":
    main()
