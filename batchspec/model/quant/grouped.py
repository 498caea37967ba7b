"""The products of a layer's experts in plain torch, on any device and in any dtype, a reference for kernels; how they are loaded.

T tokens, E experts, P pairs of k a token (`blocks/routing.py`), H hidden, I numbers between the two products of an expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.model.blocks.base import Clamp, GroupedSpec, Projection, TensorSpec
from batchspec.model.blocks.routing import Routing
from batchspec.model.fused import clamped_swiglu, silu_and_mul
from batchspec.model.quant.base import Cut, Slices, Weights, share


class GroupedLinear:
    """Weights of all experts in one allocation [E, rows, k], biases [E, rows]: a GroupedProduct.

    On a CPU an expert computes its own pairs. On a GPU that would need their number on the host, and a CUDA graph could not hold
    it: an expert computes T pairs there, those that are not its own for nothing.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def up(self, x: Tensor, routing: Routing, clamp: Clamp | None) -> Tensor:
        num_tokens, top_k = routing.expert_ids.shape
        out = x.new_empty(num_tokens * top_k + 1, self._weight.shape[1] // 2)
        for expert, pairs in _shares(routing):
            gate_up = self._product(expert, x[(pairs // top_k).clamp_(max=num_tokens - 1)])
            inner = silu_and_mul(gate_up) if clamp is None else clamped_swiglu(gate_up, alpha=clamp.alpha, limit=clamp.limit)
            out.index_copy_(0, pairs, inner)
        return out[:-1]

    def down(self, inner: Tensor, routing: Routing) -> Tensor:
        num_pairs = inner.shape[0]
        out = inner.new_empty(num_pairs + 1, self._weight.shape[1])
        for expert, pairs in _shares(routing):
            out.index_copy_(0, pairs, self._product(expert, inner[pairs.clamp(max=num_pairs - 1)]))
        return out[:-1]

    def _product(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self._weight[expert], None if self._bias is None else self._bias[expert])


def _shares(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """Each expert with its pairs, int64; P is padding."""
    return bounded_pairs(routing) if routing.pairs.is_cuda else own_pairs(routing)


def own_pairs(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """Of each expert that has some; their number is read on the host."""
    pairs = routing.pairs.long()
    for expert, (begin, end) in enumerate(pairwise(routing.offsets.tolist())):
        if end > begin:
            yield expert, pairs[begin:end]


def bounded_pairs(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """T of every expert, which no expert exceeds: its own, then P; nothing is read on the host."""
    num_pairs, num_tokens = routing.pairs.shape[0], routing.expert_ids.shape[0]
    pairs = F.pad(routing.pairs.long(), (0, num_tokens), value=num_pairs)
    place = torch.arange(num_tokens, device=pairs.device)
    for expert in range(routing.offsets.shape[0] - 1):
        own = routing.offsets[expert] + place
        yield expert, torch.where(own < routing.offsets[expert + 1], pairs[own], num_pairs)


class SeparateExperts(ABC):
    """Formats whose files hold each projection of an expert as any other one."""

    @abstractmethod
    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        """See `WeightFormat`."""

    @abstractmethod
    def shard(self, part: Projection, cut: Cut, rank: int, ranks: int) -> Slices:
        """See `WeightFormat`."""

    @abstractmethod
    def matrix(self, weights: Weights, name: str) -> Tensor:
        """The weight [N, K] of the projection of that name, of any floating-point dtype."""

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        return tuple(tensor for _, _, part in _parts(spec) for tensor in self.tensors(part))

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedLinear:
        """Each matrix goes to its place: no more than one is in memory twice."""
        shape = (spec.num_experts, spec.rows, spec.k)
        weight = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        bias = torch.empty(shape[:2], dtype=weights.dtype, device=weights.device) if spec.bias else None
        for expert, place, part in _parts(spec):
            weight[expert, place].copy_(self.matrix(weights, part.name))
            if bias is not None:
                bias[expert, place].copy_(weights.stored(f"{part.name}.bias"))
        return GroupedLinear(weight, bias)

    def shard_grouped(self, spec: GroupedSpec, cut: Cut, rank: int, ranks: int) -> Slices:
        found: Slices = {}
        for _, _, part in _parts(spec):
            found |= self.shard(part, cut, rank, ranks)
        return found


def gate_first(rows: Tensor) -> Tensor:
    """[2I, ...] with even rows of the gate and odd ones of up -> gate, then up."""
    return torch.cat((rows[0::2], rows[1::2]))


def stacked_bias(spec: GroupedSpec) -> tuple[TensorSpec, ...]:
    """The bias of stacked experts, which is stored alike in all formats."""
    return (TensorSpec(f"{spec.of(0).parts[0].name}_bias", (spec.num_experts, spec.rows), "bias"),) if spec.bias else ()


def load_stacked(weights: Weights, spec: GroupedSpec, matrix: Callable[[int], Tensor]) -> GroupedLinear:
    """Stacked experts, read one at a time. matrix: expert -> its weight [rows, k] as in the file, of any floating-point dtype."""
    weight = torch.empty((spec.num_experts, spec.rows, spec.k), dtype=weights.dtype, device=weights.device)
    order = gate_first if spec.interleaved else torch.Tensor.clone
    for expert in range(spec.num_experts):
        weight[expert].copy_(order(matrix(expert)))
    biases = [order(bias) for tensor in stacked_bias(spec) for bias in weights.tensor(tensor.name)]
    return GroupedLinear(weight, torch.stack(biases) if biases else None)


def shard_stacked(spec: GroupedSpec, cut: Cut, rank: int, ranks: int, *, multiple: int = 1) -> tuple[slice, slice]:
    """Rows and columns that a rank holds of the matrix of each expert; of interleaved rows whole pairs.

    multiple  shares of columns must be multiples of it: the size of a quantisation block
    """
    part, rows, columns = spec.of(0).parts[0], slice(0, spec.rows), slice(0, spec.k)
    if cut == "columns":
        pairs = 2 if spec.interleaved else 1
        own = share(part, spec.rows // pairs, rank, ranks)
        return slice(pairs * own.start, pairs * own.stop), columns
    return rows, share(part, spec.k, rank, ranks, multiple=multiple)


def shard_stacked_bias(spec: GroupedSpec, cut: Cut, rank: int, rows: slice) -> Slices:
    """As `shard_bias`; `rows` of `shard_stacked`."""
    experts = slice(0, spec.num_experts)
    return {tensor.name: (experts, rows) for tensor in stacked_bias(spec) if cut == "columns" or rank == 0}


def _parts(spec: GroupedSpec) -> Iterator[tuple[int, slice, Projection]]:
    """Every projection of every expert, with its rows in the expert's matrix."""
    for expert in range(spec.num_experts):
        for i, part in enumerate(spec.of(expert).parts):
            yield expert, slice(i * part.rows, (i + 1) * part.rows), part
