"""Snapshots of row states at the ends of shared prefixes: the host's record of them.

Rows can share the pages of a prefix, but not a state in a row tensor, which changes with every token of its row. So the state at
the end of a prefix is copied to a snapshot, and from there into the slot of each row that begins with this prefix. Snapshots are
the entries of the row tensors after those of the slots. One may be overwritten for another prefix as soon as the host decides so,
because the device runs all copies in the order in which they were launched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import lcm


class PrefixStates:
    """Which entry holds the snapshot of which prefix. The least recently used one is replaced."""

    def __init__(self, entries: range, *, page_size: int, multiple: int) -> None:
        """
        entries   of the row tensors
        multiple  a state may be kept after so many tokens, or a multiple of it
        """
        self.step = lcm(page_size, multiple) // page_size
        """A state may be kept after so many pages, or a multiple of it."""
        self._free = list(reversed(entries))
        self._entry_of: OrderedDict[bytes, int] = OrderedDict()
        """By the hash of the prefix's last page; the least recently used first."""

    def find(self, page_hash: bytes) -> int | None:
        """The entry with the state after the page with this hash, which counts as used; None: there is none."""
        entry = self._entry_of.get(page_hash)
        if entry is not None:
            self._entry_of.move_to_end(page_hash)
        return entry

    def add(self, page_hash: bytes, pinned: set[int]) -> int | None:
        """An entry for the state after the page with this hash, which has none yet; None if all are `pinned`."""
        if not self._free:
            oldest = next((own for own, entry in self._entry_of.items() if entry not in pinned), None)
            if oldest is None:
                return None
            self._free.append(self._entry_of.pop(oldest))
        entry = self._entry_of[page_hash] = self._free.pop()
        return entry

    def forget(self, hashes: Iterable[bytes] | None = None) -> None:
        """Drop the states after the pages with these hashes; None: all."""
        for page_hash in list(self._entry_of) if hashes is None else hashes:
            entry = self._entry_of.pop(page_hash, None)
            if entry is not None:
                self._free.append(entry)
