"""INT4 weights packed number by number as their layouts are published, by other means than batchspec's; checkpoints of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.models import make_checkpoint

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IGNORED = "re:.*layers\\.1\\.mlp\\.down.*"
"""In each layout's own way one projection of a model is not quantised."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The weight [N, K] whose number at n, k is (q[n, k] - z[n, g]) s[n, g], g = groups[k]."""

    q: Tensor
    z: Tensor
    s: Tensor
    groups: Tensor

    def matrix(self) -> Tensor:
        """fp64 [N, K]."""
        return (self.q - self.z[:, self.groups]).double() * self.s[:, self.groups].double()


def quantise(
    weight: Tensor, group_size: int, *, symmetric: bool, act_order: bool, dtype: torch.dtype, seed: int
) -> Codes:
    """Each number rounded to the nearest code; group_size -1: a row is one group. act_order: groups have columns anywhere."""
    rows, k = weight.shape
    groups = torch.arange(k) // (k if group_size == -1 else group_size)
    if act_order:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(seed))]
    z, s = (torch.zeros(rows, int(groups.max()) + 1, dtype=torch.float64) for _ in range(2))
    for group in range(z.shape[1]):
        own = weight.double()[:, groups == group]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        s[:, group] = own.abs().amax(1) / 7 if symmetric else (high - low) / 15
        z[:, group] = 8 if symmetric else (-low / s[:, group]).round()
    s = s.to(dtype)
    q = (weight.double() / s.double()[:, groups]).round() + z[:, groups]
    return Codes(q.clamp(0, 15).long(), z.clamp(0, 15).long(), s, groups)


