"""Convolutions within a block, around the attention and the MLP of each layer of a DFlash2 head. T = R * S queries, H hidden.

    d = kernel_projection(x)                        [T, 2 (into, out of), taps, groups] what the state adds to the taps
    attention or MLP reads conv(x, base[0] + d[:, 0]), and conv(its output, base[1] + d[:, 1]) is added to the residual stream

x is the norm of the stream. Keys and values of the context are not convolved.
Source: DFlash2 (https://github.com/z-lab/dflash, dflash/model.py, GroupedDynamicCausalConv).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchspec.draft.block_parts import BASE_KERNEL, CONVS, KERNELS
from batchspec.kernels.drafting.block_conv import block_conv
from batchspec.model.decoder import ResidualStream
from batchspec.model.layers.base import ProductSpec, Projection, TensorSpec, WholeBlockSpec
from batchspec.model.layers.forward import Attend, BlockSource
from batchspec.model.layers.layer import DecoderLayer, LayerSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec, GatedProducts


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConvSpec(WholeBlockSpec):
    """The shape of the two convolutions around one block of a layer."""

    name: str
    hidden_size: int
    taps: int
    groups: int

    @property
    def inner_size(self) -> int:
        """Values of one side for each query."""
        return self.taps * self.groups

    @property
    def activation_size(self) -> int:
        return 2 * self.inner_size + self.hidden_size

    @property
    def kernels(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.{KERNELS}", 2 * self.inner_size, self.hidden_size),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return (self.kernels,)

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(f"{self.name}.{BASE_KERNEL}", (2, self.taps, self.hidden_size), "scale"),)

    def build(self, source: BlockSource) -> BlockConv:
        return BlockConv(self, source)


class BlockConv:
    """The convolutions around one block of a layer."""

    def __init__(self, spec: BlockConvSpec, source: BlockSource) -> None:
        self._size = spec.inner_size
        self._kernels, self._base = source.product(spec.kernels), source.vector(f"{spec.name}.{BASE_KERNEL}")

    def into(self, x: Tensor, queries: int) -> tuple[Tensor, Tensor]:
        """x [T, H] in blocks of `queries` -> what the block reads [T, H], and the deltas [T, taps * groups] for `out_of`."""
        deltas = self._kernels(x, None)
        return block_conv(x, deltas[:, : self._size], self._base[0], queries), deltas[:, self._size :]

    def out_of(self, out: Tensor, deltas: Tensor, queries: int) -> Tensor:
        """The block's output [T, H] -> what is added to the stream [T, H]."""
        return block_conv(out, deltas, self._base[1], queries)


def block_convs(hidden_size: int, taps: int, groups: int) -> tuple[BlockConvSpec, ...]:
    """Those of a layer: around its attention, around its MLP. taps 0: none."""
    if not taps:
        return ()
    return tuple(BlockConvSpec(name=name, hidden_size=hidden_size, taps=taps, groups=groups) for name in CONVS)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions, for inputs that the caller has normed."""

    def __init__(self, spec: LayerSpec, convs: tuple[BlockConvSpec, ...], source: BlockSource) -> None:
        super().__init__(spec.attention.build(source))
        mlp = spec.mlp
        assert isinstance(mlp, GatedMlpSpec)
        self._products, self._norm, self._eps = GatedProducts(mlp, source), source.vector(f"{mlp.norm}.weight"), mlp.eps
        self.around_attention, self._around_mlp = (conv.build(source) for conv in convs)

    def after_queries(self, q: Tensor, deltas: Tensor, stream: ResidualStream, attend: Attend, queries: int) -> None:
        """Continue from the queries [T, NH, D] of what `around_attention.into` gave, to the end of the layer."""
        stream.add(self.around_attention.out_of(self.attention.output(q, attend), deltas, queries))
        x, deltas = self._around_mlp.into(stream.normed(self._norm, self._eps), queries)
        stream.add(self._around_mlp.out_of(self._products(x, None), deltas, queries))
