"""Predicted time of decoding: how many drafts rounds verify, and what all rounds of a job take with so many slots.

    seconds = (N / S - 1/2) r t(S) + r t(S / 2)         N rows of r output tokens in S slots, t(S) seconds per token of each row

N = w S + e rows that all have as many output tokens begin and end together:

    seconds = w r t(S) + r t(e)

Of rows of many lengths, in the last rounds no row is left to refill slots: the live rows, which lack between none and all of
their tokens, become fewer until the last one ends. That takes twice as long as half of a row, with half of the slots live on
average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchspec.packing.expected_drafts import ExpectedDrafts

GOOD_ENOUGH = 0.98
"""The smallest batch within 2 % of the best predicted tokens/s is chosen: fewer rows finish sooner and need less memory."""

RoundSeconds = Callable[[int, int], float]
"""(rows, drafts of each row) -> seconds of a round that verifies them. It should keep its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRound:
    """The round that makes the most tokens/s with a number of rows."""

    num_drafts: int
    """Drafts of each row that it verifies."""
    accepted: float
    """How many of them it is expected to accept."""
    seconds: float

    @property
    def token_s(self) -> float:
        """Seconds per token of each row."""
        return self.seconds / (1 + self.accepted)


def best_round(rows: int, drafts: ExpectedDrafts, seconds: RoundSeconds) -> ExpectedRound:
    """Tries more and more drafts until two more counts have brought nothing."""
    best, worse = None, 0
    for count in drafts.counts:
        tried = ExpectedRound(num_drafts=count, accepted=drafts.accepted_of(count), seconds=seconds(rows, count))
        if best is None or tried.token_s < best.token_s:
            best, worse = tried, 0
        else:
            worse += 1
        if worse == 2:
            break
    assert best is not None
    return best


def decode_seconds(
    slots: int, num_rows: int, output_tokens: float, drafts: ExpectedDrafts, seconds: RoundSeconds, *, equal: bool = False
) -> float:
    """Seconds in which so many slots decode `num_rows` rows of `output_tokens` tokens: on average, or (equal) each."""

    def token_s(rows: int) -> float:
        return best_round(rows, drafts, seconds).token_s if rows else 0.0

    slots = min(slots, num_rows)
    if equal:
        return output_tokens * (num_rows // slots * token_s(slots) + token_s(num_rows % slots))
    return output_tokens * ((num_rows / slots - 0.5) * token_s(slots) + token_s(-(-slots // 2)))


def choose_slots(
    sizes: Sequence[int], num_rows: int, drafts: ExpectedDrafts, seconds: RoundSeconds, *, equal: bool = False
) -> int:
    """The smallest of these numbers of slots that is nearly as fast as the fastest.

    Where rounds choose their drafts, it is so both if these are accepted as expected and if none is: how many a job accepts is
    known only when it runs, and its slots are fixed by then.
    """
    cases = [drafts, drafts.none_accepted] if drafts.are_chosen else [drafts]
    shares = dict.fromkeys(sizes, 1.0)
    for case in cases:
        taken = {slots: decode_seconds(slots, num_rows, 1.0, case, seconds, equal=equal) for slots in sizes}
        least = min(taken.values())
        shares = {slots: min(share, least / taken[slots]) for slots, share in shares.items()}
    enough = GOOD_ENOUGH * max(shares.values())
    return min(slots for slots, share in shares.items() if share >= enough)
