"""The experts of a layer in training: a GroupedProduct in plain torch through which gradients flow, expert by expert.

T tokens, k experts per token, P = T * k pairs (token, slot), see `kernels/moe/units.py`; H hidden, I values inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from batchspec.heads.fused import SwiGLU
from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.units import Routing, rows_by_expert
from batchspec.model.layers.base import Gating


class DifferentiableExperts:
    """The projections of each expert are separate modules. The host reads how many pairs each expert has, which synchronises on a
    GPU; an expert without pairs gets no gradient."""

    reads_rows, reads_groups = False, False

    def __init__(self, parts: Sequence[Sequence[nn.Module]]) -> None:
        """parts  gate and up, or down alone: of each the module of every expert"""
        self._parts = parts

    @property
    def weight_dtype(self) -> torch.dtype:
        return next(self._parts[0][0].parameters()).dtype

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor:
        """x [T, H] -> silu(gate) * up of each pair [P, I], in the order of the list of pairs."""
        assert gating == "silu", "experts with another function than SwiGLU are not trained"
        rows = x.index_select(0, routing.pairs.long() // routing.expert_ids.shape[1])
        out: Tensor = SwiGLU.apply(*self._products(rows, routing))  # type: ignore[no-untyped-call]
        return out

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        """inner [P, I] in the order of the list -> [P, H] in pair order."""
        assert isinstance(inner, Tensor)
        (out,) = self._products(inner, routing)
        return out.index_select(0, routing.places.long())

    def _products(self, rows: Tensor, routing: Routing) -> list[Tensor]:
        """Each projection of all rows, which are in the order of the list: every pair has an expert, since no token is dead."""
        owned = list(rows_by_expert(routing))
        return [torch.cat([experts[expert](rows[own]) for expert, own in owned]) for experts in self._parts]
