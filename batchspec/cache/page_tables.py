"""The host's page tables: which pages each row owns in every K/V group, and which it shares or gives back.

A row has the same number of columns in every group: column c is the page of its tokens c * page_size to (c + 1) * page_size - 1.
A column that the group's window has passed holds the scratch page, because it is not read again. Its page may be granted to
another row at once: later launches run on the device after the last launch that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchspec.cache.groups import KVGroups, oldest_key, oldest_key_of_prefill
from batchspec.cache.pages import SCRATCH_PAGE, PagePool
from batchspec.cache.prefix_states import PrefixStates

Columns = tuple[tuple[int, ...], ...]
"""For each group, the pages of some adjacent columns of a row."""
Counts = NDArray[np.int64]
FOREVER = 1 << 40
"""Stands for no window: longer than any row."""


class RowPages:
    """The pages of one row."""

    def __init__(self, num_groups: int = 1) -> None:
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        """For each group, the page of each column; SCRATCH_PAGE before `first`."""
        self.first = [0] * num_groups
        """For each group, the first column that the row still owns."""

    @property
    def num_columns(self) -> int:
        """Entries of the row's page table in every group."""
        return len(self.tables[0])

    @property
    def num_held(self) -> list[int]:
        """For each group, the number of pages that the row owns."""
        return [self.num_columns - first for first in self.first]

    def owned(self, group: int) -> list[int]:
        """The pages that the row has not given back."""
        return self.tables[group][self.first[group] :]

    def columns(self, first: int = 0) -> Columns:
        """The columns from `first` on."""
        return tuple(tuple(table[first:]) for table in self.tables)


