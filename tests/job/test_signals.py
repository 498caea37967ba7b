"""What a signal does in each phase of a program: its start, a job before its rows, after the last one, and its own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchspec import cli, run
from batchspec.commands import stats
from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import Interrupted, TooManyErrors
from batchspec.job import run_job as job
from batchspec.job.runner import checked_run, conclude
from batchspec.job.runner.job_run import FoundRun
from batchspec.job.runner.oom_fallback import EngineWithFallback
from batchspec.job.runner.shard_work import ShardWork
from batchspec.process.first_signals import SIGNALS
from batchspec.process.signals import EndSignals
from tests.helpers.runs import make_model, make_prompts, put, run_apart

ROOT = Path(__file__).parents[2]


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
    monkeypatch.setattr(conclude, "write_report", lambda output, _, stats: output.put_report(f"{stats.completions} rows"))
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


@pytest.mark.second
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


@pytest.mark.second
def test_a_report_that_is_missing_is_written_by_the_same_command(command: list[str], tmp_path: Path) -> None:
    assert run.main(command) == 0
    (tmp_path / "out/report.html").unlink()
    assert run.main(command) == 0
    assert (tmp_path / "out/report.html").exists()


@pytest.mark.second
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
    monkeypatch.setattr("batchspec.job.run_job.check_push_key", lambda *_: None)
    monkeypatch.setattr("batchspec.job.runner.checked_run.check_target_key", lambda *_: None)
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
    assert cli.guarded(cli.main) == 75
    assert capsys.readouterr().err == "batchspec: interrupted; run the same command again\n"


CHECKED, LOADED = "while the job was checked", "while the model was loaded"


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("owner", "name", "stage"),
    [
        (job, "open_job", CHECKED), (checked_run, "open_run", CHECKED), (job, "survey_first", CHECKED),
        (EngineWithFallback, "_make", LOADED), (FoundRun, "begin", LOADED),
    ],
)
def test_a_signal_before_the_first_row_ends_the_run_with_75_and_the_stage(
    owner: Any, name: str, stage: str, number: signal.Signals, command: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    no_more = signalled(monkeypatch, owner, name, number)
    assert run.main(command) == 75
    assert capsys.readouterr().err.splitlines()[-1] == f"batchspec: {number.name}: stopped {stage}; run the same command again"
    no_more()
    if number == signal.SIGTERM:
        assert run.main(command) == 0
        assert not OutputFolder(tmp_path / "out").missing()


def test_several_signals_before_the_first_row_are_one(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch system sends them to a program that is ending already."""

    class Ending:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            signal.raise_signal(signal.SIGTERM)

    def survey(*_: Any) -> None:
        with Ending():
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(job, "survey_first", survey)
    assert run.main(command) == 75
    assert "SIGUSR1: stopped" in capsys.readouterr().err.splitlines()[-1]


def import_while_reading() -> None:
    with EndSignals() as signals:
        signals.interrupt("while it read")
        import slow_module  # type: ignore[import-not-found]

        assert slow_module.whole
        time.sleep(5)


