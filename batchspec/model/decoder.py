"""The forward pass of decoder layers for inference: packed weights, fused kernels, everything in place. T tokens, H hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.moe.combine import combine
from batchspec.model.fused import (
    add_norm,
    combine_norm,
    combine_quantised,
    norm_quantised,
    reduce_norm,
    rms_norm,
    silu_and_mul,
)
from batchspec.model.layers.base import GroupedSpec, ProductSpec
from batchspec.model.layers.forward import GroupedProduct, Product
from batchspec.model.lora_products import LoraStacks
from batchspec.model.quant.base import Weights
from batchspec.model.quant.formats import Formats


class Pairs(NamedTuple):
    """The outputs of the experts of T tokens, before they are summed."""

    values: Tensor
    """[T * k, H]"""
    weights: Tensor
    """[T, k]"""


class Partial(NamedTuple):
    """The outputs of this rank's products, before they are summed over the ranks."""

    values: Tensor
    """[T, H]"""


class Scaled(NamedTuple):
    """Values [T, H] to be added, and a number [1] with which the sum is multiplied."""

    values: Tensor
    factor: Tensor


class ResidualStream:
    """The residual stream [T, H], changed in place, and the values that the next norm adds to it in the same kernel.

    If ranks compute a model together, every rank has the whole stream. The ranks' parts of what is added are exchanged when the
    next norm reads the stream: two exchanges per layer.
    """

    __slots__ = ("_layer_inputs", "_pending", "_ranks", "layer", "live", "residual")

    def __init__(
        self, residual: Tensor, live: Tensor | None = None, ranks: Collectives | None = None, layer_inputs: Tensor | None = None
    ) -> None:
        """residual [T, H]: if its rows are slices of wider ones, products do not add to them.

        live   bool [T] False for dead tokens, which go through no expert; None: no token is dead
        ranks  set for a model that several ranks compute
        layer_inputs  [T, L, P] of a model whose layers have inputs of their own
        """
        self.residual, self.live, self._ranks, self._layer_inputs = residual, live, ranks, layer_inputs
        self.layer = 0
        """Index of the layer that reads it."""
        self._pending: Tensor | Pairs | Partial | Scaled | None = None

    def select(self, places: Tensor) -> ResidualStream:
        """The stream of some tokens, by their indices int64 [R]; only right after a norm."""
        assert self._pending is None
        live, inputs = (None if own is None else own.index_select(0, places) for own in (self.live, self._layer_inputs))
        selected = ResidualStream(self.residual.index_select(0, places), live, self._ranks, inputs)
        selected.layer = self.layer
        return selected

    @property
    def layer_input(self) -> Tensor:
        assert self._layer_inputs is not None
        return self._layer_inputs[:, self.layer]

    def norms_in_product(self, product: Product, *, gated: bool) -> bool:
        if self._ranks is not None:  # products must leave their outputs to be exchanged
            return False
        return self.residual.is_contiguous() and product.norms_input(self.residual, gated=gated)

    def project(
        self, norm: Tensor | None, eps: float, product: Product, lora: LoraTokens | None, *, gated: bool = False,
        out_aux: Tensor | None = None,
    ) -> Any:
        form = product.fp8_form
        if form is not None and norm is not None:
            pending, self._pending = self._pending, None
            if isinstance(pending, Pairs):
                rows = combine_quantised(*pending, self.residual, norm, eps, form, out_aux)
            elif isinstance(pending, Partial):
                assert self._ranks is not None
                rows = self._ranks.add_norm_fp8(pending.values, self.residual, norm, eps, form, out_aux=out_aux)
            else:
                values, factor = pending if isinstance(pending, Scaled) else (pending, None)
                rows = norm_quantised(values, self.residual, norm, eps, form, out_aux, factor)
            out = product.of_fp8(rows)
            return silu_and_mul(out) if gated else out
        if self._pending is not None or norm is None:
            x = self._summed(out_aux) if norm is None else self.normed(norm, eps, out_aux=out_aux)
            return product.swiglu(x, lora) if gated else product(x, lora)
        if out_aux is not None:
            out_aux.copy_(self.residual)
        of_norm = product.swiglu_of_norm if gated else product.of_norm
        return of_norm(self.residual, norm, eps, lora)

    def normed(self, norm: Tensor, eps: float, *, out_aux: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if isinstance(pending, Pairs):
                return combine_norm(*pending, self.residual, norm, eps, out_aux, out)
            if isinstance(pending, Partial):
                assert self._ranks is not None
                return reduce_norm(pending.values, self.residual, norm, eps, self._ranks, out_aux, out)
            values, factor = pending if isinstance(pending, Scaled) else (pending, None)
            return add_norm(values, self.residual, norm, eps, out_aux, out, factor)
        if out_aux is not None:
            out_aux.copy_(self.residual)
        normed = rms_norm(self.residual, norm, eps)
        return normed if out is None else out.copy_(normed)

    def add_rows(self, places: Tensor, rows: Tensor) -> None:
        """Add rows [N, H] to the tokens at places int64 [N], which are different."""
        self._summed(None).index_add_(0, places, rows)

    def settle(self, out_aux: Tensor | None) -> None:
        self._summed(out_aux)

    def _summed(self, out_aux: Tensor | None) -> Tensor:
        """The stream itself [T, H], with all that was added. out_aux [T, H]: it is also written here, if given."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if isinstance(pending, Pairs):
                pending = self.combined(*pending)
            elif isinstance(pending, Partial):
                pending = self.reduced(pending.values)
            values, factor = pending if isinstance(pending, Scaled) else (pending, None)
            self.residual.add_(values)
            if factor is not None:
                self.residual.mul_(factor)
        if out_aux is not None:
            out_aux.copy_(self.residual)
        return self.residual

    def combined(self, values: Tensor, weights: Tensor) -> Tensor:
        added = values.new_empty(len(weights), values.shape[-1])
        combine(values, weights, out=added)
        return added

    def reduced(self, values: Tensor) -> Tensor:
        return values if self._ranks is None else self._ranks.sum(values)

    def add(self, values: Tensor, factor: Tensor | None = None) -> None:
        assert self._pending is None
        self._pending = values if factor is None else Scaled(values, factor)

    def add_output(self, values: Tensor) -> None:
        assert self._pending is None
        self._pending = values if self._ranks is None else Partial(values)

    def add_pairs(self, values: Tensor, weights: Tensor, shared: Tensor | None = None) -> None:
        assert self._pending is None
        if self._ranks is None:
            if shared is not None:
                self.residual.add_(shared)
            self._pending = Pairs(values, weights)
        else:
            combined = self.combined(values, weights)
            self._pending = Partial(combined if shared is None else combined.add_(shared))

    def add_product(self, product: Product, x: Tensor, lora: LoraTokens | None, *, in_product: bool) -> None:
        assert self._pending is None
        if self._ranks is not None:
            self._pending = Partial(product(x, lora))
        else:
            self._pending = product.add_to(self.residual, x, lora) if in_product else product(x, lora)


class LayerWeights:
    """The weights of one layer of a checkpoint, each projection in its format, with the adapters of its rows: a BlockSource."""

    def __init__(self, weights: Weights, formats: Formats, prefix: str, lora: LoraStacks | None = None) -> None:
        self._weights, self._formats, self._prefix, self._lora = weights, formats, prefix, lora

    def product(self, spec: ProductSpec) -> Product:
        """Raises CheckpointError for parts of different formats, which cannot be multiplied as one matrix."""
        names = [self._prefix + part.name for part in spec.parts]
        made = self._formats.of_product(names).load(self._weights, names, bias=spec.bias)
        return made if self._lora is None else self._lora.adapted(self._prefix, spec, made)

    def matrix(self, spec: ProductSpec) -> Tensor:
        (part,) = spec.parts
        name = self._prefix + part.name
        return self._formats.of_product([name]).matrix(self._weights, name)

    def vector(self, name: str) -> Tensor:
        return self._weights.tensor(self._prefix + name)

    def grouped(self, spec: GroupedSpec) -> GroupedProduct:
        """Raises CheckpointError for experts of different formats."""
        own = replace(spec, name=self._prefix + spec.name)
        names = [part.name for expert in range(own.num_experts) for part in own.of(expert).parts]
        return self._formats.of_product(names).load_grouped(self._weights, own)
