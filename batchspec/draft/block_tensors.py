"""The tensors of a head for blocks under one set of names, the layers that they make, and their products.

T tokens, R rows, S queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch

from batchspec.draft.block_conv import BlockConvSpec, block_convs
from batchspec.draft.block_parts import CONFIDENCE, CONFIDENCE_BIAS, MARKOV, MARKOV_OUT, PREDECESSORS, SELECTOR, SUCCESSORS
from batchspec.draft.block_spec import BlockSpec
from batchspec.draft.bound_head import layer_gemms
from batchspec.draft.head_tensors import head_prefix
from batchspec.model.checkpoint_part import block_tensors
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.base import Gemm, ProductSpec, Projection, TensorSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.products import gemm_products
from batchspec.model.quant.plain import PLAIN
from batchspec.tuning.table import Product

_OTHER_NAMES = {
    "midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "dflash.": "", "dspark.": "",
    "markov_w1.": "markov_head.markov_w1.", "markov_w2.": "markov_head.markov_w2.",
    f"{PREDECESSORS}.weight": PREDECESSORS, f"{SUCCESSORS}.weight": SUCCESSORS,
}
IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


def normalised(name: str) -> str:
    """A tensor's name -> `fc.weight`, `hidden_norm.weight`, `layers.{i}.self_attn.q_proj.weight`, `norm.weight`, `d2t` ..."""
    name = name.removeprefix("model.")
    for other, usual in _OTHER_NAMES.items():
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name


def block_layers(spec: BlockSpec) -> tuple[LayerSpec, ...]:
    mlp = GatedMlpSpec(hidden_size=spec.hidden_size, inner_size=spec.intermediate_size, eps=spec.rms_eps, bias=spec.mlp_bias)
    attention = AttentionSpec(
        hidden_size=spec.hidden_size, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        eps=spec.rms_eps, qkv_bias=spec.qkv_bias, o_bias=spec.o_bias, qk_norm=spec.qk_norm,
    )
    return tuple(LayerSpec(replace(attention, window=window), (mlp,)) for window in spec.windows)


def expected_tensors(spec: BlockSpec) -> list[TensorSpec]:
    """Every tensor that the spec requires, by normalised name, in the order in which `dummy_block` draws them."""
    hidden = spec.hidden_size
    tensors = [*PLAIN.tensors(_fc(spec).parts[0])]
    tensors += [TensorSpec(f"{name}.weight", (hidden,), "norm") for name in ("hidden_norm", "norm")]
    if spec.own_embedding:
        tensors.append(TensorSpec("embed_tokens.weight", (spec.vocab_size, hidden), "weight"))
    if spec.own_head:
        tensors.append(TensorSpec("lm_head.weight", (spec.draft_vocab_size, hidden), "weight"))
    if spec.mapped:
        tensors.append(TensorSpec("d2t", (spec.draft_vocab_size,), "table", ("I64", "I32")))
    if spec.markov_rank:
        tensors.append(TensorSpec(MARKOV, (spec.vocab_size, spec.markov_rank), "weight"))
        tensors.append(TensorSpec(MARKOV_OUT, (spec.draft_vocab_size, spec.markov_rank), "weight"))
    if spec.confidence != "none":
        width = hidden + (spec.markov_rank if spec.confidence == "markov" else 0)
        tensors.append(TensorSpec(CONFIDENCE, (1, width), "weight"))
        tensors.append(TensorSpec(CONFIDENCE_BIAS, (1,), "bias"))
    if spec.selector_rank:
        tensors += [TensorSpec(name, (spec.vocab_size, spec.selector_rank), "weight") for name in (PREDECESSORS, SUCCESSORS)]
        tensors += PLAIN.tensors(_selector(spec).parts[0])
    for i, layer in enumerate(block_layers(spec)):
        blocks = [*layer.blocks, *convs_of(spec)]
        tensors += [tensor for block in blocks for tensor in block_tensors(block, head_prefix(i))]
    return tensors


def block_bytes(spec: BlockSpec, dtype: torch.dtype) -> int:
    """Bytes of the head's weights in memory, with the second copy of the rows that compute K and V of the context."""
    stored = sum(prod(tensor.shape) for tensor in expected_tensors(spec) if tensor.role != "table")
    return (stored + sum(product.rows * product.k for product in _context_products(spec))) * dtype.itemsize


def _fc(spec: BlockSpec) -> ProductSpec:
    return ProductSpec((Projection("fc", spec.hidden_size, len(spec.aux_layer_ids) * spec.hidden_size, spec.fc_bias),))


def _selector(spec: BlockSpec) -> ProductSpec:
    return ProductSpec((Projection(SELECTOR, spec.selector_rank, spec.hidden_size),))


def convs_of(spec: BlockSpec) -> tuple[BlockConvSpec, ...]:
    """The convolutions of each layer."""
    return block_convs(spec.hidden_size, spec.conv_taps, spec.conv_groups)


def _context_products(spec: BlockSpec) -> Iterator[ProductSpec]:
    return (layer.attention.kv for layer in block_layers(spec))


def products(spec: BlockSpec) -> list[Product]:
    """The matrix products that drafting may use besides the target's output matrix, all with R * S tokens: fc, K and V of all
    layers, those of a layer without its K and V and of its convolutions, and that of a selector."""
    context = ProductSpec(tuple(part for product in _context_products(spec) for part in product.parts))
    gemms = [Gemm(product=product, ops=("linear",)) for product in (_fc(spec), context)]
    gemms += [gemm for layer in block_layers(spec) for gemm in layer_gemms(layer) if gemm.product != layer.attention.kv]
    gemms += [gemm for conv in convs_of(spec) for gemm in conv.gemms(1)]
    gemms += [Gemm(product=_selector(spec), ops=("linear",))] if spec.selector_rank else []
    output = [("lm_head", spec.draft_vocab_size, spec.hidden_size)] if spec.own_head else []
    return [*gemm_products(gemms, spec.hidden_size), *output]
