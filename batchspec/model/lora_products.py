"""LoRA adapters that are not merged: the part of its row's adapter is added to the product of each token.

    y = x W' + bias + s B (A x)     A [r, K], B [N, r] of the row's adapter; nothing is added to rows without one

A job's adapters are in memory as one stack per product, in the model's dtype. Their ranks are padded with zeros to the smallest
of 16, 32 and 64 that holds the largest rank of the product. If a product is cut over GPUs by columns, each GPU holds A as a whole
and its rows of B; if by rows, its columns of A and B as a whole, so that the sum over the ranks includes the adapters' part
without another exchange.
The kernels are those of `kernels/lora`; their list of tokens is made once a pass for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from batchspec.kernels.lora.lora_expand import lora_expand
from batchspec.kernels.lora.lora_shrink import lora_shrink
from batchspec.kernels.lora.lora_tokens import LoraTokens, lora_tokens
from batchspec.model.layers.base import ProductSpec, Share
from batchspec.model.layers.forward import Product
from batchspec.model.lora import Adapter
from batchspec.model.lora_shape import LoraShape
from batchspec.model.shard import share_of
from batchspec.model.spec import ModelSpec


class LoraWeights(NamedTuple):
    """A and B of all N adapters for one product of P parts (q, k and v are three; gate and up two)."""

    a: Tensor
    """[N, P, r, K]"""
    b: Tensor
    """[N, rows of all parts, r]"""
    scales: Tensor
    """fp32, in a model of fp64 fp64 [N, P]; 0: this adapter has no such part"""
    part_rows: tuple[int, ...]

    @classmethod
    def zeros(cls, shape: LoraShape, rank: int, product: ProductSpec, dtype: torch.dtype, device: torch.device) -> LoraWeights:
        count, parts, wide = shape.num_adapters, len(product.parts), torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros((count, parts, rank, product.k), dtype=dtype, device=device),
            torch.zeros((count, product.rows, rank), dtype=dtype, device=device),
            torch.zeros((count, parts), dtype=wide, device=device),
            tuple(part.rows for part in product.parts),
        )

    def put(self, entry: int, part: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Store an adapter of one part: a [its rank, K], b [rows of the part, its rank]."""
        first, rank = sum(self.part_rows[:part]), a.shape[0]
        self.a[entry, part, :rank].copy_(a)
        self.b[entry, first : first + self.part_rows[part], :rank].copy_(b)
        self.scales[entry, part] = scale

    def add(self, out: Tensor, x: Tensor, tokens: LoraTokens) -> None:
        """out [T, rows] += the adapters' part of the product of x [T, K]: two launches. Does not synchronise on a GPU."""
        h = lora_shrink(x, self.a, self.scales, tokens)
        lora_expand(h, self.b, self.scales, tokens, part_rows=self.part_rows, out=out)


class AdaptedProduct(Product):
    """A product of the base model plus the adapters of its rows.

    It reads rows in the model's dtype and returns a sum: kernels that norm or quantise before the base product, or gate after
    it, are not used.
    """

    def __init__(self, base: Product, weights: LoraWeights) -> None:
        self._base, self._weights = base, weights

    def __call__(self, x: Tensor, lora: LoraTokens | None) -> Tensor:
        assert lora is not None, "a pass of a model with adapters must say which rows have which"
        out: Tensor = self._base(x, lora)
        self._weights.add(out, x, lora)
        return out

    def add_to(self, residual: Tensor, x: Tensor, lora: LoraTokens | None) -> Tensor | None:
        assert lora is not None
        out = self._base.add_to(residual, x, lora)
        self._weights.add(residual if out is None else out, x, lora)
        return out


class LoraStacks:
    """The adapters of a model in memory, by product."""

    def __init__(self, shape: LoraShape, weights: Mapping[str, LoraWeights]) -> None:
        """weights: by the full name of the product's first projection."""
        self.shape, self._weights = shape, weights

    def adapted(self, prefix: str, product: ProductSpec, base: Product) -> Product:
        """The base product with its adapters; the base product itself if no adapter has a part of it."""
        weights = self._weights.get(prefix + product.parts[0].name)
        return base if weights is None else AdaptedProduct(base, weights)

    def tokens(self, adapters: Tensor) -> LoraTokens:
        """The work list of a pass: adapters int32 [T], 0 is none."""
        return lora_tokens(adapters, self.shape.num_adapters)


