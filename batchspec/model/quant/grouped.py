"""The grouped products of a layer's experts: Triton kernels in bf16 on a GPU, plain torch elsewhere; and their loading.

T tokens, E experts, k experts per token, P = T * k pairs (token, slot) (`kernels/moe/units.py`), H the hidden size, I the number
of values between the two products of an expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.moe.experts_plain import experts_plain_down, experts_plain_up
from batchspec.kernels.moe.gate import GEGLU, SQUARED_RELU, SWIGLU, Gate
from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, rows_by_expert
from batchspec.model.fused import clamped_swiglu, gelu_tanh_and_mul, relu_squared, silu_and_mul
from batchspec.model.layers.base import Clamp, Gating, GroupedSpec, Projection, Share, TensorSpec, scaled
from batchspec.model.layers.forward import GroupedProduct
from batchspec.model.quant.base import Slices, Weights, check_blocks
from batchspec.tuning.policy import expert_tile, gathers_rows, has_fast_experts


class PlainExperts(ABC):
    """The reference: expert by expert in plain torch, on any device and in any dtype.

    On a CPU each expert computes its own pairs. On a GPU the host would have to read their number, which a CUDA graph cannot do.
    So each expert computes T pairs there, as many as it can have at most, and the results of surplus pairs are dropped.
    """

    rows: int
    """Number of rows of an expert's matrix."""

    @abstractmethod
    def product(self, expert: int, x: Tensor) -> Tensor:
        """x [N, k] -> x times the weight of one expert, with bias: [N, rows]. k is the number of columns of the weight."""

    def plain_up(self, x: Tensor, routing: Routing, gating: Gating) -> Tensor:
        top_k, pairs = routing.expert_ids.shape[1], routing.pairs.long()
        out = x.new_empty(len(pairs) + 1, self.rows if gating == "relu2" else self.rows // 2)
        for expert, places in _places_by_expert(routing):
            gate_up = self.product(expert, x[pairs[places.clamp(max=len(pairs) - 1)] // top_k])
            out.index_copy_(0, places, _gated(gate_up, gating))
        return out[:-1]

    def plain_down(self, inner: Tensor, routing: Routing) -> Tensor:
        num_pairs = len(inner)
        pairs = F.pad(routing.pairs.long(), (0, 1), value=num_pairs)
        out = inner.new_empty(num_pairs + 1, self.rows)
        for expert, places in _places_by_expert(routing):
            out.index_copy_(0, pairs[places], self.product(expert, inner[places.clamp(max=num_pairs - 1)]))
        return out[:-1]


class GroupedLinear(PlainExperts):
    """A GroupedProduct with weights in the model's dtype: one tensor [E, rows, k] for all experts, biases [E, rows]."""

    reads_rows, reads_groups = True, False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias, self.rows, self.weight_dtype = weight, bias, weight.shape[1], weight.dtype
        self._fast = has_fast_experts(weight.device, weight.dtype) and weight.shape[2] * weight.itemsize % ROW_BYTES == 0

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor:
        if not self._fast:
            return self.plain_up(x, routing, gating)
        interpret, gated = not x.is_cuda, gating != "relu2"
        tile = tile_of(routing, gated=gated, dtype=x.dtype)
        by_token = routing.rows is None and gathers_rows(routing.unit_pairs, x.dtype, gated=gated) and x.is_contiguous()
        rows = x if by_token else rows_in_order(x, routing)
        return experts_plain_up(
            rows, self._weight, self._bias, routing, tile=tile, gate=gate_of(gating), by_token=by_token, interpret=interpret
        )

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        assert isinstance(inner, Tensor)
        if not self._fast:
            return self.plain_down(inner, routing)
        tile = tile_of(routing, gated=False, dtype=inner.dtype)
        return experts_plain_down(inner, self._weight, self._bias, routing, tile=tile, interpret=not inner.is_cuda)

    def product(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self._weight[expert], None if self._bias is None else self._bias[expert])


ROW_BYTES = 16
"""Kernels run only if rows of activations and of weights have a multiple of this many bytes: TMA needs it."""


def tile_of(routing: Routing, *, gated: bool, dtype: torch.dtype) -> ExpertTile:
    """How a product with weights of this dtype is cut for the pairs of a routing."""
    return expert_tile(routing.unit_pairs, len(routing.units), routing.units.device, gated=gated, dtype=dtype)


def rows_in_order(x: Tensor, routing: Routing) -> Tensor:
    """The rows of x [T, H] in the order of the list of pairs: [P, H]. `route` has copied them where it was given x as rows_of."""
    return sort_rows(x, routing, interpret=not x.is_cuda) if routing.rows is None else routing.rows


def gate_of(gating: Gating) -> Gate:
    """The form that kernels take."""
    if isinstance(gating, Clamp):
        return Gate(gating.limit, gating.alpha)
    return {"silu": SWIGLU, "gelu_tanh": GEGLU, "relu2": SQUARED_RELU}[gating]


def _gated(gate_up: Tensor, gating: Gating) -> Tensor:
    if isinstance(gating, Clamp):
        return clamped_swiglu(gate_up, alpha=gating.alpha, limit=gating.limit)
    if gating == "relu2":
        return relu_squared(gate_up)
    return silu_and_mul(gate_up) if gating == "silu" else gelu_tanh_and_mul(gate_up)


def _places_by_expert(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """(expert, the places int64 of its pairs in the list); place P, which does not exist, is padding."""
    return bounded_places(routing) if routing.pairs.is_cuda else own_places(routing)


def own_places(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """(expert, its places in the list of pairs, int64) for each expert that has pairs. The host reads their
    number, which synchronises on a GPU."""
    for expert, own in rows_by_expert(routing):
        yield expert, torch.arange(own.start, own.stop, device=routing.pairs.device)


def bounded_places(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """(expert, T places) for every expert: its own, at most T, then padding with P. Does not synchronise."""
    num_pairs, num_tokens = routing.pairs.shape[0], routing.expert_ids.shape[0]
    place = torch.arange(num_tokens, device=routing.pairs.device)
    for expert in range(routing.offsets.shape[0] - 1):
        own = routing.offsets[expert] + place
        yield expert, torch.where(own < routing.offsets[expert + 1], own, num_pairs)


class SeparateExperts(ABC):
    """Base of formats whose files store each projection of each expert as separate tensors, like projections outside experts."""

    @abstractmethod
    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        """See `WeightFormat`."""

    @abstractmethod
    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        """See `WeightFormat`."""

    @abstractmethod
    def shard(self, part: Projection, share: Share) -> Slices:
        """See `WeightFormat`."""

    @abstractmethod
    def matrix(self, weights: Weights, name: str) -> Tensor:
        """The weight [N, K] of the projection with this name, in any floating-point dtype."""

    def spares(self, part: Projection) -> tuple[TensorSpec, ...]:
        return ()

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        return tuple(tensor for _, _, part in expert_parts(spec) for tensor in self.tensors(part))

    def expert_nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        return self.nbytes(rows, k, dtype)

    def unpacking(self, *, grouped: bool) -> float | None:
        return None

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        """Copy each matrix into the allocation as soon as it is read, so that only one matrix at a time is in memory twice."""
        weight = torch.empty((spec.num_experts, spec.rows, spec.k), dtype=weights.dtype, device=weights.device)
        for expert, place, part in expert_parts(spec):
            weight[expert, place].copy_(self.matrix(weights, part.name))
        return GroupedLinear(weight, expert_biases(weights, spec))

    def shard_grouped(self, spec: GroupedSpec, share: Share) -> Slices:
        found: Slices = {}
        for _, _, part in expert_parts(spec):
            found |= self.shard(part, share)
        return found


def expert_biases(weights: Weights, spec: GroupedSpec) -> Tensor | None:
    """Biases [E, rows] of experts whose projections are separate tensors in the file; None without biases."""
    if not spec.bias:
        return None
    bias = torch.empty((spec.num_experts, spec.rows), dtype=weights.dtype, device=weights.device)
    for expert, place, part in expert_parts(spec):
        bias[expert, place].copy_(weights.stored(f"{part.name}.bias"))
    return bias


def gate_first(rows: Tensor) -> Tensor:
    """Reorder rows [2I, ...]: even rows are the gate's and go first, odd rows are up's."""
    return torch.cat((rows[0::2], rows[1::2]))


def order_of(spec: GroupedSpec) -> Callable[[Tensor], Tensor]:
    """A function that copies the rows of a stacked expert from the file's order to the order in memory."""
    return gate_first if spec.interleaved else torch.Tensor.clone


def stacked_bias(spec: GroupedSpec) -> tuple[TensorSpec, ...]:
    """The bias of stacked experts; every format stores it in the same way."""
    return (TensorSpec(f"{spec.of(0).parts[0].name}_bias", (spec.num_experts, spec.rows), "bias"),) if spec.bias else ()


def load_stacked(weights: Weights, spec: GroupedSpec, matrix: Callable[[int], Tensor]) -> GroupedLinear:
    """Load stacked experts one at a time. matrix: expert -> its weight [rows, k], rows in the file's order, any float dtype."""
    weight = torch.empty((spec.num_experts, spec.rows, spec.k), dtype=weights.dtype, device=weights.device)
    order = order_of(spec)
    for expert in range(spec.num_experts):
        weight[expert].copy_(order(matrix(expert)))
    return GroupedLinear(weight, stacked_biases(weights, spec))


def stacked_biases(weights: Weights, spec: GroupedSpec) -> Tensor | None:
    """Biases [E, rows] of stacked experts, rows in the order of memory; None without biases."""
    biases = [order_of(spec)(bias) for tensor in stacked_bias(spec) for bias in weights.tensor(tensor.name)]
    return torch.stack(biases) if biases else None


def shard_stacked(spec: GroupedSpec, share: Share, *, block: int = 1) -> tuple[slice, slice]:
    """The rows and columns of each expert's matrix that a rank holds. A gate row and its interleaved up row stay together.

    block  of columns that are not divided; raises ConfigError as `check_blocks`
    """
    (own,) = share.ranges
    if share.cut == "columns":
        return scaled(own, 2 if spec.interleaved else 1), slice(0, spec.k)
    check_blocks(spec.of(0).parts[0].name, spec.k, share.ranges, block)
    return slice(0, spec.rows), own


def shard_stacked_bias(spec: GroupedSpec, share: Share, rows: slice) -> Slices:
    """The part of a stacked bias that a rank holds, as in `shard_bias`. rows: the rank's rows, from `shard_stacked`."""
    experts = slice(0, spec.num_experts)
    return {tensor.name: ((experts, rows),) for tensor in stacked_bias(spec) if share.adds_bias}


def expert_parts(spec: GroupedSpec) -> Iterator[tuple[int, slice, Projection]]:
    """Every projection of every expert, with its rows in the expert's matrix."""
    for expert in range(spec.num_experts):
        for i, part in enumerate(spec.of(expert).parts):
            yield expert, slice(i * part.rows, (i + 1) * part.rows), part
