"""Writes a trained head as a checkpoint: config.json and model.safetensors, in the layouts that vLLM and SGLang read.

flat         SafeAILab, SpecForge, SGLang, vLLM: `midlayer.*`, more layers as `layers.1.*` ..
speculators  vLLM's speculators: `layers.0.*`, the shape of the layers under transformer_layer_config
A head that drafts in parallel also has mask_hidden and the id of its mask token; in the second layout its type is `peagle`.
Source of names and keys: as in batchspec/draft/formats.py, which reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from batchspec.draft.block_spec import BlockSpec
from batchspec.draft.formats import HeadSpec
from batchspec.heads.network import HeadNetwork
from batchspec.model.dtype import dtype_name
from batchspec.model.families.registry import FAMILIES
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.spec import ModelSpec

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save_head(
    folder: Path,
    network: HeadNetwork,
    draft_vocab_ids: Tensor,
    target: ModelSpec,
    *,
    layout: str,
    dtype: torch.dtype,
    verifier: str,
    draft_len: int,
) -> None:
    """Write the head.

    draft_vocab_ids  int64 [V'] ascending target ids of the draft vocabulary
    dtype            dtype of the weights
    verifier         the target's name, for the speculators layout
    draft_len        default number of draft tokens, for the speculators layout
    """
    named = network.state_dict()
    if layout != "flat":
        named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in named.items()}
    tensors = checkpoint_tensors(named, network.spec, draft_vocab_ids, dtype=dtype)
    config = head_config(network.spec, target, layout=layout, dtype=dtype, verifier=verifier, draft_len=draft_len)
    write_checkpoint(folder, tensors, config)


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write model.safetensors and config.json, each atomically; config.json, which readers require, last."""
    scratch = folder / f".{WEIGHTS}"
    save_file(tensors, scratch, metadata={"format": "pt"})
    scratch.chmod(0o644)
    os.replace(scratch, folder / WEIGHTS)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def checkpoint_tensors(
    weights: Mapping[str, Tensor], spec: HeadSpec | BlockSpec, draft_vocab_ids: Tensor, *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The weights on the CPU in `dtype`, with the tables d2t and t2d if the draft vocabulary is smaller than the target's."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    if spec.mapped:
        draft_vocab_ids = draft_vocab_ids.cpu()
        tensors["d2t"] = draft_vocab_ids - torch.arange(len(draft_vocab_ids))
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, draft_vocab_ids, True)
    return tensors


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def head_config(
    spec: HeadSpec, target: ModelSpec, *, layout: str, dtype: torch.dtype, verifier: str, draft_len: int
) -> dict[str, Any]:
    """config.json of a head made by `head.new_spec` or read by `head.published_network`."""
    shape = layer_shape(spec, target, family="llama")
    aux_layer_ids, mask_id = list(spec.aux_layer_ids), spec.mask_token_id
    parallel = mask_id is not None
    own: dict[str, Any] = {"draft_vocab_size": spec.draft_vocab_size, "torch_dtype": dtype_name(dtype)}
    if layout == "flat":
        # Programs that load heads know the default layers, and differ in how they read explicit ids.
        usual = aux_layer_ids == [2, target.num_layers // 2, target.num_layers - 3]
        ids = {} if usual else {"eagle_aux_hidden_state_layer_ids": aux_layer_ids, "num_aux_hidden_states": len(aux_layer_ids)}
        mask = {"parallel_drafting": True, "mask_token_id": mask_id, "ptd_token_id": mask_id} if parallel else {}
        return {"architectures": ["LlamaForCausalLMEagle3"], **shape, **own, **ids, **mask, "tie_word_embeddings": False}
    kind = "peagle" if parallel else "eagle3"
    return {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        **({"mask_token_id": mask_id} if parallel else {}),
        "speculators_config": speculators_config(kind, target, verifier=verifier, draft_len=draft_len),
        "transformer_layer_config": shape,
        "eagle_aux_hidden_state_layer_ids": aux_layer_ids,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": spec.target_hidden_size,
        **own,
        "tie_word_embeddings": False,
    }


def speculators_config(kind: str, target: ModelSpec, *, verifier: str, draft_len: int) -> dict[str, Any]:
    """How a head of this kind is used, for speculators and vLLM."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": draft_len, "accept_tolerance": 0.0, "verifier_accept_k": 1,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": verifier, "architectures": [FAMILIES[target.family].architecture]},
    }


def layer_shape(spec: HeadSpec | BlockSpec, target: ModelSpec, *, family: str) -> dict[str, Any]:
    """The keys of the decoder layers: those of this family, whatever the target's is."""
    return {
        "model_type": family,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": target.max_len,
        "rope_theta": spec.rope.theta,
        "rope_scaling": _rope_scaling(spec.rope),
    }


def _rope_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.type == "default":
        return None
    found: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type != "linear":
        found["original_max_position_embeddings"] = rope.original_max_len
    if rope.type == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor}
        found |= {} if rope.truncate else {"truncate": False}
    return found
