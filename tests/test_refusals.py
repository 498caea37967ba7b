"""Errors by which a machine refuses something become one line with the limit to raise; a bug keeps its traceback."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchspec.config.compose import compose, reported
from batchspec.errors import CheckpointError, ConfigError, StorageError
from batchspec.model.packaged import smollm2_folder
from batchspec.process.local_files import unusable_name
from batchspec.process.machine import num_cpus, user_cache
from batchspec.storage import local_store
from batchspec.storage.store import storing

ROOT = Path(__file__).parents[1]
NO_THREADS = "no more threads or processes can be started"


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
    ],
    ids=["thread", "process", "file", "memory", "Python's memory"],
)
def test_what_the_machine_refuses_is_one_line_and_exit_code_2(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def task() -> int:
        raise error

    assert reported(task) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"batchspec: {said}")
    assert line.endswith("and run the same command again")


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), os_error(errno.EPERM), ValueError("open files")], ids=str)
def test_any_other_error_keeps_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
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


def limited() -> None:
    """Of a child process that may not raise its limits, and that inherited what `limit_cpu` relies on as ignored."""
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    for kind, value in ((resource.RLIMIT_CPU, 1), (resource.RLIMIT_AS, 2**31)):
        resource.setrlimit(kind, (value, value if kind == resource.RLIMIT_AS else 60))


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
