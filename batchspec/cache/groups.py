"""K/V groups: which layers share a page table, and which keys a row's next round may still read in each of them.

Layers that read all keys are one group; the layers of each sliding window are another. Each has its own page pool and tables,
so that a row keeps no more pages than the window reaches. A model whose layers all read alike has one group.

Groups do not share memory: their pages hold different layers and differ in bytes. The planner sizes each group's pool by what the
rows of the batch need in it (`packing.kv_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of a target and its drafter."""

    windows: tuple[int | None, ...]
    """Of each group, the widest first: newest keys that its layers read, None for all."""
    target_layers: tuple[int, ...]
    """[target layers] the group of each."""
    draft_group: int
    """The group of the drafter's layers: the smallest whose pages reach as far back as any of these reads."""

    @classmethod
    def single(cls, num_layers: int) -> KVGroups:
        """All layers share one page table, which keeps every key."""
        return cls((None,), (0,) * num_layers, 0)

    @classmethod
    def of(cls, windows: Sequence[int | None], draft_windows: Sequence[int | None], max_len: int) -> KVGroups:
        """Groups of layers with these windows.

        windows        [target layers] newest keys that a query of the layer reads, itself included; None: all
        draft_windows  the same of the drafter's layers; None where a layer reads the first keys too
        max_len        prompt and output of a row at most: no row outgrows a window as wide as that
        """

        def reach(window: int | None) -> int | None:
            return None if window is None or window >= max_len else window

        target = [reach(window) for window in windows]
        drafts = [reach(window) for window in draft_windows]
        widest_draft = None if None in drafts else max((window for window in drafts if window is not None), default=0)
        found = sorted({*target}, key=_width, reverse=True)
        if _width(widest_draft) > _width(found[0]):
            found.insert(0, widest_draft)
        covering = [group for group, window in enumerate(found) if _width(window) >= _width(widest_draft)]
        return cls(tuple(found), tuple(found.index(window) for window in target), covering[-1])

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def num_target_layers(self, group: int) -> int:
        """The target's layers of a group."""
        return self.target_layers.count(group)

    def max_columns(self, group: int, num_tokens: int, page_size: int, lookahead: int) -> int:
        """Pages that a decoding row of `num_tokens` tokens holds at most, `lookahead` of these not committed yet."""
        columns, window = -(-num_tokens // page_size), self.windows[group]
        # The keys that may still be read begin and end anywhere in a page.
        return columns if window is None else min(columns, -(-(window + 1 + lookahead) // page_size) + 1)


def _width(window: int | None) -> float:
    return float("inf") if window is None else window


def most_keys(window: int, num_queries: float) -> float:
    """Keys that so many adjacent queries of a row read together at most: the first one's window, and one more for each other."""
    return window + num_queries - 1


def oldest_key(window: int, num_tokens: int) -> int:
    """The first key that a row with `num_tokens` committed tokens may still read in a round that is not launched yet.

    Queries of later rounds begin at the newest token, position num_tokens - 1, and those of a drafter one position before it.
    Nothing moves a row back: rejected drafts and tree nodes lie after the newest token, and where the host runs ahead of the
    results that it has read, the device has committed more tokens, not fewer.
    """
    return max(0, num_tokens - 1 - window)


def oldest_key_of_prefill(window: int, first: int) -> int:
    """The first key that a prefill reads whose first computed position is `first`."""
    return max(0, first + 1 - window)