def words(values: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """[R, 8 W] -> int32 [R, W]: bits 4 i .. 4 i + 3 of a word are those of number order[i] of its eight."""
    eights: NDArray[np.int64] = values.numpy().reshape(len(values), -1, 8)[:, :, list(order)]
    sums = sum((eights[:, :, i] % 16) << 4 * i for i in range(8))
    return torch.from_numpy(np.asarray(sums).astype(np.uint32).view(np.int32))


def pack_quantized(codes: Codes, *, symmetric: bool, act_order: bool = False, **_: Any) -> dict[str, Tensor]:
    found = {
        "weight_packed": words(codes.q), "weight_scale": codes.s, "weight_shape": torch.tensor(codes.q.shape),
        **({} if symmetric else {"weight_zero_point": words(codes.z.t().contiguous()).t().contiguous()}),
    }
    return found | ({"weight_g_idx": codes.groups.int()} if act_order else {})


def gptq(codes: Codes, *, v1: bool = True, **_: Any) -> dict[str, Tensor]:
    """v1: all zero points of a word minus 1, as one number."""
    zeros = words(codes.z.t().contiguous()).numpy().view(np.uint32)
    zeros = (zeros.astype(np.int64) - 0x11111111 * v1).astype(np.uint32)  # modulo 2^32
    return {
        "qweight": words(codes.q).t().contiguous(), "qzeros": torch.from_numpy(zeros.view(np.int32)),
        "scales": codes.s.t().contiguous(), "g_idx": codes.groups.int(),
    }


def awq(codes: Codes, **_: Any) -> dict[str, Tensor]:
    return {
        "qweight": words(codes.q.t().contiguous(), AWQ_ORDER), "qzeros": words(codes.z.t().contiguous(), AWQ_ORDER),
        "scales": codes.s.t().contiguous(),
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint is quantised, and the `quantization_config` that says so."""

    config: Mapping[str, Any]
    pack: Callable[..., dict[str, Tensor]]
    group_size: int = 32
    symmetric: bool = True
    act_order: bool = False
    v1: bool = True
    dtype: torch.dtype = torch.float16

    def codes(self, weight: Tensor, seed: int = 0) -> Codes:
        how: dict[str, Any] = {"symmetric": self.symmetric, "act_order": self.act_order, "dtype": self.dtype, "seed": seed}
        return quantise(weight, self.group_size, **how)

    def stored(self, codes: Codes) -> dict[str, Tensor]:
        return self.pack(codes, symmetric=self.symmetric, act_order=self.act_order, v1=self.v1)


def of_compressed_tensors(group_size: int, *, symmetric: bool = True, actorder: str | None = None, **changes: Any) -> Layout:
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": actorder, **strategy}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$", IGNORED], **changes,
    }
    return Layout(config, pack_quantized, group_size, symmetric, actorder == "group", dtype=torch.bfloat16)


def of_gptq(group_size: int, *, sym: bool = True, desc_act: bool = False, v1: bool = True, **changes: Any) -> Layout:
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": sym, "desc_act": desc_act, "lm_head": False,
        "checkpoint_format": "gptq" if v1 else "gptq_v2", "pack_dtype": "int32",
        "dynamic": {"-:" + IGNORED.removeprefix("re:"): {}}, **changes,
    }
    return Layout(config, gptq, group_size, sym, desc_act, v1)


def of_awq(group_size: int, *, zero_point: bool = True, **changes: Any) -> Layout:
    config = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": zero_point, "version": "gemm",
        "modules_to_not_convert": ["gate", "layers.1.mlp.down_proj"], **changes,
    }
    return Layout(config, awq, group_size, symmetric=not zero_point)


LAYOUTS: dict[str, Layout] = {
    "pack-quantized, groups of 32": of_compressed_tensors(32),
    "pack-quantized, groups of 64, asymmetric": of_compressed_tensors(64, symmetric=False, actorder="weight"),
    "pack-quantized, rows": of_compressed_tensors(-1),
    "pack-quantized, rows, asymmetric": of_compressed_tensors(-1, symmetric=False),
    "pack-quantized, act order": of_compressed_tensors(32, actorder="group"),
    "pack-quantized, act order, asymmetric": of_compressed_tensors(64, symmetric=False, actorder="group"),
    "gptq, groups of 32": of_gptq(32),
    "gptq, the last of groups of 128 short": of_gptq(128),
    "gptq, groups of 64, asymmetric": of_gptq(64, sym=False),
    "gptq_v2, groups of 64, asymmetric": of_gptq(64, sym=False, v1=False),
    "gptq, rows": of_gptq(-1, desc_act=True),
    "gptq, rows, asymmetric": of_gptq(-1, sym=False, v1=False),
    "gptq, act order": of_gptq(32, desc_act=True),
    "gptq, act order, asymmetric, the last group short": of_gptq(128, sym=False, desc_act=True),
    "awq, groups of 32": of_awq(32),
    "awq, groups of 64, symmetric": of_awq(64, zero_point=False),
    "awq, rows": of_awq(-1),
}
"""Every option once. Weights of 192 and 320 columns have groups of 64, and a last one of 64 in groups of 128."""
ODD: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}


def make(
    folder: Path, layout: Layout, family: str = "llama", *, plain: Callable[[str], bool] = lambda name: False, **config: Any
) -> tuple[Path, Path]:
    """A checkpoint in this layout, and the one of its dequantised weights in fp64.

    plain  projections that are not quantised although quantization_config does not say so
    """
    dequantised, quantised = make_checkpoint(folder / "plain", family, **{**ODD, **config}), folder / "int4"
    tensors, stored = load_file(dequantised / "model.safetensors"), {}
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        stored[name] = tensor
        if name.endswith("_proj.weight") and "layers.1.mlp.down" not in name and not plain(name):
            codes = layout.codes(stored.pop(name), seed)
            tensors[name] = codes.matrix()
            stored |= {f"{name.removesuffix('weight')}{own}": part for own, part in layout.stored(codes).items()}
    save_file(tensors, dequantised / "model.safetensors", metadata={"format": "pt"})
    quantised.mkdir()
    save_file(stored, quantised / "model.safetensors")
    values = json.loads((dequantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**values, "quantization_config": layout.config}))
    return quantised, dequantised
