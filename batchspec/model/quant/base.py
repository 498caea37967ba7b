"""A weight format: how a projection is stored in a checkpoint and in memory, and how tensor-parallel ranks divide it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from batchspec.errors import ConfigError
from batchspec.model.blocks.base import Cut, GroupedSpec, Projection, TensorSpec
from batchspec.model.blocks.forward import GroupedProduct, Product

Slices = dict[str, tuple[slice, ...]]
"""Name of a tensor -> the part that a rank holds: one slice per dimension, () for all of it. A bias that another rank adds is
left out: the rank adds zeros."""


class Weights(Protocol):
    """A source of a model's tensors, such as a checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""

    @property
    def device(self) -> torch.device:
        """The device on which tensors are returned."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name in the checkpoint, in the model's dtype, on its device."""

    def stored(self, name: str) -> Tensor:
        """The same tensor in the dtype of the file, as quantised formats need it."""

    def entry(self, name: str, index: int) -> Tensor:
        """`stored(name)[index]`; only this entry is read from the file."""


class WeightFormat(Protocol):
    """How weights are stored, loaded and divided; each file of this folder that reads a format has one."""

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        """What a file holds for one projection: names, shapes and dtypes; the weight first, the bias last."""

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        """Bytes in memory of a weight [rows, k] of a model that computes in `dtype`."""

    @property
    def kept(self) -> str:
        """What is kept in memory in a form of its own, as in "MXFP4 experts"; empty if all is in the model's dtype."""

    def for_kernels(self) -> WeightFormat:
        """This format with weights kept in memory as its kernels for plain activations read them; itself if it has none."""

    def expert_nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        """Bytes in memory of the weight [rows, k] of one expert of a grouped product, in a model that computes in `dtype`."""

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        """The projections of these names as one product, read in this order: all weights, then all biases."""

    def shard(self, part: Projection, cut: Cut, rank: int, ranks: int) -> Slices:
        """What `rank` of `ranks` holds. Raises ConfigError if the projection cannot be divided so."""

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        """What a file holds for a grouped product: names, shapes and dtypes."""

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        """Load a grouped product into one allocation for all experts. spec.name is the experts' full name in the file."""

    def shard_grouped(self, spec: GroupedSpec, cut: Cut, rank: int, ranks: int) -> Slices:
        """What `rank` of `ranks` holds: a part of every expert. Raises ConfigError if experts cannot be divided so."""


def bias_of(part: Projection) -> tuple[TensorSpec, ...]:
    """The bias of a projection; every format stores it in the same way."""
    return (TensorSpec(f"{part.name}.bias", (part.rows,), "bias"),) if part.bias else ()


def share(part: Projection, size: int, rank: int, ranks: int, *, multiple: int = 1) -> slice:
    """The share of `size` rows or columns that a rank holds. Raises ConfigError unless all ranks get equal shares.

    multiple  each share must be a multiple of it, such as the side of a quantisation block
    """
    if size % (ranks * multiple):
        blocks = f" in blocks of {multiple}" if multiple > 1 else ""
        raise ConfigError(f"{part.name}: {size} cannot be cut into {ranks} equal parts{blocks}; lower cluster.tensor_parallel")
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


def row_share(part: Projection, rank: int, ranks: int, *, multiple: int = 1) -> slice:
    """The rows that a rank holds, see `share`. Raises ConfigError for a tensor of several projections: they are not one slice."""
    if part.fused:
        raise ConfigError(f"{part.name} holds several projections, which are not cut over GPUs; set cluster.tensor_parallel=1")
    return share(part, part.rows, rank, ranks, multiple=multiple)


def shard_matrix(part: Projection, cut: Cut, rank: int, ranks: int, *, multiple: int = 1) -> tuple[slice, slice]:
    """The rows and columns of the projection's weight that a rank holds, see `share`."""
    if cut == "columns":
        return row_share(part, rank, ranks, multiple=multiple), slice(0, part.k)
    return slice(0, part.rows), share(part, part.k, rank, ranks, multiple=multiple)


def joined_bias(weights: Weights, names: Sequence[str]) -> Tensor:
    """The biases of projections that are multiplied as one matrix."""
    return torch.cat([weights.tensor(f"{name}.bias") for name in names])


def shard_bias(part: Projection, cut: Cut, rank: int, ranks: int) -> Slices:
    """The part of the bias that a rank holds. Column parallel: the rank's outputs. Row parallel: rank 0 alone adds the bias."""
    if not part.bias or (cut == "rows" and rank):
        return {}
    whole = slice(0, part.rows)
    return {f"{part.name}.bias": (row_share(part, rank, ranks) if cut == "columns" else whole,)}
