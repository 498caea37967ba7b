"""Tiny models with an MTP layer: shapes, targets of noise, and checkpoints with the tensors of the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.target import Target
from tests.helpers.engines import DEVICE, VOCAB
from tests.helpers.models import make_checkpoint
from tests.helpers.recurrent import LoudNoise

SHAPE: dict[str, Any] = {
    "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3, "full_attention_interval": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": VOCAB, "max_position_embeddings": 256, "rope_theta": 100.0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "partial_rotary_factor": 0.5,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 18,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3_5_text"},
    "moe": {"model_type": "qwen3_5_moe_text", **EXPERTS},
    "next": {"model_type": "qwen3_next", **EXPERTS, "norm_topk_prob": False},
}


def mtp_model(name: str) -> ModelSpec:
    """Recurrent layers and one that attends, and an MTP layer: dense, or with experts and a shared one."""
    return read_spec({**SHAPE, **MODELS[name], "dtype": "float64"}, "config.json")


def mtp_target(spec: ModelSpec) -> Target:
    return Target(spec, LoudNoise(spec, dtype=torch.float64, device=DEVICE), DEVICE)


def checkpoint_with_mtp(folder: Path, name: str, *, vocab: int, fused: bool = False, **config: Any) -> Path:
    """A random model as transformers saves it, and the tensors of its MTP layer, which transformers leaves out.

    fused  the experts of the layer in two tensors, as Qwen3.5 has them
    """
    kind = dict(MODELS[name])
    family = kind.pop("model_type")
    make_checkpoint(folder, family, **{**SHAPE, **kind, **config, "vocab_size": vocab})
    add_mtp(folder, fused=fused)
    return folder


def add_mtp(folder: Path, *, fused: bool = False) -> dict[str, Tensor]:
    """Add noise as the tensors of the MTP layer; returns them, each expert's alone."""
    mtp = load_spec(folder).mtp
    assert mtp is not None
    generator = torch.Generator().manual_seed(5)
    made = {tensor.name: 0.2 * torch.randn(tensor.shape, generator=generator) for tensor in mtp.tensors()}
    stored = dict(made)
    if fused:
        experts = f"{mtp.layer_prefix}mlp.experts."
        stored = {key: tensor for key, tensor in made.items() if not key.startswith(experts)}
        count = len({key.split(".")[5] for key in made if key.startswith(experts)})

        def every(part: str) -> list[Tensor]:
            return [made[f"{experts}{i}.{part}_proj.weight"] for i in range(count)]

        stored[f"{experts}gate_up_proj"] = torch.cat((torch.stack(every("gate")), torch.stack(every("up"))), 1)
        stored[f"{experts}down_proj"] = torch.stack(every("down"))
    file = folder / "model.safetensors"
    save_file(load_file(file) | stored, file, {"format": "pt"})
    return made
