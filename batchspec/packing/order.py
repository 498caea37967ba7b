"""The order in which requests enter the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from batchspec.packing.planner import PAGE_SIZE
from batchspec.records import Request


def order_requests(window: Sequence[Request], page_size: int = PAGE_SIZE) -> list[Request]:
    """The order in which requests enter the batch: rows with a shared prefix together, longest predicted output first.

    A row's group is the longest prefix of whole pages that it shares with another row of the window. A group is placed by its
    longest member; equal outputs keep the order of the input (row, then sample). Because long rows begin first, only short ones
    remain at the end, and the slots stay filled.

    Prompts are not sorted by length. How long a row keeps its slot depends on its output alone; and refills of mixed prompt
    lengths have about equal numbers of tokens, so that prefill passes have few shapes and their CUDA graphs are captured early
    (engine/prefill/graphs.py).
    """
    group_of = _groups(window, page_size)
    longest: dict[Hashable, tuple[int, int, int]] = {}
    for request in window:
        group = group_of[request.row_index]
        longest[group] = min(_rank(request), longest.get(group, _rank(request)))
    return sorted(window, key=lambda request: (longest[group_of[request.row_index]], _rank(request)))


def _rank(request: Request) -> tuple[int, int, int]:
    return -request.predicted_tokens, request.row_index, request.sample_index


def _groups(window: Sequence[Request], page_size: int) -> dict[int, Hashable]:
    """Row -> its group. A row that shares no page is in a group with its own samples only."""
    prompts = {request.row_index: request.grouping_ids for request in window}
    group_of: dict[int, Hashable] = {row: (0, row) for row in prompts}
    # Rows whose prefix up to this page another row has too. Rows of different adapters share nothing.
    together: dict[int, Hashable] = {request.row_index: request.adapter for request in window}
    end = page_size
    while together:
        pages = {
            row: (beginning, prompts[row][end - page_size : end].tobytes())
            for row, beginning in together.items()
            if len(prompts[row]) >= end
        }
        counts = Counter(pages.values())
        # Each prefix gets a number: hashing its whole content would take longer with every page.
        numbers = {page: (end, number) for number, page in enumerate(counts)}
        together = {row: numbers[page] for row, page in pages.items() if counts[page] > 1}
        group_of.update(together)
        end += page_size
    return group_of
