"""Makes nvfp4_samples.safetensors: weights that the packages themselves packed, and what they dequantise them to.

    pip install --no-deps --target DIR compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 loguru pulp nvidia-ml-py ninja scipy ...
    PYTHONPATH=.:DIR python -m tests.model.nvfp4_samples

In a throwaway environment: the packages need others. compressed-tensors packs with `NVFP4PackedCompressor`, ModelOpt with
`NVFP4QTensor`. `test_nvfp4.py` reads the file. Each sample has its layout's tensors and `expected`, bf16 [N, K].
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).with_name("nvfp4_samples.safetensors")
SIZES = ((5, 16), (33, 48), (7, 208))


def weight_of(rows: int, k: int) -> Tensor:
    """bf16 [N, K]: a row of zeros, groups of very different sizes, and numbers in the middle between two of E2M1."""
    weight = torch.randn(rows, k) * torch.logspace(-4, 0, k // 16).repeat_interleave(16)
    weight[1] = 0.0
    weight[2] = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, -6.0]).repeat(k // 8)
    return weight.bfloat16()


def of_compressed_tensors(weight: Tensor) -> dict[str, Tensor]:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    groups = weight.unflatten(1, (-1, 16))
    low, high = groups.amin(2), groups.amax(2)
    g = generate_gparam(low.min().view(1), high.max().view(1))
    assert scheme.weights is not None
    scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=g)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": g}
    stored = NVFP4PackedCompressor.compress(state, scheme)
    return {**stored, "expected": NVFP4PackedCompressor.decompress(stored, scheme)["weight"]}


def of_modelopt(weight: Tensor) -> dict[str, Tensor]:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    packed, scale, scale_2 = NVFP4QTensor.quantize(weight, 16)
    expected = packed.dequantize(torch.bfloat16, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    return {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2, "expected": expected}


def main() -> None:
    torch.manual_seed(0)
    samples: dict[str, dict[str, Tensor]] = {}
    for rows, k in SIZES:
        weight = weight_of(rows, k)
        samples[f"compressed-tensors {rows} x {k}"] = of_compressed_tensors(weight)
        samples[f"modelopt {rows} x {k}"] = of_modelopt(weight)
    save_file({f"{name}/{key}": value.contiguous() for name, own in samples.items() for key, value in own.items()}, FILE)
    FILE.chmod(0o644)  # safetensors makes it readable by its owner only


if __name__ == "__main__":
    main()
