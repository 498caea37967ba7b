"""Attention with grouped K/V heads and rotary embedding: NH query heads and KVH key/value heads of D numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.groups import most_keys
from batchspec.cache.kept import Kept
from batchspec.cache.layer_state import LayerState
from batchspec.cache.page_format import LayerPages
from batchspec.cache.sharing_cost import SharingCost
from batchspec.errors import ConfigError
from batchspec.kernels.attention.ordered_step import PART
from batchspec.kernels.attention.schedule_reference import WAVES
from batchspec.kernels.common.card import Card
from batchspec.model.fused import rms_norm, sigmoid_gated
from batchspec.model.layers.attention.kv_layout import KVLayout, LayerKV
from batchspec.model.layers.attention.paged import PagedAttend, PagedStore
from batchspec.model.layers.attention.plan import AttentionPlan, narrowed, plan_attention
from batchspec.model.layers.attention.rope import Rope, rope_frequencies, rope_of
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.base import (
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
from batchspec.model.layers.forward import Attend, BlockSource, StoreKV, Stream
from batchspec.model.layers.kind import About, Computing, Inputs, MixerSpec, Use, Work
from batchspec.model.layers.passes import Pass
from batchspec.model.layers.scaled import scaled_product

MOST_SMS, SM_RESULT_BYTES = 192, 2 * Card.sm_registers
"""Multiprocessors of a card (a B200 has 148). The results of all programs of one fill at most half of its 32-bit registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(NormedSpec, MixerSpec):
    """The shape of an attention block."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Number of keys that a query attends to at most, itself included; None: all."""
    whole_images: bool = False
    """Whether tokens of an image that is not cut (`ImagePiece.whole`) attend to all of its tokens, those after them too."""
    input_size: int | None = None
    """Width of the input of q, k and v if it is not the normed residual stream [H]; None: it is."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Whether q and k are normed, each head separately, before they are rotated."""
    qk_norm_rows: bool = False
    """Whether q and k are normed, each over all of its heads together, before they are rotated."""
    rope: RopeSpec | None = None
    """How q and k are rotated by their positions; None: not known yet (`Family.with_ropes`)."""
    v_norm: bool = False
    """Whether each head of v is normed, without a weight."""
    shared_v: bool = False
    """Whether there is no v_proj: v is what k_proj computes, before its norm and rotation."""
    kv_of: int | None = None
    """Index of the layer whose K and V it reads, with heads of the same number and size: it computes only queries. None: it
    keeps its own K and V."""
    sinks: bool = False
    """Whether each head has a learned logit that joins the denominator of its softmax."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    gated: bool = False
    """Whether q_proj computes a gate beside each head of q, as many rows after those of q; what the head attended to is
    multiplied by its sigmoid."""
    fused_qkv: bool = False
    """Whether the file holds q, k and v as one projection, `qkv_proj`, their rows one after another."""
    name: str = "self_attn"
    out_name: str = "o_proj"
    """Name of the last projection, relative to `name`."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    """Names of the norms of q and of k, relative to `name`."""
    norm: str | None = "input_layernorm"

    @property
    def rotation(self) -> RopeSpec:
        """How q and k are rotated."""
        assert self.rope is not None
        return self.rope

    @property
    def rotated_size(self) -> int:
        return self.head_dim

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Number of values of q for one token, with its gates."""
        return (2 if self.gated else 1) * self.inner_size

    @property
    def kv_size(self) -> int:
        """Number of values of K for one token, and as many of V."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv(self) -> ProductSpec:
        sizes = {"q": self.q_rows}
        if self.kv_of is None:
            sizes |= {"k": self.kv_size} | ({} if self.shared_v else {"v": self.kv_size})
        k = self.input_size or self.hidden_size
        if self.fused_qkv:
            return ProductSpec((Projection(f"{self.name}.qkv_proj", sum(sizes.values()), k, self.qkv_bias),))
        return ProductSpec(tuple(Projection(f"{self.name}.{x}_proj", rows, k, self.qkv_bias) for x, rows in sizes.items()))

    @property
    def kv(self) -> ProductSpec:
        """The part of `qkv` that computes K and V."""
        assert not self.fused_qkv
        assert self.kv_of is None
        return ProductSpec(self.qkv.parts[1:])

    @property
    def out(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.{self.out_name}", self.hidden_size, self.inner_size, self.o_bias),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.qkv, self.out

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        norms = (self.norms.tensor(f"{self.name}.{name}", size) for name, size in self._qk_norms.items())
        sinks = (TensorSpec(f"{self.name}.sinks", (self.num_heads,), "bias", wide=True),) if self.sinks else ()
        return *self.stream_norms, *norms, *sinks

    @property
    def _qk_norms(self) -> dict[str, int]:
        """Names of the norms of q and k, and the lengths of their weights."""
        if self.qk_norm_rows:
            return dict(zip(self.qk_norm_names, (self.inner_size, self.kv_size), strict=True))
        names = self.qk_norm_names if self.kv_of is None else self.qk_norm_names[:1]
        return dict.fromkeys(names, self.head_dim) if self.qk_norm else {}

    @property
    def has_qk_norms(self) -> bool:
        return self.qk_norm or self.qk_norm_rows

    @property
    def activation_size(self) -> int:
        """Values of q, k and v before and after the rotation, and the attention output; with gates q and gates once more."""
        return 2 * (self.q_rows + 2 * self.kv_size) + self.inner_size + (self.q_rows if self.gated else 0)

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        into = ("linear", "norm_linear") if self.norms_in_kernel else ("linear",)
        return Gemm(product=self.qkv, ops=into), self.gemm_of_output(self.out)

    def head_gemms(self) -> tuple[Gemm, ...]:
        return *(Gemm(product=own, ops=("linear",)) for own in (self.qkv, self.kv)), self.gemm_of_output(self.out)

    def heads_of(self, shard: Shard) -> slice:
        """The query heads of a rank; all ranks have equally many."""
        return shard.of("num_attention_heads", self.num_heads)

    def kv_heads_of(self, shard: Shard) -> slice:
        """The K/V heads that these query heads read. With fewer K/V heads than ranks, several ranks hold the same
        one. Raises ConfigError if they cannot be divided."""
        if self.num_kv_heads % shard.ranks and shard.ranks % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads {self.num_kv_heads} and {shard.ranks} ranks: one must be a multiple of the other; "
                "choose another cluster.tensor_parallel"
            )
        holders = min(shard.ranks, self.num_kv_heads)
        return Shard(shard.rank * holders // shard.ranks, holders).of("num_key_value_heads", self.num_kv_heads)

    def sharded(self, shard: Shard, unit: int) -> AttentionSpec:
        kv_heads, heads = self.kv_heads_of(shard), self.heads_of(shard)
        return replace(self, num_heads=heads.stop - heads.start, num_kv_heads=kv_heads.stop - kv_heads.start)

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        heads = self.heads_of(shard)
        inner, kv = scaled(heads, self.head_dim), scaled(self.kv_heads_of(shard), self.head_dim)
        q = scaled(heads, self.q_rows // self.num_heads)
        of_q, of_kv = Share("columns", (q,)), Share("columns", (kv,))
        of_qkv = Share("columns", (q, shifted(kv, self.q_rows), shifted(kv, self.q_rows + self.kv_size)))
        names = {"q_proj": of_q, "k_proj": of_kv, "v_proj": of_kv, "qkv_proj": of_qkv}
        names |= {self.out_name: Share("rows", (inner,), shard.rank == 0), "sinks": Share("columns", (heads,))}
        if self.qk_norm_rows:
            assert not self.gated
            names |= dict(zip(self.qk_norm_names, (of_q, of_kv), strict=True))
        return {f"{self.name}.{name}": share for name, share in names.items()}

    @property
    def num_rank_sums(self) -> int:
        return int(self.qk_norm_rows)

    def layout(self, run: Computing) -> KVLayout:
        """The format of the K and V that it reads."""
        return KVLayout(
            dtype=run.dtype, fp8=run.fp8_kv, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, page_size=run.page_size,
            ordered=run.ordered,
        )

    def kept(self, run: Computing) -> LayerState:
        shares = "attention", self.window, self.num_heads, self.head_dim, self.rope
        return LayerState(self.layout(run) if self.kv_of is None else None, self.window, reads=self.kv_of, shares=shares)

    def round_work(self, run: Computing, context: float, tokens: float) -> Work:
        keys = context if self.window is None else min(context, most_keys(self.window, tokens))
        return Work(page_bytes=keys * self.layout(run).token_bytes, flop=self._flop(keys))

    def prompt_work(self, run: Computing, prompt: float, *, ends_only: bool) -> Work:
        """A token attends to half of the prompt on average; with a window, to the keys within it."""
        most = prompt if self.window is None else min(self.window, prompt)
        return Work(flop=self._flop(most / prompt if ends_only else most * (1 - most / (2 * prompt))))

    def sharing_cost(self, run: Computing, max_q: int) -> SharingCost:
        """With a window, shared prefixes are read once per row. Partial results of the prefix and of the row's own keys
        are fp32, written and read once."""
        return SharingCost(
            page_bytes=self.layout(run).page_bytes, row_bytes=2 * 2 * 4 * max_q * self.inner_size, reads_all=self.window is None
        )

    def partial_bytes(self, run: Computing, rows: int, num_keys: int, *, shares: bool) -> int:
        """Of each head of a token its values, their maximum and their sum, in fp32: for every part of its keys if sums have one
        order; else for as many parts as programs compute, and once more; twice as many if prefixes are read once."""
        token_bytes = 4 * (self.inner_size + 2 * self.num_heads) * rows * (run.draft_len + 1)
        if run.ordered:
            return token_bytes * (-(-num_keys // PART) + 2 * shares)
        return (token_bytes + WAVES * MOST_SMS * SM_RESULT_BYTES) * (1 + shares)

    def _flop(self, keys: float) -> float:
        """Operations of a token that attends to so many keys."""
        return 4.0 * self.inner_size * keys

    def refuses(self, use: Use) -> None:
        return None

    @classmethod
    def about(cls, layers: Sequence[AttentionSpec], run: Computing) -> About:
        return About()

    @property
    def spare(self) -> tuple[str, ...]:
        """What would compute its own K and V if it reads those of another layer."""
        return () if self.kv_of is None else (f"{self.name}.k_", f"{self.name}.v_")

    def tables(self) -> Mapping[Hashable, Tensor]:
        """The frequencies of its rotation."""
        return {(self.rotation, self.head_dim): rope_frequencies(self.rotation, self.head_dim)}

    def inputs(self, pass_: Pass, kept: Kept) -> Inputs:
        kv, rope, slots, plan = LayerKV.of(kept.pages), *pass_.once(kept.key, lambda: self._prepared(pass_, kept))
        ranks = pass_.ranks if self.qk_norm_rows else None
        store = PagedStore(rope=rope, slot_mapping=slots, kv=kv, lora=pass_.lora, norm_ranks=ranks)
        return Inputs(store, PagedAttend(kv=kv, plan=plan, lora=pass_.lora))

    def _prepared(self, pass_: Pass, kept: Kept) -> tuple[Rope, Tensor, AttentionPlan]:
        """Layers that differ in their rotation share a plan, and those that differ in their plan a rotation."""
        kv, batch, turn = LayerKV.of(kept.pages), pass_.of_group(kept.group), (self.rotation, self.head_dim)
        rope = pass_.once(turn, lambda: rope_of(batch.rope_positions, pass_.tables[turn], self.rotation, pass_.dtype))
        plan = pass_.once(
            ("plan", self.window, self.whole_images, self.num_heads, kv.layout, kept.group),
            lambda: plan_attention(
                self._seen(batch), kv, num_heads=self.num_heads, **narrowed(self.window, pass_.window, pass_.sink)
            ),
        )
        return rope, batch.slot_mapping, plan

    def plan(self, batch: FlatBatch, pages: LayerPages, *, window: int | None, sink: int) -> AttentionPlan:
        return plan_attention(self._seen(batch), LayerKV.of(pages), num_heads=self.num_heads, window=window, sink=sink)

    def _seen(self, batch: FlatBatch) -> FlatBatch:
        """The batch with the last keys that this layer's queries attend to."""
        return batch if self.whole_images or batch.last_keys is None else replace(batch, last_keys=None)

    def store(self, pages: LayerPages, rope: Rope, slots: Tensor) -> PagedStore:
        return PagedStore(rope=rope, slot_mapping=slots, kv=LayerKV.of(pages))

    def attend(self, pages: LayerPages, plan: AttentionPlan, positions: Tensor | None = None) -> PagedAttend:
        return PagedAttend(kv=LayerKV.of(pages), plan=plan, positions=positions)

    def build(self, source: BlockSource) -> Attention:
        return Attention(self, source)


