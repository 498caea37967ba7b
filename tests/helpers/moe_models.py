"""Tiny float64 models with experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from batchspec.records import Completion
from tests.helpers.engines import DEVICE

_SHAPE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 31, "max_position_embeddings": 256, "num_local_experts": 5,
    "num_experts_per_tok": 2, "rope_theta": 100.0,
}
_RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 3, "full_attention_interval": 2, "head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 5, "linear_value_head_dim": 6, "num_local_experts": None,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"num_local_experts": None, "num_experts_per_tok": None},
    "qwen3_moe": {"norm_topk_prob": True, "moe_intermediate_size": 10},
    "mixtral": {"sliding_window": 9},
    "minimax_m2": {"rotary_dim": 2},
    "glm4_moe": {
        "num_local_experts": 6, "moe_intermediate_size": 10, "n_shared_experts": 2, "n_group": 3, "topk_group": 2,
        "routed_scaling_factor": 1.7, "use_qk_norm": True,
    },
    "gpt_oss": {"sliding_window": 7, "rope_theta": 1e4, "hidden_size": 20},
    "qwen3_5_text": {**_RECURRENT, "num_experts_per_tok": None},
    "qwen3_next": {**_RECURRENT, "num_experts": 6, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
}


def tiny_moe(family: str, **changes: Any) -> Target:
    """Two layers of noise, five experts, two of a token."""
    spec = tiny_spec(family, **changes)
    return Target(spec, Noise(spec, dtype=torch.float64, device=DEVICE), DEVICE)


def tiny_spec(family: str, **changes: Any) -> ModelSpec:
    """The shape of `tiny_moe`."""
    return read_spec(tiny_config(family, **changes), "config.json")


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of `tiny_moe`; of llama and qwen3_5_text, which have no experts, that of a dense
    model."""
    config = {**_SHAPE, "model_type": family, **_CHANGES[family], **changes}
    return {key: value for key, value in config.items() if value is not None}


class Noise(DummyWeights):
    """With biases and sinks that count."""

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        return found.mul_(50) if name.endswith(("bias", "sinks")) else found


class Strong(DummyWeights):
    """Layers, biases and sinks that count beside the embedding; routers that send tokens to all experts; scales that differ."""

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        if not found.dtype.is_floating_point or found.dtype is torch.float8_e4m3fn or name.endswith("input_scale"):
            return found
        if "_scale" in name:
            return found * torch.linspace(4.0, 12.0, found.numel(), dtype=found.dtype, device=found.device).view_as(found)
        return found * (50.0 if name.endswith("sinks") else 1.0 if name.endswith("norm.weight") else 8.0)


def ids_of(done: Completion) -> list[int]:
    assert done.token_ids is not None
    return [int(token) for token in done.token_ids]
