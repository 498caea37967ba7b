"""The progress display: a bar on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import io

import pytest

from batchspec.report.progress import Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_a_line_every_30_seconds_and_one_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(100, done=40, stream=stream, clock=clock) as progress:
        progress.phase("loading the model")
        for _ in range(70):
            clock.now += 1
            progress.update(tokens=50, accepted=30, rounds=20, live_rows=8)
        progress.update(completions=60)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading the model"
    assert lines[1] == "40/100 completions (40.0%), 50 tok/s, mean acceptance length 2.50, 8 live rows"
    assert len(lines) == 4
    assert lines[3] == "100/100 completions (100.0%), 50 tok/s, mean acceptance length 2.50, 8 live rows, ETA 00:00"


def test_the_time_left_comes_from_expected_tokens_where_they_are_known() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(10, stream=stream, clock=clock, interval_s=1)
    clock.now += 10
    progress.update(completions=2, tokens=1000, live_rows=4)
    progress.update(mean_output=800, in_flight_tokens=400)
    clock.now += 10
    progress.update(tokens=1000, mean_output=800, in_flight_tokens=1400)
    first, second = stream.getvalue().splitlines()
    assert first == "2/10 completions (20.0%), 100 tok/s, 4 live rows, ETA 00:40"
    assert second == "2/10 completions (20.0%), 100 tok/s, 4 live rows, ETA 00:50"


def test_the_rate_is_that_of_the_last_minute() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(10, stream=stream, clock=clock, interval_s=120)
    for second in range(120):
        clock.now += 1
        progress.update(tokens=10 if second < 60 else 500)
    assert stream.getvalue() == "0/10 completions (0.0%), 500 tok/s, 0 live rows\n"


def test_a_terminal_gets_a_bar_and_notes_above_it() -> None:
    clock, stream = Clock(), Terminal()
    with Progress(4, stream=stream, clock=clock) as progress:
        clock.now += 2
        progress.phase("half way")
        progress.update(completions=4, tokens=300, accepted=1, rounds=4, live_rows=3, mean_output=9)
    text = stream.getvalue()
    assert "half way\n" in text
    assert "100%" in text.splitlines()[-1]
    assert "4/4" in text
    assert "150 tok/s, mean acceptance length 1.25, 3 live rows, ETA 00:00" in text


def test_an_empty_rate_shows_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, clock=Clock()):
        pass
    assert capsys.readouterr().err == "0/3 completions (0.0%), 0 tok/s, 0 live rows\n"
