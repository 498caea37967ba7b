"""A Mamba2 layer: NH heads of D values, G groups of heads with a B and a C of N values each.

    z, xbc, dt = in_proj(norm(stream))       z [NH D]; x [NH D], B and C [G N] each; dt [NH]
    x, B, C = silu(conv(xbc))                depthwise, causal, W taps, C = NH D + 2 G N channels: `kernels/short_conv`
    y = recurrence(x, B, C, dt)              `kernels/mamba2`
    stream += out_proj(norm(y * silu(z)))    the norm over each group's channels; some models have none

Of several ranks each has some of the groups with their heads, but computes dt of all heads: its rows are too few for blocks that
share a scale to be divided, and take no time.

Source: transformers, models/nemotron_h (NemotronHMamba2Mixer); Dao and Gu 2024 (arXiv 2405.21060).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchspec.batch.flat_batch import Tokens
from batchspec.cache.kept import Kept
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.kernels.gated_delta.chunk_products import CHUNK
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.mamba2.gated_group_norm import gated_group_norm
from batchspec.kernels.mamba2.layout import Sizes, SsmState, SsmWeights
from batchspec.kernels.mamba2.scan_chunks import scan_chunks
from batchspec.kernels.mamba2.scan_steps import scan_steps
from batchspec.kernels.short_conv.short_conv import ConvRows, short_conv
from batchspec.model.layers.base import (
    PLAIN_NORM,
    Gemm,
    NormedSpec,
    ProductSpec,
    Projection,
    Role,
    Shard,
    Share,
    TensorSpec,
    scaled,
    shifted,
)
from batchspec.model.layers.forward import BlockSource, Selected, SelectedTokens, Stream
from batchspec.model.layers.kind import About, Computing, Inputs, MixerSpec, Use, Work, about_states, refused_by_recurrence
from batchspec.model.layers.passes import Pass
from batchspec.model.layers.scaled import column_scaled_product, scaled_product
from batchspec.model.layers.short_conv.block import rows_of

PROMPT_CHUNK: int = CHUNK.value
"""Tokens of a prompt that are taken at a time: prompts are cut at multiples of it."""
TOKEN_SHARES = {torch.float32: 0.08, torch.bfloat16: 0.2, torch.float64: 0.08}
"""Time of a round's recurrence for each draft, relative to reading and writing fp32 states, by the dtype of states: bf16 is
rounded after every token. 256 rows of Nemotron 3 Nano, 3 drafts after 4 replayed tokens (H200, 2026-11); fp64 not measured."""
PREFILL_SLOWDOWN = 12.4
"""Time of the recurrence in a prefill, relative to that of its operations at the rate of large products: 78 ns per token and
layer of Nemotron 3 Nano in 64 rows of 1,024 (H200, 2026-11). Its products are small, and a chunk waits for the one before."""
DT_BIASES, A_LOGS = (-6.9, -2.2), (0.0, 2.8)
"""Ranges of initial values in training: softplus(dt_bias) from 0.001 to 0.1, exp(A_log) up to 16. With a projected dt of 0 a
state decays by a factor of 0.2 to 0.999 per token."""


_OF_HEADS: tuple[tuple[str, Role, tuple[float, float] | None], ...] = (
    ("dt_bias", "bias", DT_BIASES), ("A_log", "bias", A_LOGS), ("D", "scale", None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(NormedSpec, MixerSpec):
    """See the module's docstring."""

    num_heads: int
    """NH"""
    head_dim: int
    """D"""
    num_groups: int
    """G, a divisor of NH"""
    state_size: int
    """N"""
    conv_width: int
    """W"""
    bias: bool = False
    """Of both projections."""
    conv_bias: bool = True
    out_norm: bool = True
    """Whether y * silu(z) is normed."""
    scales: tuple[float, float, float, float, float] = (1.0,) * 5
    """Factors of z, x, B, C and dt, as in_proj computes them."""
    all_heads: int | None = None
    """Number of heads of all ranks, whose dt it computes; None: NH"""
    first_head: int = 0
    """Index of its first head among them."""
    name: str = "mixer"
    norm: str | None = "norm"

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.num_heads, self.head_dim, self.num_groups, self.state_size)

    @property
    def inner_size(self) -> int:
        """Number of values of x for one token, and as many of z and of the output."""
        return self.sizes.inner

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.sizes.channels

    @property
    def num_steps(self) -> int:
        """Number of values of dt for one token."""
        return self.num_heads if self.all_heads is None else self.all_heads

    @property
    def into(self) -> ProductSpec:
        """The product of z, x, B, C and dt."""
        rows = self.inner_size + self.channels + self.num_steps
        return ProductSpec((Projection(f"{self.name}.in_proj", rows, self.hidden_size, self.bias),))

    @property
    def out(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.out_proj", self.hidden_size, self.inner_size, self.bias),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.into, self.out

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        """The norm of the stream, the taps [C, 1, W] and their bias, the three numbers of each head, kept in fp32 at least, and
        the norm of the output, whose weight is plain in every family."""
        taps = TensorSpec(f"{self.name}.conv1d.weight", (self.channels, 1, self.conv_width), "weight")
        bias = (TensorSpec(f"{self.name}.conv1d.bias", (self.channels,), "bias"),) if self.conv_bias else ()
        heads = (
            TensorSpec(f"{self.name}.{name}", (self.num_heads,), role, wide=True, between=between)
            for name, role, between in _OF_HEADS
        )
        norm = (PLAIN_NORM.tensor(f"{self.name}.norm", self.inner_size),) if self.out_norm else ()
        return *self.stream_norms, taps, *bias, *heads, *norm

    @property
    def activation_size(self) -> int:
        """Values of the first product; x, B and C again after the convolution; the output before and after its norm."""
        return self.into.rows + self.channels + 2 * self.inner_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        fused = self.norms_in_kernel and {*self.scales} == {1.0}
        into = ("linear", "norm_linear") if fused else ("linear",)
        return Gemm(product=self.into, ops=into), self.gemm_of_output(self.out)

    def _state(self, run: Computing) -> RowTensor:
        dtype = run.dtype if run.dtype is torch.float64 else run.state_dtype
        return RowTensor((self.num_heads, self.head_dim, self.state_size), dtype)

    def kept(self, run: Computing) -> LayerState:
        """The state, in a model of fp64 in fp64, and rings of P positions: the inputs of the convolution [P, C]; x and B after it
        [P, NH D + G N], and dt [P, NH]. A round writes K + 1 positions and reads up to as many."""
        ring = max(2 * (run.draft_len + 1), run.draft_len + self.conv_width)
        sizes = (self.channels, self.inner_size + self.num_groups * self.state_size, self.num_heads)
        rings = (RowTensor((ring, size), run.dtype) for size in sizes)
        return LayerState(None, row=(self._state(run), *rings), lags=True, chunk=PROMPT_CHUNK, shares="mamba2")

    def round_work(self, run: Computing, context: float, tokens: float) -> Work:
        numbers = self.inner_size * self.state_size
        state = self._state(run)
        return Work(state_bytes=state.nbytes, token_bytes=round(TOKEN_SHARES[state.dtype] * 2 * 4 * numbers))

    def prompt_work(self, run: Computing, prompt: float, *, ends_only: bool) -> Work:
        """In chunks of L tokens, of each head 2 L N for C B', 2 L D for W X, and 4 N D for C S' and the change of S."""
        of_head = 2 * PROMPT_CHUNK * (self.state_size + self.head_dim) + 4 * self.state_size * self.head_dim
        return Work(flop=PREFILL_SLOWDOWN * self.num_heads * of_head)

    def groups_of(self, shard: Shard) -> slice:
        """The groups of a rank, which has their heads too. Raises ConfigError if they cannot be divided."""
        return shard.of("the number of groups of Mamba2 heads", self.num_groups)

    def sharded(self, shard: Shard, unit: int) -> Mamba2Spec:
        own = self.groups_of(shard)
        heads = scaled(own, self.num_heads // self.num_groups)
        return replace(
            self, num_groups=own.stop - own.start, num_heads=heads.stop - heads.start, all_heads=self.num_heads,
            first_head=heads.start,
        )

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        own = self.groups_of(shard)
        heads, of_group = scaled(own, self.num_heads // self.num_groups), scaled(own, self.state_size)
        values, all_groups = scaled(heads, self.head_dim), self.num_groups * self.state_size
        xbc = (values, shifted(of_group, self.inner_size), shifted(of_group, self.inner_size + all_groups))
        dt = slice(self.inner_size + self.channels, self.into.rows)
        into = Share("columns", (values, *(shifted(part, self.inner_size) for part in xbc), dt))
        names = {"in_proj": into, "out_proj": Share("rows", (values,), shard.rank == 0), "norm": Share("columns", (values,))}
        names |= dict.fromkeys(("conv1d", "conv1d.bias"), Share("columns", xbc))
        names |= dict.fromkeys(("A_log", "dt_bias", "D"), Share("columns", (heads,)))
        return {f"{self.name}.{name}": share for name, share in names.items()}

    def refuses(self, use: Use) -> str | None:
        return refused_by_recurrence(use)

    @classmethod
    def about(cls, layers: Sequence[Mamba2Spec], run: Computing) -> About:
        return about_states([own.kept(run) for own in layers], "Mamba2 layer")

    def inputs(self, pass_: Pass, kept: Kept) -> Inputs:
        (state, conv_inputs, inputs, steps), batch = kept.rows, pass_.batch
        assert kept.num_folded is not None
        # In a smaller ring inputs of drafts that are rejected later would overwrite inputs that the next round reads.
        places = conv_inputs.shape[1]
        assert batch.commits or batch.max_q + self.conv_width - 1 <= places, (batch.max_q, self.conv_width, conv_inputs.shape)
        own = SsmState(state=state, inputs=inputs, steps=steps, folded=kept.num_folded)
        rows = pass_.once(("rows", kept.key), lambda: rows_of(batch))
        store = SsmStore(conv_inputs=conv_inputs, state=own, rows=rows, tokens=batch.tokens, lora=pass_.lora)
        return Inputs(store, SelectedTokens(pass_.lora))

    def build(self, source: BlockSource) -> Mamba2:
        return Mamba2(self, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmStore:
    """The rows of a pass and what a layer keeps of them."""

    conv_inputs: Tensor
    """[slots, P, C]"""
    state: SsmState
    rows: ConvRows
    tokens: Tokens
    lora: LoraTokens | None = None


class Mamba2:
    """A Mamba2 layer in two parts, up to the gated and normed values and from them on: a `Mixer`."""

    def __init__(self, spec: Mamba2Spec, source: BlockSource) -> None:
        self._spec = spec
        self._norm = None if spec.norm is None else source.vector(f"{spec.norm}.weight")
        of_groups = spec.num_groups * spec.state_size
        sizes = spec.inner_size, spec.inner_size, of_groups, of_groups, spec.num_steps
        into, like = source.product(spec.into), source.vector(f"{spec.name}.conv1d.weight")
        self._into = column_scaled_product(into, list(zip(sizes, spec.scales, strict=True)), like)
        self._taps = like.flatten(1).mT.contiguous()
        self._conv_bias = source.vector(f"{spec.name}.conv1d.bias") if spec.conv_bias else None
        self._weights = SsmWeights(
            a_log=source.vector(f"{spec.name}.A_log"), dt_bias=source.vector(f"{spec.name}.dt_bias"),
            d=source.vector(f"{spec.name}.D"),
        )
        self._out_norm = source.vector(f"{spec.name}.norm.weight") if spec.out_norm else None
        self._out = scaled_product(source.product(spec.out), spec.out_scale)

    def norms_in_product(self, stream: Stream) -> bool:
        return self._spec.norms_in_kernel and stream.norms_in_product(self._into, gated=False)

    def begin(self, stream: Stream, store: SsmStore, out_aux: Tensor | None = None) -> Tensor:
        """[T, NH D] the gated and normed outputs of the recurrence; the states of the rows are written."""
        return self._mixed(stream.project(self._norm, self._spec.eps, self._into, store.lora, out_aux=out_aux), store)

    def values_of(self, normed: Tensor, store: SsmStore) -> Tensor:
        """The same for an input [T, H] that the caller has normed."""
        return self._mixed(self._into(normed, store.lora), store)

    def _mixed(self, made: Tensor, store: SsmStore) -> Tensor:
        """made: the output of the first product"""
        spec = self._spec
        z, xbc, dt = made.split((spec.inner_size, spec.channels, spec.num_steps), 1)
        dt = dt.narrow(1, spec.first_head, spec.num_heads)
        xbc = short_conv(xbc, self._taps, self._conv_bias, store.conv_inputs, store.rows, gated=False)
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
        if store.tokens == "prompt":
            scan_chunks(xbc, dt, self._weights, store.state, store.rows, out)
        else:
            scan_steps(xbc, dt, self._weights, store.state, store.rows, out, commits=store.tokens != "drafts")
        return gated_group_norm(out, z, self._out_norm, spec.num_groups, spec.eps)

    def output(self, begun: Tensor, lora: LoraTokens | None) -> Tensor:
        """[T, H] the output of the last product, of this rank, from the result of `begin`."""
        out: Tensor = self._out(begun, lora)
        return out

    def finish(self, begun: Tensor, stream: Stream, attend: Selected, *, add_in_product: bool) -> None:
        stream.add_product(self._out, begun, attend.lora, in_product=add_in_product)
