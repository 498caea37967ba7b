"""What rounds are expected to accept before any has run: the planner and `plan` compute with it.

Every draft is taken to be accepted with the same chance r if those before it were. So a round that verifies k drafts of a row
brings 1 + r + r^2 + ... + r^k tokens. r follows from the drafter's `assumed_accepted`, or from draft.synthetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

ASSUMED_OF = 3
"""A round that verifies so many drafts accepts `assumed_accepted` of them. Further drafts are assumed to add none."""
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class ExpectedDrafts:
    """How many drafts of a row a round may verify, and how many of them it is expected to accept."""

    counts: tuple[int, ...]
    """Ascending; of a tree its nodes. One alone: all rounds verify as many. Several, 0 among them: a run measures which of them
    makes the most tokens/s, and verifies as many."""
    accepted: float
    """Accepted drafts of a row in a round that verifies the most."""
    draft_bytes: tuple[int, ...] = ()
    """Bytes of weights that the drafter reads to draft as many as each of the counts; empty: none."""

    @property
    def are_chosen(self) -> bool:
        return len(self.counts) > 1

    @property
    def none_accepted(self) -> ExpectedDrafts:
        """The same if no draft is ever accepted."""
        return replace(self, accepted=0.0)

    def bytes_of(self, count: int) -> int:
        """Bytes that the drafter reads in a round that verifies so many."""
        return self.draft_bytes[self.counts.index(count)] if self.draft_bytes else 0

    def accepted_of(self, count: int) -> float:
        """Accepted drafts of a row in a round that verifies so many."""
        return _sum_of_powers(_rate(self.accepted, self.counts[-1]), count)


def accepted_of_few(assumed: float, count: int) -> float:
    """Accepted drafts of a row in a round that verifies at most `count`, if of ASSUMED_OF it accepts `assumed`."""
    return _sum_of_powers(_rate(assumed, ASSUMED_OF), min(count, ASSUMED_OF))


def accepted_of_most(accepted: float, drafted: float, most: int) -> float:
    """Accepted drafts of a row in a round that verifies `most`, if rounds accept `accepted` of `drafted` on average."""
    return 0.0 if drafted <= 0 else _sum_of_powers(_rate(accepted, drafted), most)


def _sum_of_powers(rate: float, count: float) -> float:
    """r + r^2 + ... + r^count; a count between two numbers, a mean, brings a share of the last power."""
    whole = int(count)
    return sum(rate**power for power in range(1, whole + 1)) + (count - whole) * rate ** (whole + 1)


@cache
def _rate(accepted: float, count: float) -> float:
    """r with r + r^2 + ... + r^count = accepted, between 0 and 1."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _sum_of_powers(middle, count) > accepted else (middle, high)
    return low
