"""The progress display: a bar on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import time
from typing import Any

import pytest

from batchspec.job.report import progress_bar as progress_module
from batchspec.job.report.progress_bar import ProgressBar


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_a_line_every_30_seconds_and_one_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressBar(100, done=40, stream=stream, clock=clock) as progress:
        progress.phase("loading the model")
        for _ in range(70):
            clock.now += 1
            progress.update(tokens=50, accepted=30, rounds=20, live_rows=8)
        progress.update(completions=60)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading the model"
    assert lines[1] == "40/100 completions (40.0%), 50 tok/s, mean acceptance length 2.50, 8 rows running"
    assert len(lines) == 4
    assert lines[3] == "100/100 completions (100.0%), 50 tok/s, mean acceptance length 2.50"


def test_the_time_left_comes_from_expected_tokens_where_they_are_known() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = ProgressBar(10, stream=stream, clock=clock, interval_s=1)
    clock.now += 10
    progress.update(completions=2, tokens=1000, rounds=1000, live_rows=4)
    progress.update(mean_output=800, in_flight_tokens=400)
    clock.now += 10
    progress.update(tokens=1000, rounds=1000, mean_output=800, in_flight_tokens=1400)
    first, second = stream.getvalue().splitlines()
    assert first == "2/10 completions (20.0%), 100 tok/s, mean acceptance length 1.00, 4 rows running, ETA 00:40"
    assert second == "2/10 completions (20.0%), 100 tok/s, mean acceptance length 1.00, 4 rows running, ETA 00:50"


def test_no_time_left_is_shown_while_rows_run_that_are_longer_than_was_expected() -> None:
    """`ETA 00:00` beside running rows was shown for minutes."""
    clock, stream = Clock(), io.StringIO()
    progress = ProgressBar(4, stream=stream, clock=clock, interval_s=1)
    for in_flight in (180, 199, 230):
        clock.now += 10
        progress.update(tokens=100, rounds=50, live_rows=4, completions=0, mean_output=50, in_flight_tokens=in_flight)
    first, second, third = stream.getvalue().splitlines()
    assert first == "0/4 completions (0.0%), 10 tok/s, mean acceptance length 1.00, 4 rows running, ETA 00:02"
    assert second.endswith("4 rows running")
    assert third.endswith("4 rows running")


def test_the_tokens_of_prefill_alone_give_no_time_left() -> None:
    """The first token of each row comes from its prefill: its rate made 17 hours of a minute's job."""
    clock, stream = Clock(), io.StringIO()
    progress = ProgressBar(80, stream=stream, clock=clock, interval_s=30)
    clock.now += 36
    progress.update(tokens=4, mean_output=100, in_flight_tokens=4, live_rows=16)
    assert stream.getvalue().splitlines() == ["0/80 completions (0.0%), 0 tok/s, 16 rows running"]


@pytest.mark.parametrize("result", [{"tokens": 4}, {"completions": 1}, {"rounds": 2}])
def test_a_prefill_that_gives_tokens_or_rows_is_no_silence(result: dict[str, Any]) -> None:
    """Jobs that score prompts have no rounds. What a run does without the engine is no result: it may commit while that hangs."""
    clock, stream = Clock(), io.StringIO()
    progress = ProgressBar(80, stream=stream, clock=clock, interval_s=30)
    clock.now += 100
    progress.update(live_rows=16, **result)
    assert "no result" not in stream.getvalue()
    assert progress.facts()["quiet_s"] == 0
    clock.now += 35
    progress.update(shards=1)
    assert stream.getvalue().splitlines()[-1].endswith("no result for 35 s")
    assert progress.facts()["quiet_s"] == 35


def test_the_rate_is_that_of_the_last_minute() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = ProgressBar(10, stream=stream, clock=clock, interval_s=120)
    for second in range(120):
        clock.now += 1
        progress.update(tokens=10 if second < 60 else 500, rounds=1)
    assert stream.getvalue() == "0/10 completions (0.0%), 500 tok/s, mean acceptance length 1.00\n"


def test_the_rate_needs_few_samples_however_many_rounds_end_in_a_minute() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = ProgressBar(10, stream=stream, clock=clock, interval_s=99)
    for _ in range(100_000):
        clock.now += 0.001
        progress.update(tokens=1, rounds=1)
    assert len(progress._history) < 2 * progress_module.WINDOW_S / progress_module.SAMPLE_S
    assert stream.getvalue() == "0/10 completions (0.0%), 1,000 tok/s, mean acceptance length 1.00\n"


