"""The options that benchmark mains share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from batchspec.kernels.benchmarks import four_bit_bench, fp8_bench, moe_bench
from batchspec.kernels.benchmarks.options import add_limits, json_lines, parse_on_gpu, parser_of


def test_the_options_of_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["bench", "--models", "b", "--seconds", "7"])
    parser = parser_of("room.bench", ("a", "b"), (1, 16))
    add_limits(parser, seconds=55)
    found = parse_on_gpu(parser)
    assert found is not None
    assert vars(found) == {"models": ["b"], "tokens": [1, 16], "jobs": 14, "seconds": 7.0, "out": None}


@pytest.mark.parametrize("bench", [fp8_bench, four_bit_bench, moe_bench])
def test_without_a_gpu_a_benchmark_prints_one_line(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench"])
    bench.main()
    assert capsys.readouterr().out.endswith(": no GPU here, nothing to time\n")


def test_timings_are_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    for us in (1.5, 2.5):
        json_lines(str(path))({"us": us})
    json_lines(None)({"us": 3.5})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"us": 1.5}, {"us": 2.5}]
