"""Bytecode of what a run imports, where Python keeps none: there, compiling 2,000 sources takes half of the time before a job.

Some images set PYTHONDONTWRITEBYTECODE, or have packages without bytecode in a folder that is not writable. There bytecode is
kept in the user's cache folder; the folders of the sources stay as they are. At a first start, when no bytecode exists, several
processes compile the sources of `imported.txt` before they are imported, which takes 2 s of CPU time.
`python -m batchspec.process.bytecode` writes that list anew, and keeps what other versions of packages import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

from batchspec.process.machine import num_cpus, user_cache

FEWEST_CPUS, MOST_PROCESSES = 4, 8
LONGEST_S = 20
"""Seconds after which a start goes on without the rest of the bytecode."""
WITNESS = "torch"
"""If this package, the largest, has bytecode, the installed packages are taken to have it."""
ENTRANCES = (
    "batchspec.run", "batchspec.config.compose", "batchspec.cluster.workers", "batchspec.cluster.devices", "batchspec.job.run_job"
)
"""The modules that a run imports before its job begins, with all that they import."""
LIST = Path(__file__).with_name("imported.txt")
COMPILE = """
import py_compile, sys
for path in sys.stdin.read().splitlines():
    try:
        py_compile.compile(path, doraise=True)
    except Exception:
        pass
"""


def keep_bytecode() -> None:
    """See above. Does nothing if the largest package has bytecode, or if PYTHONPYCACHEPREFIX is set. Child processes follow."""
    source = _source(f"{WITNESS}/__init__.py")
    if source is None or sys.pycache_prefix is not None or _has_bytecode(source):
        return
    with suppress(OSError):  # as where there is no home folder: then there is no bytecode, as before
        if sys.dont_write_bytecode or not os.access(source.parent, os.W_OK):
            _use(_folder())
        if not _has_bytecode(source):
            _compile_listed()


def _use(folder: Path) -> None:
    """Keep bytecode in this folder from now on, of this process and of those that it starts."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _folder() -> Path:
    return user_cache() / "batchspec" / "bytecode"


def _has_bytecode(source: Path) -> bool:
    return os.path.exists(cache_from_source(str(source)))


def _compile_listed() -> None:
    """Compile the listed sources in as many processes as there are CPUs. Raises OSError if no process can be started."""
    num = min(MOST_PROCESSES, num_cpus())
    if num < FEWEST_CPUS:
        return
    found = {source: source.stat().st_size for name in listed() if (source := _source(name)) is not None}
    largest_first = sorted(found, key=lambda source: -found[source])
    command = [sys.executable, "-I", "-S", *_prefix_option(), "-c", COMPILE]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(num)]
    for i, process in enumerate(processes):
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write("\n".join(map(str, largest_first[i::num])))
            process.stdin.close()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LONGEST_S)


def _prefix_option() -> list[str]:
    return [] if sys.pycache_prefix is None else ["-X", f"pycache_prefix={sys.pycache_prefix}"]


def listed() -> list[str]:
    """Paths of sources, each from the folder that holds its package, as in torch/nn/functional.py."""
    return LIST.read_text(encoding="utf-8").split()


def _source(name: str) -> Path | None:
    """The file of a listed name in this environment; None: it is not there."""
    spec = PathFinder.find_spec(name.partition("/")[0].removesuffix(".py"))
    if spec is None:
        return None
    root = next(iter(spec.submodule_search_locations or ()), None)
    path = Path(root).parent / name if root is not None else Path(spec.origin or "")
    return path if path.suffix == ".py" and path.is_file() else None


def imported(names: Iterable[str]) -> Iterator[str]:
    """The sources of these modules of this process, as in the list."""
    for name in names:
        spec = getattr(sys.modules[name], "__spec__", None)
        origin = None if spec is None or spec.name != name else spec.origin
        if origin is not None and origin.endswith(".py"):
            path = name.replace(".", "/")
            yield f"{path}/__init__.py" if os.path.basename(origin) == "__init__.py" else f"{path}.py"


def main() -> None:
    for name in ENTRANCES:
        import_module(name)
    others = {name for name in listed() if not name.startswith("batchspec/")}
    LIST.write_text("\n".join(sorted(others.union(imported(sorted(sys.modules))))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
