"""A weight format: how a projection is stored in a checkpoint and in memory, and how tensor-parallel ranks divide it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.layers.base import GroupedSpec, Projection, Share, TensorSpec
from batchspec.model.layers.forward import GroupedProduct, Product

Pieces = tuple[tuple[slice, ...], ...]
"""The part of a tensor that a rank holds: each piece has a slice per dimension, and they lie one after another along the one
dimension in which they differ. () is all of it."""
Slices = dict[str, Pieces]
"""Name of a tensor -> the part that a rank holds. A bias that another rank adds is left out: the rank adds zeros."""


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

    def spares(self, part: Projection) -> tuple[TensorSpec, ...]:
        """Tensors that a file may have besides these, and that are not used: biases of zeros, scales of other hardware."""

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        """Bytes in memory of a weight [rows, k] of a model that computes in `dtype`."""

    @property
    def kept(self) -> str:
        """What is kept in memory in a form of its own, as in "MXFP4 experts"; empty if all is in the model's dtype."""

    def in_one_order(self) -> WeightFormat:
        """This format with sums in one order (decode.deterministic), in a model of bf16. Raises ConfigError if it has no such
        products."""

    def for_kernels(self) -> WeightFormat:
        """This format with weights kept in memory as its kernels for plain activations read them; itself if it has none."""

    def expert_nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        """Bytes in memory of the weight [rows, k] of one expert of a grouped product, in a model that computes in `dtype`."""

    def unpacking(self, *, grouped: bool) -> float | None:
        """How long kernels take to unpack a weight of this format, relative to INT4; None: no kernel unpacks it.

        grouped  whether it is a weight of experts
        """

    def matrix(self, weights: Weights, name: str) -> Tensor:
        """The weight [N, K] of the projection with this name, in any floating-point dtype."""

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        """The projections of these names as one product, read in this order: all weights, then all biases."""

    @property
    def block(self) -> int:
        """Number of values between the two products of an MLP that are not divided between ranks: those of a block with one
        scale, or the fewest that kernels read; 1: any are."""

    def shard(self, part: Projection, share: Share) -> Slices:
        """What the rank with this share holds. Raises ConfigError if that divides a block."""

    def holds(self, spec: GroupedSpec) -> bool:
        """Whether checkpoints store a grouped product in this format; otherwise they store it unquantised."""

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        """What a file holds for a grouped product: names, shapes and dtypes."""

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        """Load a grouped product into one allocation for all experts. spec.name is the experts' full name in the file."""

    def shard_grouped(self, spec: GroupedSpec, share: Share) -> Slices:
        """What the rank with this share holds: a part of every expert. Raises ConfigError if that divides a block."""


def bias_of(part: Projection) -> tuple[TensorSpec, ...]:
    """The bias of a projection; every format stores it in the same way."""
    return (TensorSpec(f"{part.name}.bias", (part.rows,), "bias"),) if part.bias else ()


def check_size(part: Projection, size: int, what: str, unit: int, kind: str) -> None:
    """Raises CheckpointError for a projection that no file can hold in this kind of weights.

    size  its number of `what`, inputs or outputs, which must be a multiple of `unit`
    """
    if size % unit:
        raise CheckpointError(
            f"{part.name}: {size} {what} are no multiple of {unit}, so that it cannot be in {kind} as quantization_config says; "
            "use a checkpoint that names it as not quantised, or one in another format"
        )


def unordered(weights: str) -> ConfigError:
    """The error of decode.deterministic with weights, as in "NVFP4 weights", that the library multiplies."""
    return ConfigError(
        f"decode.deterministic=true with {weights} is supported in float64 only: the library computes their products, in no "
        "fixed order; remove it, or set model.dtype=float64"
    )


def check_blocks(name: str, size: int, ranges: Sequence[slice], block: int) -> None:
    """Raises ConfigError if one of the ranges of `size` rows or columns divides a block."""
    for own in ranges:
        if own.start % block or (own.stop % block and own.stop != size):
            raise ConfigError(
                f"{name}: a part of {own.stop - own.start} of {size} divides a block of {block}; lower cluster.tensor_parallel"
            )


def shard_matrix(part: Projection, share: Share, *, block: int = 1) -> Pieces:
    """The pieces of the projection's weight that a rank holds. Raises ConfigError as `check_blocks`."""
    if share.cut == "columns":
        check_blocks(part.name, part.rows, share.ranges, block)
        return tuple((own, slice(0, part.k)) for own in share.ranges)
    check_blocks(part.name, part.k, share.ranges, block)
    return tuple((slice(0, part.rows), own) for own in share.ranges)


def joined_bias(weights: Weights, names: Sequence[str]) -> Tensor:
    """The biases of projections that are multiplied as one matrix."""
    return torch.cat([weights.tensor(f"{name}.bias") for name in names])


def shard_bias(part: Projection, share: Share) -> Slices:
    """The part of the bias that a rank holds. Column parallel: the rank's outputs. Row parallel: one rank alone adds the bias."""
    if not part.bias or not share.adds_bias:
        return {}
    whole = (slice(0, part.rows),)
    return {f"{part.name}.bias": tuple((own,) for own in share.ranges) if share.cut == "columns" else (whole,)}
