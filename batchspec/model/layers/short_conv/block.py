"""A short convolution layer: C channels, each convolved over its newest W inputs.

    b, c, x = in_proj(norm(stream))          C values each
    stream += out_proj(c * conv(b * x))      depthwise, causal, W taps: `kernels/short_conv`

It keeps the newest inputs b * x of a row, as many as the next round reads whatever is accepted of this one.
Source: transformers, models/lfm2 (Lfm2ShortConv).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.kept import Kept
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.short_conv.short_conv import ConvRows, short_conv
from batchspec.model.layers.base import (
    Gemm,
    NormedSpec,
    ProductSpec,
    Projection,
    Shard,
    Share,
    TensorSpec,
    shifted,
)
from batchspec.model.layers.forward import BlockSource, Selected, SelectedTokens, Stream
from batchspec.model.layers.kind import About, Computing, Inputs, MixerSpec, Use, Work, row_lines
from batchspec.model.layers.passes import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(NormedSpec, MixerSpec):
    """See the module's docstring."""

    inner_size: int
    """C"""
    width: int
    """W"""
    bias: bool = False
    """Of both projections and of the convolution."""
    name: str = "conv"
    norm: str | None = "operator_norm"

    @property
    def bcx(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.in_proj", 3 * self.inner_size, self.hidden_size, self.bias),))

    @property
    def out(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.out_proj", self.hidden_size, self.inner_size, self.bias),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.bcx, self.out

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        """The norm of the stream, the taps [C, 1, W], and the bias of the convolution."""
        taps = TensorSpec(f"{self.name}.conv.weight", (self.inner_size, 1, self.width), "weight")
        bias = (TensorSpec(f"{self.name}.conv.bias", (self.inner_size,), "bias"),) if self.bias else ()
        return *self.stream_norms, taps, *bias

    @property
    def activation_size(self) -> int:
        """Values of b, c and x, and of the gated output."""
        return 4 * self.inner_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        into = ("linear", "norm_linear") if self.norms_in_kernel else ("linear",)
        return Gemm(product=self.bcx, ops=into), self.gemm_of_output(self.out)

    def ring(self, run: Computing) -> RowTensor:
        """The inputs [P, C] of the newest P = K + W positions: those that a round may reject, and those that its first reads."""
        return RowTensor((run.draft_len + self.width, self.inner_size), run.dtype)

    def kept(self, run: Computing) -> LayerState:
        return LayerState(None, row=(self.ring(run),), shares="short convolution")

    def round_work(self, run: Computing, context: float, tokens: float) -> Work:
        """W - 1 inputs are read and `tokens` written; `Work.state_bytes` counts both."""
        return Work(state_bytes=ceil((self.width - 1 + tokens) / 2) * self.inner_size * run.dtype.itemsize)

    def prompt_work(self, run: Computing, prompt: float, *, ends_only: bool) -> Work:
        return Work(flop=2 * (self.width + 1) * self.inner_size)

    def refuses(self, use: Use) -> str | None:
        if use == "tree":
            return "has short convolutions, which read the tokens before in one order: only chains can be verified"
        return "has short convolutions, whose inputs a drafter does not keep" if use == "drafter" else None

    @classmethod
    def about(cls, layers: Sequence[ShortConvSpec], run: Computing) -> About:
        return About(model=(("convolutions", row_lines([own.kept(run) for own in layers])),))

    def channels_of(self, shard: Shard, unit: int) -> slice:
        """The channels of a rank. Raises ConfigError if they cannot be divided."""
        return shard.of("the number of channels of a short convolution", self.inner_size, unit)

    def sharded(self, shard: Shard, unit: int) -> ShortConvSpec:
        own = self.channels_of(shard, unit)
        return replace(self, inner_size=own.stop - own.start)

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        own = self.channels_of(shard, unit)
        parts = Share("columns", tuple(shifted(own, part * self.inner_size) for part in range(3)))
        names = {"in_proj": parts, "out_proj": Share("rows", (own,), shard.rank == 0)}
        names |= dict.fromkeys(("conv", "conv.bias"), Share("columns", (own,)))
        return {f"{self.name}.{name}": share for name, share in names.items()}

    def inputs(self, pass_: Pass, kept: Kept) -> Inputs:
        (ring,), batch = kept.rows, pass_.batch
        # Otherwise a draft that is rejected later takes the place of an input that the next round reads.
        assert batch.commits or batch.max_q + self.width - 1 <= ring.shape[1], (batch.max_q, self.width, ring.shape)
        rows = pass_.once(kept.key, lambda: rows_of(batch))
        return Inputs(ConvStore(ring=ring, rows=rows, lora=pass_.lora), SelectedTokens(pass_.lora))

    def build(self, source: BlockSource) -> ShortConv:
        return ShortConv(self, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvStore:
    """The rows of a pass, and what a layer keeps of them."""

    ring: Tensor
    """[slots, P, C]"""
    rows: ConvRows
    lora: LoraTokens | None = None


def rows_of(batch: FlatBatch) -> ConvRows:
    """The rows of a pass, as the kernel takes them."""
    return ConvRows(
        cu_seqlens=batch.cu_seqlens_q, positions=batch.positions, slots=batch.slot_ids(), live=batch.kv_len,
        max_tokens=batch.max_q,
    )


class ShortConv:
    """A short convolution in two parts, up to the gated output and from it on: a `Mixer`."""

    def __init__(self, spec: ShortConvSpec, source: BlockSource) -> None:
        self._spec = spec
        self._norm = source.vector(f"{spec.norm}.weight")
        self._bcx = source.product(spec.bcx)
        self._taps = source.vector(f"{spec.name}.conv.weight").flatten(1).mT.contiguous()
        self._bias = source.vector(f"{spec.name}.conv.bias") if spec.bias else None
        self._out = source.product(spec.out)

    def norms_in_product(self, stream: Stream) -> bool:
        return self._spec.norms_in_kernel and stream.norms_in_product(self._bcx, gated=False)

    def begin(self, stream: Stream, store: ConvStore, out_aux: Tensor | None = None) -> Tensor:
        """[T, C] the gated output of the convolution; the inputs of the tokens are kept."""
        bcx = stream.project(self._norm, self._spec.eps, self._bcx, store.lora, out_aux=out_aux)
        return short_conv(bcx, self._taps, self._bias, store.ring, store.rows)

    def finish(self, begun: Tensor, stream: Stream, attend: Selected, *, add_in_product: bool) -> None:
        stream.add_product(self._out, begun, attend.lora, in_product=add_in_product)
