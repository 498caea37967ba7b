"""Rows are begun as long as that pays before the batch system ends the job; then the run ends by itself, in time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from batchspec.job.runner.run_monitor import RequestsInTime
from batchspec.job.supervise.deadline import PREFILLS, Deadline
from batchspec.request_stream import ListedRequests
from tests.helpers.streams import all_of


@dataclass
class Cluster:
    """A clock, the time limit as seen from it, and how often it was asked for."""

    limit: float | None
    now: float = 0.0
    asked: int = 0
    stopped: list[float] = field(default_factory=list)

    def left_s(self) -> float | None:
        self.asked += 1
        return None if self.limit is None else self.limit - self.now

    def deadline(self, reserve_s: float, *, keeps_tokens: bool) -> Deadline:
        return Deadline(
            self.left_s, reserve_s, keeps_tokens=keeps_tokens, stop=lambda: self.stopped.append(self.now), clock=lambda: self.now
        )


def row(predicted: int) -> Any:
    return SimpleNamespace(predicted_tokens=predicted)


def ended(tokens: int, prefill_s: float, decode_s: float) -> Any:
    return SimpleNamespace(token_ids=np.zeros(tokens), stats=SimpleNamespace(prefill_s=prefill_s, decode_s=decode_s))


def begun(deadline: Deadline, *predicted: int) -> list[int]:
    in_time = RequestsInTime(ListedRequests(map(row, predicted)), deadline, lambda: None)
    return [request.predicted_tokens for request in all_of(in_time)]


def test_without_a_limit_everything_is_begun() -> None:
    cluster = Cluster(None)
    deadline = cluster.deadline(120, keeps_tokens=False)
    deadline.observe(ended(10, 1, 1000))
    cluster.now = 1e9
    assert begun(deadline, 10**9) == [10**9]
    deadline.check()
    assert not deadline.reached
    assert not cluster.stopped
    assert cluster.asked == 1  # nothing is asked a second time


def test_rows_that_would_start_over_are_admitted_only_if_they_can_finish() -> None:
    """0.5 s of prefill, 0.1 s a token: 400 tokens take 40.5 s, of the 50 s that are left before the reserve 51 are too many."""
    cluster = Cluster(1000)
    deadline = cluster.deadline(100, keeps_tokens=False)
    assert begun(deadline, 10**6) == [10**6]  # no row has ended yet, so the rate is unknown
    for tokens in (50, 150):
        deadline.observe(ended(tokens, 0.5, tokens / 10))
    cluster.now = 850
    assert begun(deadline, 400) == [400]
    assert not deadline.reached
    assert begun(deadline, 600, 400, 500) == [400]
    assert deadline.reached
    deadline.check()
    assert not cluster.stopped  # rows in slots continue
    cluster.now = 900
    deadline.check()
    assert cluster.stopped == [900]


def test_rows_whose_tokens_are_kept_are_begun_until_repeating_their_prefill_would_cost_a_tenth() -> None:
    cluster = Cluster(1000)
    deadline = cluster.deadline(100, keeps_tokens=True)
    deadline.observe(ended(100, 2.0, 300.0))
    cluster.now = 1000 - 100 - 2.0 * PREFILLS - 0.1
    assert begun(deadline, 10**6) == [10**6]
    cluster.now += 0.2
    assert begun(deadline, 1) == []


def test_a_limit_that_was_moved_is_seen_before_anything_is_refused() -> None:
    cluster = Cluster(1000)
    deadline = cluster.deadline(100, keeps_tokens=True)
    cluster.now, cluster.limit = 950, 5000
    assert begun(deadline, 1) == [1]
    deadline.check()
    assert not cluster.stopped
    cluster.now, cluster.limit = 4901, None  # a limit that is over, or a controller that is silent
    deadline.check()
    assert cluster.stopped == [4901]


def test_a_short_job_does_not_spend_most_of_its_time_on_its_end() -> None:
    cluster = Cluster(60)
    deadline = cluster.deadline(120, keeps_tokens=True)
    cluster.now = 44
    assert begun(deadline, 1) == [1]
    cluster.now = 46
    assert begun(deadline, 1) == []
