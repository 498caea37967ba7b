"""Python programs in processes that are forked from one that has torch imported, which takes a new interpreter three seconds."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from batchspec.process.child_process import BOOTSTRAP


def run_program(words: Sequence[str]) -> int:
    """Exit code of what `python *words` does. `words` begin with -c or -m."""
    option, program, *rest = words
    sys.argv = ["-c" if option == "-c" else program, *rest]
    try:
        if option == "-c":
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.modules.pop(program, None)  # the server has imported it; runpy warns about a module that it runs a second time
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def program_words(words: Sequence[str]) -> Sequence[str]:
    """Those of [sys.executable, *words] that name the program and its arguments. `BOOTSTRAP` is left out: a forked child has the
    modules of its server already."""
    assert words[0] == sys.executable
    return words[words.index(BOOTSTRAP) + 3 :] if BOOTSTRAP in words else words[1:]


class ForkedPopen(subprocess.Popen[str]):
    """`Popen([sys.executable, *words])` of a process without other threads: a child that is forked, and does not start anew.

    What a new interpreter would not have, it has: the modules, their patches, the seed of hashes.
    """

    def __init__(self, words: Sequence[str], *, env: Mapping[str, str], pass_fds: Collection[int], **rest: Any) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a thread may hold a lock, which the child would wait for"
        sys.stdout.flush()
        sys.stderr.flush()

        def instead_of_exec() -> None:
            become_program(program_words(words), env, pass_fds)

        super().__init__(words, env=env, pass_fds=pass_fds, preexec_fn=instead_of_exec, **rest)


def become_program(words: Sequence[str], env: Mapping[str, str], handles: Collection[int]) -> None:
    """Do what exec and the interpreter's start would, but for the imports. Does not return."""
    code = 1
    try:
        gc.enable()  # subprocess has disabled it
        kept = {0, 1, 2, *handles}
        for number in [int(name) for name in os.listdir("/proc/self/fd")]:
            if number not in kept:
                with suppress(OSError):  # the listing's own
                    os.close(number)  # the pipe by which the parent waits for exec, too
        for name in signal.valid_signals():
            if callable(signal.getsignal(name)):
                signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
        for name in (signal.SIGPIPE, signal.SIGXFSZ):  # subprocess has set these to their defaults, which end the process
            signal.signal(name, signal.SIG_IGN)
        vars(weakref.finalize)["_registry"].clear()  # or the child would delete temporary folders of its parent when it ends
        os.environ.clear()
        os.environ.update(env)
        sys.stdin = open(0)  # noqa: SIM115
        code = run_program(words)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
