"""A weight format: how a projection lies in the checkpoint's files and in memory, and how it is cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from batchspec.errors import ConfigError
from batchspec.model.blocks.base import GroupedSpec, Projection, TensorSpec
from batchspec.model.blocks.forward import GroupedProduct, Product

Cut = Literal["columns", "rows"]
"""columns: each rank makes some of the outputs (W is cut along its rows); rows: each rank reads some of the inputs."""
Slices = dict[str, tuple[slice, ...]]
"""tensor name -> the part of it that a rank holds, a slice for each dimension; a tensor that it does not need is left out"""


class Weights(Protocol):
    """Where a model's tensors come from."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""

    @property
    def device(self) -> torch.device:
        """Where tensors go."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name in the checkpoint, in the model's dtype, on its device."""

    def stored(self, name: str) -> Tensor:
        """The same in the dtype of the file: what a quantised format reads."""

    def entry(self, name: str, index: int) -> Tensor:
        """`stored(name)[index]`, nothing else of it read."""


class WeightFormat(Protocol):
    """One file of this folder."""

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        """What a file holds for one projection: names, shapes and dtypes; the weight first, the bias last."""

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        """Bytes in memory of a weight [rows, k] of a model that computes in `dtype`."""

    def for_kernels(self) -> WeightFormat:
        """The same with weights kept as the fast kernels of this format read them, where activations are plain."""

    def expert_nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        """The same of the weight of one expert in a grouped product."""

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        """The projections of these names as one product, read in this order: all weights, then all biases."""

    def shard(self, part: Projection, cut: Cut, rank: int, ranks: int) -> Slices:
        """What `rank` of `ranks` holds. Raises ConfigError where the projection cannot be cut so."""

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        """What a file holds for a grouped product."""

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        """A grouped product, its name whole: all weights in one allocation, into which each tensor is read."""

    def shard_grouped(self, spec: GroupedSpec, cut: Cut, rank: int, ranks: int) -> Slices:
        """What `rank` of `ranks` holds: a part of every expert."""


def bias_of(part: Projection) -> tuple[TensorSpec, ...]:
    """The bias of a projection, which is stored alike in all formats."""
    return (TensorSpec(f"{part.name}.bias", (part.rows,), "bias"),) if part.bias else ()


def share(part: Projection, size: int, rank: int, ranks: int, *, multiple: int = 1) -> slice:
    """The share of `size` rows or columns that a rank holds. Raises ConfigError unless all ranks get equal ones.

    multiple  shares must be multiples of it: the side of a quantisation block
    """
    if size % (ranks * multiple):
        blocks = f" in blocks of {multiple}" if multiple > 1 else ""
        raise ConfigError(f"{part.name}: {size} cannot be cut into {ranks} equal parts{blocks}; use fewer GPUs a model")
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


def row_share(part: Projection, rank: int, ranks: int, *, multiple: int = 1) -> slice:
    """The rows of a rank, as `share`. Raises ConfigError for projections in one tensor, whose shares are not one slice."""
    if part.fused:
        raise ConfigError(f"{part.name} holds several projections, which are not cut over GPUs; use one GPU a model")
    return share(part, part.rows, rank, ranks, multiple=multiple)


def shard_matrix(part: Projection, cut: Cut, rank: int, ranks: int, *, multiple: int = 1) -> tuple[slice, slice]:
    """Rows and columns of its weight that a rank holds, as `share`."""
    if cut == "columns":
        return row_share(part, rank, ranks, multiple=multiple), slice(0, part.k)
    return slice(0, part.rows), share(part, part.k, rank, ranks, multiple=multiple)


def joined_bias(weights: Weights, names: Sequence[str]) -> Tensor:
    """The biases of projections that are multiplied as one matrix."""
    return torch.cat([weights.tensor(f"{name}.bias") for name in names])


def shard_bias(part: Projection, cut: Cut, rank: int, ranks: int) -> Slices:
    """Cut along its outputs with the weight; where the inputs are cut, rank 0 alone adds it."""
    if not part.bias or (cut == "rows" and rank):
        return {}
    whole = slice(0, part.rows)
    return {f"{part.name}.bias": (row_share(part, rank, ranks) if cut == "columns" else whole,)}
