"""What a wheel holds: recipes, groups, kernels and the demo's prompts work from it, wherever it is unpacked."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_PACKED = {"conf/prompts/make_demo.py"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, built from a copy of the tracked and untracked sources."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed: a wheel cannot be built without the network")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = ["pyproject.toml", "README.md", "LICENSE", "batchspec", "kernels", "conf", "jobs"]
    present = [name for name in names if (ROOT / name).exists()]
    subprocess.run(["cp", "-a", *present, str(source)], cwd=ROOT, check=True)
    if not (source / "README.md").exists():
        (source / "README.md").write_text("batchspec\n")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_every_module_recipe_and_prompt_file_is_inside(unpacked: Path) -> None:
    package = unpacked / "batchspec"
    wanted = {
        path.relative_to(ROOT / top).as_posix() if top == "batchspec" else path.relative_to(ROOT).as_posix()
        for top in ("batchspec", "kernels", "conf")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".yaml", ".parquet", ".json", ".txt", ".safetensors") and "__pycache__" not in path.parts
    } - NOT_PACKED
    wanted |= {f"conf/job/{path.name}" for path in (ROOT / "jobs").glob("*.yaml")}
    missing = {name for name in wanted if not (package / name).is_file()}
    assert not missing
    assert (package / "py.typed").is_file()


@pytest.mark.parametrize("words", [["batchspec.run"], ["batchspec.cli", "run"]], ids=["module", "command"])
def test_the_demo_is_composed_from_the_wheel_in_any_folder(unpacked: Path, tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", *words, "--cfg", "job", "+job=demo"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(unpacked), "PATH": ""}, check=True, capture_output=True, text=True
    )
    assert "path: smollm2-135m" in done.stdout
    assert "path: pkg://demo" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_prompts_are_found_in_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    code = "from batchspec.config.compose import compose; print(compose(['+job=demo']).input.path)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(unpacked)}, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()) == unpacked / "batchspec" / "conf" / "prompts" / "demo.parquet"
    assert Path(done.stdout.strip()).is_file()
