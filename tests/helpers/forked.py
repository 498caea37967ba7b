"""Python programs in processes of their own that start at once: a server that has torch imported forks them
(tests/helpers/runs.py)."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from batchspec.packing import rates
from tests.helpers.programs import become_program, program_words, run_program
from tests.helpers.runs import fork_context, make_jobs_quick, put
from tests.helpers.stand_ins import H200


def run_python(
    words: Sequence[str], *, env: Mapping[str, str] = os.environ, cwd: Path | str = ".", timeout_s: float = 300
) -> CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *words], capture_output=True, text=True)` returns. `words` begin with -c or -m.

    Jobs in there are quick, see `make_jobs_quick`. Raises AssertionError where the program takes longer than `timeout_s`.
    """
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = fork_context().Process(target=_child, args=(list(words), dict(env), os.path.abspath(cwd), out, err))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"{words} hangs: {err.read_text(errors='replace')}")
        return CompletedProcess(list(words), process.exitcode, out.read_text(errors="replace"), err.read_text(errors="replace"))


def _child(words: list[str], environ: dict[str, str], cwd: str, out: Path, err: Path) -> None:
    os.environ.clear()  # of the server, which may have begun before a test changed it
    os.environ.update(environ)
    os.chdir(cwd)
    for path, number in ((out, 1), (err, 2)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        os.close(handle)
    make_jobs_quick(pytest.MonkeyPatch())
    put(rates, "calibrate", lambda *_, **__: H200)
    code = run_program(words)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class ServedPopen:
    """`Popen([sys.executable, *words])` of a process with threads, which cannot fork itself: the server forks the child.

    stdin is a pipe, stdout is left out, stderr is that of this process.
    """

    def __init__(self, words: Sequence[str], *, env: Mapping[str, str], pass_fds: Collection[int], **_: Any) -> None:
        begin, end = os.pipe()
        handles = [_Handle(number, number) for number in pass_fds] + [_Handle(begin, 0), _Handle(2, 2)]
        self._process = fork_context().Process(target=_become, args=(list(program_words(words)), dict(env), handles))
        self._process.start()
        os.close(begin)
        self.stdin = os.fdopen(end, "w")
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(str(self.pid), timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """As `Popen.send_signal`: a process that has just ended gets none. The server reports its exit code a little later."""
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Handle:
    """A file descriptor, and the number that it has in the child."""

    def __init__(self, own: int, number: int) -> None:
        self.own, self.number = own, number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.own), self.number)


def _received(sent: Any, number: int) -> _Handle:
    return _Handle(sent.detach(), number)


def _become(words: list[str], environ: dict[str, str], handles: list[_Handle]) -> None:
    high = [fcntl.fcntl(handle.own, fcntl.F_DUPFD, 500) for handle in handles]  # no number is taken before it is moved
    for place, handle in zip(high, handles, strict=True):
        os.dup2(place, handle.number)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.setsid()
    become_program(words, environ, [handle.number for handle in handles])


_CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode())
    server.shutdown(socket.SHUT_WR)
    code, out, err = json.load(server.makefile())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@contextmanager
def python_for_scripts() -> Iterator[Path]:
    """A program that a script may call instead of Python, as `run_python`; its output comes when it has ended."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path, program = Path(folder, "server"), Path(folder, "python")
        program.write_text(_CLIENT.format(python=sys.executable, path=str(path)))
        program.chmod(0o755)
        server.bind(str(path))
        server.listen()
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        yield program
        server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return  # it is over
        with client, client.makefile("rw") as stream:
            words, env, cwd = json.load(stream)
            try:
                done = run_python(words, env=env, cwd=cwd)
                answer = [done.returncode, done.stdout, done.stderr]
            except AssertionError as error:
                answer = [1, "", str(error)]
            json.dump(answer, stream)
