"""Groups of rows that share a prefix, on the device. `slots/prefix_groups.py` finds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from batchspec.batch.upload import upload
from batchspec.engine.step import PrefixGroup
from batchspec.kernels.attention.work_list import SharedPrefixes


class PrefixGroupTables:
    """The groups on the device, in the form that attention reads."""

    def __init__(self, num_slots: int, page_size: int, device: torch.device) -> None:
        self._page_size, self._most = page_size, max(1, num_slots // 2)
        self._row_group = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self._row_order = torch.arange(num_slots, dtype=torch.int32, device=device)
        self._group_start = torch.zeros(self._most + 1, dtype=torch.int32, device=device)
        self._shared_len = torch.zeros(self._most, dtype=torch.int32, device=device)

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
        # Rows without a group come after the members, in order: a round of fewer rows reads only the first entries.
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
        """Views for rounds over the first slots; a captured graph reads what was last written to them."""
        most = max(1, num_rows // 2)
        return SharedPrefixes(
            row_group=self._row_group[:num_rows],
            row_order=self._row_order[:num_rows],
            group_start=self._group_start[: most + 1],
            shared_len=self._shared_len[:most],
        )