class AdapterSource(Protocol):
    """Adapters that are not in memory yet: in files (AdapterSet), or random (DummyAdapters)."""

    @property
    def shape(self) -> LoraShape: ...

    def load(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> LoraStacks:
        """The adapters of the part of the model that `spec` describes, on the device."""


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of a job, numbered 1, 2, ... in this order."""

    adapters: tuple[Adapter, ...]
    names: tuple[str, ...] = ()
    """Their names in the column `adapter`. (): there is one, for all rows."""

    @property
    def shape(self) -> LoraShape:
        ranks: dict[str, int] = {}
        for adapter in self.adapters:
            for module, delta in adapter.kept.items():
                ranks[module] = max(ranks.get(module, 0), delta.rank)
        return LoraShape(len(self.adapters), tuple(sorted(ranks.items())), of_all_rows=not self.names)

    def load(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> LoraStacks:
        """Raises CheckpointError for a file that has changed since it was opened."""
        shape, whole = self.shape, spec.whole or spec
        weights = {prefix + product.parts[0].name: made for prefix, product, made in empty_stacks(shape, spec, dtype, device)}
        shares = {
            prefix + part.name: share_of(spec, index, part.name)
            for index, (prefix, block) in enumerate(whole.blocks())
            for product in block.products
            for part in product.parts
        }
        places = {
            prefix + part.name: (prefix + product.parts[0].name, place)
            for prefix, block in whole.blocks()
            for product in block.products
            for place, part in enumerate(product.parts)
        }
        for entry, adapter in enumerate(self.adapters):
            tensors = adapter.tensors()
            for module, delta in adapter.kept.items():
                product, part = places[module]
                a, b = part_of_adapter(tensors[delta.a], tensors[delta.b], shares[module])
                weights[product].put(entry, part, a, b, delta.scale)
        return LoraStacks(shape, weights)


@dataclass(frozen=True, slots=True)
class DummyAdapters:
    """Random adapters of all projections, for benchmarks."""

    num_adapters: int
    rank: int
    modules: tuple[str, ...]

    @classmethod
    def of(cls, spec: ModelSpec, num_adapters: int, rank: int) -> DummyAdapters:
        whole = spec.whole or spec
        names = (prefix + part.name for prefix, block in whole.blocks() for own in block.products for part in own.parts)
        return cls(num_adapters, rank, tuple(names))

    @property
    def shape(self) -> LoraShape:
        return LoraShape(self.num_adapters, tuple((name, self.rank) for name in sorted(self.modules)))

    def load(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> LoraStacks:
        noise, weights = torch.Generator(device).manual_seed(0), {}
        for prefix, product, made in empty_stacks(self.shape, spec, dtype, device):
            made.a[:, :, : self.rank].normal_(0, product.k**-0.5, generator=noise)
            made.b[:, :, : self.rank].normal_(0, 0.02, generator=noise)
            made.scales.fill_(1.0)
            weights[prefix + product.parts[0].name] = made
        return LoraStacks(self.shape, weights)


def empty_stacks(
    shape: LoraShape, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, ProductSpec, LoraWeights]]:
    """Zeros for each product that an adapter changes, with the prefix of its layer."""
    for prefix, block in spec.blocks():
        for product in block.products:
            if rank := shape.rank_of(prefix, product):
                yield prefix, product, LoraWeights.zeros(shape, rank, product, dtype, device)


def part_of_adapter(a: Tensor, b: Tensor, share: Share | None) -> tuple[Tensor, Tensor]:
    """The parts of A [r, K] and B [N, r] of one projection that a rank holds; share None: all."""
    if share is None:
        return a, b
    if share.cut == "columns":
        return a, torch.cat([b[own] for own in share.ranges])
    return torch.cat([a[:, own] for own in share.ranges], 1), b
