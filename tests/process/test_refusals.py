"""Errors by which a machine refuses something become one line with the limit to raise; a bug keeps its traceback."""

from __future__ import annotations

import errno
import io
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pyarrow as pa
import pytest
import torch

from batchspec import cli, run
from batchspec.checkpoint.packaged import smollm2_folder
from batchspec.cli import guarded
from batchspec.config.compose import compose, reported
from batchspec.console.terminal import StatusLine
from batchspec.data.dataset.files import reading
from batchspec.data.runstate.scan import scanning
from batchspec.data.storage import local_store
from batchspec.data.storage.store import storing
from batchspec.errors import BadRow, CapacityError, CheckpointError, ConfigError, InputError, Interrupted, StorageError
from batchspec.packing.device_memory import total_memory
from batchspec.packing.prompt_encoder import _refused_as
from batchspec.process import preflight
from batchspec.process.child_process import start_module
from batchspec.process.local_files import unusable_name
from batchspec.process.machine import num_cpus, user_cache

ROOT = Path(__file__).parents[2]
AGAIN = "Resource temporarily unavailable"
NO_CALL = "the system refuses a call, `"
NO_THREADS = "no more threads or processes can be started"


class PanicException(BaseException):
    """As the panics of libraries in Rust, which have a class of this name each."""


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), f"{NO_THREADS} (can't start new thread); raise"),
        (os_error(errno.EAGAIN), f"{NO_THREADS} ([Errno 11] Resource temporarily unavailable); raise"),
        (os_error(errno.EMFILE), "no more files can be opened ([Errno 24] Too many open files); raise the limit of"),
        (os_error(errno.ENOMEM), "out of memory ([Errno 12] Cannot allocate memory); free the machine's memory or raise"),
        (MemoryError(), "out of memory (MemoryError); free the machine's memory or raise the limit"),
        (RuntimeError("unable to start watchdog thread"), f"{NO_THREADS} (unable"),
        (PanicException(f'could not spawn threads: Os {{ code: 11, message: "{AGAIN}" }}'), f"{NO_THREADS} (could not spawn"),
        (pa.ArrowException(f"Unknown error: Failed to launch worker thread: {AGAIN}"), f"{NO_THREADS} (Unknown error"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "out of memory (libtorch_cpu.so: failed"),
        (os_error(errno.EPERM), "the system refuses a call, `raise error` ([Errno 1] Operation not permitted); allow it"),
        (OSError(errno.EACCES, "Permission denied", sys.executable), "no process can be started ([Errno 13] Permission denied"),
    ],
    ids=[
        "thread", "process", "file", "memory", "Python's memory", "timer", "thread of Rust", "thread of Arrow", "library", "call",
        "interpreter",
    ],
)
def test_what_the_machine_refuses_is_one_line_and_exit_code_2(
    error: BaseException, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def task() -> int:
        raise error

    assert reported(task) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"batchspec: {said}")
    assert line.endswith("and run the same command again")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"), OSError(errno.EPERM, "Operation not permitted", "a file"), ValueError("open files"),
        PanicException("index out of bounds"),
        ImportError("a.so: failed to map segment from shared object: Operation not permitted"),
    ],
    ids=str,
)
def test_any_other_error_keeps_its_traceback(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def task() -> int:
        raise error

    assert reported(task) == 1
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (errno.EFBIG, "raise the limit of the size of a file (ulimit -f)"), (errno.EMFILE, "raise the limit of open files"),
        (errno.ENOSYS, "or use one that can do it"), (errno.EISDIR, "move away"), (errno.EIO, "repair the file system"),
    ],
)
def test_an_error_of_storage_says_what_helps(code: int, cure: str) -> None:
    with pytest.raises(StorageError, match=f"nothing committed is lost: .*{cure[:20]}"), storing("writing a part"):
        raise os_error(code)


