"""Decides when a refill is prepared: once slots have been idle for as long as its fixed time, and after as many further rounds as
keep the device busy meanwhile.

The last requests of a job enter as soon as all of them have a slot (`SlotAllocator.refill_is_due`): no others can share their
refill, and the job ends with them."""

from __future__ import annotations

from batchspec.engine.prefill.cost import PrefillCost
from batchspec.packed_batch import MOST_ROUNDS_BEFORE_REFILL


class IdleSlots:
    """Adds up for how long slots have been idle since the last refill.

    A refill is due when idle slots have cost as much as its fixed time, which does not depend on its tokens: the sum of both is
    smallest there (Harris 1913, economic order quantity). A pass that is replayed takes the fixed time and the time of its
    tokens. Another one takes as long as its launches or its tokens, whichever is longer.
    """

    def __init__(self, cost: PrefillCost, num_slots: int) -> None:
        self._cost, self._num_slots, self._idle = cost, num_slots, 0.0

    def restart(self) -> None:
        """The free slots are refilled now."""
        self._idle = 0.0

    def refill_is_due(self, num_free: int, row_tokens: int, *, may_hold: bool, round_s: float, refill_s: float | None) -> bool:
        """Add a round in which `num_free` slots are idle. Returns whether idle slots have cost as much as a refill by now.

        row_tokens  number of tokens of the request that waits longest
        may_hold    its row may be held in its slot (`SamplingMode.may_hold`)
        round_s     seconds that a round over all slots takes at present, in the unit of the prefill cost
        refill_s    fixed seconds of a refill whose pass is replayed (`RefillTimes`); None: not measured
        """
        self._idle += round_s * num_free / self._num_slots
        cost = self._cost
        if cost.replay is not None and cost.is_replayed(row_tokens, may_hold=may_hold):
            return self._idle >= (cost.replay if refill_s is None else refill_s)
        return self._idle >= cost.least - cost.token * num_free * row_tokens


def rounds_before_refill(rounds: int, num_left: int | None) -> int:
    """Number of further rounds to launch before the next refill is prepared, at most MOST_ROUNDS_BEFORE_REFILL.

    Choosing and uploading the rows of a refill can take the host longer than the launched rounds. If the device was idle when a
    refill was launched, one more round is launched before the next one is prepared; if it had more than one left to do, one less.

    rounds    launched before the last refill
    num_left  rounds and passes that the device had left to do when that refill had been launched; None: no round is to be
              launched before refills
    """
    if num_left is None:
        return 0
    if num_left == 0:
        return min(MOST_ROUNDS_BEFORE_REFILL, rounds + 1)
    return max(0, rounds - 1) if num_left > 1 else rounds
