"""A gated delta rule layer: HK key heads of DK numbers, HV value heads of DV, G = HV / HK of them to a key head.

    qkvz, ba = products of norm(stream)      q, k [HK DK], v, z [HV DV]; b, a [HV]
    q, k, v = silu(conv(q | k | v))          depthwise, causal, W taps, C = 2 HK DK + HV DV channels
    o = recurrence(q, k, v, b, a)            `kernels/gated_delta`
    stream += out(norm(o) * silu(z))         the norm over each value head

A file has q, k, v and z in the order of their names, each with all its heads (Qwen3.5), or of each key head with its value heads
after one another (Qwen3-Next, `interleaved`); the same for b and a. Channels of the convolution are in the first order in both.
Source: transformers, models/qwen3_next (Qwen3NextGatedDeltaNet), models/qwen3_5 (Qwen3_5GatedDeltaNet); Yang et al. 2024 (arXiv
2412.06464).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, Tokens
from batchspec.cache.kept import Kept
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.kernels.gated_delta.chunk_products import CHUNK
from batchspec.kernels.gated_delta.convolve import convolve
from batchspec.kernels.gated_delta.delta_chunks import delta_chunks
from batchspec.kernels.gated_delta.delta_steps import delta_steps
from batchspec.kernels.gated_delta.gated_norm import gated_norm
from batchspec.kernels.gated_delta.layout import (
    DeltaBatch,
    DeltaColumns,
    DeltaState,
    DeltaWeights,
    interleaved_columns,
    split_columns,
)
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.base import (
    PLAIN_NORM,
    Gemm,
    NormedSpec,
    ProductSpec,
    Projection,
    Shard,
    Share,
    TensorSpec,
    scaled,
    shifted,
)
from batchspec.model.layers.forward import BlockSource, Selected, SelectedTokens, Stream
from batchspec.model.layers.kind import About, Computing, Inputs, MixerSpec, Use, Work, about_states, refused_by_recurrence
from batchspec.model.layers.passes import Pass

RECURRENT_CHUNK = 64
"""Tokens of a prompt that are taken at a time: prompts are cut at multiples of it."""
TOKEN_SHARE = 0.2
"""Time of a round's recurrence for each draft, relative to reading and writing fp32 states: 0.19 with Qwen3.5-35B-A3B and 256
rows, 0.25 with the 27B and 64 (H200, 2026-11)."""
PREFILL_SLOWDOWN = 4.5
"""Time of the recurrence in a prefill, relative to that of its operations at the rate of large products: its products are small,
and a chunk waits for the one before. From the prefill of Qwen3.5-35B-A3B on an H200: 49 ns per token and layer (2026-11)."""
DT_BIASES, A_LOGS = (-6.9, -2.2), (0.0, 2.8)
"""Ranges that models are trained from: softplus(dt_bias) from 0.001 to 0.1, exp(A_log) up to 16. Without `a`, a token leaves 20 %
to 99.9 % of a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(NormedSpec, MixerSpec):
    """See the module's docstring."""

    num_key_heads: int
    """HK"""
    num_value_heads: int
    """HV, a multiple of HK"""
    key_dim: int
    """DK"""
    value_dim: int
    """DV"""
    conv_width: int
    """W"""
    interleaved: bool = False
    """Whether the file has the parts of each key head one after another."""
    name: str = "linear_attn"
    norm: str | None = "input_layernorm"

    @property
    def group(self) -> int:
        """G, number of value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def keys_size(self) -> int:
        """Number of values of k for one token, and as many of q."""
        return self.num_key_heads * self.key_dim

    @property
    def inner_size(self) -> int:
        """Number of values of v for one token, and as many of z and of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C, of the convolution."""
        return 2 * self.keys_size + self.inner_size

    @property
    def qkvz(self) -> ProductSpec:
        sizes = {"qkvz": self.channels + self.inner_size} if self.interleaved else {"qkv": self.channels, "z": self.inner_size}
        return self._product(sizes)

    @property
    def ba(self) -> ProductSpec:
        """The product of the gates."""
        heads = self.num_value_heads
        sizes = {"ba": 2 * heads} if self.interleaved else {"b": heads, "a": heads}
        return replace(self._product(sizes), quantisable=False)

    def _product(self, sizes: Mapping[str, int]) -> ProductSpec:
        return ProductSpec(tuple(Projection(f"{self.name}.in_proj_{x}", rows, self.hidden_size) for x, rows in sizes.items()))

    @property
    def out(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.out_proj", self.hidden_size, self.inner_size),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.qkvz, self.ba, self.out

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        """The norm of the stream, the taps [C, 1, W], the two parameters of the decay, kept in fp32 at least, and the norm of a
        value head, whose weight is plain in every family."""
        decay = (
            TensorSpec(f"{self.name}.{name}", (self.num_value_heads,), "bias", wide=True, between=between)
            for name, between in (("dt_bias", DT_BIASES), ("A_log", A_LOGS))
        )
        taps = TensorSpec(f"{self.name}.conv1d.weight", (self.channels, 1, self.conv_width), "weight")
        return *self.stream_norms, taps, *decay, PLAIN_NORM.tensor(f"{self.name}.norm", self.value_dim)

    @property
    def activation_size(self) -> int:
        """Values of q, k, v and z, and q, k and v again after the convolution; b and a, and the fp32 gates; what `delta_chunks`
        computes before it takes the states; the output before and after its norm."""
        of_chunks: int = 2 * CHUNK.value + 6
        return self.qkvz.rows + self.channels + (6 + of_chunks) * self.num_value_heads + 2 * self.inner_size

    def kept(self, run: Computing) -> LayerState:
        rows = self.row_tensors(run.dtype, run.state_dtype, run.draft_len)
        return LayerState(None, row=rows, lags=True, chunk=RECURRENT_CHUNK, shares="gated delta")

    def round_work(self, run: Computing, context: float, tokens: float) -> Work:
        numbers = self.num_value_heads * self.key_dim * self.value_dim
        return Work(
            state_bytes=self._state(run.dtype, run.state_dtype).nbytes, token_bytes=round(TOKEN_SHARE * 2 * 4 * numbers)
        )

    def prompt_work(self, run: Computing, prompt: float, *, ends_only: bool) -> Work:
        return Work(flop=PREFILL_SLOWDOWN * self.prefill_flop)

    @property
    def prefill_flop(self) -> int:
        """Operations of the recurrence for one token of a prompt, in chunks of C = 64 tokens. Of each value head

            4 C DK + 8 C^2    q k' and k k' in the chunk, and its inverse, four products of C x C matrices
            6 DK DV + 4 C DV  k S', q S' and the change of S; the products of both C x C matrices with the values

        Real sizes: 197 thousand, of which the states take half.
        """
        size: int = CHUNK.value
        of_chunk = 4 * size * (self.key_dim + self.value_dim) + 8 * size * size
        return self.num_value_heads * (of_chunk + 6 * self.key_dim * self.value_dim)

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        return *(Gemm(product=own, ops=("linear",)) for own in (self.qkvz, self.ba)), self.gemm_of_output(self.out)

    def _state(self, dtype: torch.dtype, state_dtype: torch.dtype) -> RowTensor:
        return RowTensor((self.num_value_heads, self.value_dim, self.key_dim), dtype if dtype is torch.float64 else state_dtype)

    def row_tensors(self, dtype: torch.dtype, state_dtype: torch.dtype, draft_len: int) -> tuple[RowTensor, ...]:
        """What it keeps of a row, in the order of `DeltaState`: the state [HV, DV, DK], and rings of P positions with the inputs
        of the convolution [P, C], keys [P, HK, DK], values [P, HV, DV] and gates [P, HV, 2].

        dtype, state_dtype  of what it computes with, and of the state, which in a model of fp64 is fp64
        draft_len           K, the maximum number of drafts that a round verifies
        """
        ring, wide = max(2 * (draft_len + 1), draft_len + self.conv_width), torch.promote_types(dtype, torch.float32)
        heads = self.num_value_heads
        return (
            self._state(dtype, state_dtype),
            RowTensor((ring, self.channels), dtype),
            RowTensor((ring, self.num_key_heads, self.key_dim), dtype),
            RowTensor((ring, heads, self.value_dim), dtype),
            RowTensor((ring, heads, 2), wide),
        )

    @property
    def columns(self) -> DeltaColumns:
        """Where the outputs of the two products hold their parts."""
        made = interleaved_columns if self.interleaved else split_columns
        return made(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)

    def key_heads_of(self, shard: Shard) -> slice:
        """The key heads of a rank, which has their value heads too. Raises ConfigError if they cannot be divided."""
        return shard.of("linear_num_key_heads", self.num_key_heads)

    def sharded(self, shard: Shard, unit: int) -> GatedDeltaSpec:
        own = self.key_heads_of(shard)
        count = own.stop - own.start
        return replace(self, num_key_heads=count, num_value_heads=count * self.group)

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        own = self.key_heads_of(shard)
        heads = scaled(own, self.group)
        keys, values = scaled(own, self.key_dim), scaled(heads, self.value_dim)
        of_heads = Share("columns", (heads,))
        qkv = Share("columns", (keys, shifted(keys, self.keys_size), shifted(values, 2 * self.keys_size)))
        names = {"in_proj_qkv": qkv, "in_proj_z": Share("columns", (values,)), "in_proj_b": of_heads, "in_proj_a": of_heads}
        names |= {
            "in_proj_qkvz": Share("columns", (scaled(own, self.qkvz.rows // self.num_key_heads),)),
            "in_proj_ba": Share("columns", (scaled(own, 2 * self.group),)),
            "out_proj": Share("rows", (values,), shard.rank == 0),
            "conv1d": qkv, "A_log": of_heads, "dt_bias": of_heads,
        }
        return {f"{self.name}.{name}": share for name, share in names.items()}

    def refuses(self, use: Use) -> str | None:
        return refused_by_recurrence(use)

    @classmethod
    def about(cls, layers: Sequence[GatedDeltaSpec], run: Computing) -> About:
        return about_states([own.kept(run) for own in layers], "recurrent layer")

    def inputs(self, pass_: Pass, kept: Kept) -> Inputs:
        state, conv_inputs, keys, values, gates = kept.rows
        assert kept.num_folded is not None
        own = DeltaState(
            state=state, conv_inputs=conv_inputs, keys=keys, values=values, gates=gates, folded=kept.num_folded
        )
        rows = pass_.once(kept.key, lambda: _rows_of(pass_.batch))
        return Inputs(DeltaStore(state=own, batch=rows, tokens=pass_.batch.tokens, lora=pass_.lora), SelectedTokens(pass_.lora))

    def build(self, source: BlockSource) -> GatedDelta:
        return GatedDelta(self, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaStore:
    """The rows of a pass and what a layer keeps of them."""

    state: DeltaState
    batch: DeltaBatch
    tokens: Tokens
    lora: LoraTokens | None = None


def _rows_of(batch: FlatBatch) -> DeltaBatch:
    return DeltaBatch(
        cu_seqlens=batch.cu_seqlens_q, positions=batch.positions, row_ids=batch.row_ids, slots=batch.slot_ids(),
        live=batch.kv_len, max_tokens=batch.max_q,
    )


class GatedDelta:
    """The gated delta rule of a layer in two parts, up to the gated and normed values and from them on: a `Mixer`."""

    def __init__(self, spec: GatedDeltaSpec, source: BlockSource) -> None:
        self.spec, self._columns = spec, spec.columns
        self._norm = source.vector(f"{spec.norm}.weight")
        self._qkvz, self._ba = source.product(spec.qkvz), source.product(spec.ba)
        conv = source.vector(f"{spec.name}.conv1d.weight")
        self._weights = DeltaWeights(
            conv=conv.flatten(1), a_log=source.vector(f"{spec.name}.A_log"), dt_bias=source.vector(f"{spec.name}.dt_bias")
        )
        self._out_norm = source.vector(f"{spec.name}.norm.weight")
        self._out = source.product(spec.out)

    def norms_in_product(self, stream: Stream) -> bool:
        return False  # two products read the normed stream

    def begin(self, stream: Stream, store: DeltaStore, out_aux: Tensor | None = None) -> Tensor:
        """[T, HV * DV] the gated and normed outputs of the recurrence; the states of the rows are written."""
        spec, batch = self.spec, store.batch
        normed = stream.normed(self._norm, spec.eps, out_aux=out_aux)
        x, ba = self._qkvz(normed, store.lora), self._ba(normed, store.lora)
        drafts = store.tokens == "drafts"
        inputs = convolve(x, ba, self._weights, self._columns, store.state, batch, keeps_inputs=drafts)
        out = torch.empty_like(inputs.v)
        if store.tokens == "prompt":
            delta_chunks(inputs, store.state, batch, out)
        else:
            delta_steps(inputs, store.state, batch, out, commits=not drafts)
        return gated_norm(out, x, self._columns, self._out_norm, spec.eps)

    def finish(self, begun: Tensor, stream: Stream, attend: Selected, *, add_in_product: bool) -> None:
        stream.add_product(self._out, begun, attend.lora, in_product=add_in_product)
