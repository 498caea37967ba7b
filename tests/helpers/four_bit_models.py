"""Quantises the projections of a Llama-like or Mixtral-like model to each format of four bits, rounded to the nearest code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.helpers import nvfp4_layouts
from tests.helpers.int4_layouts import Layout, of_awq, of_compressed_tensors, of_gptq
from tests.helpers.nvfp4_layouts import Packer, compressed, fp8, group, int4, nvfp4

PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
_PLAIN = ["lm_head", "re:.*gate$"]


@dataclass(frozen=True, slots=True)
class Form:
    """How a model is stored."""

    config: Mapping[str, Any]
    """quantization_config"""
    packer: Callable[[str], Packer]
    """The packer of a projection, by its name."""


def _in_int4(layout: Layout) -> Form:
    own = int4(layout)
    return Form(layout.config, lambda name: own)


def _in_nvfp4(config: Mapping[str, Any], *, divides: bool) -> Form:
    own = nvfp4(divides=divides)
    return Form(config, lambda name: own)


def _fp8_and_nvfp4() -> Form:
    of_attention, of_mlp = fp8(scalar=False), nvfp4(divides=True)
    config = compressed(group("float-quantized", "re:.*self_attn.*"), group("nvfp4-pack-quantized", "re:.*mlp.*"))
    return Form(config, lambda name: of_attention if "self_attn" in name else of_mlp)


FOUR_BITS: dict[str, Form] = {
    "int4": _in_int4(of_compressed_tensors(32, ignore=_PLAIN)),
    "gptq": _in_int4(of_gptq(32, sym=False, desc_act=True, dynamic={})),
    "awq": _in_int4(of_awq(32, modules_to_not_convert=None)),
    "nvfp4": _in_nvfp4({**nvfp4_layouts.MODELOPT, "ignore": ["lm_head", "*.gate"]}, divides=False),
    "nvfp4_ct": _in_nvfp4(nvfp4_layouts.of_compressed_tensors(ignore=_PLAIN), divides=True),
    "fp8_nvfp4": _fp8_and_nvfp4(),
}


def packed(tensors: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """Every projection of the layers, except routers, in this form of FOUR_BITS; other tensors as they are."""
    made, packer = dict[str, Tensor](), FOUR_BITS[form].packer
    for name, tensor in tensors.items():
        if name.endswith(PROJECTIONS):
            module = name.removesuffix(".weight")
            stored, _ = packer(module)(tensor.float(), 0)
            made |= {f"{module}.{key}": value for key, value in stored.items()}
        else:
            made[name] = tensor
    return made