class Attention:
    """Attention in two parts, up to q and from q on: a `Mixer`."""

    def __init__(self, spec: AttentionSpec, source: BlockSource) -> None:
        self.spec, self._scale = spec, spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self._norm = None if spec.norm is None else source.vector(f"{spec.norm}.weight")
        self._post_norm = None if spec.post_norm is None else source.vector(f"{spec.post_norm}.weight")
        self._qkv = source.product(spec.qkv)
        of_q, of_k = (f"{spec.name}.{name}.weight" for name in spec.qk_norm_names)
        self._q_norm = source.vector(of_q) if spec.has_qk_norms else None
        self._k_norm = source.vector(of_k) if spec.has_qk_norms and spec.kv_of is None else None
        self._sinks = source.vector(f"{spec.name}.sinks") if spec.sinks else None
        self._out = scaled_product(source.product(spec.out), spec.out_scale)

    @property
    def norm(self) -> Tensor:
        """The weight of the norm of its input."""
        assert self._norm is not None
        return self._norm

    def keeper(self) -> Callable[[Tensor, StoreKV], Tensor]:
        kv = self._qkv.rows_from(self.spec.q_rows)
        return lambda normed, store: self._rotated(kv(normed, store.lora), store)

    def norms_in_product(self, stream: Stream) -> bool:
        return self.spec.norms_in_kernel and stream.norms_in_product(self._qkv, gated=False)

    def begin(self, stream: Stream, store: StoreKV, out_aux: Tensor | None = None) -> Tensor:
        """q [T, NH, D], with gates [T, 2 NH, D], all heads of q first; K and V are stored.

        out_aux  [T, H]: the layer's input stream is written here if it is given
        """
        return self._stored(stream.project(self._norm, self.spec.eps, self._qkv, store.lora, out_aux=out_aux), store)

    def queries_of(self, normed: Tensor, store: StoreKV) -> Tensor:
        """The same for an input [T, input_size] that the caller has normed."""
        return self._stored(self._qkv(normed, store.lora), store)

    def finish(self, begun: Tensor, stream: Stream, attend: Attend, *, add_in_product: bool) -> None:
        """Continue from the result of `begin`, of the stream's tokens, to the end of the block. add_in_product: see `Block`."""
        if self._post_norm is None:
            stream.add_product(self._out, self._attended(begun, attend), attend.lora, in_product=add_in_product)
        else:
            stream.add(rms_norm(stream.reduced(self.output(begun, attend)), self._post_norm, self.spec.eps))

    def output(self, begun: Tensor, attend: Attend) -> Tensor:
        """[T, H] the output of the last product, of this rank, from the result of `begin`."""
        out: Tensor = self._out(self._attended(begun, attend), attend.lora)
        return out

    def _attended(self, begun: Tensor, attend: Attend) -> Tensor:
        """[T, NH * D]"""
        q, *gate = begun.chunk(2, 1) if self.spec.gated else (begun,)
        attended = attend(q, self._scale, self._sinks)
        return sigmoid_gated(attended.view(gate[0].shape), gate[0]).flatten(1) if gate else attended

    def _stored(self, qkv: Any, store: StoreKV) -> Tensor:
        gate = None
        if self.spec.gated:
            in_training = not isinstance(qkv, Tensor)
            heads, *kv = qkv if in_training else qkv.split((self.spec.q_rows, 2 * self.spec.kv_size), -1)
            q, gate = heads.unflatten(-1, (-1, 2, self.spec.head_dim)).unbind(2)
            parts = (q.flatten(1), *kv)
            qkv = parts if in_training else torch.cat(parts, -1)
        rotated = self._rotated(qkv, store)
        return rotated if gate is None else torch.cat((rotated, gate), 1)

    def _rotated(self, qkv: Any, store: StoreKV) -> Tensor:
        if self.spec.kv_of is not None:
            return store.rotate(qkv, q_norm=self._q_norm, eps=self.spec.eps)
        return store.rotate_and_store(
            qkv, q_norm=self._q_norm, k_norm=self._k_norm, eps=self.spec.eps, v_norm=self.spec.v_norm,
            shared_v=self.spec.shared_v,
        )
