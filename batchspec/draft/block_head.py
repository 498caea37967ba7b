"""A head that drafts a block: its weights and its network. T tokens, R rows, H hidden, V draft vocabulary.

    context    c = norm(fc(the target's states)) [T, H];   K and V of every layer are products of c, all layers in one product
    block      x = embed(the newest token, masks);   L decoder layers, whose queries read the context and the block
    DSpark     logits of a draft += W2 w1[the token before it]
    DFlash2    logits of its best tokens += B (a[the token before it] * P state);   convolutions within the block (`block_conv`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from batchspec.batch.image_inputs import ImageInputs
from batchspec.cache.page_format import LayerPages
from batchspec.checkpoint.config_values import shown
from batchspec.checkpoint.files import LocalFiles, ModelFiles, StoredTensor, listed, stored_tensors, weight_names
from batchspec.checkpoint.weight_files import opened_weights
from batchspec.draft.block_conv import ConvolvedLayer
from batchspec.draft.block_parts import CONFIDENCE, CONFIDENCE_BIAS
from batchspec.draft.block_spec import BlockSpec, read_block
from batchspec.draft.block_tensors import IGNORED, block_layers, convs_of, expected_tensors, normalised
from batchspec.draft.bound_head import BoundHead, Place
from batchspec.draft.head import HeadWeights
from batchspec.draft.head_tensors import head_prefix
from batchspec.draft.output import DraftOutput
from batchspec.draft.weights import check_tables, map_ids_of
from batchspec.errors import CheckpointError
from batchspec.model.decoder import ResidualStream
from batchspec.model.fused import rms_norm
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.of_model import first_attention
from batchspec.model.layers.attention.paged import PagedStore
from batchspec.model.layers.attention.plan import AttentionPlan
from batchspec.model.quant.plain import Linear
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weight_checks import misfits

_PICKLES = ("mask_embedding.pt", "mask_embedding.bin", "mask_embedding.pth")
_WIDE = (CONFIDENCE, CONFIDENCE_BIAS)
"""Tensors that are kept in fp32, or in fp64 for such a model."""


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
        convs = convs_of(spec)
        layers = [
            ConvolvedLayer(layer, convs, source) if convs else layer.build(source)
            for layer, source in zip(specs, sources, strict=True)
        ]
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

    def block_layer(
        self, index: int, normed: Tensor, residual: Tensor, at: Place, pages: LayerPages, plan: AttentionPlan, queries: int
    ) -> Tensor:
        """`layer` for blocks of `queries` queries, with the convolutions of a layer that has them."""
        layer = self._layers[index]
        if not isinstance(layer, ConvolvedLayer):
            return self.layer(index, normed, residual, at, pages, plan)
        read, deltas = layer.around_attention.into(normed, queries)
        stream, attend = ResidualStream(residual), layer.attention.spec.attend(pages, plan)
        layer.after_queries(self.queries(index, read, at, pages), deltas, stream, attend, queries)
        return self._normed(index, stream)

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
        if name.endswith(IGNORED):
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
            ones = tensor.role in ("norm", "scale")
            tensors[tensor.name] = out.fill_(1.0) if ones else out.normal_(0.0, 0.02, generator=generator)
    map_ids = torch.arange(spec.draft_vocab_size, device=device) * spec.vocab_size // spec.draft_vocab_size
    return BlockWeights(spec, tensors, map_ids.int() if spec.mapped else None)


def dummy_block_spec(
    target: ModelSpec, *, draft_vocab_size: int = 32000, num_layers: int = 5, block_size: int = 8, dflash2: bool = False
) -> BlockSpec:
    """A typical DSpark head: five dense layers of the target's shape, as many of its states, Markov matrices of rank 256.

    dflash2  a typical DFlash2 head: in their place convolutions of two taps with groups of 16 channels, and a selector of that
             rank, over all tokens
    """
    vocab, like, depth = min(draft_vocab_size, target.vocab_size), first_attention(target), target.num_layers
    taps = sorted({round(1 + i * (depth - 1) / num_layers) for i in range(num_layers)})
    spec = BlockSpec(
        hidden_size=target.hidden_size, num_layers=num_layers, num_heads=like.num_heads, num_kv_heads=like.num_kv_heads,
        head_dim=like.head_dim, intermediate_size=target.intermediate_size, vocab_size=target.vocab_size, draft_vocab_size=vocab,
        aux_layer_ids=tuple(taps), rms_eps=target.rms_eps, rope=target.rope.of_heads, windows=(None,) * num_layers,
        causal=(False,) * num_layers, windows_at_anchor=False, block_size=block_size, from_anchor=True,
        mask_token_id=target.vocab_size - 1, markov_rank=256, confidence="markov", own_head=vocab < target.vocab_size,
        mapped=vocab < target.vocab_size,
    )
    if not dflash2:
        return spec
    return replace(
        spec, from_anchor=False, block_size=block_size + 1, draft_vocab_size=target.vocab_size, own_head=False, mapped=False,
        markov_rank=0, confidence="none", selector_rank=256, conv_taps=2,
        conv_groups=target.hidden_size // gcd(target.hidden_size, 16),
    )
