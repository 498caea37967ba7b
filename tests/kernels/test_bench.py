"""The benchmark mains print a line for the machine, a table, and nothing else."""

from __future__ import annotations

import re
import runpy

import pytest
import torch

from batchspec.kernels.benchmarks import lora_bench
from batchspec.kernels.benchmarks.timing import Bench, wall_us

MAINS = [
    ("rounds.accept", "accept"),
    ("kv_cache.slot_mapping", "slots"),
    ("drafting.ngram_lookup", "ngram_lookup"),
    ("rounds.move_rows", "compact"),
    ("rounds.write_rows", "write_rows"),
]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(("module", "name"), MAINS)
def test_every_row_has_time_bandwidth_and_ratio(module: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module(f"batchspec.kernels.{module}", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    if not torch.cuda.is_available():
        assert lines.pop(0).startswith(f"{name}: no GPU here, so this times the torch reference only")
    assert re.fullmatch(rf"{name}: copy bandwidth \d+ GB/s \(bytes read \+ written\)", lines[0])
    assert lines[1].split() == ["shape", "us", "GB/s", "of", "copy", "reference", "us", "ratio"]
    assert len(lines) > 3
    for line in lines[2:]:
        assert re.fullmatch(r".{44} +[\d.]+ +[\d.]+ +[\d.]+% +[\d.]+ +[\d.]+x", line)


def test_wall_clock_cycles_over_the_copies() -> None:
    calls: list[int] = []
    assert wall_us([lambda: calls.append(0), lambda: calls.append(1)], repeats=3) > 0
    assert calls == [0, 1, 0, 1]


def test_a_kernel_that_differs_from_its_reference_gets_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    def write(numbers: torch.Tensor, *, out: torch.Tensor, wrong: int) -> None:
        out.copy_(numbers).add_(wrong)

    def outs(wrong: int) -> list[dict[str, object]]:
        return [{"out": torch.zeros(3, device=bench.device), "wrong": amount} for amount in (wrong, 0)]

    bench = Bench("test")
    numbers = (torch.arange(3.0, device=bench.device),)
    bench.same_row("same", write, write, [numbers], outs(0), num_bytes=24)
    with pytest.raises(AssertionError):
        bench.same_row("other", write, write, [numbers], outs(1), num_bytes=24)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["shape", "same"]


def test_the_benchmark_of_adapters_times_each_product_of_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    lora_bench.main(["--rows", "8", "--per-row", "2", "--adapters", "3", "--ranks", "16", "--sweep"])
    lines = capsys.readouterr().out.splitlines()
    products = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in lora_bench.SHAPES]
    assert products == list(lora_bench.SHAPES)
    assert sum("us of both by splits of K" in line for line in lines) == 2 * len(products)
