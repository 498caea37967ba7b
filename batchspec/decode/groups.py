"""Rows that begin with the same pages: attention reads such a beginning once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.decode.rows import upload
from batchspec.decode.scheduler import Row
from batchspec.kernels.attention_list import SharedPrefixes

MIN_PAGES = 8
"""Of a common beginning: reading fewer once saves less than the second pass over the rows costs."""


class Groups:
    """The device's account of which rows share a beginning. A member that dies stays listed and is skipped."""

    def __init__(self, slots: int, page_size: int, device: torch.device) -> None:
        self._page_size, self._most = page_size, max(1, slots // 2)
        ints = {"dtype": torch.int32, "device": device}
        self._row_group = torch.full((slots,), -1, **ints)  # type: ignore[call-overload]
        self._row_order = torch.arange(slots, **ints)  # type: ignore[call-overload]
        self._group_start = torch.zeros(self._most + 1, **ints)  # type: ignore[call-overload]
        self._shared_len = torch.zeros(self._most, **ints)  # type: ignore[call-overload]
        self.any = False
        """Whether there is a group at all: rounds without one leave its work out."""

    def update(self, rows: Sequence[Row | None]) -> None:
        """What is in the slots now. Nothing is uploaded as long as no rows share anything."""
        found = shared_beginnings(rows)
        if not (found or self.any):
            return
        self.any = bool(found)
        group, order, start, length = self._tables(len(rows), found)
        for field, values in zip(
            (self._row_group, self._row_order, self._group_start, self._shared_len), (group, order, start, length), strict=True
        ):
            field.copy_(upload(values, torch.int32, field.device))

    def _tables(self, slots: int, found: list[tuple[list[int], int]]) -> tuple[NDArray[np.int32], ...]:
        group, start, length = np.full(slots, -1, np.int32), np.zeros(self._most + 1, np.int32), np.zeros(self._most, np.int32)
        order: list[int] = []
        for index, (members, pages) in enumerate(found):
            group[members] = index
            order += members
            start[index + 1 :] = len(order)
            length[index] = pages * self._page_size
        # Rows of no group behind them, in order: a round of fewer rows reads the first entries only.
        order += np.flatnonzero(group < 0).tolist()
        return group, np.array(order, np.int32), start, length

    def first(self, num_rows: int) -> SharedPrefixes:
        """Of the first slots, where all rows are."""
        most = max(1, num_rows // 2)
        return SharedPrefixes(
            row_group=self._row_group[:num_rows],
            row_order=self._row_order[:num_rows],
            group_start=self._group_start[: most + 1],
            shared_len=self._shared_len[:most],
        )


def shared_beginnings(rows: Sequence[Row | None]) -> list[tuple[list[int], int]]:
    """Slots whose rows begin with the same pages, and how many of them: groups of at least two rows and MIN_PAGES pages."""
    by_first: dict[int, list[Row]] = {}
    for row in rows:
        if row is not None and len(row.pages) >= MIN_PAGES:
            by_first.setdefault(row.pages[0], []).append(row)
    found = []
    for members in by_first.values():
        if len(members) > 1:
            columns = zip(*(row.pages for row in members), strict=False)
            pages = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
            if pages >= MIN_PAGES:
                found.append(([row.slot for row in members], pages))
    return found
