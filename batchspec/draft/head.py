"""An EAGLE-3 head: its tensors, and its network. T tokens, R rows, H hidden, NH heads of D numbers.

Ranks may compute a head together (`batchspec.draft.shard`); NH is then the number of a rank's heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.image_inputs import ImageInputs
from batchspec.draft.bound_head import BoundHead, layer_gemms, put_images
from batchspec.draft.formats import HeadSpec
from batchspec.draft.head_tensors import HIDDEN_NORM, fc_product, head_layers, head_prefix
from batchspec.draft.output import DraftOutput
from batchspec.kernels.drafting.eagle_head_input import eagle_head_input
from batchspec.kernels.norm_rope.norm import rms_norm as tap_norm
from batchspec.model.fused import rms_norm
from batchspec.model.layers.base import Gemm, GroupedSpec, ProductSpec
from batchspec.model.layers.forward import GroupedProduct
from batchspec.model.products import gemm_products
from batchspec.model.quant.plain import Linear
from batchspec.model.target import Target
from batchspec.tuning.table import Product


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A head's shape and its tensors by normalised name."""

    spec: HeadSpec
    tensors: dict[str, Tensor]
    map_ids: Tensor | None
    """int32 [draft vocabulary] target id of each draft id; None if they are equal."""

    def bind(self, target: Target, *, argmax: bool = True) -> EagleHead:
        return EagleHead(self, target, argmax=argmax)


class HeadWeights:
    """A BlockSource: a layer's weights among those of a head, which are not quantised."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def product(self, spec: ProductSpec) -> Linear:
        names = [self._prefix + part.name for part in spec.parts]
        weight = torch.cat([self._tensors[f"{name}.weight"] for name in names])
        return Linear(weight, torch.cat([self._tensors[f"{name}.bias"] for name in names]) if spec.bias else None)

    def matrix(self, spec: ProductSpec) -> Tensor:
        (part,) = spec.parts
        return self._tensors[f"{self._prefix}{part.name}.weight"]

    def vector(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def grouped(self, spec: GroupedSpec) -> GroupedProduct:
        raise NotImplementedError  # layers of heads are dense


class EagleHead(BoundHead):
    """A head bound to a target, whose embedding and lm_head it uses if its checkpoint has none."""

    def __init__(self, head: Head, target: Target, *, argmax: bool = True) -> None:
        spec, tensors = head.spec, head.tensors
        ranks = None if spec.whole is None else target.ranks
        output = DraftOutput(
            target, tensors.get("lm_head.weight"), head.map_ids, draft_vocab_size=spec.draft_vocab_size, part=spec.draft_part,
            ranks=ranks, argmax=argmax,
        )
        layers = [layer.build(HeadWeights(tensors, head_prefix(i))) for i, layer in enumerate(head_layers(spec))]
        super().__init__(target, layers, tensors["norm.weight"], spec.rms_eps, output, ranks)
        self.spec = spec
        self._fc = None if spec.final_hidden else Linear(tensors["fc.weight"], tensors.get("fc.bias"))
        self._input_norm = tensors.get("input_norm.weight")
        self._tap_norms = [tensors[f"fc_norm.{i}.weight"] for i in range(len(spec.aux_layer_ids))] if spec.fc_norm else []
        self._hidden_norm = tensors[HIDDEN_NORM]
        own = tensors.get("embed_tokens.weight")
        same = own is not None and own.shape == target.embedding.shape and torch.equal(own, target.embedding)
        self._embedding = target.embedding if own is None or same else own

    def features(self, aux_hidden_states: Tensor) -> Tensor:
        if self._fc is None:
            return rms_norm(aux_hidden_states, self._target.final_norm, self._target.spec.rms_eps)
        if self._input_norm is not None:
            aux_hidden_states = rms_norm(aux_hidden_states, self._input_norm, self._eps)
        elif self._tap_norms:
            normed, size = torch.empty_like(aux_hidden_states), self.spec.target_hidden_size
            for tap, out, weight in zip(aux_hidden_states.split(size, 1), normed.split(size, 1), self._tap_norms, strict=True):
                tap_norm(tap, weight, self._eps, out=out)
            aux_hidden_states = normed
        return self._fc(aux_hidden_states)

    def enter(
        self, tokens: Tensor, hidden: Tensor, *, row_ids: Tensor | None = None, positions: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The input of layer 0 is [T, 2H]: the normed embedding, then the normed hidden state."""
        size = self.spec.hidden_size
        normed = hidden.new_empty(hidden.shape[0], 2 * size)
        eagle_head_input(
            tokens, hidden, self._embedding, self._layers[0].attention.norm, self._hidden_norm, self._eps,
            out=normed, row_ids=row_ids, positions=positions,
        )
        put_images(images, self._layers[0].attention.norm, self._eps, normed[:, :size])
        return normed, normed[:, size:] if self.spec.norm_before_residual else hidden


def products(spec: HeadSpec) -> list[Product]:
    """The matrix products that drafting may use: with R * S tokens fc, qkv and K/V, with R tokens the others."""
    fc = fc_product(spec)
    gemms = [] if fc is None else [Gemm(product=fc, ops=("linear",))]
    gemms += [gemm for layer in head_layers(spec) for gemm in layer_gemms(layer)]
    return [*gemm_products(gemms, spec.hidden_size), ("lm_head", spec.draft_vocab_size, spec.hidden_size)]
