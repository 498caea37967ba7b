"""Decides which states rows take over from prefixes, and which they leave for others, in models that keep row tensors."""

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

    num_pages: int = 0
    """Pages that it shares with others, after which it begins."""
    num_common: int = 0
    """Pages at its beginning that others have computed or will, up to the last after which a state may be kept."""

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
    the second. If it has been prefilled already, the second computes the prefix once more, at least in the layers that keep
    states, and leaves the state for the third.
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
        common = self._pools.match(hashes).num_columns // self._states.step * self._states.step
        prefix, plan = self._begun(hashes, common)
        plan.num_pages, plan.num_common = prefix.num_columns, common
        return prefix, plan

    def admit(self, plan: PrefixPlan, hashes: Sequence[bytes]) -> None:
        """The request is one of the group, so its plan will be carried out: it leaves the state after the longest prefix that
        another one had too, and more if later requests of the group ask for them. Nothing is promised before."""
        if plan.num_common > plan.num_pages:
            self._leave(plan, plan.num_common, hashes[plan.num_common - 1])
        for count in range(plan.num_pages + self._states.step, len(hashes) + 1, self._states.step):
            self._computing.setdefault(hashes[count - 1], (plan, count))

    def _leave(self, plan: PrefixPlan, count: int, page_hash: bytes) -> int | None:
        """The entry in which the request with this plan leaves the state after so many pages, the last of which has this hash;
        None if there is one already, or none to be had."""
        if self._states.find(page_hash) is not None:
            return None
        entry = self._states.add(page_hash, self._pinned)
        if entry is not None:
            self._pinned.add(entry)
            plan.saves[count] = entry
        return entry

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
        if entry is None and after is not None:
            entry = self._leave(*after, page_hash)
        if entry is None:
            return None
        self._pinned.add(entry)
        return PrefixPlan(restores=entry, after=after)
