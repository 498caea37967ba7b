"""What `batchspec bench` says before it has figures, and when it is ended in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from batchspec.bench import command as bench
from batchspec.bench.phases import Phases
from batchspec.errors import Interrupted
from batchspec.model.families.shapes import COMMON
from tests.bench.test_bench import TINY

ROOT = Path(__file__).parents[2]


def test_each_phase_is_said_as_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({**COMMON, **TINY}))
    sizes = ["--batch", "2", "--prompt", "4", "--gen", "3", "--dtype", "float32", "--device", "cpu"]
    assert bench.main([str(tmp_path / "o"), "n", "--shape", str(shape), "--draft", "none", "lookup", "--k", "2", *sizes]) == 0
    said = [line.split(" s  ", 1) for line in capsys.readouterr().err.splitlines()]
    ways = ("none", "lookup K=2")
    turns = [f"{way}: {what}" for way in ways for what in ("preparing turn 1 of 1", "one token of each row", "turn 1 of 1")]
    assert [what for _, what in said] == [f"making the weights of {shape}", *turns]
    seconds = [float(age) for age, _ in said]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_single_rounds_name_their_phases_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({**COMMON, **TINY}))
    sizes = ["--batch", "2", "--prompt", "4", "--rounds", "2", "--dtype", "float32", "--device", "cpu"]
    assert bench.main([str(tmp_path / "o"), "n", "--shape", str(shape), *sizes]) == 0
    assert capsys.readouterr().err.endswith(" s  none: preparing and timing 2 rounds\n")


def test_a_phase_that_lasts_is_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    ages = iter([10.0, 10.0, *(12.5 + second for second in range(1000))])
    phases = Phases(lambda: next(ages))
    with phases.watched(repeat_s=0.02):
        phases.begin("compiling")
        until = time.monotonic() + 10
        err = ""
        while "so far" not in err and time.monotonic() < until:
            time.sleep(0.01)
            err += capsys.readouterr().err
    assert err.startswith("   10.0 s  compiling\n")
    assert "compiling: 2.5 s so far\n" in err


def test_sigterm_ends_the_command_with_the_phase_that_it_came_in() -> None:
    phases = Phases(iter([3.0, 3.0, 44.5]).__next__)
    before = signal.getsignal(signal.SIGTERM)

    def load() -> None:
        with phases.watched():
            phases.begin("loading")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(Interrupted, match=r"^SIGTERM during loading: 41\.5 s so far; nothing was written$"):
        load()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not [thread for thread in threading.enumerate() if thread.name == "phases"]


HANGS = """
import ctypes
from batchspec.bench.phases import Phases
phases = Phases()
with phases.watched(grace_s=0.2):
    phases.begin("waiting for a device")
    lock, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
"""


def test_a_main_thread_that_never_returns_does_not_keep_the_process() -> None:
    """As in a wait for a device that hangs, where no handler of a signal runs."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", HANGS], env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().endswith(" s  waiting for a device\n")
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == Interrupted.exit_code
    with process.stderr as stream:
        (line,) = stream.read().splitlines()
    assert re.match(r"batchspec: SIGTERM during waiting for a device: \d+\.\d s", line)
    assert line.endswith(" s so far, which does not return; nothing was written")
