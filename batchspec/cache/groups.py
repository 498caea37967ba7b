"""K/V groups: which layers share a page table, and which keys a row's next round may still read in each of them.

Layers that read all keys are one group, and the layers of each sliding window are another. Each group has its own page pool and
page tables, so a row keeps only the pages that the window covers. A model whose layers all have the same window has one group.

Layers of one group may differ in the shape of their K and V: a page has a part of its own for each layer.

Groups do not share memory: their pages hold different layers and differ in size. The planner sizes each group's pool by the pages
that the rows of the batch need in it (`packing.kv_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of a target and its drafter."""

    windows: tuple[int | None, ...]
    """The window of each group, the widest first: number of newest keys that its layers read, None for all."""
    target_layers: tuple[int, ...]
    """[target layers] the group of each layer."""
    draft_group: int
    """The group of the drafter's layers: the one with the narrowest window that covers all keys that these layers read."""

    @classmethod
    def single(cls, num_layers: int) -> KVGroups:
        """All layers share one page table, which keeps every key."""
        return cls((None,), (0,) * num_layers, 0)

    @classmethod
    def of(cls, windows: Sequence[int | None], draft_windows: Sequence[int | None], max_len: int) -> KVGroups:
        """Groups of layers with these windows.

        windows        [target layers] number of newest keys that a query of the layer reads, itself included; None: all
        draft_windows  the same for the drafter's layers; None also for a layer that reads the first keys too (sink)
        max_len        maximum prompt + output length of a row; a window of at least this length counts as None
        """

        def reach(window: int | None) -> int | None:
            return None if window is None or window >= max_len else window

        target = [reach(window) for window in windows]
        drafts = [reach(window) for window in draft_windows]
        widest_draft = None if None in drafts else max((window for window in drafts if window is not None), default=0)
        found = sorted({*target} or {None}, key=_width, reverse=True)  # rows have a page table even if no layer keeps pages
        if _width(widest_draft) > _width(found[0]):
            found.insert(0, widest_draft)
        covering = [group for group, window in enumerate(found) if _width(window) >= _width(widest_draft)]
        return cls(tuple(found), tuple(found.index(window) for window in target), covering[-1])

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def max_columns(self, group: int, num_tokens: int, page_size: int, lookahead: int) -> int:
        """Maximum number of pages of a decoding row with `num_tokens` tokens, the last `lookahead` of them uncommitted."""
        columns, window = -(-num_tokens // page_size), self.windows[group]
        # The first and last key that may still be read can be anywhere in their pages, hence one page more.
        return columns if window is None else min(columns, -(-(window + 1 + lookahead) // page_size) + 1)


def _width(window: int | None) -> float:
    return float("inf") if window is None else window


def most_keys(window: int, num_queries: float) -> float:
    """Maximum number of keys that `num_queries` adjacent queries of a row read together: the window, and one for each further
    query."""
    return window + num_queries - 1


def oldest_key(window: int, num_tokens: int) -> int:
    """The first key that a row with `num_tokens` committed tokens may still read in rounds that are not launched yet.

    Queries of later rounds begin at the newest token, position num_tokens - 1, and a drafter's queries one position earlier.
    num_tokens never decreases: rejected drafts and tree nodes come after the newest token, and if the host has not read the
    latest results, the device has committed more tokens than the host knows, not fewer.
    """
    return max(0, num_tokens - 1 - window)


def oldest_key_of_prefill(window: int, first: int) -> int:
    """The first key that a prefill reads if `first` is the first position that it computes."""
    return max(0, first + 1 - window)
