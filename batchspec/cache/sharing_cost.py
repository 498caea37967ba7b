"""Whether attention is faster if it reads a prefix that rows share once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

SECOND_PASS_BYTES = 40 << 20
"""Cost of a second pass over the rows and of merging its results, for each layer: the bytes that attention reads in that time."""
L2_SHARE = 0.5
"""Share of the saved bytes that rows with a shared prefix would have found in the L2 cache. Both numbers are fitted to 17 shapes,
each measured once on an H200 (`python -m batchspec.kernels.benchmarks shared_prefixes`), and were tested on no others.
For three of these shapes the rule chooses the slower way, by 1 to 4 % of attention; always reading once takes up to twice the
time."""


class Group(Protocol):
    """Rows whose first pages are the same."""

    @property
    def slots(self) -> Sequence[int]: ...

    @property
    def num_pages(self) -> int: ...


class _AllSlots(NamedTuple):
    slots: range
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingCost:
    """What sharing saves and costs, in bytes of one layer: all layers save and cost the same.

    Rows with a shared prefix take a second launch, over the groups, and a third, which merges the partial results of both.
    """

    page_bytes: int
    """Bytes of a page in one layer."""
    row_bytes: int
    """Bytes of the partial results of a group's member, of the prefix and of its own keys: fp32, written and read once."""
    pass_bytes: int = SECOND_PASS_BYTES
    reads_all: bool = True
    """Whether some layer reads all keys. Layers with a window read shared prefixes once per row."""

    def pays(self, groups: Sequence[Group]) -> bool:
        """Whether a round over rows with these groups is faster if it reads their prefixes once.

        Reading a prefix once takes about as long as reading it for two rows, so a group of two saves nothing.
        """
        if not (groups and self.reads_all):
            return False
        pages = sum((len(group.slots) - 2) * group.num_pages for group in groups)
        members = sum(len(group.slots) for group in groups)
        return self.pass_bytes == 0 or (1 - L2_SHARE) * pages * self.page_bytes - members * self.row_bytes > self.pass_bytes

    def may_pay(self, num_slots: int, num_pages: int) -> bool:
        """Whether `pays` can be true in a batch of `num_slots` whose prefixes have at most `num_pages` pages."""
        return self.pays([_AllSlots(range(num_slots), num_pages)])


NOTHING_SHARED = SharingCost(page_bytes=0, row_bytes=0, reads_all=False)
"""Of a model whose layers read no prefix once for several rows."""
NO_LAUNCHES = SharingCost(page_bytes=1, row_bytes=0, pass_bytes=0)
"""Where no kernels are launched a second pass is free."""
