"""What `batchspec bench` says before it has figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchspec.bench import command as bench
from batchspec.model.families.shapes import COMMON
from tests.bench.test_bench import TINY


def test_each_phase_is_said_as_it_begins_and_by_the_line_of_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    monkeypatch.setattr(bench, "program_does", stages.append)
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({**COMMON, **TINY}))
    sizes = ["--batch", "2", "--prompt", "4", "--gen", "3", "--dtype", "float32", "--device", "cpu"]
    assert bench.main([str(tmp_path / "o"), "n", "--shape", str(shape), "--draft", "none", "lookup", "--k", "2", *sizes]) == 0
    said = [line.split(" s  ", 1) for line in capsys.readouterr().err.splitlines()]
    ways = ("none", "lookup K=2")
    turns = [f"{way}: {what}" for way in ways for what in ("preparing turn 1 of 1", "one token of each row", "turn 1 of 1")]
    assert [what for _, what in said] == [f"making the weights of {shape}", *turns]
    assert stages == [f"during {what!r}, before anything was written" for _, what in said]
    seconds = [float(age) for age, _ in said]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_single_rounds_name_their_phases_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({**COMMON, **TINY}))
    sizes = ["--batch", "2", "--prompt", "4", "--rounds", "2", "--dtype", "float32", "--device", "cpu"]
    assert bench.main([str(tmp_path / "o"), "n", "--shape", str(shape), *sizes]) == 0
    assert capsys.readouterr().err.endswith(" s  none: preparing and timing 2 rounds\n")
