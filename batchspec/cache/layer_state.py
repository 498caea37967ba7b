"""What a layer keeps of each row from round to round: declared by models and drafters, counted by the planner, held by `KVCache`.

    K/V          of every token, in pages. A row takes pages as it grows, shares those of a cached prefix, and gives them back
                 when it leaves its slot or its window has passed them (`page_tables.py`). Passes and rounds write K/V of their
                 tokens. Acceptance moves those of a tree (`KVCache.move_accepted`); rejected ones are overwritten.
    row tensors  one entry a slot, of a fixed size. A prefill pass writes the entries of its rows (`KVCache.enter`), a round those
                 of its rows after acceptance, and compaction moves them with the row. An entry means nothing once its row has
                 left the slot. Rows share none: what follows a cached prefix is prefilled, and that writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from batchspec.cache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor [slots, *shape] with one entry a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one entry."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one layer keeps."""

    kv: KVLayout
    window: int | None = None
    """Number of newest keys that a query reads, its own included; None: all, or the first ones too."""
    row: tuple[RowTensor, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row besides its pages, however many tokens it has; `kv.page_bytes` are those of a page."""
        return sum(tensor.nbytes for tensor in self.row)
