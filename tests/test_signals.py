"""What a signal does in each phase of a run: before its rows, after the last one, and in commands that compute nothing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchspec import cli, run
from batchspec.commands import stats
from batchspec.errors import TooManyErrors
from batchspec.runner import conclude
from batchspec.runstate.output_folder import OutputFolder
from batchspec.supervise.signals import SIGNALS, EndSignals
from tests.runs import make_model, make_prompts


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_prompts(folder / "in.parquet", 6)
    make_model(folder / "model")
    return folder


@pytest.fixture
def command(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A job whose report is one line."""
    monkeypatch.setattr(conclude, "can_draw", lambda: True)
    monkeypatch.setattr(conclude, "write_report", lambda output, stats: output.put_report(f"{stats.completions} rows"))
    return [
        f"model.path={inputs}/model", f"input.path={inputs}/in.parquet", f"output.dir={tmp_path}/out", "decode.max_new_tokens=4",
        "output.shard_rows=2", "packing.max_num_seqs=2", "draft=none",
    ]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before, "the program's own handlers are back"


def signalled(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *numbers: signal.Signals) -> Callable[[], None]:
    """The process gets these signals whenever `name` is called, until the function that is returned is."""
    call = getattr(owner, name)

    def with_signals(*arguments: Any, **named: Any) -> Any:
        for number in numbers:
            signal.raise_signal(number)
        return call(*arguments, **named)

    monkeypatch.setattr(owner, name, with_signals)
    return lambda: monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("owner", "name", "left"),
    [
        (conclude, "job_stats", "README.md and report.html"), (conclude, "dataset_card", "README.md and report.html"),
        (conclude, "write_report", "report.html"), (OutputFolder, "put_report", "report.html"),
    ],
)
def test_a_signal_after_the_last_row_ends_the_run_with_0_and_the_next_one_writes_what_is_left(
    owner: Any, name: str, left: str, number: signal.Signals, command: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    out, no_more = tmp_path / "out", signalled(monkeypatch, owner, name, number)
    assert run.main(command) == 0
    line = f"{out}: {number.name}: all rows are committed; run the same command again for {left}"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert not OutputFolder(out).missing()
    no_more()
    assert run.main(command) == 0
    assert "already complete" in (said := capsys.readouterr().err)
    assert f"{out}/report.html: the job in pictures" in said
    assert (out / "report.html").read_text() == "6 rows"
    assert (out / "README.md").exists()


def test_a_report_that_is_missing_is_written_by_the_same_command(command: list[str], tmp_path: Path) -> None:
    assert run.main(command) == 0
    (tmp_path / "out/report.html").unlink()
    assert run.main(command) == 0
    assert (tmp_path / "out/report.html").exists()


def test_a_report_of_a_part_of_the_rows_does_not_outlive_them(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `batchspec report` writes it while the job runs."""
    assert run.main([*command, "input.limit=3"]) == 0
    no_more = signalled(monkeypatch, conclude, "write_report", signal.SIGTERM)
    assert run.main([*command, "resume=extend"]) == 0
    assert not (tmp_path / "out/report.html").exists()
    no_more()
    assert run.main([*command, "resume=extend"]) == 0
    assert (tmp_path / "out/report.html").read_text() == "6 rows"


def test_a_signal_while_the_rows_are_pushed_tells_that_they_are_not(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchspec.job.check_push_key", lambda *_: None)
    monkeypatch.setattr("batchspec.runner.job_run.check_target_key", lambda *_: None)
    monkeypatch.setattr(conclude, "push_output", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert run.main([*command, "output.push_to_hub=org/answers"]) == 75
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"batchspec: {tmp_path}/out: SIGTERM: all rows are committed; run the same command again for the dataset org/answers of "
        "the hub"
    )


def test_too_many_error_rows_are_told_whatever_is_interrupted(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    signalled(monkeypatch, conclude, "write_report", signal.SIGTERM)
    assert run.main([*command, "model.max_len=6", "input.max_error_fraction=1"]) == TooManyErrors.exit_code


def test_further_signals_do_not_interrupt_the_line_about_the_first() -> None:
    with EndSignals() as signals:
        signals.interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        for number in SIGNALS:
            signal.raise_signal(number)
        assert signals.name == "SIGTERM"


def test_ctrl_c_in_a_command_that_computes_nothing_says_nothing_of_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stats, "job_stats", interrupted)
    monkeypatch.setattr(sys, "argv", ["batchspec", "stats", str(tmp_path)])
    assert cli.console() == 75
    assert capsys.readouterr().err == "batchspec: interrupted; run the same command again\n"
