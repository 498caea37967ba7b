"""Compiling ahead: launches compile nothing on a first start, and nothing else changes, whatever the threads do.

The process needs no GPU: a fake driver reports a Hopper GPU and launches nothing, and tensors are on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, threading
import torch, triton
import triton.language as tl
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from batchspec.kernels.common.compile_ahead import compile_ahead
from batchspec.kernels.sampling.argmax import argmax_kernel

CPU = torch.device("cpu")
launchers, launches = [], []

def launcher(src, metadata):
    launchers.append(threading.current_thread().name.split("_")[0])
    return lambda *args: launches.append(metadata.name)

properties = lambda device: {"max_shared_mem": 232448}
load = lambda *args: (None, None, 0, 0, 1024)
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    launcher_cls=launcher, utils=SimpleNamespace(get_device_properties=properties, load_binary=load),
))
compiled = []
def listener(**event):
    compiled.append((threading.current_thread().name.split("_")[0], event["cache_hit"]))
triton.knobs.compilation.listener = listener

@triton.jit
def add_kernel(x, out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) + count, mask=at < count)

@triton.jit
def bad_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))

x = torch.arange(64.0)
def add(block):
    add_kernel[(1,)](x, torch.empty_like(x), 64, BLOCK=block)
def bad():
    bad_kernel[(1,)](x, BLOCK=16)
logits, ids = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int32)
def argmax(block):
    argmax_kernel[(2,)](logits, None, ids, None, None, None, 64, 1, 0, 64, FLAG=False, ACC=tl.float32, BLOCK=block, PDL=False,
                        num_warps=4)
def script():
    SCRIPT_BODY
script()
"""
AHEAD = """
assert not compile_ahead([lambda: add(64), lambda: add(128), lambda: add(256)], CPU, num_probes=1)
assert launches == []
assert compiled == [("kernels", False)] * 3, compiled
assert launchers == ["kernels"] * 3
add(64), add(128), add(256), add(256)
assert launches == ["add_kernel"] * 4
assert len(compiled) == 3, compiled
add(512)
assert compiled[3:] == [("MainThread", False)]
"""
KNOWN = """
assert not compile_ahead([lambda: add(64), lambda: add(128)], CPU, num_probes=1)
add_kernel.device_caches.clear()
compiled.clear()
assert compile_ahead([lambda: add(64), lambda: add(128), lambda: add(1024)], CPU, num_probes=2)
assert compiled == [("kernels", True)] * 2, compiled
"""
ENDED = """
assert not compile_ahead([lambda: (add(64), x.sum().item(), add(128)), lambda: add(256)], CPU, num_probes=1)
add(64), add(128), add(256)
assert compiled == [("kernels", False)] * 2 + [("MainThread", False)], compiled
"""
DYING = """
died = []
def fails(*args, **kwargs):
    died.append(1)
    raise MemoryError
add_kernel.device_caches[0]
compiling, add_kernel.compile = add_kernel.compile, fails
assert not compile_ahead([lambda: add(64), lambda: add(128)], CPU, num_probes=2)
assert len(died) == 2
add_kernel.compile = compiling
add(64), add(128)
assert launches == ["add_kernel"] * 2
assert compiled == [("MainThread", False)] * 2, compiled
"""
WRONG = """
assert not compile_ahead([bad, lambda: add(64)], CPU, num_probes=2)
try:
    bad()
except triton.CompilationError:
    pass
else:
    raise AssertionError
add(64)
assert launches == ["add_kernel"]
"""
NO_THREADS = """
def no_thread(thread):
    raise RuntimeError("can't start new thread")
start, threading.Thread.start = threading.Thread.start, no_thread
assert not compile_ahead([lambda: add(64), lambda: add(128)], CPU, num_probes=1)
threading.Thread.start = start
add(64), add(128)
assert launches == ["add_kernel"] * 2
assert compiled == [("MainThread", False)] * 2, compiled
"""
SAME_BITS = """
import hashlib, pathlib
def cubins():
    folder = pathlib.Path(triton.knobs.cache.dir)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.cubin")}
assert not compile_ahead([lambda block=block: add(block) for block in (32, 64, 128, 256)], CPU, num_probes=4)
ahead = cubins()
triton.knobs.cache.dir += "2"
add_kernel.device_caches.clear()
for block in (32, 64, 128, 256):
    add(block)
assert len(ahead) == 4
assert cubins() == ahead
"""


