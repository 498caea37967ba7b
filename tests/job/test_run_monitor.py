"""What a run reports while it runs: the engine's totals, as differences since the last call."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest

from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.rounds.records import RoundLog
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.runner.run_monitor import RunMonitor
from batchspec.records import Completion


def done(num_tokens: int) -> Completion:
    return Completion(
        request_id="q", row_index=0, sample_index=0, shard=0, status="ok", finish_reason="stop",
        token_ids=np.zeros(num_tokens, np.int32),
    )


def test_the_progress_counts_each_round_once_and_nothing_of_earlier_passes() -> None:
    """An engine that has made 50 tokens before; a mean of 100 is predicted, which weighs as much as 8 finished rows."""
    progress = ProgressBar(10, stream=io.StringIO())
    totals = EngineTotals(tokens=50, accepted=10, row_rounds=20)
    reporter = RunMonitor(progress, 100.0, totals)
    totals.tokens, totals.accepted, totals.row_rounds, totals.live_rows = 150, 40, 70, 3
    reporter.after_round(totals)
    facts = progress.facts()
    assert [facts[name] for name in ("tokens", "accepted", "rounds", "live_rows")] == [100, 30, 50, 3]
    assert (facts["mean_output"], facts["in_flight_tokens"]) == (100.0, 100)
    reporter.finished(done(60))
    totals.tokens, totals.accepted, totals.row_rounds, totals.live_rows = 250, 80, 130, 2
    reporter.after_round(totals)
    facts = progress.facts()
    assert [facts[name] for name in ("tokens", "accepted", "rounds", "live_rows")] == [200, 70, 110, 2]
    assert facts["completions"] == 1
    assert facts["mean_output"] == pytest.approx((8 * 100 + 60) / 9, abs=0.05)
    assert facts["in_flight_tokens"] == 200 - 60


def test_rows_that_finish_after_the_last_round_are_counted_too() -> None:
    progress = ProgressBar(10, stream=io.StringIO())
    reporter = RunMonitor(progress, 100.0, EngineTotals())
    reporter.finished(done(60))
    reporter.finished(done(60))
    reporter.ended()
    reporter.ended()
    assert progress.facts()["completions"] == 2


def test_tokens_that_rows_had_from_earlier_runs_are_not_in_flight() -> None:
    progress, totals = ProgressBar(10, stream=io.StringIO()), EngineTotals()
    reporter = RunMonitor(progress, 100.0, totals)
    totals.tokens = 20
    reporter.finished(done(90))
    reporter.after_round(totals)
    assert progress.facts()["in_flight_tokens"] == 0


def test_a_prefill_of_several_passes_counts_once() -> None:
    """The passes of a group share the moment when it began: what a later one took holds what the earlier ones took."""
    totals, lines = EngineTotals(), RoundLog.of(np.zeros((1, 5), np.int32))

    def add(began: object, seconds: float) -> None:
        launched = SimpleNamespace(began=began, is_prefill=began is not None, seconds_since=lambda _: seconds)
        totals.add(launched, lines)  # type: ignore[arg-type]

    first, second = object(), object()
    for began, seconds in ((first, 1.0), (first, 3.0), (None, 9.0), (first, 4.0), (second, 2.0)):
        add(began, seconds)
    assert totals.prefill_s == 4 + 2
