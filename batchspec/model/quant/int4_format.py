"""What the INT4 layouts of checkpoints have in common: bytes, loading, groups of columns, and cuts over ranks.

Each layout (`pack_quantized.py`, `gptq.py`, `awq.py`) names its tensors and converts them to `FourBitWeight`.

Words hold 8 codes of a row or of a column, and zero points of 8 rows, so a rank's part of a weight has whole words. Its columns
are whole groups; of act-order weights, whose groups have columns anywhere, each rank has the scales of all groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Self

import torch
from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.kernels.common.four_bit import BLOCK, ROWS, WORDS, FourBitWeight, dequantise, is_readable
from batchspec.kernels.common.int4 import CODES, arrange, bf16_scales
from batchspec.model.layers.base import GroupedSpec, Projection, Share
from batchspec.model.layers.forward import GroupedProduct, Product
from batchspec.model.quant.base import Pieces, Weights, check_size, joined_bias, shard_matrix, unordered
from batchspec.model.quant.four_bit import FourBitLinear
from batchspec.model.quant.four_bit_experts import load_experts
from batchspec.model.quant.grouped import SeparateExperts, expert_parts

TYPICAL_SCALE = 4e-3
"""Of dummy weights: their standard deviation is then 0.02."""
MEAN_CODE = 8.0
"""Of dummy weights; of their zero points too."""
EIGHTS = -0x77777778
"""A word of zero points of 8, 0x88888888, as int32."""
_SCALE_BYTES = 2  # fp16 or bf16 in published checkpoints


@dataclass(frozen=True, slots=True)
class Int4(SeparateExperts):
    """A layout of INT4 weights."""

    group_size: int | None
    """Number of columns that share a scale, a multiple of 8; None: all of a row."""
    symmetric: bool
    """Whether all zero points are 8."""
    act_order: bool = False
    """Whether the file says which group each column is in (`desc_act`, `actorder`)."""
    ordered: bool = False
    """Whether products sum in one order (decode.deterministic). The caller checks that kernels compute them."""

    @abstractmethod
    def weight(self, weights: Weights, name: str) -> FourBitWeight:
        """Read the projection of this name. Raises CheckpointError for values that its layout does not allow."""

    @property
    def kept(self) -> str:
        return "INT4 weights"

    def unpacking(self, *, grouped: bool) -> float | None:
        return 1.0

    def for_kernels(self) -> Self:
        return self

    def in_one_order(self) -> Self:
        if self.act_order or not (self.group_size is None or is_readable(self.group_size)):
            kind = "in act order" if self.act_order else f"in groups of {self.group_size}"
            raise unordered(f"INT4 weights {kind}")
        return replace(self, ordered=True)

    def holds(self, spec: GroupedSpec) -> bool:
        return not spec.stacked  # quantisers convert modules, but stacked experts are parameters

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        """Without the order of the columns of act-order weights, 4 bytes a column."""
        blocks, rows, size = -(-k // BLOCK), -(-rows // ROWS) * ROWS, self.group_size or k
        groups = blocks * (BLOCK // size) if size < BLOCK and BLOCK % size == 0 and size < k else self.num_groups(k)
        shift = 0 if self.symmetric else _SCALE_BYTES if dtype is torch.bfloat16 else 2 * _SCALE_BYTES
        return rows * (2 * blocks * WORDS + groups * (_SCALE_BYTES + shift))

    def arranged(
        self, weights: Weights, name: str, words: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None = None
    ) -> FourBitWeight:
        """The form in memory of the projection of this name; see `arrange`. In a model of bf16 its scales are rounded to bf16.

        Raises CheckpointError for scales that are not finite, and for those that the kernels cannot read. Synchronises.
        """
        if not bool(scales.isfinite().all()):
            raise CheckpointError(f"{name}: a scale is not finite; download the file again, or quantise again")
        if weights.dtype is torch.bfloat16:
            try:
                scales = bf16_scales(scales)
            except ValueError as error:
                raise CheckpointError(f"{name}: {error} in bf16; set model.dtype=float32, or quantise again") from None
        return arrange(words, scales, zeros, self.group_size or words.shape[1] * CODES, groups, dtype=weights.dtype)

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        parts = [self.weight(weights, name) for name in names]
        return FourBitLinear(parts, joined_bias(weights, names) if bias else None, ordered=self.ordered)

    def matrix(self, weights: Weights, name: str) -> Tensor:
        return dequantise(self.weight(weights, name), weights.dtype)

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        parts = ((expert, rows, part.name, self.weight(weights, part.name)) for expert, rows, part in expert_parts(spec))
        return load_experts(weights, spec, parts, act_order=self.act_order)

    def kernel_group(self, k: int) -> int | None:
        """The size of the groups of a row of k columns as the kernels take it (`FourBitWeight.kernel_group`)."""
        if self.num_groups(k) == 1:
            return 0
        return self.group_size if self.group_size is not None and is_readable(self.group_size) else None

    def num_groups(self, k: int) -> int:
        return 1 if self.group_size is None else -(-k // self.group_size)

    def check(self, part: Projection, *, packs_rows: bool, whole_groups: bool = True) -> None:
        """Raises CheckpointError for sizes that the layout cannot hold.

        packs_rows    words hold codes, or zero points, of 8 rows
        whole_groups  the last group may not have fewer columns
        """
        divisor = CODES if self.group_size is None or not whole_groups else self.group_size
        check_size(part, part.k, "inputs", divisor, "INT4")
        check_size(part, part.rows, "outputs", CODES if packs_rows else 1, "INT4")

    @property
    def block(self) -> int:
        return CODES if self.group_size is None or self.act_order else lcm(CODES, self.group_size)

    def cut(self, part: Projection, share: Share, *, packs_rows: bool) -> Pieces:
        """The pieces of the weight [N, K] that a rank holds. Raises ConfigError if that divides a word or a group."""
        of_rows = CODES if packs_rows else 1
        return shard_matrix(part, share, block=of_rows if share.cut == "columns" else self.block)

    def groups_in(self, columns: slice, k: int) -> slice:
        """The groups of a part of the k columns."""
        if self.group_size is None or self.act_order:
            return slice(0, self.num_groups(k))
        return slice(columns.start // self.group_size, -(-columns.stop // self.group_size))

    def groups_of(self, index: Tensor, num_groups: int, name: str) -> Tensor | None:
        """The groups of columns in act order as `arrange` takes them, from a tensor of this name.

        index       [K] the group of each column of the part that this process holds
        num_groups  that it holds
        Raises CheckpointError for a group that is not there. Synchronises on a GPU.
        """
        in_order = torch.arange(len(index), device=index.device) // (self.group_size or len(index))
        low, high = (int(value) for value in index.aminmax())
        if low < 0 or high >= num_groups:
            raise CheckpointError(
                f"{name} names groups {low} .. {high}, and there are {num_groups}; download the file again, or quantise again"
            )
        return None if torch.equal(index.long(), in_order) else index.int()


def in_words(own: slice) -> slice:
    """The words of a range of codes that begins with a word."""
    return slice(own.start // CODES, -(-own.stop // CODES))
