"""What layers read besides the stream: of each token P numbers a layer, from a table of tokens and from the token's embedding.

    a[t] = table[token t] * sqrt(P)                [L, P]
    b[t] = norm(W embedding[t] / sqrt(H))          [L, P], the norm over the P numbers of a layer
    inputs[t] = (a[t] + b[t]) / sqrt(2)

Layer l reads its own in a last block: stream += norm(W2 (gelu_tanh(W1 stream) * inputs[l])), times a number of the layer, if it
has one. Every rank has all of it. The table [V, L * P] may be larger than all other weights.
Source: transformers, models/gemma4 (Gemma4TextModel.project_per_layer_inputs, Gemma4TextDecoderLayer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.image_inputs import ImageInputs
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.fused import gelu_tanh_and_mul, rms_norm
from batchspec.model.layers.base import (
    NormedSpec,
    NormForm,
    ProductSpec,
    Projection,
    TensorSpec,
    WholeBlockSpec,
)
from batchspec.model.layers.forward import BlockSource, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec(WholeBlockSpec):
    """The shape of what computes the inputs of all layers."""

    hidden_size: int
    size: int
    """P"""
    num_layers: int
    """L"""
    vocab_size: int
    """V, of the table"""
    image_token: int
    """The token whose numbers in the table the tokens of images read; their embeddings are those of the image."""
    eps: float
    norms: NormForm

    @property
    def product(self) -> ProductSpec:
        part = Projection("per_layer_model_projection", self.inner_size, self.hidden_size)
        return ProductSpec((part,), quantisable=False)

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return (self.product,)

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        table = TensorSpec("embed_tokens_per_layer.weight", (self.vocab_size, self.inner_size), "weight")
        return table, self.norms.tensor("per_layer_projection_norm", self.size)

    @property
    def table_size(self) -> int:
        return self.vocab_size * self.inner_size

    @property
    def inner_size(self) -> int:
        return self.num_layers * self.size

    @property
    def activation_size(self) -> int:
        """What comes from the table and from the embedding, a temporary of each, and the sum."""
        return 5 * self.inner_size

    def build(self, source: BlockSource) -> LayerInputs:
        return LayerInputs(self, source)


class LayerInputs:
    """See the module's docstring."""

    def __init__(self, spec: LayerInputsSpec, source: BlockSource) -> None:
        self._spec = spec
        self._table, self._product = source.vector("embed_tokens_per_layer.weight"), source.product(spec.product)
        self._norm = source.vector("per_layer_projection_norm.weight")
        # transformers rounds this factor to the dtype of the table.
        self._factor = float(torch.tensor(spec.size**0.5, dtype=self._table.dtype))

    def __call__(self, token_ids: Tensor, embedded: Tensor, lora: LoraTokens | None, images: ImageInputs | None) -> Tensor:
        """token_ids int32 [T] and their embeddings [T, H], those of images in their places -> [T, L, P]."""
        if images is not None:
            token_ids = token_ids.index_fill(0, images.places, self._spec.image_token)
        spec, shape = self._spec, (len(token_ids), self._spec.num_layers, self._spec.size)
        of_tokens = self._table.index_select(0, token_ids).mul_(self._factor).view(shape)
        projected: Tensor = self._product(embedded, lora)
        of_embeddings = rms_norm(projected.mul_(spec.hidden_size**-0.5).view(shape), self._norm, spec.eps)
        return of_embeddings.add_(of_tokens).mul_(2**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputSpec(WholeBlockSpec, NormedSpec):
    """The shape of the block with which a layer reads its input. It norms its output, not the stream."""

    size: int
    """P"""
    norm: str | None = None

    @property
    def gate(self) -> ProductSpec:
        return ProductSpec((Projection("per_layer_input_gate", self.size, self.hidden_size),), quantisable=False)

    @property
    def out(self) -> ProductSpec:
        return ProductSpec((Projection("per_layer_projection", self.hidden_size, self.size),), quantisable=False)

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.gate, self.out

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        return self.stream_norms

    @property
    def inner_size(self) -> int:
        return self.size

    @property
    def activation_size(self) -> int:
        return 4 * self.size + self.hidden_size

    def build(self, source: BlockSource) -> LayerInput:
        return LayerInput(self, source)


class LayerInput:
    """See the module's docstring."""

    num_experts_read = None

    def __init__(self, spec: LayerInputSpec, source: BlockSource) -> None:
        self._eps = spec.eps
        self._gate, self._out = source.product(spec.gate), source.product(spec.out)
        self._post_norm = source.vector(f"{spec.post_norm}.weight")
        self._out_factor = None if spec.out_factor is None else source.vector(spec.out_factor)

    def pass_sizes(self, most: int) -> Sequence[int]:
        return ()

    def norms_in_product(self, stream: Stream) -> bool:
        return False

    def __call__(self, stream: Stream, lora: LoraTokens | None, *, add_in_product: bool) -> None:
        gate = stream.project(None, self._eps, self._gate, lora)
        inner = gelu_tanh_and_mul(torch.cat((gate, stream.layer_input), 1))
        stream.add(rms_norm(self._out(inner, lora), self._post_norm, self._eps), self._out_factor)