PROCESSES = """
command = [sys.executable, "-m", "batchspec.kernels.common.compile_process"]
assert not compile_ahead([lambda: argmax(64), lambda: argmax(128), lambda: argmax(256)], CPU, num_probes=3, command=command)
assert launches == []
assert compiled == [("kernels", True)] * 3, compiled
assert launchers == ["kernels"] * 3
argmax(64), argmax(128), argmax(256), argmax(256)
assert launches == ["argmax_kernel"] * 4
assert len(compiled) == 3, compiled
argmax_kernel.device_caches.clear()
assert compile_ahead([lambda: argmax(64)], CPU, num_probes=1, command=[sys.executable, "-c", "raise SystemExit"])
"""
PROCESSES_SAME_BITS = """
import hashlib, pathlib
def cubins():
    folder = pathlib.Path(triton.knobs.cache.dir)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.cubin")}
command = [sys.executable, "-m", "batchspec.kernels.common.compile_process"]
assert not compile_ahead([lambda: argmax(64), lambda: argmax(128)], CPU, num_probes=2, command=command)
ahead = cubins()
triton.knobs.cache.dir += "2"
argmax_kernel.device_caches.clear()
argmax(64), argmax(128)
assert len(ahead) == 2
assert cubins() == ahead
"""
PROCESSES_FAIL = """
for command in ([sys.executable, "-c", "raise SystemExit"], ["/nowhere"], [sys.executable, "-c", "print('what?')"]):
    add_kernel.device_caches.clear(), compiled.clear(), launches.clear()
    triton.knobs.cache.dir += "2"
    assert not compile_ahead([lambda: add(64), lambda: add(128)], CPU, num_probes=2, command=command)
    assert compiled == [("kernels", False)] * 2, compiled
    add(64), add(128)
    assert launches == ["add_kernel"] * 2
"""
PROCESSES_UNKNOWN = """
command = [sys.executable, "-m", "batchspec.kernels.common.compile_process"]
assert not compile_ahead([lambda: add(64), lambda: argmax(64), bad], CPU, num_probes=3, command=command)
assert sorted(compiled) == [("kernels", False), ("kernels", True)], compiled
"""


BODIES = {
    "processes compile, and threads load what they compiled": PROCESSES,
    "the machine code of processes is the same": PROCESSES_SAME_BITS,
    "without working processes threads compile": PROCESSES_FAIL,
    "what processes cannot import or compile is compiled by threads": PROCESSES_UNKNOWN,
    "launches compile nothing that was compiled ahead": AHEAD,
    "kernels on disk are loaded, and the other runs left out": KNOWN,
    "a run that ends early is compiled up to there": ENDED,
    "what threads fail to compile is compiled at its launch": DYING,
    "a kernel that cannot be compiled fails at its launch": WRONG,
    "without threads launches compile as usual": NO_THREADS,
    "the machine code is the same": SAME_BITS,
}
FORKING = """
import os, runpy, sys, traceback
import torch, triton  # once, and not in each process
for script in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["TRITON_CACHE_DIR"] = script + ".cache"
        code = 0
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            traceback.print_exc(file=open(script + ".error", "w"))
            code = 1
        os._exit(code)
    open(script + ".code", "w").write(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each has run in a process of its own, because other tests interpret kernels."""
    folder = tmp_path_factory.mktemp("scripts")
    found = {name: folder / f"{number}.py" for number, name in enumerate(BODIES)}
    for name, path in found.items():
        body = "\n".join(f"    {line}" for line in BODIES[name].strip().splitlines())
        path.write_text(SCRIPT.replace("    SCRIPT_BODY", body))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", FORKING, *map(str, found.values())], env=env, check=True)
    return found


@pytest.mark.second
@pytest.mark.parametrize("name", BODIES)
def test_compiling_ahead(name: str, scripts: dict[str, Path]) -> None:
    error = scripts[name].with_suffix(".py.error")
    assert scripts[name].with_suffix(".py.code").read_text() == "0", error.read_text() if error.exists() else "it died"


IMPORT_ALL = """
import sys
from importlib import import_module
from batchspec.kernels.common.compile_process import _WithoutTorch
sys.meta_path.insert(0, _WithoutTorch())
for name in sys.argv[1:]:
    import_module(name)
assert type(sys.modules["torch"]).__name__ == "_AnyModule"
"""


@pytest.mark.second
def test_processes_can_import_the_modules_of_all_kernels() -> None:
    """They import no torch."""
    files = [path for path in sorted((ROOT / "kernels").glob("*/*.py")) if "_kernel(" in path.read_text()]
    names = [f"batchspec.kernels.{path.parent.name}.{path.stem}" for path in files if path.parent.name != "benchmarks"]
    assert "batchspec.kernels.rounds.allocate_drafts" in names
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", IMPORT_ALL, *names], env=env, check=True)


AT_ONCE = """
command = [sys.executable, "-m", "batchspec.kernels.common.compile_process"]
sys.stdin.readline()
blocks = (64, 128, 256, 512)
compile_ahead([lambda block=block: argmax(block) for block in blocks], CPU, num_probes=len(blocks), command=command)
for block in blocks:
    argmax(block)
assert launches == ["argmax_kernel"] * len(blocks)
assert all(hit for _, hit in compiled), compiled
"""


@pytest.mark.second
def test_several_programs_share_a_cache_on_disk(tmp_path: Path) -> None:
    """As the tasks of an array do: they begin at once with an empty cache, and each gets whole kernels."""
    body = "\n".join(f"    {line}" for line in AT_ONCE.strip().splitlines())
    (tmp_path / "program.py").write_text(SCRIPT.replace("    SCRIPT_BODY", body))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    programs = [
        subprocess.Popen(
            [sys.executable, tmp_path / "program.py"], env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [program.communicate("go\n")[1] for program in programs]
    assert [program.returncode for program in programs] == [0, 0, 0], said
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 4


MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "kernels").glob("*/*.py")
    if path.parent.name not in ("benchmarks", "common", "train") and path.name != "__init__.py"
)


@pytest.mark.second
def test_the_modules_of_all_kernels_that_jobs_launch_can_be_imported_without_torch() -> None:
    code = (
        "import sys; from importlib import import_module\n"
        "from batchspec.kernels.common.compile_process import _WithoutTorch\n"
        "sys.meta_path.insert(0, _WithoutTorch())\n"
        f"for name in {MODULES}: import_module('batchspec.' + name)\n"
        "assert not hasattr(sys.modules['torch'], '__file__')"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
