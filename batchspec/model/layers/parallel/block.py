"""Attention and Mamba2 in parallel: both read one norm of the stream, and their outputs are added up.

    x = norm(stream)
    stream += attention(x) + mamba(x)

It keeps of a row what both keep: K and V in pages, and the state. Several ranks add up their parts of both outputs at once.
Source: transformers, models/falcon_h1 (FalconH1DecoderLayer).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchspec.cache.kept import Kept
from batchspec.cache.layer_state import LayerState
from batchspec.cache.sharing_cost import SharingCost
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.paged import PagedStore
from batchspec.model.layers.base import Gemm, NormedSpec, ProductSpec, Shard, Share, TensorSpec
from batchspec.model.layers.forward import Attend, BlockSource, Stream
from batchspec.model.layers.kind import About, Computing, Inputs, MixerSpec, Use, Work, about_states
from batchspec.model.layers.mamba2.block import Mamba2Spec, SsmStore
from batchspec.model.layers.passes import Pass

Stores = tuple[PagedStore, SsmStore]
"""`Inputs.begin`: where attention and the Mamba2 layer keep what the tokens bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec(NormedSpec, MixerSpec):
    """The shapes of both; neither norms its input or its output."""

    attention: AttentionSpec
    mamba: Mamba2Spec
    norm: str | None = "input_layernorm"

    @property
    def parts(self) -> tuple[AttentionSpec, Mamba2Spec]:
        return self.attention, self.mamba

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return *self.attention.products, *self.mamba.products

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        return *self.stream_norms, *self.attention.vectors, *self.mamba.vectors

    @property
    def inner_size(self) -> int:
        return self.attention.inner_size + self.mamba.inner_size

    @property
    def activation_size(self) -> int:
        """Of both, their results together, and the input and one output."""
        return sum(part.activation_size for part in self.parts) + self.inner_size + 2 * self.hidden_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        """Neither output is added to the stream by its product."""
        return tuple(replace(gemm, ops=("linear",)) for part in self.parts for gemm in part.gemms(tokens))

    def sharded(self, shard: Shard, unit: int) -> ParallelSpec:
        return replace(self, attention=self.attention.sharded(shard, unit), mamba=self.mamba.sharded(shard, unit))

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        return {**self.attention.shares(shard, unit), **self.mamba.shares(shard, unit)}

    def kept(self, run: Computing) -> LayerState:
        pages, state = (part.kept(run) for part in self.parts)
        return replace(state, pages=pages.pages, window=pages.window, shares=("parallel", pages.shares, state.shares))

    def round_work(self, run: Computing, context: float, tokens: float) -> Work:
        reads, moves = (part.round_work(run, context, tokens) for part in self.parts)
        return replace(moves, page_bytes=reads.page_bytes, flop=reads.flop + moves.flop)

    def prompt_work(self, run: Computing, prompt: float, *, ends_only: bool) -> Work:
        return Work(flop=sum(part.prompt_work(run, prompt, ends_only=ends_only).flop for part in self.parts))

    def sharing_cost(self, run: Computing, max_q: int) -> SharingCost | None:
        return self.attention.sharing_cost(run, max_q)

    def partial_bytes(self, run: Computing, rows: int, num_keys: int, *, shares: bool) -> int:
        return self.attention.partial_bytes(run, rows, num_keys, shares=shares)

    def refuses(self, use: Use) -> str | None:
        return self.mamba.refuses(use)

    @classmethod
    def about(cls, layers: Sequence[ParallelSpec], run: Computing) -> About:
        return about_states([own.kept(run) for own in layers], "Mamba2 layer")

    def tables(self) -> Mapping[Hashable, Tensor]:
        return self.attention.tables()

    def inputs(self, pass_: Pass, kept: Kept) -> Inputs:
        attention, mamba = (part.inputs(pass_, kept) for part in self.parts)
        return Inputs((attention.begin, mamba.begin), attention.finish)

    def build(self, source: BlockSource) -> Parallel:
        return Parallel(self, source)


class Parallel:
    """See the module's docstring: a `Mixer`. Between its parts it holds q and the outputs of the recurrence of each token."""

    def __init__(self, spec: ParallelSpec, source: BlockSource) -> None:
        self._spec = spec
        self._norm = source.vector(f"{spec.norm}.weight")
        self._attention, self._mamba = spec.attention.build(source), spec.mamba.build(source)

    def norms_in_product(self, stream: Stream) -> bool:
        return False

    def begin(self, stream: Stream, store: Stores, out_aux: Tensor | None = None) -> Tensor:
        """[T, NH * D + inner values of the Mamba2 layer]; K, V and states are written."""
        (of_attention, of_mamba), x = store, stream.normed(self._norm, self._spec.eps, out_aux=out_aux)
        q = self._attention.queries_of(x, of_attention)
        return torch.cat((q.flatten(1), self._mamba.values_of(x, of_mamba)), 1)

    def finish(self, begun: Tensor, stream: Stream, attend: Attend, *, add_in_product: bool) -> None:
        own = self._spec.attention
        q, values = begun.split((own.inner_size, self._spec.mamba.inner_size), 1)
        out = self._attention.output(q.reshape(-1, own.num_heads, own.head_dim), attend)
        stream.add_output(out.add_(self._mamba.output(values.contiguous(), attend.lora)))
