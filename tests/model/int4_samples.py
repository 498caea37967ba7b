"""Makes int4_samples.safetensors: weights that the packages themselves packed, and what they dequantise them to.

    pip install --no-deps --target DIR compressed-tensors==0.20.0 gptqmodel==7.7.0 loguru psutil accelerate datasets ...
    PYTHONPATH=.:DIR python -m tests.model.int4_samples

In a throwaway environment: the packages need others, and GPTQModel need not be built (its source archive, unpacked, in PYTHONPATH
is enough). compressed-tensors packs with `PackedQuantizationCompressor`; GPTQModel with `TorchLinear`, whose zero points
`convert_gptq_v2_to_v1_format_module` makes those of format gptq, and AWQ with `pack_awq_columns`.
`test_int4.py` reads the file. Each sample has its layout's tensors and `expected`, fp16 or bf16 [N, K].
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).with_name("int4_samples.safetensors")


class Case(NamedTuple):
    group_size: int
    """-1: all of a row."""
    symmetric: bool
    """Whether all zero points are 8."""
    rows: int = 32
    columns: int = 128
    act_order: bool = False


CASES = {
    "groups of 32, asymmetric": Case(32, False), "groups of 64": Case(64, True), "rows, asymmetric": Case(-1, False),
    "groups of 128, 32 x 384": Case(128, False, 32, 384), "groups of 32, 32 x 224": Case(32, True, 32, 224),
    "rows of 160": Case(-1, True, 32, 160),
}
"""In every layout. GPTQModel packs multiples of 32 rows and columns."""
ODD = {"groups of 24, 56 x 72": Case(24, False, 56, 72), "rows of 40": Case(-1, True, 8, 40)}
"""In the layouts of compressed-tensors and AWQ."""
ACT_ORDER = Case(32, False, act_order=True)
"""Of GPTQModel; compressed-tensors has removed its own."""


def random_codes(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [N, K] and z [N, G] in 0 .. 15, z of 0 and 15 too; s [N, G]; the group of each column [K]."""
    size = case.columns if case.group_size == -1 else case.group_size
    groups = torch.arange(case.columns) // size
    count = int(groups[-1]) + 1
    groups = groups[torch.randperm(case.columns)] if case.act_order else groups
    q = torch.randint(0, 16, (case.rows, case.columns))
    z = torch.full((case.rows, count), 8) if case.symmetric else torch.randint(0, 16, (case.rows, count))
    return q, z, torch.rand(case.rows, count) * 0.02 + 0.01, groups


def of_compressed_tensors(case: Case) -> dict[str, Tensor]:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    q, z, s, groups = random_codes(case)
    size = {"strategy": "channel"} if case.group_size == -1 else {"strategy": "group", "group_size": case.group_size}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, symmetric=case.symmetric, **size))
    scale = s.bfloat16()
    weight = (q - z[:, groups]).bfloat16() * scale[:, groups]
    state = {"weight": weight, "weight_scale": scale}
    state |= {} if case.symmetric else {"weight_zero_point": (z - 8).to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    return {**packed, "expected": PackedQuantizationCompressor.decompress(packed, scheme)["weight"]}


def of_gptqmodel(case: Case, *, v1: bool) -> dict[str, Tensor]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    q, z, s, groups = random_codes(case)
    s = s.half().float()
    linear = torch.nn.Linear(case.columns, case.rows, bias=False)
    linear.weight.data = (q - z[:, groups]) * s[:, groups]
    sizes = {"bits": 4, "group_size": case.group_size, "in_features": case.columns, "out_features": case.rows}
    packed = TorchLinear(
        **sizes, sym=case.symmetric, desc_act=case.act_order, bias=False, pack_dtype=torch.int32, register_buffers=True
    )
    packed.pack_block(linear, s, z.float(), groups.int())
    packed.qzero_format(2)
    packed.optimized = False
    packed.post_init()
    expected = packed.dequantize_weight().t().contiguous().half()
    if v1:
        convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=4))
    return {**{name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}, "expected": expected}


def of_awq(case: Case) -> dict[str, Tensor]:
    from gptqmodel.quantization.awq.utils.packing_utils import AWQ_ORDER, dequantize_gemm, pack_awq_columns

    q, z, s, _ = random_codes(case)
    weight, zeros = (pack_awq_columns(x.t().contiguous().int(), 4, order=AWQ_ORDER) for x in (q, z))
    scales = s.t().half().contiguous()
    size = case.columns if case.group_size == -1 else case.group_size
    expected = dequantize_gemm(weight, zeros, scales, 4, size).t().contiguous()
    return {"qweight": weight, "qzeros": zeros, "scales": scales, "expected": expected.half()}


def main() -> None:
    torch.manual_seed(0)
    samples: dict[str, dict[str, Tensor]] = {}
    for name, case in CASES.items():
        samples[f"pack-quantized {name}"] = of_compressed_tensors(case)
        samples[f"gptq {name}"] = of_gptqmodel(case, v1=True)
        samples[f"gptq_v2 {name}"] = of_gptqmodel(case, v1=False)
        samples[f"awq {name}"] = of_awq(case)
    for name, case in ODD.items():
        samples[f"pack-quantized {name}"] = of_compressed_tensors(case)
        samples[f"awq {name}"] = of_awq(case)
    samples["gptq in act order"] = of_gptqmodel(ACT_ORDER, v1=True)
    save_file({f"{name}/{key}": value.contiguous() for name, own in samples.items() for key, value in own.items()}, FILE)
    FILE.chmod(0o644)  # safetensors makes it readable by its owner only


if __name__ == "__main__":
    main()
