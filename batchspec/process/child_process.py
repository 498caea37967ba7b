"""Child processes of a run. A signal that is sent to all processes of a job does not end them; they end with the run.

Those that compute from input, which may be hostile, get no credentials, and limit their own CPU time and memory.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batchspec.errors import CapacityError
from batchspec.process.local_files import told
from batchspec.process.threads import start_thread

BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
"""Signals that a batch system or a terminal sends to all processes of a job."""
BOOTSTRAP = """
import sys
root, paths, option, program = sys.argv[1:5]
del sys.argv[1:5]
sys.path[:] = eval(paths)
import runpy
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
found = PathFinder.find_spec("batchspec", [root])
sys.modules["batchspec"] = package = module_from_spec(found)
found.loader.exec_module(package)
if option == "-m":
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    exec(program, {"__name__": "__main__"})
"""
"""The program that each child process runs first: it sets `sys.path` and imports batchspec from its parent's folder. That folder
is an argument, because a search that has the working directory last might find another version, which is installed."""
PASSED_ENVIRONMENT = ("PATH", "TZ", "PYTHON", "LD_LIBRARY_PATH", "LANG", "LC_")
"""Prefixes of the environment variables that a process that computes from input gets: credentials are not passed on."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started within this block have BLOCKED_SIGNALS blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)  # a child process inherits the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def python_command(option: str, program: str, *arguments: str) -> list[str]:
    """The command that starts `python -m PROGRAM` or `python -c PROGRAM`; the caller may append arguments of the program.

    The child imports batchspec from the same folder as this process, and other modules by `import_paths`.
    """
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    return [sys.executable, "-P", "-c", BOOTSTRAP, root, repr(import_paths()), option, program, *arguments]


def import_paths() -> list[str]:
    """`sys.path`, but with what Python itself put first at its end: the working directory ("") or the main script's folder.

    So files that happen to be there do not shadow modules of Python or of a dependency. Entries of PYTHONPATH stay where they
    are, also those for the same folders: a child must not import another version of a tokenizer than this process does. So does
    the first entry of `python -m`, which cannot be told from PYTHONPATH's; for this package's programs it is last already.
    """
    paths = sorted(sys.path, key=lambda path: not path)
    main = sys.modules.get("__main__")
    script = None if getattr(main, "__spec__", None) else getattr(main, "__file__", None)
    if script and not sys.flags.safe_path and os.path.realpath(paths[0]) == os.path.dirname(os.path.realpath(script)):
        paths.append(paths.pop(0))
    return [os.path.abspath(path) for path in paths]


def start_module(module: str, *, pass_fds: Sequence[int] = (), **environment: str) -> subprocess.Popen[bytes]:
    """Start a module that processes the job's input, with pipes to its standard input and output.

    Its environment is `environment` and the variables of PASSED_ENVIRONMENT; pass_fds: open files that it inherits. Raises
    CapacityError if it could not limit itself.
    """
    _check_limits()
    environ = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ENVIRONMENT)}
    with signals_blocked():
        return subprocess.Popen(
            python_command("-m", module), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environ | environment, pass_fds=pass_fds,
        )


def _check_limits() -> None:
    """Raises CapacityError if the system refuses limits, even those that hold already, to this process: then also to a child."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))
    except OSError as error:
        raise CapacityError(
            f"the system refuses to limit the memory and CPU time of a process ({told(error)}), without which no chat template "
            "and no constraint is executed, and no image decoded; allow setrlimit and prlimit64 (seccomp profile of the "
            "container) and run the same command again"
        ) from error


def act_when_parent_ends(act: Callable[[], object]) -> None:
    """Call `act`, in a thread, when the parent of this process is gone.

    The parent keeps the other end of this process's standard input open while it lives.
    """

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
            pass
        act()

    start_thread(wait, "parent")


AGAIN_S = 1.0
"""CPU seconds after which `stopped_after` raises once more: an exception that is raised in a destructor is lost."""


class OutOfTime(BaseException):
    """A block of `stopped_after` used up its CPU time. No `Exception`, so that no handler of the block takes it for its own."""


@contextmanager
def stopped_after(cpu_s: float) -> Iterator[None]:
    """Raises OutOfTime once this process has spent `cpu_s` seconds of CPU time in the block, as soon as Python runs again.

    Only in the main thread, and not inside another such block.
    """

    end_s = time.process_time() + cpu_s

    def stop(*_: object) -> None:
        if (left_s := end_s - time.process_time()) <= 0:
            raise OutOfTime
        signal.setitimer(signal.ITIMER_PROF, left_s, AGAIN_S)  # the timer counts whole ticks of a process that had parts of them

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_cpu(cpu_s: int) -> None:
    """From now on this process has at least `cpu_s` seconds of CPU time, and at most two more; then the system ends it with
    SIGXCPU."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # whoever started the run may have had it ignored
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(time.process_time()) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