class PagePools:
    """The page pools of all groups; every method acts on all of them."""

    def __init__(
        self, groups: KVGroups, num_pages: Sequence[int], page_size: int, *, lookahead: int = 0,
        states: PrefixStates | None = None,
    ) -> None:
        """
        num_pages  of each group's pool, its scratch page included
        lookahead  maximum number of tokens of a row that have pages and are not committed yet
        states     of a model that keeps row states: those that are kept of prefixes
        """
        self.states = states
        self.groups, self.page_size = groups, page_size
        self.pools = tuple(PagePool(count) for count in num_pages)
        self._windows = np.array([FOREVER if window is None else window for window in groups.windows], np.int64)
        self._most_held_ints = [groups.max_columns(group, FOREVER, page_size, lookahead) for group in range(groups.num_groups)]
        self._most_held = np.array(self._most_held_ints)
        self._windowed = [(group, window) for group, window in enumerate(groups.windows) if window is not None]
        self.most_columns = min(num_pages) - 1
        """Maximum number of columns of a row: during its prefill it owns all its columns in every group."""
        assert len(self.pools) == groups.num_groups, (num_pages, groups)

    @property
    def num_free(self) -> tuple[int, ...]:
        """For each group, the number of pages that could be granted now."""
        return tuple([pool.num_free for pool in self.pools])

    @property
    def any_window(self) -> bool:
        """Whether some group has a window, so that rows give pages back while they decode."""
        return bool(self._windowed)

    def match(self, hashes: Sequence[bytes]) -> RowPages:
        """The pages of the longest cached prefix of `hashes`. Owners do not change.

        A group with a window needs only the pages of the prefix that the first query after it reads; earlier columns are scratch.
        """
        if not self._windowed:  # one group, of layers that read all keys
            prefix = RowPages()
            prefix.tables[0].extend(self.pools[0].match(hashes))
            return prefix
        found: list[list[int | None]] = [[] for _ in self.pools]
        usable = len(hashes)
        for group, pool in enumerate(self.pools):
            if self.groups.windows[group] is None:
                found[group] += pool.match(hashes)
                usable = min(usable, len(found[group]))
        for group, _ in self._windowed:
            found[group] += [self.pools[group].find(page_hash) for page_hash in hashes[:usable]]
        num_columns = max(set.intersection(*(self._lengths(group, found[group]) for group, _ in self._windowed)))
        prefix = RowPages(len(self.pools))
        for group, pages in enumerate(found):
            first = prefix.first[group] = self._first_column(group, num_columns)
            prefix.tables[group].extend([SCRATCH_PAGE] * first + [page or SCRATCH_PAGE for page in pages[first:num_columns]])
        return prefix

    def _lengths(self, group: int, found: Sequence[int | None]) -> set[int]:
        """The prefix lengths, in columns, for which the group has all pages that the first query after the prefix reads."""
        lengths, missing = {0}, -1
        for column, page in enumerate(found):
            missing = column if page is None else missing
            if missing < self._first_column(group, column + 1):
                lengths.add(column + 1)
        return lengths

    def _first_column(self, group: int, num_columns: int) -> int:
        """The first column of a prefix of `num_columns` that is read after it."""
        window, num_tokens = self.groups.windows[group], num_columns * self.page_size
        return 0 if window is None else min(num_columns, oldest_key_of_prefill(window, num_tokens) // self.page_size)

    def num_idle(self, prefix: RowPages) -> list[int]:
        """For each group, the number of pages of a matched prefix that no row owns: sharing them uses up free pages."""
        return [pool.num_idle(prefix.owned(group)) for group, pool in enumerate(self.pools)]

    def most_held(self, num_columns: Counts) -> Counts:
        """int64 [groups, rows] maximum number of pages of decoding rows with so many columns [rows]."""
        held: Counts = np.minimum(num_columns, self._most_held[:, None])
        return held

    def most_held_by_row(self, num_columns: int) -> list[int]:
        """`most_held` of one row."""
        return [min(num_columns, most) for most in self._most_held_ints]

    def passed_columns(self, num_tokens: Counts) -> Counts:
        """int64 [groups, rows] number of columns that no later round reads, of rows with so many committed tokens [rows]."""
        passed: Counts = np.maximum(0, num_tokens - 1 - self._windows[:, None]) // self.page_size
        return passed

    def admit(self, prefix: RowPages, num_columns: int, hashes: Sequence[bytes]) -> None:
        """Give a row its pages: it shares those of the matched `prefix`, and gets new ones up to `num_columns`. `prefix` becomes
        the row's record.

        hashes  hashes of the prompt's full pages, which later rows can match from now on
        """
        num_matched = prefix.num_columns
        for group, pool in enumerate(self.pools):
            table = prefix.tables[group]
            pool.share(prefix.owned(group))
            new = pool.take(num_columns - num_matched)
            table += new
            pool.cache_prefix(new, hashes[num_matched:])

    def grow(self, row: RowPages, count: int) -> Columns:
        """Add `count` columns in every group and return them. The caller has checked that the pages are free."""
        new = tuple([tuple(pool.take(count)) for pool in self.pools])
        for table, pages in zip(row.tables, new, strict=True):
            table += pages
        return new

    def free_passed(self, row: RowPages, num_tokens: int) -> None:
        """Give back the pages that no later round reads. The row has `num_tokens` committed tokens, all prefilled."""
        for group, window in self._windowed:
            first, now = row.first[group], oldest_key(window, num_tokens) // self.page_size
            if now > first:
                table = row.tables[group]
                self.pools[group].release(table[first:now])
                table[first:now] = [SCRATCH_PAGE] * (now - first)
                row.first[group] = now

    def release(self, row: RowPages) -> None:
        """Give back all pages."""
        for group, pool in enumerate(self.pools):
            pool.release(row.owned(group))
            row.tables[group].clear()
            row.first[group] = 0

    def forget_prefix(self, hashes: Sequence[bytes]) -> None:
        """Drop the cached prefix whose pages have these hashes; rows keep their pages."""
        if self.states is not None:
            self.states.forget(hashes)
        for pool in self.pools:
            pool.forget_prefix(hashes)

    def forget(self) -> None:
        """Drop all cached prefixes; rows keep their pages."""
        if self.states is not None:
            self.states.forget()
        for pool in self.pools:
            pool.forget()
