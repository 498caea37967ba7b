"""What a layer keeps of each row from round to round: declared by models and drafters, counted by the planner, held by `KVCache`.

    K/V          of every token, in pages. A row takes pages as it grows, shares those of a cached prefix, and gives them back
                 when it leaves its slot or its window has passed them (`page_tables.py`). Passes and rounds write K/V of their
                 tokens. Acceptance moves those of a tree (`KVCache.move_accepted`); rejected ones are overwritten.
    row tensors  one entry a slot, of a fixed size. A prefill pass writes the entries of its rows, a round those of its rows, and
                 compaction moves them with the row. An entry means nothing once its row has left the slot. A drafter's are
                 written after acceptance (`KVCache.enter`); of a row with a cached prefix, by the prefill of what follows it.
                 Those of a target's recurrent layer lag: a round does not know which of its tokens will be accepted, so it keeps
                 their inputs, and the next round adds those that were (`KVCache.num_folded`). A row with a cached prefix begins
                 with a copy of the state at its end (`prefix_states.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
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

    kv: KVLayout | None
    """None: it keeps no K and V."""
    window: int | None = None
    """Number of newest keys that a query reads, its own included; None: all, or the first ones too."""
    row: tuple[RowTensor, ...] = ()
    reads: int | None = None
    """Index of the layer whose K and V it reads; None: it reads its own, or none."""
    chunk: int | None = None
    """Number of tokens at whose multiples a prefill may end inside a prompt; None: anywhere."""

    @property
    def layout(self) -> KVLayout:
        """Of a layer that keeps K and V."""
        assert self.kv is not None
        return self.kv

    @property
    def page_bytes(self) -> int:
        """Bytes of its part of a page."""
        return 0 if self.kv is None else self.kv.page_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row besides its pages, however many tokens it has."""
        return sum(tensor.nbytes for tensor in self.row)


def windows_of(layers: Iterable[LayerState]) -> list[int | None]:
    """Of the layers that keep K and V."""
    return [layer.window for layer in layers if layer.kv is not None]
