"""What a layer keeps of each row from round to round: declared by models and drafters, counted by the planner, held by `KVCache`.

    pages        what it keeps of every token, such as K and V. A row takes pages as it grows, shares those of a cached prefix,
                 and gives them back when it leaves its slot or its window has passed them (`page_tables.py`). Passes and rounds
                 write those of their tokens. Acceptance moves those of a tree (`KVCache.move_accepted`); rejected ones are
                 overwritten.
    row tensors  one entry a slot, of a fixed size. A prefill pass writes the entries of its rows, a round those of its rows, and
                 compaction moves them with the row. An entry means nothing once its row has left the slot. A drafter's are
                 written after acceptance (`KVCache.enter`); of a row with a cached prefix, by the prefill of what follows it.
                 A target's round does not know which of its tokens will be accepted. So a state, to which all tokens are
                 added, lags (`LayerState.lags`): a round keeps the inputs of its tokens, and the next one adds those that were
                 accepted. An entry with a place for each position does not: the next round overwrites what was
                 rejected. A row with a cached prefix begins with a copy of the entry at its end (`prefix_states.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import prod

import torch

from batchspec.cache.page_format import PageFormat


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor [slots, *shape] with one entry a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    temporary_bytes: int = 0
    """Bytes that a round needs besides, for each row, while it computes from the entries."""

    @property
    def nbytes(self) -> int:
        """Bytes of one entry."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one layer keeps."""

    pages: PageFormat | None
    """None: it keeps nothing in pages."""
    window: int | None = None
    """Number of newest keys that a query reads, its own included; None: all, or the first ones too."""
    row: tuple[RowTensor, ...] = ()
    lags: bool = False
    """Whether `row` holds a state that lags one round: `KVCache.num_folded` counts the tokens that it holds."""
    reads: int | None = None
    """Index of the layer whose pages it reads; None: it reads its own, or none."""
    chunk: int | None = None
    """Number of tokens at whose multiples a prefill may end inside a prompt; None: anywhere."""
    shares: Hashable = None
    """A key: what a pass prepares is made once for all layers with an equal key, page format and K/V group."""

    @property
    def page_bytes(self) -> int:
        """Bytes of its part of a page."""
        return 0 if self.pages is None else self.pages.page_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row besides its pages, however many tokens it has."""
        return sum(tensor.nbytes for tensor in self.row)

    @property
    def temporary_bytes(self) -> int:
        """As of `RowTensor`."""
        return sum(tensor.temporary_bytes for tensor in self.row)


def windows_read(layers: Iterable[LayerState]) -> list[int | None]:
    """Of the layers that read pages, their own or another's."""
    return [layer.window for layer in layers if layer.pages is not None or layer.reads is not None]


def windows_of(layers: Iterable[LayerState]) -> list[int | None]:
    """Of the layers that keep pages."""
    return [layer.window for layer in layers if layer.pages is not None]
