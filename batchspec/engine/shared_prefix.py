"""Rows whose first pages are the same: attention reads such a prefix once for all of them.

The scheduler finds the groups (`PrefixGroups`), the executor keeps them on the device (`PrefixGroupTables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.batch.device_batch import upload
from batchspec.engine.request_state import RequestState
from batchspec.engine.step import PrefixGroup
from batchspec.kernels.attention.work_list import SharedPrefixes

MIN_PAGES = 8
"""Of a shared prefix: reading fewer pages once saves less than a second pass over the rows costs."""


class PrefixGroups:
    """Which rows share a prefix.

    Groups hold for one row bucket and for the rows that are in its slots: `renew` compares both before every round, so no
    caller has to remember when rows enter, move, or when the bucket shrinks. A member that dies stays listed and is skipped.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_rows, self._owner = -1, np.full(num_slots, -1, np.int64)
        self.any = False
        """Whether there is a group at all: rounds without one leave its work out."""

    def clear(self) -> None:
        """No row is in any slot: what follows may count its refills from 0 again."""
        self._num_rows = -1

    def renew(
        self, requests: Sequence[RequestState | None], owner: NDArray[np.int64], num_rows: int
    ) -> tuple[PrefixGroup, ...] | None:
        """All groups of a round over the first `num_rows` slots; None where the device's tables need no change.

        requests  by slot; owner int64 [slots] counts refills, -1 for a free slot

        Nothing changes while no row has entered or moved and the bucket is the same, nor while no rows share anything.
        """
        if num_rows == self._num_rows and not ((owner != self._owner) & (owner >= 0)).any():
            return None
        assert not (owner[num_rows:] >= 0).any(), (num_rows, owner)
        self._num_rows, self._owner = num_rows, owner.copy()
        found = find_groups(requests[:num_rows])
        had_any, self.any = self.any, bool(found)
        return found if found or had_any else None


def find_groups(requests: Sequence[RequestState | None]) -> tuple[PrefixGroup, ...]:
    """Slots whose rows begin with the same pages: groups of at least two rows and MIN_PAGES pages."""
    by_first: dict[int, list[RequestState]] = {}
    for state in requests:
        if state is not None and state.pages.num_columns >= MIN_PAGES and not state.pages.first[0]:
            by_first.setdefault(state.pages.tables[0][0], []).append(state)
    found = []
    for members in by_first.values():
        if len(members) > 1:
            columns = zip(*(state.pages.tables[0] for state in members), strict=False)
            pages = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
            if pages >= MIN_PAGES:
                found.append(PrefixGroup(tuple(state.slot for state in members), pages))
    return tuple(found)


class PrefixGroupTables:
    """The groups on the device, as attention reads them."""

    def __init__(self, num_slots: int, page_size: int, device: torch.device) -> None:
        self._page_size, self._most = page_size, max(1, num_slots // 2)
        ints = {"dtype": torch.int32, "device": device}
        self._row_group = torch.full((num_slots,), -1, **ints)  # type: ignore[call-overload]
        self._row_order = torch.arange(num_slots, **ints)  # type: ignore[call-overload]
        self._group_start = torch.zeros(self._most + 1, **ints)  # type: ignore[call-overload]
        self._shared_len = torch.zeros(self._most, **ints)  # type: ignore[call-overload]

    def write(self, groups: Sequence[PrefixGroup], num_rows: int) -> None:
        """Replace all groups, those of a round over the first `num_rows` slots, in stream order."""
        slots = len(self._row_group)
        row_group, start, length = (
            np.full(slots, -1, np.int32),
            np.zeros(self._most + 1, np.int32),
            np.zeros(self._most, np.int32),
        )
        order: list[int] = []
        for index, group in enumerate(groups):
            row_group[list(group.slots)] = index
            order += group.slots
            start[index + 1 :] = len(order)
            length[index] = group.num_pages * self._page_size
        # Rows of no group come after the members, in order: a round of fewer rows reads the first entries only.
        order += np.flatnonzero(row_group < 0).tolist()
        assert sorted(order[:num_rows]) == list(range(num_rows)), (num_rows, order)  # no member beyond the bucket
        assert len(groups) <= max(1, num_rows // 2), (num_rows, groups)  # `first` cuts no group off
        for field, values in zip(
            (self._row_group, self._row_order, self._group_start, self._shared_len),
            (row_group, np.array(order, np.int32), start, length),
            strict=True,
        ):
            field.copy_(upload(values, torch.int32, field.device))

    def first(self, num_rows: int) -> SharedPrefixes:
        """Views for rounds over the first slots: a captured graph reads what was written to them last."""
        most = max(1, num_rows // 2)
        return SharedPrefixes(
            row_group=self._row_group[:num_rows],
            row_order=self._row_order[:num_rows],
            group_start=self._group_start[: most + 1],
            shared_len=self._shared_len[:most],
        )
