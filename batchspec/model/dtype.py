"""The data type in which a model computes, and its name."""

from __future__ import annotations

import torch

from batchspec.errors import ConfigError
from batchspec.model.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16: as keys, manifests and checkpoints name it."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """model.dtype -> the dtype to compute in. `auto`: the checkpoint's, but fp32 on a CPU without fast bf16 products.

    Raises ConfigError for `auto` if the checkpoint's dtype is fp16, which is not supported.
    """
    if name != "auto":
        return DTYPES[name]
    if spec.dtype not in DTYPES:
        raise ConfigError(f"model.dtype=auto: the checkpoint is {spec.dtype}, which is not supported; set bfloat16 or float32")
    dtype = DTYPES[spec.dtype]
    slow = device.type == "cpu" and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.float32 if dtype is torch.bfloat16 and slow else dtype
