"""decode.deterministic (batch-invariant sums): checks which models, dtypes and devices support it, and switches it on."""

from __future__ import annotations

import torch

from batchspec.errors import ConfigError
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.four_bit import ROWS
from batchspec.kernels.moe.route import MAX_EXPERTS, MAX_TOP_K
from batchspec.model.dtype import dtype_name
from batchspec.model.layers.mlp.moe import MoeSpec
from batchspec.model.quant.grouped import ROW_BYTES
from batchspec.model.quant.int4_format import Int4
from batchspec.model.spec import ModelSpec
from batchspec.tuning.policy import has_same_bits_in_all_tiles

ORDER_VERSION = 4
"""Version of the order of sums and of the bits of weights: a job that began with another version is not continued."""


def in_one_order(spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, on_this_machine: bool = True) -> ModelSpec:
    """The model with batch-invariant sums: their order depends on the row alone. A float64 model is returned unchanged: its
    order of sums changes no token.

    on_this_machine  False: the job will run on another machine, whose devices are unknown
    Raises ConfigError for devices, dtypes and weight formats for which it is not supported.
    """
    if dtype is torch.float64:
        return spec
    asked = "decode.deterministic=true"
    if on_this_machine and device.type != "cuda":
        raise ConfigError(f"{asked} on a CPU needs model.dtype=float64, and it is {dtype_name(dtype)}; set it, or use a GPU")
    if on_this_machine and dtype is not torch.bfloat16:
        raise ConfigError(f"{asked} on a GPU is supported with model.dtype=bfloat16 only, and it is {dtype_name(dtype)}; set it")
    if on_this_machine and not has_same_bits_in_all_tiles(device):
        raise ConfigError(
            f"{asked} is supported only on GPUs of the Hopper generation (compute capability 9.0), and this is "
            f"{card_of(device).name}; remove it, or set model.dtype=float64"
        )
    if (why := spec.refuses("ordered")) is not None:
        raise ConfigError(f"{asked}: {spec.family} {why}; remove it, or set model.dtype=float64")
    _check_rows(spec, asked)
    for prefix, block in spec.blocks():
        if isinstance(block, MoeSpec):
            _check_experts(spec, prefix, block, asked)
    return spec.in_one_order()


def _check_rows(spec: ModelSpec, asked: str) -> None:
    """Raises ConfigError for FP8 products whose rows no kernel of batchspec reads: torch would compute them."""
    for prefix, gemm in spec.gemms(1):
        part = gemm.product.parts[0]
        if part.k % ROW_BYTES and spec.formats.quantises_input_of(prefix + part.name):
            raise ConfigError(
                f"{asked}: FP8 rows of {part.k} numbers ({prefix}{part.name}) are not a multiple of {ROW_BYTES}, so torch sums "
                "them, in no fixed order; set model.activations=dtype, which converts weights at load to twice the memory"
            )


def _check_experts(spec: ModelSpec, prefix: str, block: MoeSpec, asked: str) -> None:
    """Raises ConfigError for experts that no kernel of batchspec computes."""
    found = [
        f"experts with rows of {grouped.k} numbers"
        for grouped in block.grouped
        if grouped.k * torch.bfloat16.itemsize % ROW_BYTES
    ]
    found += [
        f"INT4 experts with {grouped.part_rows} outputs"
        for grouped in block.grouped
        if grouped.part_rows % ROWS and isinstance(spec.formats.of(prefix + grouped.of(0).parts[0].name), Int4)
    ]
    if block.experts.num_experts > MAX_EXPERTS or block.router.top_k > MAX_TOP_K:
        found.append(f"{block.experts.num_experts} experts with {block.router.top_k} a token")
    if found:
        raise ConfigError(f"{asked}: {found[0]} are computed by the library, in no fixed order; remove it")
