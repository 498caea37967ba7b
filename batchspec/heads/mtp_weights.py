"""The weights of an MTP layer between a checkpoint and a network: read into it, and written from it.

A file holds norms less `NormForm.offset`. What is written is never quantised, whatever the weight format of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchspec.heads.mtp_network import MtpNetwork
from batchspec.heads.save import write_checkpoint
from batchspec.model.dtype import dtype_name
from batchspec.model.families.registry import FAMILIES
from batchspec.model.layers.base import TensorSpec, projections
from batchspec.model.mtp import MtpSpec
from batchspec.model.quant.base import Weights
from batchspec.model.quant.formats import ALL_PLAIN
from batchspec.model.quant.grouped import expert_parts
from batchspec.model.spec import ModelSpec


def plain(spec: MtpSpec) -> MtpSpec:
    """The same layer with no weight quantised."""
    return replace(spec, formats=ALL_PLAIN)


@torch.no_grad()
def draw_weights(network: MtpNetwork, out_norm: Tensor, *, seed: int) -> None:
    """Give the network random matrices, and norms of 1 but for the last one [H]."""
    network.draw_matrices(seed)
    network.get_parameter(f"{network.spec.join.out_norm}.weight").copy_(out_norm)


@torch.no_grad()
def read_weights(network: MtpNetwork, spec: MtpSpec, weights: Weights) -> None:
    """Give the network all weights of a checkpoint's layer, in the dtype of the network.

    spec  the layer with the weight formats of this checkpoint
    """
    for name, tensor in _tensors(spec, weights):
        network.get_parameter(name.removeprefix(spec.prefix)).copy_(tensor)


def _tensors(spec: MtpSpec, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every weight as the layer computes with it, none quantised, by its name in a checkpoint without formats."""
    for prefix, block in spec.blocks():
        parts = [*projections(block), *(part for grouped in block.grouped for _, _, part in expert_parts(grouped))]
        for part in parts:
            name = prefix + part.name
            yield f"{name}.weight", spec.formats.of(name).matrix(weights, name)
            if part.bias:
                yield f"{name}.bias", weights.tensor(f"{name}.bias")
        for vector in block.vectors:
            yield prefix + vector.name, weights.tensor(prefix + vector.name)


def stored_tensors(network: MtpNetwork, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights on the CPU in `dtype`, as a file holds them."""
    return {
        tensor.name: _stored(network.get_parameter(tensor.name.removeprefix(network.spec.prefix)), tensor, dtype)
        for tensor in plain(network.spec).tensors()
    }


def _stored(weight: Tensor, tensor: TensorSpec, dtype: torch.dtype) -> Tensor:
    return (weight.detach() - tensor.offset).to("cpu", dtype).contiguous()


def save_mtp(
    folder: Path, network: MtpNetwork, target: ModelSpec, *, dtype: torch.dtype, target_name: str, draft_len: int
) -> None:
    """Write the layer as a folder of its own: `mtp.*` as in the target's checkpoint, and a config.json that names the target.

    dtype        of the weights
    target_name  model.path
    draft_len    K, the number of drafts that is usual in jobs
    """
    write_checkpoint(folder, stored_tensors(network, dtype), mtp_config(target, dtype, target_name, draft_len))


def mtp_config(target: ModelSpec, dtype: torch.dtype, target_name: str, draft_len: int) -> dict[str, Any]:
    """config.json of a tuned MTP layer. Its shape is that which the target's config.json gives it."""
    return {
        "draft": "mtp",
        "target": {
            "name_or_path": target_name,
            "architectures": [FAMILIES[target.family].architecture],
            "model_type": target.family,
            "hidden_size": target.hidden_size,
            "num_hidden_layers": target.num_layers,
            "vocab_size": target.vocab_size,
        },
        "num_speculative_tokens": draft_len,
        "torch_dtype": dtype_name(dtype),
    }
