"""The parent finds a rank whose process does not run, and reports no other rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.distributed import silent_ranks
from batchspec.distributed.channel import _LIVENESS, Channel, make_memory
from batchspec.distributed.silent_ranks import LATER_S, START_S, SilentRanks
from batchspec.process.load_progress import PAUSE_S


class Clock:
    now = 100.0

    CLOCK_BOOTTIME = 7

    def clock_gettime(self, clock: int) -> float:
        assert clock == self.CLOCK_BOOTTIME
        return self.now


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as patch:
        made = Clock()
        patch.setattr(silent_ranks, "time", made)
        yield made


NOBODY = [-1, -1]
"""Numbers of no process."""
PHASES = st.tuples(st.sampled_from([0.1, 0.9, 1.0, 600.0]), st.sampled_from([1, 4, 8, 9, 605, 700]), st.booleans(), st.booleans())


@pytest.mark.second
@given(phases=st.lists(PHASES, max_size=6), watched=st.booleans())
def test_a_rank_is_silent_after_the_limit_unless_its_parent_did_not_run_either(
    phases: list[tuple[float, int, bool, bool]], watched: bool, clock: Clock
) -> None:
    """phases: seconds before each call, number of calls, which of two ranks count before each.

    A pause counts at most 1 s, and a long one starts the limit anew: the ranks may need longer than the parent to go on.
    """
    looks = [(seconds, lives) for seconds, count, *lives in phases for _ in range(count)]
    handle, limit_s = make_memory(), 3.0 if watched else 0.0
    silent, ranks = SilentRanks(Channel(handle, None, 2), limit_s, NOBODY), [Channel(handle, rank, 2) for rank in range(2)]
    os.close(handle)
    waited, started = [0.0, 0.0], [False, False]
    for seconds, lives in looks:
        clock.now += seconds
        for rank, lives_on in enumerate(map(bool, lives)):
            if lives_on:
                ranks[rank]._line(rank)[_LIVENESS] += 1
            started[rank] |= lives_on
            waited[rank] = 0.0 if lives_on or seconds > PAUSE_S else waited[rank] + min(seconds, 1.0)
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


READS = "import sys; file = open('/dev/zero', 'rb')\nfor line in sys.stdin: print(len(file.read(int(line))), flush=True)"


def test_a_rank_that_reads_is_not_silent_although_no_thread_of_it_counts(clock: Clock) -> None:
    """Such as one that copies a large tensor from a slow disk by a call that holds the GIL."""
    handle = make_memory()
    channel = Channel(handle, None, 1)
    os.close(handle)
    channel._line(0)[_LIVENESS] = 1
    with subprocess.Popen([sys.executable, "-c", READS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        silent = SilentRanks(channel, 10.0, [process.pid])

        def found_within(seconds: int, num_bytes: int) -> bool:
            for _ in range(seconds):
                print(num_bytes, file=process.stdin, flush=True)
                assert process.stdout.readline() == f"{num_bytes}\n"  # type: ignore[union-attr]
                clock.now += 1.0
                if silent.find():
                    return True
            return False

        assert not found_within(60, 1 << 20)
        assert found_within(20, 10), "the progress lines of a process that hangs are not progress"
        process.stdin.close()
