"""Decides which recurrent states rows take over from prefixes, and which they leave for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from batchspec.cache.page_tables import PagePools, RowPages
from batchspec.cache.prefix_states import PrefixStates


@dataclass(slots=True)
class PrefixPlan:
    """What a request's prefill does with states of prefixes."""

    restores: int | None = None
    """Entry of the state with which it begins; None: at its first token."""
    saves: dict[int, int] = field(default_factory=dict)
    """Number of its pages after which the state is kept -> the entry."""
    after: tuple[PrefixPlan, int] | None = None
    """The request of the group that leaves this state, and the number of pages after which it does; None: the state is there."""

    @property
    def level(self) -> int:
        """Number of pieces of other requests' prompts, one after another, that must be prefilled before this one begins."""
        if self.after is None:
            return 0
        other, count = self.after
        return other.level + sum(own <= count for own in other.saves)


class PrefixPlanner:
    """Plans the prefills of one group of requests after another.

    A prefix that two requests have in common is computed by the first. If that one is of the same group, it leaves its state for
    the second. If it has been prefilled already, the second computes the prefix once more, its recurrent layers at least, and
    leaves the state for the third.
    """

    def __init__(self, pools: PagePools, states: PrefixStates) -> None:
        self._pools, self._states = pools, states
        self._pinned: set[int] = set()
        self._computing: dict[bytes, tuple[PrefixPlan, int]] = {}

    def begin_group(self) -> None:
        """The requests that are planned from now on are prefilled together, after those before."""
        self._pinned.clear()
        self._computing.clear()

    def plan(self, hashes: Sequence[bytes]) -> tuple[RowPages, PrefixPlan]:
        """The pages that a request shares, and its plan. hashes: of the pages of its prompt that may be shared."""
        step = self._states.step
        longest = self._pools.match(hashes).num_columns // step * step
        prefix, plan = self._begun(hashes, longest)
        if longest > prefix.num_columns and self._states.find(hashes[longest - 1]) is None:
            entry = self._states.add(hashes[longest - 1], self._pinned)
            if entry is not None:
                self._pinned.add(entry)
                plan.saves[longest] = entry
        for count in range(prefix.num_columns + step, len(hashes) + 1, step):
            self._computing.setdefault(hashes[count - 1], (plan, count))
        return prefix, plan

    def _begun(self, hashes: Sequence[bytes], longest: int) -> tuple[RowPages, PrefixPlan]:
        """The longest prefix of at most so many pages whose state is there, or will be left by a request of the group."""
        for count in range(longest, 0, -self._states.step):
            prefix = self._pools.match(hashes[:count])
            if prefix.num_columns == count and (plan := self._taken(hashes[count - 1])) is not None:
                return prefix, plan
        return self._pools.match(()), PrefixPlan()

    def _taken(self, page_hash: bytes) -> PrefixPlan | None:
        """A plan that begins with the state after this page; None if there is none and none can be left."""
        entry, after = self._states.find(page_hash), self._computing.get(page_hash)
        if entry is None and after is not None and (entry := self._states.add(page_hash, self._pinned)) is not None:
            other, count = after
            other.saves[count] = entry
        if entry is None:
            return None
        self._pinned.add(entry)
        return PrefixPlan(restores=entry, after=after)
