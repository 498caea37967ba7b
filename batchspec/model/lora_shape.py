"""Sizes of a job's LoRA adapters that are not merged, from which memory and cost are computed. No weights here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from batchspec.kernels.lora.lora_expand import MOST_PARTS
from batchspec.kernels.lora.lora_shrink import PROGRAMS, padded_rank
from batchspec.kernels.lora.lora_tokens import BLOCKS
from batchspec.model.layers.base import ProductSpec

MAX_RANK = 64
"""Largest rank of an adapter that is not merged: the largest that the kernels are compiled for."""


@dataclass(frozen=True)
class LoraShape:
    """N adapters, and the largest rank of any of them for each projection."""

    num_adapters: int
    ranks: tuple[tuple[str, int], ...]
    """(full name of a projection, rank), sorted."""
    of_all_rows: bool = False
    """Whether there is one adapter for all rows; otherwise each row has one of them or none."""

    @property
    def numbers(self) -> range:
        """Numbers that a row's adapter may have: 0 is none."""
        return range(1 if self.of_all_rows else 0, self.num_adapters + 1)

    @cached_property
    def _rank_by_name(self) -> dict[str, int]:
        return dict(self.ranks)

    def rank_of(self, prefix: str, product: ProductSpec) -> int:
        """The padded rank of a product of the layer with this prefix; 0: no adapter changes it."""
        largest = max(self._rank_by_name.get(prefix + part.name, 0) for part in product.parts)
        return (padded_rank(largest) or 0) if largest else 0

    def size_of(self, prefix: str, product: ProductSpec) -> int:
        """Number of values of A and B of all adapters in memory; see `lora_products.py`."""
        rank = self.rank_of(prefix, product)
        return self.num_adapters * rank * (len(product.parts) * product.k + product.rows)

    def temporary_bytes(self, tokens: int) -> int:
        """Upper bound of the bytes between the two products of this number of tokens, and of the list of tokens.

        Splits of K times parts times tiles of at least 16 tokens are at most PROGRAMS, or there is one split.
        """
        padded = [rank for rank in (padded_rank(own) for _, own in self.ranks) if rank is not None]
        values = max(MOST_PARTS * tokens, PROGRAMS * BLOCKS[-1]) * max(padded, default=0)
        return 4 * values + 64 * (tokens + self.num_adapters)

    def product_bytes(self, prefix: str, product: ProductSpec, dtype: torch.dtype) -> int:
        return self.size_of(prefix, product) * dtype.itemsize
