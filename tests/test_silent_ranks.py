"""The parent finds a rank whose process does not run, and reports no other rank."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.distributed import silent_ranks
from batchspec.distributed.channel import _LIVENESS, Channel, make_memory
from batchspec.distributed.silent_ranks import LATER_S, START_S, SilentRanks


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as patch:
        made = Clock()
        patch.setattr(silent_ranks, "time", made)
        yield made


PHASES = st.tuples(st.sampled_from([0.1, 0.9, 1.0, 600.0]), st.sampled_from([1, 4, 8, 9, 605, 700]), st.booleans(), st.booleans())


@given(phases=st.lists(PHASES, max_size=6), watched=st.booleans())
def test_a_rank_is_silent_after_the_limit_unless_its_parent_did_not_run_either(
    phases: list[tuple[float, int, bool, bool]], watched: bool, clock: Clock
) -> None:
    """phases: seconds before each call, number of calls, which of two ranks count before each. A pause counts at most 1 s."""
    looks = [(seconds, lives) for seconds, count, *lives in phases for _ in range(count)]
    handle, limit_s = make_memory(), 3.0 if watched else 0.0
    silent, ranks = SilentRanks(Channel(handle, None, 2), limit_s), [Channel(handle, rank, 2) for rank in range(2)]
    os.close(handle)
    waited, started = [0.0, 0.0], [False, False]
    for seconds, lives in looks:
        clock.now += seconds
        for rank, lives_on in enumerate(map(bool, lives)):
            if lives_on:
                ranks[rank]._line(rank)[_LIVENESS] += 1
            started[rank] |= lives_on
            waited[rank] = 0.0 if lives_on else waited[rank] + min(seconds, 1.0)
        found = silent.find()
        for rank in range(2):
            most_s = LATER_S + (limit_s if started[rank] else START_S)
            if watched and waited[rank] > most_s + 1e-6:
                assert rank in found
            if not watched or waited[rank] < most_s - 1e-6:
                assert rank not in found


def test_a_rank_increments_its_liveness_counter() -> None:
    handle = make_memory()
    rank, parent = Channel(handle, 1, 2), Channel(handle, None, 2)
    os.close(handle)
    assert parent.liveness_count(1) == 0
    rank.start_liveness_thread()
    parent.wait(lambda: parent.liveness_count(1) > 1)
    assert parent.liveness_count(0) == 0
