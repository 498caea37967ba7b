"""Grouped products of experts with weights of four bits, INT4 or NVFP4: Triton kernels in bf16 on a GPU, elsewhere plain torch,
here of INT4 weights and in `nvfp4.py` of NVFP4 weights.

The kernels read experts whose columns are in order, in groups as for dense products, and whose projections have a multiple of 16
rows. Plain torch computes the others, one expert after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.kernels.common.four_bit import ROWS, FourBitWeight, dequantise
from batchspec.kernels.moe.experts_four_bit import StackedFourBit, experts_four_bit_down, experts_four_bit_up
from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.units import Routing
from batchspec.model.layers.base import Gating, GroupedSpec
from batchspec.model.quant.base import Weights
from batchspec.model.quant.dequantised import multiply_in_pieces
from batchspec.model.quant.grouped import PlainExperts, expert_biases, gate_of, rows_in_order, tile_of
from batchspec.tuning.policy import has_fast_experts


class ExpertWeights:
    """The weights of all experts of a grouped product, in one allocation that is filled one projection at a time.

    The rows of each projection begin at a multiple of 16.
    """

    def __init__(self, spec: GroupedSpec, like: FourBitWeight, *, act_order: bool) -> None:
        """like: the weight of one projection. act_order: each projection has an order of columns, or groups, of its own."""
        self._parts, self._like, self._blocks = len(spec.parts), like, like.words.shape[1]

        def empty(one: Tensor) -> Tensor:
            rows = self._parts * one.shape[1]
            return one.new_empty((spec.num_experts, one.shape[0], rows, *one.shape[2:]))

        self.words, self.scales = empty(like.words), empty(like.scales)
        self.shifts = None if like.shifts is None else empty(like.shifts)
        self.row_scales = None if like.row_scales is None else empty(like.row_scales)
        self._own: dict[tuple[int, int], FourBitWeight] | None = {} if act_order else None

    def put(self, expert: int, place: int, name: str, part: FourBitWeight) -> None:
        """Copy a projection of this name, number `place` of its expert. Raises CheckpointError for scales of another dtype than
        those of the first one."""
        if part.scales.dtype != self.scales.dtype:
            dtypes = f"{part.scales.dtype}, and those of other experts {self.scales.dtype}"
            raise CheckpointError(f"{name}: its scales are {dtypes}; give those of all experts of a layer one dtype")
        own = self._part(expert, place, part)
        for mine, theirs in zip(_tensors(own), _tensors(part), strict=True):
            mine.copy_(theirs)
        if self._own is not None:
            self._own[expert, place] = own

    def of(self, expert: int) -> list[FourBitWeight]:
        """The weights of an expert's projections, without copies."""
        own = self._own
        return [self._part(expert, place, self._like) if own is None else own[expert, place] for place in range(self._parts)]

    def _part(self, expert: int, place: int, like: FourBitWeight) -> FourBitWeight:
        """The weight of a projection whose columns are those of `like`."""
        blocks = slice(place * self._blocks, (place + 1) * self._blocks)
        rows = slice(blocks.start * ROWS, blocks.stop * ROWS)
        shifts, row_scales = (None if own is None else own[expert, :, rows] for own in (self.shifts, self.row_scales))
        words, scales = self.words[expert, :, blocks], self.scales[expert, :, rows]
        return replace(like, words=words, scales=scales, shifts=shifts, row_scales=row_scales)

    def for_kernels(self) -> StackedFourBit | None:
        """What the kernels read; None if they cannot read these weights."""
        group = None if self._own is not None else self._like.kernel_group
        if group is None or self._like.num_rows % ROWS:
            return None
        return StackedFourBit(self.words, self.scales, self.shifts, self._like.k, group, self.row_scales)


def _tensors(weight: FourBitWeight) -> list[Tensor]:
    """What a weight has of its own, without its order of columns."""
    return [own for own in (weight.words, weight.scales, weight.shifts, weight.row_scales) if own is not None]


class FourBitExperts(PlainExperts):
    """A GroupedProduct with weights of four bits in a model of this dtype."""

    weight_dtype = torch.int32
    reads_groups = False

    def __init__(self, weight: ExpertWeights, bias: Tensor | None, rows: int, dtype: torch.dtype) -> None:
        self.weight, self._bias, self.rows = weight, bias, rows
        self._stacked = weight.for_kernels() if has_fast_experts(weight.words.device, dtype) else None

    @property
    def reads_rows(self) -> bool:
        return self._stacked is not None

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor:
        if self._stacked is None:
            return self.plain_up(x, routing, gating)
        tile, rows = tile_of(routing, gated=gating != "relu2", dtype=self.weight_dtype), rows_in_order(x, routing)
        return experts_four_bit_up(
            rows, self._stacked, self._bias, routing, tile=tile, gate=gate_of(gating), interpret=not x.is_cuda
        )

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        assert isinstance(inner, Tensor)
        if self._stacked is None:
            return self.plain_down(inner, routing)
        tile = tile_of(routing, gated=False, dtype=self.weight_dtype)
        return experts_four_bit_down(inner, self._stacked, self._bias, routing, tile=tile, interpret=not inner.is_cuda)

    def product(self, expert: int, x: Tensor) -> Tensor:
        return multiply_in_pieces(x, self.weight.of(expert), dequantise, None if self._bias is None else self._bias[expert])


def load_experts(
    weights: Weights, spec: GroupedSpec, parts: Iterable[tuple[int, slice, str, FourBitWeight]], *, act_order: bool
) -> FourBitExperts:
    """The grouped product of these projections: expert, rows in its matrix, name and weight of each. act_order: see
    `ExpertWeights`."""
    stacked: ExpertWeights | None = None
    for expert, rows, name, part in parts:
        stacked = ExpertWeights(spec, part, act_order=act_order) if stacked is None else stacked
        stacked.put(expert, rows.start // spec.part_rows, name, part)
    assert stacked is not None
    return FourBitExperts(stacked, expert_biases(weights, spec), spec.rows, weights.dtype)
