"""A head that drafts a block: its tensors and its network. T tokens, R rows, H hidden, V draft vocabulary.

    context    c = norm(fc(the target's states)) [T, H];   K and V of every layer are products of c, all layers in one product
    block      x = embed(the newest token, masks);   L decoder layers, whose queries read the context and the block
    DSpark     logits of a draft += W2 w1[the token before it]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from batchspec.batch.image_inputs import ImageInputs
from batchspec.checkpoint.config_values import shown
from batchspec.checkpoint.files import LocalFiles, ModelFiles, StoredTensor, listed, stored_tensors, weight_names
from batchspec.checkpoint.weight_files import opened_weights
from batchspec.draft.block_spec import CONFIDENCE, CONFIDENCE_BIAS, MARKOV, MARKOV_OUT, BlockSpec, read_block
from batchspec.draft.bound_head import BoundHead, Place, layer_gemms
from batchspec.draft.head import HeadWeights
from batchspec.draft.head_tensors import head_prefix
from batchspec.draft.output import DraftOutput
from batchspec.draft.weights import check_tables, map_ids_of
from batchspec.errors import CheckpointError
from batchspec.model.checkpoint_part import block_tensors
from batchspec.model.fused import rms_norm
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.of_model import first_attention
from batchspec.model.layers.attention.paged import PagedStore
from batchspec.model.layers.base import Gemm, ProductSpec, Projection, TensorSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.products import gemm_products
from batchspec.model.quant.plain import PLAIN, Linear
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weight_checks import misfits
from batchspec.tuning.table import Product

_OTHER_NAMES = {
    "midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "dflash.": "", "dspark.": "",
    "markov_w1.": "markov_head.markov_w1.", "markov_w2.": "markov_head.markov_w2.",
}
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_PICKLES = ("mask_embedding.pt", "mask_embedding.bin", "mask_embedding.pth")
_WIDE = (CONFIDENCE, CONFIDENCE_BIAS)
"""Tensors that are kept in fp32, or in fp64 for such a model."""


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
    for i, layer in enumerate(block_layers(spec)):
        tensors += [tensor for block in layer.blocks for tensor in block_tensors(block, head_prefix(i))]
    return tensors


def block_bytes(spec: BlockSpec, dtype: torch.dtype) -> int:
    """Bytes of the head's weights in memory, with the second copy of the rows that compute K and V of the context."""
    stored = sum(prod(tensor.shape) for tensor in expected_tensors(spec) if tensor.role != "table")
    return (stored + sum(product.rows * product.k for product in _context_products(spec))) * dtype.itemsize


def _fc(spec: BlockSpec) -> ProductSpec:
    return ProductSpec((Projection("fc", spec.hidden_size, len(spec.aux_layer_ids) * spec.hidden_size, spec.fc_bias),))


def _context_products(spec: BlockSpec) -> Iterator[ProductSpec]:
    return (layer.attention.kv for layer in block_layers(spec))


def products(spec: BlockSpec) -> list[Product]:
    """The matrix products that drafting may use besides the target's output matrix, all with R * S tokens: fc, K and V of all
    layers, and those of a layer without its K and V."""
    context = ProductSpec(tuple(part for product in _context_products(spec) for part in product.parts))
    gemms = [Gemm(product=product, ops=("linear",)) for product in (_fc(spec), context)]
    gemms += [gemm for layer in block_layers(spec) for gemm in layer_gemms(layer) if gemm.product != layer.attention.kv]
    output = [("lm_head", spec.draft_vocab_size, spec.hidden_size)] if spec.own_head else []
    return [*gemm_products(gemms, spec.hidden_size), *output]


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeights:
    """A head's shape and its tensors by normalised name."""

    spec: BlockSpec
    tensors: Mapping[str, Tensor]
    map_ids: Tensor | None
    """int32 [V] target id of each draft id; None if they are equal."""

    def bind(self, target: Target, *, argmax: bool = True) -> BlockHead:
        return BlockHead(self, target, argmax=argmax)