def test_a_signal_during_an_import_counts_when_the_import_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module.py").write_text("import signal, time\nsignal.raise_signal(15)\ntime.sleep(0.1)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Interrupted, match="SIGTERM: stopped while it read; run the same command again"):
        import_while_reading()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def swallowing() -> None:
    """A patch: an exception of the first signal is lost, as in a destructor, and the load goes on."""

    def make(_: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        os._exit(9)

    put(EngineWithFallback, "_make", make)


@pytest.mark.second
def test_a_second_ctrl_c_ends_a_load_that_goes_on(command: list[str], tmp_path: Path) -> None:
    code, said = run_apart(command, tmp_path / "log", swallowing)
    assert code == 75, said
    assert said.splitlines()[-1] == f"batchspec: SIGINT: stopped {LOADED}; run the same command again"


def as_process_1() -> list[str]:
    """A command's first words, which make it process 1 of a new namespace, as in a container."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    return words


@pytest.mark.second
@pytest.mark.parametrize("how", ["a shell's child", "process 1"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("imported", ["shlex", "hydra"], ids=["the first imports", "the last imports"])
def test_a_program_that_imports_its_modules_ends_with_75(number: signal.Signals, how: str, imported: str, tmp_path: Path) -> None:
    """As process 1 it would ignore what it has no handler for."""
    module = tmp_path / f"{imported}.py"
    module.write_text(f"import os, time\nos.kill(os.getpid(), {number})\ntime.sleep(60)\n")
    words = [*(as_process_1() if how == "process 1" else []), sys.executable, "-m", "batchspec.run", "+job=demo"]
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(words, env=os.environ | paths, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (75, STOPPED.format(number.name, " during start-up"))


BEGUN = """
import os, signal, sys
from batchspec.process.program import begin_program
begin_program()
from batchspec.cli import guarded
def full(number):
    os.dup2(os.open("/dev/full", os.O_WRONLY), number)
"""


def program(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program of batchspec without a job."""
    words = [sys.executable, "-c", f"{BEGUN}{code}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **options)


UNWRITTEN = "batchspec: standard output cannot be written: No space left on device (ENOSPC)\n"
STOPPED = "batchspec: {}: stopped{}; run the same command again\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import atexit; atexit.register(lambda: os.kill(os.getpid(), 15)); sys.exit(guarded(lambda: 0))", (0, "")),
        ("os.kill(os.getpid(), 10)", (75, STOPPED.format("SIGUSR1", " during start-up"))),
        ("sys.exit(guarded(lambda: os.kill(os.getpid(), 15)))", (75, STOPPED.format("SIGTERM", ""))),
        ("from batchspec.console.terminal import say; full(2); sys.exit(guarded(lambda: say('lost') or 3))", (3, "")),
        ("from batchspec.console.terminal import show; full(1); sys.exit(guarded(lambda: show('answer')))", (74, UNWRITTEN)),
    ],
    ids=["after its end", "at its start", "in a command", "messages on a full disk", "results on a full disk"],
)
def test_a_program_ends_with_its_exit_code(code: str, expected: tuple[int, str]) -> None:
    done = program(code)
    assert (done.returncode, done.stderr) == expected


def test_a_program_ends_without_freeing_what_it_holds_once_all_is_written() -> None:
    done = program(
        "import atexit, threading, time\nfrom batchspec.process.program import end_program\n"
        "class Held:\n    def __del__(self): print('freed')\n"
        "held = Held()\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
        "atexit.register(print, 'registered')\nend_program(guarded(lambda: print('answer') or 3))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "answer\nregistered\n", "")


@pytest.mark.parametrize("words", [["batchspec.run"], ["batchspec", "run"], ["batchspec.cli", "run"]], ids=" ".join)
def test_every_command_ends_so(words: list[str], tmp_path: Path) -> None:
    """The interpreter would free what the module `sitecustomize` holds."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nclass Held:\n    def __del__(self, write=os.write): write(2, b'freed')\nheld = Held()\n"
    )
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", *words, "--help"], env=os.environ | paths, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "batchspec" in done.stdout


def test_what_a_parent_ignored_blocked_or_closed_does_not_change_a_program() -> None:
    """With SIGCHLD ignored, a killed child would seem to have ended with 0; nohup's SIGHUP stays ignored."""

    def inherited() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.close(0)

    done = program(
        "import subprocess\nassert subprocess.run(['false']).returncode == 1\nassert os.path.samefile('/dev/fd/0', os.devnull)\n"
        "os.kill(os.getpid(), signal.SIGHUP)\nos.kill(os.getpid(), signal.SIGTERM)",
        preexec_fn=inherited,
    )
    assert (done.returncode, done.stderr) == (75, STOPPED.format("SIGTERM", " during start-up"))


def test_a_program_that_imports_batchspec_keeps_its_own_handlers() -> None:
    handlers = f"[signal.getsignal(n) for n in {[*map(int, SIGNALS)]}]"
    code = f"import signal; own = {handlers}; import batchspec, batchspec.cli, batchspec.run; assert {handlers} == own"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def signalled_at_the_third_shard() -> None:
    """A patch: the process sends itself a real signal when it is about to admit the rows of its third shard."""
    without_images = ShardWork.without_images

    def signalled(self: ShardWork, shard: InputShard) -> InputShard:
        if shard.index == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return without_images(self, shard)

    put(ShardWork, "without_images", signalled)


@pytest.mark.second
def test_a_signal_ends_a_run_that_reads_one_error_row_after_the_other(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": \n' * 40 + '{"prompt": "the last"}\n' * 2)
    words = [*command, f"input.path={tmp_path}/bad.jsonl", "input.max_error_fraction=1"]
    code, said = run_apart(words, tmp_path / "log", signalled_at_the_third_shard)
    assert (code, "SIGTERM: 3 of 21 shards are committed" in said) == (Interrupted.exit_code, True), said
    assert run.main(words) == 0
    assert not OutputFolder(tmp_path / "out").missing()
