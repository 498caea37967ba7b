"""Groups of rows whose first pages are the same: attention reads such a prefix once for all rows of a group.

`rounds/prefix_tables.py` has the groups on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.step import PrefixGroup

MIN_PAGES = 8
"""Minimum number of pages of a shared prefix that is read once."""


class PrefixGroups:
    """Tracks which rows share a prefix that a round reads once.

    Groups are valid for one row bucket and for the rows in its slots. `renew` compares both before every round, so callers need
    not report that rows enter or move, or that the bucket shrinks. A member that ends stays listed and is skipped.
    """

    def __init__(self, num_slots: int, pays: Callable[[Sequence[PrefixGroup]], bool] = bool) -> None:
        """pays: whether a round with these groups reads their prefixes once; default: whenever there is a group."""
        self._num_rows, self._owner, self._pays = -1, np.full(num_slots, -1, np.int64), pays
        self.any = False
        """Whether rounds read prefixes once. If not, they omit the launches for it."""

    def renew(
        self, requests: Sequence[RequestState | None], owner: NDArray[np.int64], num_rows: int
    ) -> tuple[PrefixGroup, ...] | None:
        """All groups of a round over the first `num_rows` slots, () if they do not pay; None if the device's tables are up to
        date.

        requests  by slot
        owner     int64 [slots] number of the refill that filled the slot, -1 for a free slot

        The tables are up to date if no row has entered or moved and the bucket is the same, or if no rows share anything.
        """
        if num_rows == self._num_rows and not ((owner != self._owner) & (owner >= 0)).any():
            return None
        assert not (owner[num_rows:] >= 0).any(), (num_rows, owner)
        self._num_rows, self._owner = num_rows, owner.copy()
        found = find_groups(requests[:num_rows])
        found = found if self._pays(found) else ()
        had_any, self.any = self.any, bool(found)
        return found if found or had_any else None


def find_groups(requests: Sequence[RequestState | None]) -> tuple[PrefixGroup, ...]:
    """Slots whose rows begin with the same pages: groups of at least two rows and MIN_PAGES pages."""
    by_first: dict[int, list[RequestState]] = {}
    for state in requests:
        if state is not None and len(table := state.pages.tables[0]) >= MIN_PAGES and not state.pages.first[0]:
            by_first.setdefault(table[0], []).append(state)
    found = []
    for members in by_first.values():
        if len(members) > 1:
            tables = [state.pages.tables[0] for state in members]
            ends = zip(min(tables), max(tables), strict=False)  # a prefix common to the least and the greatest is common to all
            pages = sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], ends))
            if pages >= MIN_PAGES:
                found.append(PrefixGroup(tuple(state.slot for state in members), pages))
    return tuple(found)