class BlockHead(BoundHead):
    """A head bound to a target, whose embedding and output matrix it uses if its checkpoint has none."""

    def __init__(self, head: BlockWeights, target: Target, *, argmax: bool = True) -> None:
        spec, tensors = head.spec, head.tensors
        output = DraftOutput(
            target, tensors.get("lm_head.weight"), head.map_ids, draft_vocab_size=spec.draft_vocab_size,
            part=slice(0, spec.draft_vocab_size), ranks=None, argmax=argmax,
        )
        specs, sources = block_layers(spec), [HeadWeights(tensors, head_prefix(i)) for i in range(spec.num_layers)]
        layers = [layer.build(source) for layer, source in zip(specs, sources, strict=True)]
        super().__init__(target, layers, tensors["norm.weight"], spec.rms_eps, output, None)
        self._fc, self._hidden_norm = Linear(tensors["fc.weight"], tensors.get("fc.bias")), tensors["hidden_norm.weight"]
        prefixes = [head_prefix(i) for i in range(spec.num_layers)]
        names = [prefix + part.name for prefix in prefixes for part in specs[0].attention.kv.parts]
        bias = torch.cat([tensors[f"{name}.bias"] for name in names]) if spec.qkv_bias else None
        self._context = Linear(torch.cat([tensors[f"{name}.weight"] for name in names]), bias)
        self._qk_norms = [
            tuple(source.vector(f"self_attn.{name}.weight") if spec.qk_norm else None for name in ("q_norm", "k_norm"))
            for source in sources
        ]
        own = tensors.get("embed_tokens.weight")
        same = own is not None and own.shape == target.embedding.shape and torch.equal(own, target.embedding)
        self._embedding = target.embedding if own is None or same else own

    def features(self, aux_hidden_states: Tensor) -> Tensor:
        return rms_norm(self._fc(aux_hidden_states), self._hidden_norm, self._eps)

    def keep_all(self, features: Tensor, at: Place, kv: Sequence[LayerKV]) -> None:
        """Write K and V of every layer from features [T, H]: one product for all of them."""
        parts = self._context(features).chunk(len(kv), 1)
        for part, own, (q_norm, k_norm) in zip(parts, kv, self._qk_norms, strict=True):
            store = PagedStore(rope=at.rope, slot_mapping=at.slots, kv=own)
            store.rotate_and_store(part, q_norm=q_norm, k_norm=k_norm, eps=self._eps)

    def enter(
        self, tokens: Tensor, hidden: Tensor, *, row_ids: Tensor | None = None, positions: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The embedding alone enters layer 0: it is written to `hidden` [T, H], which becomes the residual stream. It is not
        scaled, whatever the target does: the sources' heads were trained so."""
        assert images is None, "tokens after a prompt are no images"
        torch.index_select(self._embedding, 0, tokens, out=hidden)
        return rms_norm(hidden, self._layers[0].attention.norm, self._eps), hidden


def open_block(files: ModelFiles, target: ModelSpec, *, aux_layers: str = "auto") -> BlockSpec:
    """Check a head by config.json, the headers of its weight files and its vocabulary tables; no weight is read.

    Raises CheckpointError for what `read_block` refuses, for tensors of wrong names, shapes or dtypes, for a d2t that leads out
    of the vocabulary, and for a pickled embedding of masks.
    """
    if pickled := sorted(name for name in files.names() if name in _PICKLES):
        raise CheckpointError(
            f"{files.where}: {pickled[0]} is a pickle, which is not read; save its mask embedding as a row of a safetensors "
            "embed_tokens, at mask_token_id"
        )
    stored: dict[str, StoredTensor] = {}
    for name, tensor in stored_tensors(files).items():
        if name.endswith(_IGNORED):
            continue
        if normalised(name) in stored:
            raise CheckpointError(f"{files.where}: {listed([name])} is stored twice, under two names; export the head again")
        stored[normalised(name)] = tensor
    spec = read_block(files.folder, stored, target, aux_layers=aux_layers)
    expected = expected_tensors(spec)
    unexpected = stored.keys() - {tensor.name for tensor in expected} - {"t2d", "d2t"}
    if problems := misfits(expected, stored, unexpected):
        raise CheckpointError(f"{files.where}: the head's weights do not fit config.json: {'; '.join(problems)}")
    if spec.mapped:
        check_tables(files, stored, spec.vocab_size)
    return spec


def load_block(folder: Path, spec: BlockSpec, *, dtype: torch.dtype, device: torch.device) -> BlockWeights:
    """Read the safetensors of a head that `open_block` has checked, in the target's dtype, the confidence in fp32 or fp64.

    Raises CheckpointError for a file that was changed meanwhile.
    """
    tensors: dict[str, Tensor] = {}
    for file_name in weight_names(LocalFiles(folder)):
        with opened_weights(folder / file_name) as file:
            tensors |= {normalised(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    map_ids = map_ids_of(shown(folder), spec.vocab_size, tensors) if spec.mapped else None
    kept = {}
    for tensor in expected_tensors(spec):
        if tensor.role == "table":
            continue
        if tensor.name not in tensors or tensors[tensor.name].shape != tensor.shape:
            raise CheckpointError(f"{shown(folder)}: {tensor.name} has changed since it was checked; run the job again")
        kept[tensor.name] = tensors[tensor.name].to(device=device, dtype=_dtype_of(tensor.name, dtype))
    return BlockWeights(spec, kept, None if map_ids is None else map_ids.to(device))


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if name in _WIDE else dtype


def dummy_block(spec: BlockSpec, *, dtype: torch.dtype, device: torch.device) -> BlockWeights:
    """Random weights of the right shapes, the same in every run on one kind of device; draft ids are spread over the
    vocabulary."""
    generator, tensors = torch.Generator(device).manual_seed(1), {}
    for tensor in expected_tensors(spec):
        if tensor.role != "table":
            out = torch.empty(tensor.shape, dtype=_dtype_of(tensor.name, dtype), device=device)
            tensors[tensor.name] = out.fill_(1.0) if tensor.role == "norm" else out.normal_(0.0, 0.02, generator=generator)
    map_ids = torch.arange(spec.draft_vocab_size, device=device) * spec.vocab_size // spec.draft_vocab_size
    return BlockWeights(spec, tensors, map_ids.int() if spec.mapped else None)


def dummy_block_spec(target: ModelSpec, *, draft_vocab_size: int = 32000, num_layers: int = 5, block_size: int = 8) -> BlockSpec:
    """A typical DSpark head: five dense layers of the target's shape, as many of its states, Markov matrices of rank 256."""
    vocab, like, depth = min(draft_vocab_size, target.vocab_size), first_attention(target), target.num_layers
    taps = sorted({round(1 + i * (depth - 1) / num_layers) for i in range(num_layers)})
    return BlockSpec(
        hidden_size=target.hidden_size, num_layers=num_layers, num_heads=like.num_heads, num_kv_heads=like.num_kv_heads,
        head_dim=like.head_dim, intermediate_size=target.intermediate_size, vocab_size=target.vocab_size, draft_vocab_size=vocab,
        aux_layer_ids=tuple(taps), rms_eps=target.rms_eps, rope=target.rope.of_heads, windows=(None,) * num_layers,
        causal=(False,) * num_layers, windows_at_anchor=False, block_size=block_size, from_anchor=True,
        mask_token_id=target.vocab_size - 1, markov_rank=256, confidence="markov", own_head=vocab < target.vocab_size,
        mapped=vocab < target.vocab_size,
    )
