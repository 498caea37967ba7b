"""What the cache holds of one layer, as the layer's passes write and read it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from batchspec.cache.layer_state import LayerState
from batchspec.cache.page_format import LayerPages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """Of one layer."""

    pages: LayerPages | None
    """Its own, or those of the layer that it reads; None: it keeps nothing in pages."""
    group: int
    """K/V group of its pages; 0 without pages."""
    rows: tuple[Tensor, ...]
    """Its row tensors [entries, ...]."""
    num_folded: Tensor | None
    """`KVCache.num_folded`."""
    key: int
    """Equal for layers that share what a pass prepares: those with one `LayerState.shares`, page format and group."""


def kept_of(
    layers: Sequence[LayerState], pages: Sequence[LayerPages], page_groups: Sequence[int], *,
    rows: Sequence[tuple[Tensor, ...]] | None = None, num_folded: Tensor | None = None,
) -> tuple[Kept, ...]:
    """Of each layer of a model.

    pages, page_groups  of those that keep pages
    rows                the row tensors of each; None: none of this model's are read through `Kept`
    """
    own = iter(zip(pages, page_groups, strict=True))
    nothing: tuple[LayerPages | None, int] = None, 0
    held = [nothing if layer.pages is None else next(own) for layer in layers]
    keys: dict[Hashable, int] = {}

    def made() -> Iterator[Kept]:
        for index, layer in enumerate(layers):
            read, group = held[index if layer.reads is None else layer.reads]
            key = layer.shares, None if read is None else read.layout, group
            yield Kept(
                pages=read, group=group, rows=() if rows is None else rows[index], num_folded=num_folded,
                key=keys.setdefault(key, len(keys)),
            )

    return tuple(made())
