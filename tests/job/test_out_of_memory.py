"""Memory runs out at any place in the middle of a job: no row is lost, none is written twice, and no token differs."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import batchspec
from batchspec import run
from batchspec.commands import plan, verify
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.executor import Executor
from batchspec.engine.rounds.round import Round
from batchspec.errors import CapacityError
from batchspec.job.load import loaded_engine
from batchspec.job.load.build import load_engine
from batchspec.job.runner import shard_workers
from batchspec.job.runner.oom_fallback import EngineWithFallback
from batchspec.job.runner.shard_work import ShardWork
from batchspec.job.runner.shard_worker import COMMAND
from batchspec.packing.admit import Admission
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.runs import make_model, make_prompts

pytestmark = pytest.mark.second

ROWS = 11
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
SMALLER = "going on with a smaller batch"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    data = make_prompts(out.parent / "prompts.parquet", ROWS)
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={out}", "output.shard_rows=3",
        "decode.max_new_tokens=12", "packing.max_num_seqs=4", "draft=lookup", "output.token_ids=true", *more,
    ]


def rows_of(out: Path) -> list[tuple[Any, ...]]:
    """Each row in order, with its tokens."""
    return pl.read_parquet(out / "data").select("request_id", "sample_index", "status", "token_ids").rows()


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    out = tmp_path_factory.mktemp("expected") / "out"
    assert run.main(arguments(model, out)) == 0
    rows = rows_of(out)
    assert [row[0] for row in rows] == [f"q{i}" for i in range(ROWS)]
    return rows


def fails(patch: pytest.MonkeyPatch, place: str, *, again: bool = False) -> Callable[[], int]:
    """Have a method raise the error of its place; `again`: once more in the smaller batch. Returns how often it did."""
    owner, name, error, at = PLACES[place]
    call, shrink, calls, left = getattr(owner, name), EngineWithFallback.shrink, [0], [at]
    raised = []

    def failing(self: Any, *rest: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] in left:
            raised.append(calls[0])
            raise type(error)(*error.args)  # a new one: its traceback holds the engine
        return call(self, *rest, **named)

    def then(self: EngineWithFallback, message: str) -> None:
        shrink(self, message)
        if again:
            left.append(calls[0] + 1)

    patch.setattr(owner, name, failing)
    patch.setattr(EngineWithFallback, "shrink", then)
    return lambda: len(raised)


PLACES: dict[str, tuple[type, str, BaseException, int]] = {
    "the first prefill": (Executor, "_launch_prefill", GPU, 1),
    "a later prefill, beside live rows": (Executor, "_launch_prefill", GPU, 3),
    "a round": (Round, "run", GPU, 7),
    "a round, of the host": (Round, "run", MemoryError(), 7),
    "a shard that is admitted, after the survey": (Admission, "admit", MemoryError(), 6),
    "the table of a shard": (ShardWork, "compact_table", MemoryError(), 1),
    "the table of a later shard": (ShardWork, "compact_table", MemoryError(), 3),
    "publishing a shard": (OutputFolder, "publish", MemoryError(), 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_running_out_of_memory_once_makes_the_batch_smaller(
    model: Path, tmp_path: Path, place: str, expected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The larger engine is gone when the smaller one is loaded: the memory of a GPU may not hold both."""
    num_raised = fails(monkeypatch, place)
    engines, alive = list[weakref.ref[Engine]](), list[int]()

    def loads(*args: Any, **named: Any) -> Engine:
        alive.append(sum(engine() is not None for engine in engines))
        engine = load_engine(*args, **named)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr("batchspec.job.load.loaded_engine.load_engine", loads)
    assert run.main(arguments(model, tmp_path / "out")) == 0
    assert alive == [0, 0]
    assert num_raised() == 1
    assert SMALLER in capsys.readouterr().err
    assert rows_of(tmp_path / "out") == expected


@pytest.mark.parametrize("place", PLACES)
def test_running_out_of_memory_twice_ends_the_run_and_the_same_command_resumes_it(
    model: Path, tmp_path: Path, place: str, expected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        fails(patch, place, again=True)
        assert run.main(arguments(model, tmp_path / "out")) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "out of memory again, with 2 slots" in said
    assert said.endswith("run the same command again: finished rows stay")
    assert run.main(arguments(model, tmp_path / "out")) == 0
    assert rows_of(tmp_path / "out") == expected


@pytest.mark.parametrize("command", [run.main, plan.main], ids=["run", "plan"])
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=["memory", "fork"])
def test_memory_that_runs_out_in_the_survey_ends_the_command_before_anything_is_written(
    model: Path, tmp_path: Path, command: Callable[[list[str]], int], error: BaseException, expected: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """There is no batch yet that could be made smaller."""
    words = arguments(model, tmp_path / "out")

    def fails(self: Tokenizer, *rest: Any, **named: Any) -> list[int]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", fails)
        assert command(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("batchspec: out of memory while rows were read and tokenised (")
    assert said.endswith("); free the machine's memory and run the same command again")
    assert not (tmp_path / "out").exists()
    assert run.main(words) == 0
    assert rows_of(tmp_path / "out") == expected


@pytest.mark.parametrize("task", ["admit", "write"])
@pytest.mark.parametrize("always", [False, True])
def test_memory_that_runs_out_in_a_worker_process_loses_no_row(
    model: Path, tmp_path: Path, task: str, always: bool, expected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error in the worker is raised in the run; a file that was begun does not stay."""
    marks = tmp_path / "marks"
    marks.mkdir()
    fault = (
        f"import pathlib\nfrom batchspec.job.runner import shard_worker\nmarks, task = pathlib.Path({str(marks)!r}), {task!r}\n"
        "inner = getattr(shard_worker, task)\n"
        "def failing(*rest):\n"
        f"    if {always} or not list(marks.iterdir()):\n"
        "        (marks / 'raised').touch()\n"
        "        raise MemoryError\n"
        "    return inner(*rest)\n"
        "failing.__qualname__ = failing.__name__ = task\nfailing.__module__ = shard_worker.__name__\n"
        "setattr(shard_worker, task, failing)\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(shard_workers, "COMMAND", fault + COMMAND)
        code = run.main(arguments(model, tmp_path / "out", "input.num_workers=1"))
    assert list(marks.iterdir())
    said = capsys.readouterr().err
    assert (code, SMALLER in said) == (2 if always else 0, True), said
    assert run.main(arguments(model, tmp_path / "out", "input.num_workers=1")) == 0
    assert rows_of(tmp_path / "out") == expected
    assert not list((tmp_path / "out/_batchspec/tmp").iterdir())


@pytest.mark.parametrize("where", [(Round, "run"), (loaded_engine, "load_engine")], ids=["decode", "load"])
@pytest.mark.parametrize("command", ["generate", "verify"])
def test_a_call_that_cannot_go_on_with_a_smaller_batch_says_so_in_one_line(
    command: str, where: tuple[Any, str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"model.path={model}", "model.dtype=float32", "device=cpu", "decode.max_new_tokens=4"]
    if command == "verify":
        make_prompts(tmp_path / "prompts.parquet", 3)
        assert run.main([*words, f"input.path={tmp_path}/prompts.parquet", f"output.dir={tmp_path}/out"]) == 0

    def fail(*_: object, **__: object) -> None:
        raise GPU

    monkeypatch.setattr(*where, fail)
    said = r"out of memory while (rows were decoded|the model was loaded).*CUDA out of memory.*2\.00 GiB"
    with pytest.raises(CapacityError, match=said):
        batchspec.generate(["a"], overrides=words) if command == "generate" else verify.verify(tmp_path / "out", 0)
