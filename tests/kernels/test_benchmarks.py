"""Every entry of the table of benchmarks runs, and its kernel agrees with its reference; the runner says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from batchspec.kernels.benchmarks import runner as runner_module
from batchspec.kernels.benchmarks.__main__ import main
from batchspec.kernels.benchmarks.case import Benchmark, Case, relative_error
from batchspec.kernels.benchmarks.exchange import NAMES, exchanges
from batchspec.kernels.benchmarks.mamba2 import conv_case
from batchspec.kernels.benchmarks.routing import route_case
from batchspec.kernels.benchmarks.runner import WIDTH, Runner
from batchspec.kernels.benchmarks.table import TABLE
from tests.helpers.scaled_mm import library_on_cpu
from tests.helpers.stand_in_gpu import stand_in_gpu
from tests.kernels.call_clock import Clock
from tests.kernels.peers import Peers

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernels, as a machine without a GPU does")


def run(benchmark: Benchmark, *shape: Any, **options: Any) -> list[str]:
    """The lines of a case."""
    lines: list[str] = []
    Runner(Clock(), CPU, show=lines.append, copy_gb_s=4000.0, **options).run(benchmark, shape or benchmark.tiny)
    return lines


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are interpreted, which cuts bf16 off instead of rounding it."""
    monkeypatch.setattr(runner_module, "TOLERANCE", 3e-2)
    torch.manual_seed(0)
    with stand_in_gpu(torch.bfloat16), library_on_cpu():
        yield


def are_timed(lines: list[str]) -> bool:
    """Whether all have the columns of the table, and none says what is wrong."""
    return bool(lines) and all(len(line[WIDTH:].split()) == 6 for line in lines)


@interpreted
@pytest.mark.parametrize("name", TABLE)
def test_a_kernel_agrees_with_its_reference_and_is_timed(name: str, gpu: None) -> None:
    case = TABLE[name].make(*TABLE[name].tiny)
    assert case.limit_us > 0
    lines = run(replace(TABLE[name], make=lambda *_: case))
    assert are_timed(lines), lines
    assert lines[0].startswith(f"{name} ")


def test_bytes_are_those_that_one_call_reads_and_writes() -> None:
    """A pass writes the newest positions of a row into its ring, a round all its tokens; lists are made from ids."""
    for per_row, kept in ((1, 1), (4, 4), (40, 16)):
        assert conv_case(2, per_row, 70).num_bytes == 2 * (2 * per_row + 3 + kept) * 70 * 2
    logits, chosen, listed = 20 * 10 * 4, 60 * 8, 60 * 8 + 11 * 4 + (10 + 60 // 16) * 16
    wanted = {"both": logits + chosen + listed, "experts": logits + chosen, "lists": 60 * 4 + listed}
    assert {part: route_case(20, 3, 10, "biased", part).num_bytes for part in wanted} == wanted


@interpreted
@pytest.mark.parametrize(
    "name", ["fp8_linear", "four_bit_linear", "ordered", "experts", "verify_attention", "shared_prefixes"]
)
def test_other_settings_of_a_sweep_give_the_same_result(name: str, gpu: None) -> None:
    case = TABLE[name].make(*TABLE[name].tiny)
    assert case.reference is not None
    expected, settings = case.reference(), case.settings()
    assert len(settings) > 1
    result = next(iter(settings.values()))[0]()
    assert relative_error(result() if callable(result) else result, expected) < 3e-2


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_exchanges_of_a_rank_whose_peers_never_wait_are_timed(name: str, gpu: None) -> None:
    table = exchanges(Peers.make(2, 1 << 16).ends[0], None)
    assert tuple(table) == NAMES
    assert are_timed(lines := run(table[name])), lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="times all kernels on a GPU")
def test_the_command_needs_gpus_and_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["argmax"]) == 2
    assert main(["--ranks", "2"]) == 2
    assert capsys.readouterr().out == "this machine has 0 GPUs; 1 needed\nthis machine has 0 GPUs; 2 needed\n"
    for words in (["reduce"], ["--ranks", "2", "--sweep"], ["argmax", "--ranks", "2"]):
        with pytest.raises(SystemExit):
            main(words)
    assert "no benchmark argmax; choose from reduce, " in capsys.readouterr().err


def case(*values: float, **options: Any) -> Case:
    """Calls that give these numbers, one after another, where 1 is right."""
    calls = [lambda value=value: torch.tensor([value]) for value in values]
    return Case(calls=calls, reference=lambda: torch.ones(1), num_bytes=4e6, flop=1e9, **options)


def made(case: Case) -> Benchmark:
    return Benchmark("made", lambda rows: case, "rows", ((1,), (2,)), (1,))


def test_a_line_has_time_rates_shares_and_error() -> None:
    assert run(made(case(1.0)))[0].split() == ["made", "rows=1", "98.00", "40.8", "1.0%", "10.2", "1.3%", "0e+00"]


def test_other_ways_have_lines_of_their_own_and_of_settings_the_fastest() -> None:
    other = case(1.0, compare={"library": case(1.0).calls}, settings=lambda: {"a": case(1.0).calls, "b": case(1.0).calls})
    assert [line.split()[0] for line in run(made(other))] == ["made", "library"]
    lines = run(made(other), sweep=True)
    assert lines[2].split()[:5] == ["fastest", "of", "2:", "b", "95.00"]


def test_a_way_with_a_wrong_result_is_not_timed() -> None:
    wrong, library = run(made(case(2.0, compare={"library": case(1.0).calls})))
    assert wrong == "made rows=1: WRONG, error 1.0e+00"
    assert are_timed([library])


def test_numbers_that_were_not_written_are_wrong() -> None:
    assert "WRONG" in run(made(case(float("nan"))))[0]


def test_an_error_is_one_line_and_the_next_case_runs() -> None:
    lines: list[str] = []

    def make(rows: int) -> Case:
        if rows == 1:
            raise ValueError("no such\n rows")
        return case(1.0)

    benchmark = Benchmark("made", make, "rows", ((1,), (2,)), (1,))
    runner = Runner(Clock(), CPU, show=lines.append, copy_gb_s=1.0)
    for shape in benchmark.shapes:
        runner.run(benchmark, shape)
    assert lines[0] == "made rows=1: ValueError: no such rows"
    assert lines[1].startswith("made rows=2 ")


def test_only_shapes_with_all_words_run() -> None:
    benchmark = Benchmark("made", lambda **sizes: case(1.0), "model tokens", (("a", 1), ("a", 16), ("b", 16)), ("a", 1))
    assert list(benchmark.matching("tokens=16 model=a")) == [("a", 16)]
    assert list(benchmark.matching("tokens=1")) == [("a", 1)]
    lines: list[str] = []
    Runner(Clock(), CPU, show=lines.append).run_all([benchmark], "tokens=2")
    assert lines == ["--only 'tokens=2': no shape has all of these words; each must be as in the table, e.g. rows=64"]
    assert len(list(benchmark.matching(""))) == 3
    for one in TABLE.values():
        assert all(len(one.labelled(shape).split()) == len(one.columns.split()) for shape in (*one.shapes, one.tiny))
