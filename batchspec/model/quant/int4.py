"""Products with INT4 weights (W4A16), on any device in plain torch: weights stay packed, and each call dequantises them.

    y = x W' + b     W [N, K] as `kernels/common/int4.py` defines it, in the dtype of x

So the result is that of the model with dequantised weights; in fp64 it has the same bits, unless a matrix is larger than PIECE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.kernels.common.int4 import CODES, Int4Weight, dequantise
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.units import Routing
from batchspec.model.blocks.base import Gating, GroupedSpec
from batchspec.model.blocks.forward import Product
from batchspec.model.quant.grouped import PlainExperts

PIECE = 1 << 22
"""Maximum number of weights that are dequantised at once; they take about 50 MB in bf16."""


class Int4Linear(Product):
    """x [T, K] -> x @ W.T + bias [T, N]; W is that of all parts, their rows one after another."""

    def __init__(self, parts: Sequence[Int4Weight], bias: Tensor | None = None) -> None:
        self.weights, self._bias = joined(parts), bias

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        return multiply(x, self.weights, self._bias)

    def rows_from(self, first: int) -> Product:
        rows = slice(first, sum(weight.num_rows for weight in self.weights))
        return Int4Linear(rows_of(self.weights, rows), None if self._bias is None else self._bias[first:])


def multiply(x: Tensor, weights: Sequence[Int4Weight], bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, rows of all weights]. Does not synchronise."""
    num_rows, step = sum(weight.num_rows for weight in weights), max(1, PIECE // x.shape[1])
    outs = []
    for first in range(0, num_rows, step):
        own = slice(first, min(first + step, num_rows))
        matrix = torch.cat([dequantise(part, x.dtype) for part in rows_of(weights, own)])
        outs.append(F.linear(x, matrix, None if bias is None else bias[own]))
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


def rows_of(weights: Iterable[Int4Weight], own: slice) -> list[Int4Weight]:
    """The weights of a range of the rows of all, which lie one after another; without copies."""
    found, at = [], 0
    for weight in weights:
        part = slice(max(own.start - at, 0), min(own.stop - at, weight.num_rows))
        if part.start < part.stop:
            found.append(weight.rows(part))
        at += weight.num_rows
    return found


def joined(parts: Sequence[Int4Weight]) -> tuple[Int4Weight, ...]:
    """The parts as one weight, if all divide their columns in the same way; otherwise as they are."""
    first, *others = parts
    if not others or not all(first.has_groups_of(part) for part in others):
        return tuple(parts)
    zeros = [part.zeros for part in parts if part.zeros is not None]
    assert len(zeros) in (0, len(parts))
    words, scales = torch.cat([part.words for part in parts]), torch.cat([part.scales for part in parts])
    return (replace(first, words=words, scales=scales, zeros=torch.cat(zeros) if zeros else None),)


class StackedInt4:
    """The weights of all experts of a grouped product, in one allocation that is filled one projection at a time."""

    def __init__(self, spec: GroupedSpec, like: Int4Weight, *, act_order: bool) -> None:
        """like: the weight of one projection. act_order: each projection has groups of its own."""

        def empty(one: Tensor) -> Tensor:
            return one.new_empty((spec.num_experts, spec.rows, one.shape[1]))

        self.words, self.scales = empty(like.words), empty(like.scales)
        self.zeros = None if like.zeros is None else empty(like.zeros)
        self.group_size, self._part_rows, device = like.group_size, spec.part_rows, like.words.device
        shape = (spec.num_experts, len(spec.parts), like.words.shape[1] * CODES)
        self.groups = torch.empty(shape, dtype=torch.int32, device=device) if act_order else None

    def put(self, expert: int, rows: slice, name: str, part: Int4Weight) -> None:
        """Copy a projection of this name. rows: its rows in the matrix of its expert. Raises CheckpointError for scales of
        another dtype than those of the first one."""
        if part.scales.dtype != self.scales.dtype:
            dtypes = f"{part.scales.dtype}, and those of other experts {self.scales.dtype}"
            raise CheckpointError(f"{name}: its scales are {dtypes}; give those of all experts of a layer one dtype")
        self.words[expert, rows].copy_(part.words)
        self.scales[expert, rows].copy_(part.scales)
        if self.zeros is not None:
            assert part.zeros is not None
            self.zeros[expert, rows].copy_(part.zeros)
        if self.groups is not None:
            columns = torch.arange(self.groups.shape[2], device=self.groups.device)
            own = columns // self.group_size if part.groups is None else part.groups
            self.groups[expert, rows.start // self._part_rows].copy_(own)

    def of(self, expert: int) -> list[Int4Weight]:
        """The weight of an expert, without copies; with groups of their own one for each of its projections."""
        zeros = None if self.zeros is None else self.zeros[expert]
        whole = Int4Weight(self.words[expert], self.scales[expert], zeros, self.group_size)
        if self.groups is None:
            return [whole]
        starts = range(0, whole.num_rows, self._part_rows)
        parts = zip((whole.rows(slice(at, at + self._part_rows)) for at in starts), self.groups[expert], strict=True)
        return [replace(part, groups=own) for part, own in parts]


class Int4Experts(PlainExperts):
    """A GroupedProduct with INT4 weights."""

    weight_dtype = torch.int32
    reads_rows = reads_groups = False

    def __init__(self, weight: StackedInt4, bias: Tensor | None) -> None:
        self.weight, self._bias, self.rows = weight, bias, weight.words.shape[1]

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor:
        return self.plain_up(x, routing, gating)

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        assert isinstance(inner, Tensor)
        return self.plain_down(inner, routing)

    def product(self, expert: int, x: Tensor) -> Tensor:
        return multiply(x, self.weight.of(expert), None if self._bias is None else self._bias[expert])