def test_a_terminal_gets_a_bar_and_notes_above_it() -> None:
    clock, stream = Clock(), Terminal()
    with ProgressBar(4, stream=stream, clock=clock) as progress:
        clock.now += 2
        progress.phase("half way\x1b[31m")
        progress.update(completions=4, tokens=300, accepted=1, rounds=4, live_rows=3, mean_output=9)
    text = stream.getvalue()
    assert "\r\x1b[Khalf way\\x1b[31m\n  0% |" in text, "above the bar, which is drawn again"
    last = text.splitlines()[-1].rpartition("\r")[2]
    assert last.startswith("100% |█████████████████████████████████| ")
    assert last.endswith("| 4/4, 00:02, 150 tok/s, acceptance 1.25\x1b[K")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (200, f" 45% |{'█' * 18}{'░' * 22}| 450/1000, 12:34, ETA 00:55, 600 tok/s, acceptance 1.25, 32 rows running"),
        (80, f" 45% |{'█' * 7}{'░' * 10}| 450/1000, 12:34, ETA 00:55, 600 tok/s, acceptance 1.25"),
        (60, f" 45% |{'█' * 6}{'░' * 8}| 450/1000, 12:34, ETA 00:55, 600 tok/s"),
        (40, f" 45% |{'█' * 2}{'░' * 3}| 450/1000, 12:34, ETA 00:55"),
        (30, f" 45% |{'█' * 2}{'░' * 4}| 450/1000, 12:34"),
        (16, " 45% 450/1000"),
        (8, " 45% 45"),
    ],
)
def test_the_bar_fits_its_terminal_and_what_matters_most_stays(columns: int, said: str) -> None:
    clock = Clock()
    progress = ProgressBar(1000, stream=Terminal(), clock=clock)
    clock.now += 694
    progress.update()
    clock.now += 60
    progress.update(completions=450, tokens=36000, accepted=25, rounds=100, live_rows=32, mean_output=60)
    assert progress.bar(columns) == said
    assert len(said) < columns


def test_the_elapsed_time_is_updated_while_no_round_ends() -> None:
    clock = Clock()
    progress = ProgressBar(10, stream=Terminal(), clock=clock)
    progress.update(completions=1, tokens=10, rounds=5)
    clock.now += 95
    assert ", 01:35, 0 tok/s, no result for 95 s" in progress.bar(100)


def test_the_bar_is_drawn_without_anybody_s_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "TICK_S", 0.01)
    stream, clock = Terminal(), Clock()
    with ProgressBar(10, stream=stream, clock=clock):
        clock.now += 61
        deadline = time.monotonic() + 30
        while "01:01" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "01:01" in stream.getvalue()


def test_a_log_file_hears_of_a_long_prefill_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "TICK_S", 0.01)
    stream, clock = io.StringIO(), Clock()
    with ProgressBar(10, stream=stream, clock=clock) as progress:
        progress.update(completions=1, rounds=1)
        clock.now += 31
        deadline = time.monotonic() + 30
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue().splitlines()[0].endswith("no result for 31 s")


def test_a_log_file_hears_which_phase_of_the_start_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may compile for minutes: a run that is ended meanwhile has said what it was at."""
    monkeypatch.setattr(progress_module, "TICK_S", 0.01)
    stream, clock = io.StringIO(), Clock()
    with ProgressBar(10, stream=stream, clock=clock) as progress:
        progress.phase("loading the model")
        clock.now += 20
        progress.phase("compiling kernels")
        clock.now += 11
        deadline = time.monotonic() + 30
        while "so far" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue().splitlines()[:3] == ["loading the model", "compiling kernels", "compiling kernels: 11 s so far"]


def test_on_a_real_terminal_of_40_and_80_columns_nothing_wraps_and_the_bar_is_seen() -> None:
    for columns in (40, 80):
        shown = on_terminal(columns)
        drawn = [line.removesuffix("\x1b[K") for line in re.split(r"[\r\n]+", shown) if "%" in line]
        assert drawn
        assert all(len(line) < columns and "|" in line for line in drawn), drawn
        assert all("█" in line and "ETA" in line for line in drawn[-1:]), drawn


def on_terminal(columns: int) -> str:
    """What a progress bar writes to a pseudo-terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        clock = Clock()
        with ProgressBar(1000, stream=stream, clock=clock) as progress:
            for _ in range(5):
                clock.now += 10
                progress.update(completions=150, tokens=700, accepted=5, rounds=20, live_rows=8)
        written = b""
        while not written.endswith(b"\n"):  # the system hands over what was written a part at a time
            written += os.read(ours, 1 << 16)
    os.close(ours)
    return written.decode()


def test_an_empty_rate_shows_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(3, clock=Clock()):
        pass
    assert capsys.readouterr().err == "0/3 completions (0.0%), 0 tok/s\n"
