"""The tensors of an EAGLE-3 head under one set of names, and the layers that they make."""

from __future__ import annotations

import re
from math import prod

import torch

from batchspec.draft.formats import HeadSpec
from batchspec.model.checkpoint_part import block_tensors
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.base import ProductSpec, Projection, TensorSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.quant.plain import PLAIN
from batchspec.model.weights import Shapes, shapes_of

HIDDEN_NORM = "layers.0.hidden_norm.weight"
"""The norm of the feature that layer 0 reads."""


def normalised(name: str) -> str:
    """A tensor's name in either layout -> `fc.weight`, `layers.{i}.self_attn.q_proj.weight`, `norm.weight`, `d2t` ...

    Layer 0 is the one that reads embedding and feature.
    """
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    if found := re.match(r"additional_layers\.(\d+)\.", name):
        return f"layers.{int(found[1]) + 1}." + name[found.end() :]
    return name


def expected_tensors(spec: HeadSpec) -> list[TensorSpec]:
    """Every tensor that the spec requires, by normalised name, in the order in which `dummy_head` draws them.

    mask_hidden may have more leading dimensions of size one, and may be as wide as the head instead of its aux hidden states.
    The vocabulary tables d2t and t2d are checked separately.
    """
    fc, hidden = fc_product(spec), spec.hidden_size
    width = feature_width(spec)
    tensors = [] if fc is None else PLAIN.tensors(fc.parts[0])
    tensors = [*tensors, TensorSpec("norm.weight", (hidden,), "norm")]
    if spec.input_norm:
        tensors.append(TensorSpec("input_norm.weight", (width,), "norm"))
    if spec.fc_norm:
        names = (f"fc_norm.{i}.weight" for i in range(len(spec.aux_layer_ids)))
        tensors += [TensorSpec(name, (spec.target_hidden_size,), "norm") for name in names]
    if spec.own_embedding:
        tensors.append(TensorSpec("embed_tokens.weight", (spec.vocab_size, hidden), "weight"))
    if spec.own_head:
        tensors.append(TensorSpec("lm_head.weight", (spec.draft_part.stop - spec.draft_part.start, hidden), "weight"))
    if spec.mapped:
        tensors.append(TensorSpec("d2t", (spec.draft_vocab_size,), "table", ("I64", "I32")))
    if spec.mask_token_id is not None:
        tensors.append(TensorSpec("mask_hidden", (1, width), "weight"))
    for i, layer in enumerate(head_layers(spec)):
        found = [tensor for block in layer.blocks for tensor in block_tensors(block, head_prefix(i))]
        tensors += sorted(found, key=lambda tensor: ("weight", "bias", "norm").index(tensor.role))
    tensors.append(TensorSpec(HIDDEN_NORM, (hidden,), "norm"))
    return tensors


def expected_shapes(spec: HeadSpec) -> Shapes:
    """Names and shapes of `expected_tensors`."""
    return shapes_of(expected_tensors(spec))


def feature_width(spec: HeadSpec) -> int:
    """Number of values of the target's hidden states that a head reads for each token."""
    return len(spec.aux_layer_ids) * spec.target_hidden_size


def fc_product(spec: HeadSpec) -> ProductSpec | None:
    """Concatenated aux hidden states -> the feature [H]; None if the feature is the target's last hidden state itself."""
    if spec.final_hidden:
        return None
    return ProductSpec((Projection("fc", spec.hidden_size, feature_width(spec), spec.fc_bias),))


def head_layers(spec: HeadSpec) -> tuple[LayerSpec, ...]:
    """The decoder layers of a head. The input of layer 0 is the embedding and the feature, each normed, concatenated."""
    mlp = GatedMlpSpec(
        hidden_size=spec.hidden_size, inner_size=spec.intermediate_size, eps=spec.rms_eps, bias=spec.mlp_bias
    )
    attentions = [
        AttentionSpec(
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_eps,
            window=window,
            input_size=None if index else 2 * spec.hidden_size,
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            qk_norm=spec.qk_norm,
        )
        for index, window in enumerate(spec.windows)
    ]
    return tuple(LayerSpec(attention, (mlp,)) for attention in attentions)


def head_prefix(index: int) -> str:
    """The prefix of the normalised names of a layer's tensors."""
    return f"layers.{index}."


def head_bytes(spec: HeadSpec, dtype: torch.dtype) -> int:
    """Bytes of the head's weights in memory."""
    return sum(prod(tensor.shape) for tensor in expected_tensors(spec) if tensor.role != "table") * dtype.itemsize