@pytest.mark.parametrize(
    ("code", "passes"), [(errno.EINVAL, True), (errno.ENOSYS, True), (errno.ENOTSUP, True), (errno.EIO, False)]
)
def test_a_file_system_that_cannot_sync_folders_is_used_and_a_broken_one_is_not(
    code: int, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise os_error(code)

    monkeypatch.setattr(os, "fsync", fsync)
    if passes:
        local_store._sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            local_store._sync_folder(tmp_path)


def test_what_a_system_does_not_tell_is_taken_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise os_error(errno.EPERM)

    monkeypatch.setattr(os, "sched_getaffinity", refused)
    monkeypatch.setattr(os, "pathconf", refused)
    assert num_cpus() == os.cpu_count()
    assert unusable_name(tmp_path / "out") == ""
    assert "300 bytes" in unusable_name(tmp_path / ("x" * 300))


def test_a_user_without_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker run --user 1234`: neither HOME nor a line in /etc/passwd."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for name in ("XDG_CACHE_HOME", "BATCHSPEC_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError, match="set HOME or XDG_CACHE_HOME"):
        user_cache()
    with pytest.raises(CheckpointError, match="this user has no home folder to keep it in; set BATCHSPEC_CACHE"):
        smollm2_folder()


def test_a_deleted_working_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"the working folder cannot be found \(No such file or directory \(ENOENT\)\)"):
        compose(["output.dir=out"])


@pytest.mark.parametrize(("call", "module"), [("eventfd", os), ("epoll", select)])
def test_a_call_without_which_a_library_would_crash_is_asked_for_before_it_is_imported(
    call: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise os_error(errno.EPERM)

    monkeypatch.setattr(module, call, refused)
    assert guarded(lambda: pytest.fail("the command began")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"batchspec: {NO_CALL}")


def test_the_threads_of_a_run_are_asked_for_and_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def few(thread: threading.Thread) -> None:
        if len(started) == preflight.OTHER_THREADS:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    assert guarded(lambda: pytest.fail("the command began")) == 2
    assert NO_THREADS in capsys.readouterr().err
    assert not any(thread.is_alive() for thread in started)


def test_too_little_address_space_for_the_libraries_is_refused_before_they_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "soft_limit", lambda kind: 2**30 if kind == resource.RLIMIT_AS else None)
    for command in (lambda: run.main([]), lambda: cli.main(["plan"])):
        assert guarded(command) == 2
        assert capsys.readouterr().err == (
            "batchspec: this process may use 1.00 GiB of address space, and the smallest run takes 3 GiB; raise the limit "
            "(ulimit -v) and run the same command again\n"
        )


def test_no_process_computes_from_input_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise os_error(errno.EPERM)

    monkeypatch.setattr(resource, "setrlimit", refused)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(CapacityError, match=r"refuses to limit .* \(Operation not permitted \(EPERM\)\).*; allow setrlimit and"):
        start_module("batchspec.text.template_process")


def test_a_file_is_not_blamed_for_threads_that_cannot_be_started(tmp_path: Path) -> None:
    error = pa.ArrowException(f"Unknown error: Failed to launch worker thread: {AGAIN}")
    for block in (reading("a.parquet"), scanning("out")):
        with pytest.raises(CapacityError, match=NO_THREADS), block:
            raise error
    with pytest.raises(InputError, match="repair the file"), reading("a.csv"):
        raise pa.ArrowInvalid(f"CSV parse error: {AGAIN}")


def test_a_row_is_not_blamed_for_threads_that_cannot_be_started() -> None:
    with pytest.raises(RuntimeError, match="can't start"), _refused_as("chat template"):
        raise RuntimeError("can't start new thread")
    with pytest.raises(BadRow, match="can't start"), _refused_as("chat template"):
        raise ValueError("can't start new thread")


def test_a_terminal_that_is_gone_does_not_replace_the_error_of_the_run() -> None:
    stream = io.StringIO()
    with pytest.raises(Interrupted, match="SIGHUP"), StatusLine(stream) as line:  # noqa: PT012
        line.draw("half done")
        stream.write = Mock(side_effect=os_error(errno.EIO))  # type: ignore[method-assign]
        raise Interrupted("SIGHUP")


def test_the_memory_of_a_machine_that_does_not_answer_is_that_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sysinfo is refused, sysconf returns any number."""
    total = total_memory(torch.device("cpu"))
    monkeypatch.setattr(os, "sysconf", lambda _: -(10**11))
    assert total_memory(torch.device("cpu")) == total > 0


def test_a_thread_starts_or_is_refused_however_little_memory_is_left() -> None:
    """`Thread.start` waits for ever where a thread has memory for its stack alone."""
    code = (
        "import faulthandler, resource\n"
        "from batchspec.process.threads import STACK_BYTES, start_thread\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))\n"
        "faulthandler.dump_traceback_later(10, exit=True)\n"
        "start_thread(list, 'first').join()\n"
        "for left in range(0, 64 << 10, 4 << 10):\n"
        "    size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + STACK_BYTES + left\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (size, -1))\n"
        "    try:\n"
        "        start_thread(list, 'next').join()\n"
        "    except (OSError, RuntimeError):\n"
        "        print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["refused"] * 16, "")


def limited() -> None:
    """Of a child process that may not raise its limits, and that inherited what `limit_cpu` relies on as ignored."""
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    for kind, value in ((resource.RLIMIT_CPU, 1), (resource.RLIMIT_AS, 2**31)):
        resource.setrlimit(kind, (value, value if kind == resource.RLIMIT_AS else 60))


@pytest.mark.second
def test_a_limited_process_keeps_limits_that_are_lower_and_ends_at_its_own() -> None:
    code = (
        "import resource\n"
        "from batchspec.process.child_process import limit_cpu\n"
        "from batchspec.process.machine import lower_limit\n"
        "lower_limit(resource.RLIMIT_AS, 2**40); assert resource.getrlimit(resource.RLIMIT_AS) == (2**31, 2**31)\n"
        "limit_cpu(10**6); assert resource.getrlimit(resource.RLIMIT_CPU) == (60, 60)\n"
        "limit_cpu(0)\nwhile True: pass"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, preexec_fn=limited, check=False, timeout=60)
    assert done.returncode == -signal.SIGXCPU
