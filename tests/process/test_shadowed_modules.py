"""Files in the working directory that are named like modules of Python or of a dependency: no process of a run imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import polars as pl
import pytest

from batchspec.process.child_process import import_paths, python_command
from batchspec.text.templates import Templates
from tests.helpers.runs import make_model

pytestmark = pytest.mark.second

ROOT = Path(__file__).parents[2]
DEPENDENCIES = ("numpy", "torch", "polars", "pyarrow", "hydra", "omegaconf", "jinja2", "tokenizers", "safetensors", "msgspec")
SHOW_IMPORTED = "import runpy, sys; print(*sys.modules)"
BEFORE = set(
    subprocess.run([sys.executable, "-S", "-c", SHOW_IMPORTED], capture_output=True, text=True, check=True).stdout.split()
)
"""Modules that `python -m` may import before it imports batchspec: only the user can prevent that, by python -P.
-S leaves out the site module: which of them it has imported earlier depends on the .pth files of the environment."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for each module of Python and for each dependency, which ends the process that imports it."""
    folder = tmp_path_factory.mktemp("hostile")
    there = [name for name in sys.stdlib_module_names if find_spec(name) is not None]  # others are Windows's
    for name in (*there, *DEPENDENCIES, "batchspec"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was imported from the working directory')\n")
    return folder


@pytest.fixture
def within(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in the folder, and has it first in `sys.path`, as `python -c` and notebooks have it."""
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", ["", *sys.path])


def test_a_child_process_imports_nothing_from_the_working_directory(within: None) -> None:
    code = "import random, json, queue, inspect, types, numpy, batchspec, sys; print(batchspec.__file__, sys.argv)"
    done = subprocess.run([*python_command("-c", code), "more"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{ROOT}/batchspec/__init__.py ['-c', 'more']\n"


def test_a_template_is_rendered_in_such_a_folder(within: None) -> None:
    assert Templates({"default": "{{ text }}"}, "here").render("default", {"text": "hello"}) == "hello"


def test_a_module_that_only_the_working_directory_has_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency may be in it, or batchspec itself, even if another version is installed."""
    (tmp_path / "of_my_own.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert import_paths()[-1] == str(tmp_path)
    subprocess.run([*python_command("-c", "import of_my_own")], check=True)


SHOWS_BOTH = """
import subprocess, sys, dependency
print(dependency.__file__, flush=True)
from batchspec.process.child_process import python_command
again = (
    "import subprocess; from batchspec.process.child_process import python_command; subprocess.run(python_command('-c', {0!r}))"
)
show = "import dependency; print(dependency.__file__)"
subprocess.run(python_command("-c", show), check=True)
subprocess.run(python_command("-c", again.format(show)), check=True)
"""


@pytest.mark.parametrize(
    "start", [("program.py",), ("-m", "program"), ("-P", "program.py"), ("-m", "batchspec.run")], ids=" ".join
)
def test_a_process_and_its_children_import_a_module_from_the_same_file(start: tuple[str, ...], tmp_path: Path) -> None:
    """PYTHONPATH has several versions of it, in any order: also in the working directory and in the main script's folder."""
    folders = {name: tmp_path / name for name in ("here", "script", "other")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "dependency.py").write_text("")
    script = folders["script"] / "program.py"
    script.write_text(SHOWS_BOTH)
    (tmp_path / "library").mkdir()
    (tmp_path / "library/program.py").write_text(SHOWS_BOTH)
    (tmp_path / "library/hydra.py").write_text(SHOWS_BOTH + "raise SystemExit")  # batchspec.run imports it
    words = [str(script) if word == "program.py" else word for word in start]
    for order in permutations(folders.values()):
        if start == ("program.py",) and order[0] != folders["script"]:
            continue  # Python put it first, for this process alone
        path = os.pathsep.join(map(str, (*order, tmp_path / "library", ROOT)))
        done = subprocess.run(
            [sys.executable, *words], cwd=folders["here"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        files = done.stdout.splitlines()
        assert len(files) == 3
        assert len(set(files)) == 1, order


@pytest.mark.parametrize("program", ["batchspec.run", "batchspec"])
def test_a_whole_run_works_in_such_a_folder(program: str, hostile: Path, tmp_path: Path) -> None:
    """Two processes with workers of their own, a chat template, a schema, and each way to start it."""
    folder = tmp_path / "here"
    folder.mkdir()
    for file in hostile.iterdir():
        if file.stem not in BEFORE | {"batchspec"} and not file.stem.startswith("_"):
            (folder / file.name).write_bytes(file.read_bytes())
    messages = [[{"role": "user", "content": f"Say {i}"}] for i in range(3)]
    pl.DataFrame({"messages": messages}).write_parquet(tmp_path / "in.parquet")
    words = [
        f"model.path={make_model(tmp_path / 'model')}", f"input.path={tmp_path / 'in.parquet'}", f"output.dir={tmp_path / 'out'}",
        "decode.choice=[yes,no]", "decode.max_new_tokens=8", "output.shard_rows=1", "draft=none", "model.dtype=float64",
        "input.num_workers=1", "cluster.workers=2", "device=cpu",
    ]
    command = [sys.executable, "-m", program, *(["run"] if program == "batchspec" else []), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(pl.read_parquet(tmp_path / "out/data")["status"]) <= {"ok", "truncated"}
