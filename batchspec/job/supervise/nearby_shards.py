"""The order in which a run tries to claim shards: neighbours one after another, because neighbours often share prefixes.

Runs that claimed whatever shard comes next in the input would take turns, and each would compute the prefixes of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Set
from dataclasses import dataclass
from operator import itemgetter
from random import Random

from batchspec.data.dataset.reader import InputShard

ReadShards = Callable[[Container[int]], Iterator[InputShard]]
"""Reads the shards of the input that are not in the argument, in order."""


@dataclass(frozen=True, slots=True)
class _AllBut(Container[int]):
    """All shards but these."""

    wanted: frozenset[int]

    def __contains__(self, shard: object) -> bool:
        return shard not in self.wanted


class NearbyShards(Iterator[InputShard]):
    """The shards of one pass, each once, in input order until the next shard turns out to be claimed by another run. The other
    run keeps going from there; this one jumps into the longest stretch of unclaimed shards.

    So two runs that begin together divide the input near its middle, and later what is left of it again. A run alone reads all
    shards in order.

    read       reads the input
    left       the shards of the pass
    of_others  those of a set of shards that other runs hold or have done; they are left out of this pass
    seed       chooses the place in a stretch: runs that begin together do not meet at one place again
    """

    def __init__(self, read: ReadShards, left: Set[int], of_others: Callable[[Set[int]], Set[int]], seed: str) -> None:
        self._read, self._left, self._of_others, self._random = read, {*left}, of_others, Random(seed)
        self._begin(min(self._left, default=0))

    def __next__(self) -> InputShard:
        while (shard := next(self._shards, None)) is None:
            self._left = {index for index in self._left if index < self._first}  # the input did not give the others
            if not self._left:
                raise StopIteration
            self._go_elsewhere(met=False)
        self._left.discard(shard.index)
        return shard

    def claimed(self) -> None:
        """This run has claimed the shard that came last."""
        self._has_claimed = True

    def missed(self, *, done: bool) -> None:
        """Another run holds the shard that came last, or has done it."""
        if self._has_claimed or not done:  # a complete job has no claims: its shards are passed one by one
            self._go_elsewhere(met=True)

    def _go_elsewhere(self, *, met: bool) -> None:
        """met: whether this run has just met another one, which may hold only that shard so far."""
        of_others = self._of_others(self._left)
        self._left -= of_others
        first = min(self._left, default=0)
        if met or of_others:
            # Another run may be on its way into the stretch from its beginning.
            begin, length = max(_stretches(self._left), key=itemgetter(1), default=(0, 1))
            first = begin + length // 4 + self._random.randrange(length // 2 + 1)
        self._begin(first)

    def _begin(self, first: int) -> None:
        """Read the shards that are left from this one on."""
        self._first, self._has_claimed = first, False
        self._shards = self._read(_AllBut(frozenset(index for index in self._left if index >= first)))


def _stretches(shards: Set[int]) -> Iterator[tuple[int, int]]:
    """First shard and length of each run of consecutive shards."""
    for begin in sorted(shard for shard in shards if shard - 1 not in shards):
        length = 1
        while begin + length in shards:
            length += 1
        yield begin, length
