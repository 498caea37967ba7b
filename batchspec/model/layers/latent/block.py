"""Multi-head latent attention (MLA): the keys and values of all heads are products of one latent per token.

    x = norm(stream)
    q = q_b(norm(q_a(x)))                     NH heads of N numbers without a rotation and P with one; q_proj(x) without q_a
    c, k = kv_a(x);  c = norm(c)              R and P numbers, the same for all heads; k and the P numbers of q are rotated
    keys, values = kv_b(c)                    N and V numbers for each head, whose key ends with k
    stream += o_proj(softmax(scale q keys') values)

q_a and kv_a, which read the same x, are multiplied as one matrix. Pages hold c and k. The plans of `plan.py` compute the last
two lines.
Source: transformers, models/glm4_moe_lite; DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.kept import Kept
from batchspec.cache.layer_state import LayerState
from batchspec.cache.page_format import LayerPages
from batchspec.console.text import bytes_text
from batchspec.kernels.attention.schedule_reference import WAVES
from batchspec.kernels.attention.settings import MAX_QUERIES
from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.latent.settings import latent_tile
from batchspec.model.layers.attention.block import MOST_SMS, SM_RESULT_BYTES
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
    whole_shares,
)
from batchspec.model.layers.forward import BlockSource, Stream
from batchspec.model.layers.kind import About, Computing, Inputs, MixerSpec, Use, Work
from batchspec.model.layers.latent.attend import HeadSizes, Matrices
from batchspec.model.layers.latent.pages import LatentLayout, LatentPages
from batchspec.model.layers.latent.plan import LatentPlan, plan_latents
from batchspec.model.layers.latent.prefill import KEYS, most_bytes
from batchspec.model.layers.latent.store import LatentAttend, LatentStore
from batchspec.model.layers.passes import Pass

TURNING_POINT = 184
"""Operations in bf16 that an H200 computes in the time in which it reads a byte."""
REFUSED: Mapping[Use, str] = {
    "tree": "has latent attention, which verifies chains of drafts only",
    "ordered": "has latent attention, whose sums have no fixed order on a GPU",
    "adapters": "has latent attention, whose kv_b_proj has no adapters of single rows",
    "padded_prefill": "has latent attention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(NormedSpec, MixerSpec):
    """See the module's docstring."""

    num_heads: int
    """NH"""
    sizes: HeadSizes
    query_rank: int | None
    """Number of outputs of q_a; None: there is none."""
    scale: float
    """Factor of the scores."""
    rope: RopeSpec
    inner_eps: float
    """epsilon of the norms of what q_a and kv_a compute"""
    bias: bool = False
    """Of q_a, kv_a and o_proj."""
    name: str = "self_attn"
    norm: str | None = "input_layernorm"
    window: ClassVar[None] = None

    @property
    def rotation(self) -> RopeSpec:
        return self.rope

    @property
    def rotated_size(self) -> int:
        return self.sizes.rope_dim

    @property
    def vector_size(self) -> int:
        """R + P, what is kept of a token."""
        return self.sizes.latent_dim + self.sizes.rope_dim

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.sizes.value_dim

    @property
    def into(self) -> ProductSpec:
        """q_a and kv_a as one, which every rank computes; kv_a alone where there is no q_a."""
        q_a, name = self.query_rank, self.name
        first = () if q_a is None else (Projection(f"{name}.q_a_proj", q_a, self.hidden_size, self.bias),)
        return ProductSpec((*first, Projection(f"{name}.kv_a_proj_with_mqa", self.vector_size, self.hidden_size, self.bias)))

    @property
    def queries(self) -> ProductSpec:
        """q_b, or q_proj."""
        rows = self.num_heads * self.sizes.query_dim
        if self.query_rank is None:
            return self._product("q_proj", rows, self.hidden_size)
        return self._product("q_b_proj", rows, self.query_rank)

    @property
    def kv_b(self) -> ProductSpec:
        return self._product(
            "kv_b_proj", self.num_heads * (self.sizes.key_dim + self.sizes.value_dim), self.sizes.latent_dim
        )

    @property
    def out(self) -> ProductSpec:
        return self._product("o_proj", self.hidden_size, self.inner_size, bias=self.bias)

    def _product(self, name: str, rows: int, k: int, *, bias: bool = False) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.{name}", rows, k, bias),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.into, self.queries, self.kv_b, self.out

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        sizes = {"q_a_layernorm": self.query_rank, "kv_a_layernorm": self.sizes.latent_dim}
        inner = (self.norms.tensor(f"{self.name}.{name}", size) for name, size in sizes.items() if size is not None)
        return *self.stream_norms, *inner

    @property
    def activation_size(self) -> int:
        """Values of q_a, q and kv_a before and after norms and rotation; q and the result in the absorbed form; the result."""
        absorbed = self.num_heads * (self.vector_size + self.sizes.latent_dim)
        kept = 2 * ((self.query_rank or 0) + self.num_heads * self.sizes.query_dim + self.vector_size)
        return kept + absorbed + self.inner_size

    def row_bytes_of_pass(self, run: Computing, num_keys: int) -> int:
        """Vectors of a part of a prefill as they are read and once more, and the keys and values that are made of them at once
        (`prefill.py`)."""
        num_keys = max(num_keys, KEYS)
        return 2 * num_keys * self.vector_size * run.dtype.itemsize + most_bytes(self.num_heads, num_keys, self.sizes, run.dtype)

    def partial_bytes(self, run: Computing, rows: int, num_keys: int, *, shares: bool) -> int:
        """Of each head of a token its sums, their maximum and their sum, in fp32, for as many parts of its keys as programs
        compute, and once more."""
        token_bytes = 4 * self.num_heads * (self.sizes.latent_dim + 2)
        return token_bytes * rows * (run.draft_len + 1) + WAVES * MOST_SMS * SM_RESULT_BYTES

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        """kv_b counts as a product of each token: both forms of `attend.py` multiply by it once for a token of their pass."""
        into = (Gemm(product=own, ops=("linear",)) for own in (self.into, self.queries))
        return *into, Gemm(product=self.kv_b, ops=()), self.gemm_of_output(self.out)

    def head_gemms(self) -> tuple[Gemm, ...]:
        return self.gemms(1)

    def layout(self, run: Computing) -> LatentLayout:
        return LatentLayout(
            dtype=run.dtype, fp8=run.fp8_kv, size=self.vector_size, rope_dim=self.sizes.rope_dim, page_size=run.page_size
        )

    def kept(self, run: Computing) -> LayerState:
        return LayerState(self.layout(run), shares=("latent attention", self.num_heads, self.sizes, self.rope))

    def round_work(self, run: Computing, context: float, tokens: float) -> Work:
        """In the absorbed form, of whole tiles of heads and tokens as on Hopper, of which the interpreter has the features."""
        lanes = math.ceil(self.num_heads * tokens)
        tile = latent_tile(lanes, run.dtype, INTERPRETER, fp8=run.fp8_kv)
        lines = -(-lanes // tile) * tile
        flop = 2.0 * lines / tokens * (self.vector_size + self.sizes.latent_dim) * context
        return Work(page_bytes=context * self.layout(run).token_bytes, flop=flop)

    def flop_per_byte(self, run: Computing, tokens: float) -> float:
        """Operations of a round in which a row verifies `tokens`, for each byte of latents that it reads."""
        work = self.round_work(run, 1, tokens)
        return work.flop * tokens / work.page_bytes

    def prompt_work(self, run: Computing, prompt: float, *, ends_only: bool) -> Work:
        """In the expanded form. A token attends to half of the prompt on average."""
        return Work(flop=2.0 * self.num_heads * (self.sizes.query_dim + self.sizes.value_dim) * (1 if ends_only else prompt / 2))

    def refuses(self, use: Use) -> str | None:
        return REFUSED.get(use)

    @classmethod
    def about(cls, layers: Sequence[LatentSpec], run: Computing) -> About:
        token_bytes, widest = sum(own.layout(run).token_bytes for own in layers), max(layers, key=lambda own: own.num_heads)
        bound = next(k for k in range(MAX_QUERIES) if k + 1 == MAX_QUERIES or widest.flop_per_byte(run, k + 1) > TURNING_POINT)
        return About(
            model=((
                "latents",
                f"{len(layers)} of the layers keep {bytes_text(token_bytes)} per token, one vector of all heads, whole on each "
                f"rank; rounds compute {widest.flop_per_byte(run, 1):.0f} operations with each byte of them, with drafts more: "
                f"on an H200 arithmetic bounds their attention from K = {bound} on",
            ),)
        )

    def heads_of(self, shard: Shard) -> slice:
        """The heads of a rank; all ranks have equally many."""
        return shard.of("num_attention_heads", self.num_heads)

    def sharded(self, shard: Shard, unit: int) -> LatentSpec:
        own = self.heads_of(shard)
        return replace(self, num_heads=own.stop - own.start)

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        """Every rank has all of q_a and kv_a, and keeps whole vectors."""
        heads, sizes = self.heads_of(shard), self.sizes
        q = Share("columns", (scaled(heads, self.sizes.query_dim),))
        names = {
            "q_proj": q, "q_b_proj": q, "kv_b_proj": Share("columns", (scaled(heads, sizes.key_dim + sizes.value_dim),)),
            "o_proj": Share("rows", (scaled(heads, sizes.value_dim),), shard.rank == 0),
        }
        return whole_shares((self.into,)) | {f"{self.name}.{name}": share for name, share in names.items()}

    def tables(self) -> Mapping[Hashable, Tensor]:
        """The frequencies of its rotation."""
        return {(self.rope, self.sizes.rope_dim): rope_frequencies(self.rope, self.sizes.rope_dim)}

    def inputs(self, pass_: Pass, kept: Kept) -> Inputs:
        pages = LatentPages.of(kept.pages)
        rope, slots, plan = pass_.once(kept.key, lambda: self._prepared(pass_, kept))
        return Inputs(
            LatentStore(rope=rope, slot_mapping=slots, pages=pages, lora=pass_.lora),
            LatentAttend(plan=plan, pages=pages, lora=pass_.lora),
        )

    def _prepared(self, pass_: Pass, kept: Kept) -> tuple[Rope, Tensor, LatentPlan]:
        batch, pages = pass_.of_group(kept.group), LatentPages.of(kept.pages)
        rope = rope_of(batch.rope_positions, pass_.tables[self.rope, self.sizes.rope_dim], self.rope, pass_.dtype)
        return rope, batch.slot_mapping, self.plan(batch, pages, window=pass_.window, sink=pass_.sink)

    def plan(self, batch: FlatBatch, pages: LayerPages, *, window: int | None, sink: int) -> LatentPlan:
        own = LatentPages.of(pages)
        return plan_latents(batch, own, num_heads=self.num_heads, sizes=self.sizes, window=window, sink=sink)

    def store(self, pages: LayerPages, rope: Rope, slots: Tensor) -> LatentStore:
        return LatentStore(rope=rope, slot_mapping=slots, pages=LatentPages.of(pages))

    def attend(self, pages: LayerPages, plan: LatentPlan, positions: Tensor | None = None) -> LatentAttend:
        return LatentAttend(plan=plan, pages=LatentPages.of(pages), positions=positions)

    def build(self, source: BlockSource) -> LatentAttention:
        return LatentAttention(self, source)


class LatentAttention:
    """Latent attention of a layer in two parts, up to q and from q on: a `Mixer`."""

    def __init__(self, spec: LatentSpec, source: BlockSource) -> None:
        self.spec = spec
        self.norm = source.vector(f"{spec.norm}.weight")
        self._into, self._queries = source.product(spec.into), source.product(spec.queries)
        self._q_norm = None if spec.query_rank is None else source.vector(f"{spec.name}.q_a_layernorm.weight")
        self._kv_norm = source.vector(f"{spec.name}.kv_a_layernorm.weight")
        self._matrices = Matrices.of(source.matrix(spec.kv_b).to(self.norm.dtype), spec.sizes)  # multiplied from both sides
        self._out = source.product(spec.out)

    def norms_in_product(self, stream: Stream) -> bool:
        return self._q_norm is not None and self.spec.norms_in_kernel and stream.norms_in_product(self._into, gated=False)

    def begin(self, stream: Stream, store: LatentStore, out_aux: Tensor | None = None) -> Tensor:
        """q [T, NH, N + P]; the vectors of the tokens are stored."""
        if self._q_norm is None:  # two products read the normed stream
            return self.queries_of(stream.normed(self.norm, self.spec.eps, out_aux=out_aux), store)
        return self._begun(stream.project(self.norm, self.spec.eps, self._into, store.lora, out_aux=out_aux), store)

    def queries_of(self, normed: Tensor, store: LatentStore) -> Tensor:
        if self._q_norm is None:
            return self._stored(self._into(normed, store.lora), self._queries(normed, store.lora), store)
        return self._begun(self._into(normed, store.lora), store)

    def _begun(self, made: Tensor, store: LatentStore) -> Tensor:
        """made [T, rank of q_a + R + P]: what q_a and kv_a computed"""
        assert self._q_norm is not None
        q_a, rows = made.split((len(self._q_norm), self.spec.vector_size), 1)
        return self._stored(rows, self._queries.of_norm(q_a, self._q_norm, self.spec.inner_eps, store.lora), store)

    def keeper(self) -> Callable[[Tensor, LatentStore], Tensor]:
        kv_a = self._into.rows_from(self.spec.query_rank or 0)
        return lambda normed, store: self._stored(kv_a(normed, store.lora), normed.new_empty(len(normed), 0), store)

    def _stored(self, rows: Tensor, q: Tensor, store: LatentStore) -> Tensor:
        """rows: what kv_a computed; q [T, NH (N + P)], of no head if only vectors are stored"""
        heads = q.unflatten(1, (-1, self.spec.sizes.query_dim))
        return store.write(rows, heads, self._kv_norm, self.spec.inner_eps)

    def finish(self, begun: Tensor, stream: Stream, attend: LatentAttend, *, add_in_product: bool) -> None:
        attended = attend.plan.attend(
            begun, attend.pages, self._matrices, self.spec.sizes, self.spec.scale, attend.positions
        )
        stream.add_product(self._out, attended.flatten(1), attend.lora, in_product=add_in_product)
