"""Writes a trained DSpark head as a checkpoint: config.json and model.safetensors.

flat         DeepSpec, SGLang: the shape of the layers at the top
speculators  vLLM's speculators: the shape of the layers under transformer_layer_config
Source of names and keys: as in batchspec/draft/block_spec.py, which reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchspec.draft.block_spec import BlockSpec
from batchspec.heads.block_network import BlockNetwork
from batchspec.heads.save import checkpoint_tensors, layer_shape, speculators_config, write_checkpoint
from batchspec.model.dtype import dtype_name
from batchspec.model.spec import ModelSpec

_NUM_ANCHORS = 512
"""Of DeepSpec's trainings; its loader requires the key, which changes nothing that a head computes."""


def save_block(
    folder: Path, network: BlockNetwork, draft_vocab_ids: Tensor, target: ModelSpec, *, layout: str, dtype: torch.dtype,
    verifier: str, draft_len: int,
) -> None:
    """Write the head; arguments as of `save_head`."""
    tensors = checkpoint_tensors(network.state_dict(), network.spec, draft_vocab_ids, dtype=dtype)
    config = block_config(network.spec, target, layout=layout, dtype=dtype, verifier=verifier, draft_len=draft_len)
    write_checkpoint(folder, tensors, config)


def block_config(
    spec: BlockSpec, target: ModelSpec, *, layout: str, dtype: torch.dtype, verifier: str, draft_len: int
) -> dict[str, Any]:
    """config.json of a head made by `block.new_block_spec`."""
    shape = layer_shape(spec, target, family="qwen3")
    own: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.from_anchor,
        "markov_rank": spec.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "draft_vocab_size": spec.draft_vocab_size,
        "torch_dtype": dtype_name(dtype),
        "tie_word_embeddings": False,
    }
    if layout == "flat":
        layers = {"target_layer_ids": [boundary - 1 for boundary in spec.aux_layer_ids], "num_target_layers": target.num_layers}
        return {"architectures": ["Qwen3DSparkModel"], **shape, **own, **layers, "num_anchors": _NUM_ANCHORS}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": speculators_config("dspark", target, verifier=verifier, draft_len=draft_len),
        "transformer_layer_config": shape,
        "aux_hidden_state_layer_ids": list(spec.aux_layer_ids),
        "target_hidden_size": spec.hidden_size,
        **own,
    }
