"""What a run did over time: sums sampled while it runs, and pictured on one axis whatever was sampled."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import wait
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.errors import StorageError
from batchspec.job.report.timeline import DETAIL, Run, Timeline, course, parse_run


@dataclass
class Totals:
    tokens: int = 0
    preempted: int = 0
    live_rows: int = 0
    prefill_s: float = 0.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def recorded(rounds: list[tuple[float, int, bool]], *, slots: int = 4, started_at: float = 1000.0) -> str:
    """The file of a run with these rounds: seconds, live rows, whether all rows have entered. A row gets two tokens a round."""
    clock, totals, files = Clock(), Totals(), list[str]()
    timeline = Timeline(files.append, slots=slots, clock=clock, wall=lambda: started_at)
    for seconds, live, exhausted in rounds:
        clock.now += seconds
        totals.tokens, totals.live_rows = totals.tokens + 2 * live, live
        timeline.observe(totals, exhausted=exhausted)
    timeline.close()
    return files[-1]


def run_of(rounds: list[tuple[float, int, bool]], **changes: float) -> Run:
    run = parse_run(recorded(rounds, **changes))  # type: ignore[arg-type]
    assert run is not None
    return run


def test_a_slot_is_live_or_idle_for_a_reason() -> None:
    got = course([run_of([(1, 4, False), (1, 3, False), (1, 2, True), (1, 1, True)])])
    assert got is not None
    assert got.edges_s.tolist() == [0, 1, 2, 3, 4]
    assert got.live_rows.tolist() == [4, 3, 2, 1]
    assert got.waiting.tolist() == [0, 1, 0, 0]  # a row was left for the slot
    assert got.ending.tolist() == [0, 0, 2, 3]
    assert got.tok_s.tolist() == [8, 6, 4, 2]


def test_a_prefill_is_neither_live_nor_idle_and_is_not_lost_where_its_result_comes_late() -> None:
    clock, totals, files = Clock(), Totals(), list[str]()
    timeline = Timeline(files.append, slots=4, clock=clock, wall=lambda: 1000.0)
    for prefill_s, live, exhausted in ((1, 4, False), (0, 3, False), (1.5, 3, False), (0, 2, True), (0.5, 2, True)):
        clock.now += 1
        totals.live_rows, totals.prefill_s = live, totals.prefill_s + prefill_s
        timeline.observe(totals, exhausted=exhausted)
    timeline.close()
    run = parse_run(files[-1])
    assert run is not None
    got = course([run])
    assert got is not None
    assert got.prefill.tolist() == [4, 0, 4, 1, 1]
    assert got.live_rows.tolist() == [0, 3, 0, 1, 1]
    assert got.waiting.tolist() == [0, 1, 0, 0, 0]
    assert got.ending.tolist() == [0, 0, 0, 2, 2]


@pytest.mark.second
def test_a_run_is_sampled_once_a_second_and_later_more_seldom() -> None:
    many = recorded([(0.1, 4, False)] * 100).splitlines()
    assert 10 <= len(many) - 2 <= 11
    rounds = 5 * DETAIL
    hours = run_of([(2.0, 4, False)] * rounds)
    assert 2 * DETAIL < len(hours.samples["t"]) < 3 * DETAIL + 2
    assert hours.seconds == 2 * rounds
    assert hours.samples["tokens"][-1] == 8 * rounds


@pytest.mark.second
@given(rounds=st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 4), st.booleans()), min_size=1, max_size=60))
def test_what_is_pictured_adds_up_to_the_run(rounds: list[tuple[float, int, bool]]) -> None:
    run = run_of(rounds)
    got = course([run])
    assert got is not None
    width = np.diff(got.edges_s)
    assert (got.tok_s * width).sum() == pytest.approx(2 * sum(live for _, live, _ in rounds), abs=1e-6)
    slots = got.live_rows + got.ending + got.waiting
    assert np.allclose(slots * width, 4 * width, atol=0.01)
    assert got.edges_s[-1] == pytest.approx(sum(seconds for seconds, _, _ in rounds), abs=0.01)


def test_pauses_are_cut_out_and_runs_side_by_side_add_up() -> None:
    rounds = [(1.0, 4, False)] * 4
    later = course([run_of(rounds, started_at=90_000.0), run_of(rounds, started_at=1000.0)])
    assert later is not None
    assert (later.edges_s[-1], later.starts_s) == (8, (0, 4))
    assert later.tok_s.tolist() == [8] * 4
    beside = course([run_of(rounds), run_of(rounds)])
    assert beside is not None
    assert (beside.edges_s[-1], beside.tok_s.tolist(), beside.live_rows.tolist()) == (4, [16] * 4, [8] * 4)


def test_a_run_is_saved_once_a_minute_and_a_disk_that_refuses_does_not_end_it() -> None:
    clock, totals, calls = Clock(), Totals(), list[int]()

    def refuse(text: str) -> None:
        calls.append(len(text))
        raise StorageError("full")

    timeline = Timeline(refuse, slots=1, clock=clock)
    for _ in range(200):
        clock.now += 1
        timeline.observe(totals, exhausted=False)
        if timeline._saving is not None:
            wait([timeline._saving])
    timeline.close()
    assert len(calls) == 1


def test_rounds_do_not_wait_while_the_timeline_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sampled meanwhile is in the next file, at the latest in the one at the end."""
    clock, totals, files, opened = Clock(), Totals(live_rows=1), list[str](), threading.Event()

    def slow(text: str) -> None:
        assert opened.wait(60)
        files.append(text)

    timeline = Timeline(slow, slots=1, clock=clock)
    for _ in range(200):
        clock.now += 1
        timeline.observe(totals, exhausted=False)
    assert files == []
    opened.set()
    timeline.close()
    assert [len(text.splitlines()) for text in files] == [62, 202], "a header and the zeros, then a sample a second"


def test_the_end_of_a_run_waits_until_its_last_sample_is_saved() -> None:
    clock, files = Clock(), list[str]()

    def slow(text: str) -> None:
        time.sleep(0.2)
        files.append(text)

    timeline = Timeline(slow, slots=1, clock=clock)
    clock.now += 1
    timeline.observe(Totals(live_rows=1), exhausted=False)
    timeline.close()
    assert [len(text.splitlines()) for text in files] == [3]


@pytest.mark.parametrize("damage", ["", "{}", "nonsense", "cut", "one"])
def test_a_damaged_file_is_no_run(damage: str) -> None:
    whole = recorded([(1, 4, False)] * 3)
    text = {"cut": whole[: len(whole) - 9], "one": "\n".join(whole.splitlines()[:2])}.get(damage, damage)
    assert parse_run(text) is None
    assert course([]) is None


def test_a_file_is_lines_of_json() -> None:
    header, *samples = map(json.loads, recorded([(2, 4, False)]).splitlines())
    assert header == {"started_at": 1000.0, "slots": 4}
    assert samples == [[0] * 7, [2.0, 8, 0, 8.0, 0.0, 0.0, 0.0]]
