"""Rows that begin with the same pages: attention reads such a beginning once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.batch.device_batch import upload
from batchspec.engine.scheduler import Row
from batchspec.kernels.attention.work_list import SharedPrefixes

MIN_PAGES = 8
"""Of a common beginning: reading fewer once saves less than the second pass over the rows costs."""


class SharedPrefixGroups:
    """The device's tables of which rows share a beginning.

    They are valid for one row bucket and for the rows that are in its slots: `renew` compares both before every round, so no
    caller has to remember when rows enter, move, or when the bucket shrinks. A member that dies stays listed and is skipped.
    """

    def __init__(self, slots: int, page_size: int, device: torch.device) -> None:
        self._page_size, self._most = page_size, max(1, slots // 2)
        ints = {"dtype": torch.int32, "device": device}
        self._row_group = torch.full((slots,), -1, **ints)  # type: ignore[call-overload]
        self._row_order = torch.arange(slots, **ints)  # type: ignore[call-overload]
        self._group_start = torch.zeros(self._most + 1, **ints)  # type: ignore[call-overload]
        self._shared_len = torch.zeros(self._most, **ints)  # type: ignore[call-overload]
        self._num_rows, self._owner = -1, np.full(slots, -1, np.int64)
        self.any = False
        """Whether there is a group at all: rounds without one leave its work out."""

    def clear(self) -> None:
        """No row is in any slot: what follows may count its refills from 0 again."""
        self._num_rows = -1

    def renew(self, rows: Sequence[Row | None], owner: NDArray[np.int64], num_rows: int) -> bool:
        """Bring the tables up to date for a round over the first `num_rows` slots; whether any of its rows share a beginning.

        rows   by slot; owner int64 [slots] counts refills, -1 for a free slot

        Nothing is uploaded while no row has entered or moved and the bucket is the same, nor while no rows share anything.
        """
        if num_rows == self._num_rows and not ((owner != self._owner) & (owner >= 0)).any():
            return self.any
        assert not (owner[num_rows:] >= 0).any(), (num_rows, owner)
        self._num_rows, self._owner = num_rows, owner.copy()
        found = shared_beginnings(rows[:num_rows])
        if found or self.any:
            self._upload(found, num_rows)
        self.any = bool(found)
        return self.any

    def _upload(self, found: list[tuple[list[int], int]], num_rows: int) -> None:
        slots = len(self._row_group)
        group, start, length = np.full(slots, -1, np.int32), np.zeros(self._most + 1, np.int32), np.zeros(self._most, np.int32)
        order: list[int] = []
        for index, (members, pages) in enumerate(found):
            group[members] = index
            order += members
            start[index + 1 :] = len(order)
            length[index] = pages * self._page_size
        # Rows of no group come after the members, in order: a round of fewer rows reads the first entries only.
        order += np.flatnonzero(group < 0).tolist()
        assert sorted(order[:num_rows]) == list(range(num_rows)), (num_rows, order)  # no member beyond the bucket
        assert len(found) <= max(1, num_rows // 2), (num_rows, found)  # `first` cuts no group off
        for field, values in zip(
            (self._row_group, self._row_order, self._group_start, self._shared_len),
            (group, np.array(order, np.int32), start, length),
            strict=True,
        ):
            field.copy_(upload(values, torch.int32, field.device))

    def first(self, num_rows: int) -> SharedPrefixes:
        """Views for rounds over the first slots: a captured graph reads what `renew` has written to them last."""
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
