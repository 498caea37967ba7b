"""NVFP4 weights packed number by number as their layouts are published, by other means than batchspec's; checkpoints of them, and
checkpoints of several formats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.int4_layouts import Layout
from tests.helpers.int4_layouts import of_compressed_tensors as of_int4
from tests.helpers.models import make_checkpoint
from tests.model.test_fp8 import TOKEN, WEIGHTS

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDDLES = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(E2M1)], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The weight [N, K] whose number at n, k is e2m1(q[n, k]) s[n, k // 16] g, or / g."""

    q: Tensor
    s: Tensor
    """e4m3"""
    g: float
    """a number of fp32"""
    divides: bool

    def matrix(self) -> Tensor:
        """fp64 [N, K]."""
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)[self.q]
        scaled = values * self.s.double().repeat_interleave(16, 1)
        return scaled / self.g if self.divides else scaled * self.g


def quantise(weight: Tensor, *, divides: bool) -> Numbers:
    """Each number rounded to the nearest; the largest of the weight is 6 * 448, and the largest of each 16 is 6."""
    weight = weight.double()
    largest = float(weight.abs().max().clamp(min=1e-12))
    g = float(torch.tensor(6 * 448 / largest if divides else largest / (6 * 448)).float())
    unit = 1 / g if divides else g
    groups = weight.unflatten(1, (-1, 16))
    s = (groups.abs().amax(2) / 6 / unit).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scaled = groups / (s.double() * unit)[..., None]
    q = torch.bucketize(scaled.abs(), _MIDDLES) + 8 * (scaled < 0)
    return Numbers(q.flatten(1), s, g, divides)


def packed(codes: Tensor) -> Tensor:
    """[N, K] -> uint8 [N, K / 2]: of two neighbours the first is in the low half."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def tensors_of(numbers: Numbers, *, inputs: bool = True, scalars: tuple[int, ...] = (1,)) -> dict[str, Tensor]:
    """The tensors of a projection, by what follows its name. inputs: those of activations in FP4 too; scalars: a shape."""
    codes, factor, of_inputs = NAMES[numbers.divides]
    found = {codes: packed(numbers.q), "weight_scale": numbers.s, factor: torch.full(scalars, numbers.g)}
    return found | ({of_inputs: torch.full(scalars, 0.03)} if inputs else {})


MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        }
    },
    "ignore": ["lm_head", "*layers.1.mlp.down_proj*"], "producer": {"name": "modelopt", "version": "0.47.0"},
}
"""As ModelOpt writes it into config.json; one projection of a model is not quantised."""
FP8_AND_NVFP4: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        f"model.layers.{i}.{name}": {"quant_algo": algorithm}
        for i in range(2) for name, algorithm in (("self_attn", "FP8_PER_CHANNEL_PER_TOKEN"), ("mlp.experts", "NVFP4"))
    },
}
"""Attention and experts of a model of two layers in formats of their own."""
_FLOAT4 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}


def of_compressed_tensors(*, inputs: bool = True, **changes: Any) -> dict[str, Any]:
    """As llm-compressor writes it, schemes NVFP4 and (without inputs) NVFP4A16."""
    of_inputs = {**_FLOAT4, "dynamic": "local"} if inputs else None
    group = {
        "targets": ["Linear"], "weights": _FLOAT4, "input_activations": of_inputs, "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down.*", "re:.*gate$"], **changes,
    }


def group(form: str, *targets: str, **changes: Any) -> dict[str, Any]:
    """A group of compressed-tensors: FP8 by row, INT4 in groups of 32 or NVFP4."""
    inputs = TOKEN if form == "float-quantized" else None
    weights: dict[str, Any] = {
        "float-quantized": {**WEIGHTS, "strategy": "channel"},
        "pack-quantized": of_int4(32).config["config_groups"]["group_0"]["weights"],
        "nvfp4-pack-quantized": of_compressed_tensors()["config_groups"]["group_0"]["weights"],
    }[form]
    return {"targets": [*targets], "weights": weights, "input_activations": inputs, "format": form, **changes}


def compressed(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "config_groups": {f"group_{i}": own for i, own in enumerate(groups)}, **changes,
    }


NAMES = {
    True: ("weight_packed", "weight_global_scale", "input_global_scale"), False: ("weight", "weight_scale_2", "input_scale"),
}
Packer = Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]
"""A weight [N, K] and a seed -> the tensors of a projection, by what follows its name, and the weight that they are, fp64."""


def nvfp4(*, divides: bool, **how: Any) -> Packer:
    def pack(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        numbers = quantise(weight, divides=divides)
        return tensors_of(numbers, **how), numbers.matrix()

    return pack


def int4(layout: Layout) -> Packer:
    def pack(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        codes = layout.codes(weight, seed)
        return layout.stored(codes), codes.matrix()

    return pack


def fp8(*, scalar: bool) -> Packer:
    """Scalar: one scale, and one of the activations; otherwise one a row."""

    def pack(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.abs().max().view(1) if scalar else weight.abs().amax(1, keepdim=True)
        scale = largest.float() / 448
        values = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        inputs = {"input_scale": torch.tensor(0.03)} if scalar else {}
        return {"weight": values, "weight_scale": scale, **inputs}, (values.float() * scale).double()

    return pack


ODD: dict[str, Any] = {"hidden_size": 176, "intermediate_size": 304, "num_hidden_layers": 2}
"""Whole groups of 16, and an odd number of them."""


def make(
    folder: Path, quantisation: dict[str, Any], packer: Callable[[str], Packer | None], family: str = "llama", **config: Any
) -> tuple[Path, Path]:
    """A checkpoint with this quantization_config, and the one of its dequantised weights in fp64.

    packer  name of a projection of the layers -> how it is stored; None: as it is
    """
    plain, quantised = make_checkpoint(folder / "plain", family, **{**ODD, **config}), folder / "quantised"
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        module = name.removesuffix(".weight")
        pack = packer(module) if name.endswith("_proj.weight") else None
        if pack is None:
            stored[name] = tensor
        else:
            own, tensors[name] = pack(tensor, seed)
            stored |= {f"{module}.{key}": part for key, part in own.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantised.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, quantised / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**values, "quantization_config": quantisation}))
    return quantised, plain


def all_but_one(packer: Packer) -> Callable[[str], Packer | None]:
    """The projection that MODELOPT and `of_compressed_tensors` name is not quantised."""
    return lambda name: None if "layers.1.mlp.down" in name else packer
