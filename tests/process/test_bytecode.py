"""Bytecode is kept where Python would keep none, and nothing changes elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, os, sys
from pathlib import Path
from batchspec.process import bytecode

bytecode.WITNESS, bytecode.LIST, bytecode.FEWEST_CPUS = "witness", Path(sys.argv[1]), 1
before = sys.pycache_prefix, os.environ.get("PYTHONDONTWRITEBYTECODE")
started, popen = [], bytecode.subprocess.Popen
bytecode.subprocess.Popen = lambda *args, **kwargs: started.append(1) or popen(*args, **kwargs)
bytecode.keep_bytecode()
compiled = [os.path.exists(bytecode.cache_from_source(str(path))) for path in map(bytecode._source, bytecode.listed()) if path]
import witness.part
changed = before != (sys.pycache_prefix, os.environ.get("PYTHONDONTWRITEBYTECODE"))
print(json.dumps({
    "compiled": compiled, "started": len(started), "cached": witness.part.__cached__, "changed": changed,
    "child": os.environ.get("PYTHONPYCACHEPREFIX"),
}))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages without bytecode: one of two modules, one of which is not listed, and one that is not Python."""
    package = tmp_path / "site" / "witness"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("part", "VALUE = 1"), ("unlisted", ""), ("wrong", "def (")):
        (package / f"{name}.py").write_text(text)
    names = ("witness/__init__.py", "witness/part.py", "witness/wrong.py", "witness/gone.py", "nowhere/gone.py")
    (tmp_path / "list.txt").write_text("\n".join(names))
    return package


def start(site: Path, **environment: str) -> dict[str, Any]:
    root, folder = str(Path(__file__).parents[2]), site.parents[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PYTHONPATH": f"{root}:{site.parent}", "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "list.txt")], env=env, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_where_python_writes_no_bytecode_it_is_kept_in_the_cache_folder(site: Path) -> None:
    folder = site.parents[1] / "cache" / "batchspec" / "bytecode"
    first = start(site, PYTHONDONTWRITEBYTECODE="1")
    assert first["compiled"] == [True, True, False], "a source that is no Python stops nothing"
    assert first["started"] > 0
    assert first["cached"].startswith(str(folder))
    assert first["child"] == str(folder)
    assert not (site / "__pycache__").exists()
    assert folder.stat().st_mode & 0o077 == 0
    second = start(site, PYTHONDONTWRITEBYTECODE="1")
    assert second["started"] == 0
    assert second["compiled"] == [True, True, False]


def test_where_python_writes_it_beside_the_sources_it_is_only_written_sooner(site: Path) -> None:
    found = start(site)
    assert found["compiled"] == [True, True, False]
    assert not found["changed"]
    assert Path(found["cached"]).parent == site / "__pycache__"


def test_packages_with_bytecode_and_a_folder_of_the_users_own_are_left_alone(site: Path, tmp_path: Path) -> None:
    own = start(site, PYTHONPYCACHEPREFIX=str(tmp_path / "own"), PYTHONDONTWRITEBYTECODE="1")
    assert own["started"] == 0
    assert not own["changed"]
    start(site)
    with_bytecode = start(site, PYTHONDONTWRITEBYTECODE="1")
    assert with_bytecode["started"] == 0
    assert not with_bytecode["changed"]


def test_without_a_folder_to_keep_it_in_a_run_starts_as_before(site: Path) -> None:
    (site.parents[1] / "file").write_text("")
    found = start(site, XDG_CACHE_HOME=str(site.parents[1] / "file"), PYTHONDONTWRITEBYTECODE="1")
    assert not found["changed"]
    assert found["compiled"] == [False, False, False]


@pytest.mark.second
def test_the_list_holds_what_a_run_imports() -> None:
    """Nearly all of it, of several versions of packages: what it lacks is compiled as it is imported.
    `python -m batchspec.process.bytecode` writes it anew."""
    code = (
        "import sys, json\n"
        "from importlib import import_module\n"
        "from batchspec.process import bytecode\n"
        "for name in bytecode.ENTRANCES: import_module(name)\n"
        "used, known = set(bytecode.imported(sorted(sys.modules))), set(bytecode.listed())\n"
        "print(json.dumps([len(used), sorted(used - known), len(known - used)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    used, missing, surplus = json.loads(done.stdout)
    assert used > 1000
    assert len(missing) < 0.05 * used, missing
    assert surplus < 0.1 * used
