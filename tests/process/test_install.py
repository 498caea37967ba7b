"""What is built: the source distribution can run its tests; recipes, groups, kernels and the demo's prompts work from its wheel,
wherever that is unpacked."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import batchspec
from batchspec import errors

pytestmark = pytest.mark.second

ROOT = Path(__file__).parents[2]
NOT_PACKED = {"conf/prompts/make_demo.py"}
MANIFESTS = ("submit.sbatch", "kubernetes.yml", "skypilot.yml")
SUFFIXES = (".py", ".yaml", ".parquet", ".json", ".txt", ".safetensors")


def built(kind: str, source: Path, folder: Path) -> Path:
    """The file that setuptools makes of a source tree: kind is sdist, wheel or editable. The network is not used."""
    folder.mkdir()
    code = f"import sys; from setuptools.build_meta import build_{kind}; build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, built from a copy of the tracked and untracked sources."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed: nothing can be built without the network")
    copy, folder = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("sources")
    names = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "batchspec", "kernels", "conf", "jobs", "tests"]
    names += [".ci", ".github"]
    present = [name for name in names if (ROOT / name).exists()]
    subprocess.run(["cp", "-a", *present, str(copy)], cwd=ROOT, check=True)
    with tarfile.open(built("sdist", copy, copy / "dist")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # None before Python 3.11.4, which has no filters
        archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def unpacked(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel that is built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(built("wheel", sources, folder / "dist")) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def files(folder: Path) -> set[str]:
    """Paths below a folder whose content matters, symlinks left out."""
    found = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in found}


def test_every_source_test_recipe_and_script_is_in_the_source_distribution(sources: Path) -> None:
    wanted = {f"{top}/{name}" for top in ("batchspec", "kernels", "conf", "jobs", "tests") for name in files(ROOT / top)}
    wanted |= {f"batchspec/{top}/{name}" for top in ("kernels", "conf") for name in files(ROOT / top)}
    wanted |= {f"{folder}/README.md" for folder in ("batchspec", "conf", "jobs", "kernels")}
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "jobs").rglob("*.md")}
    wanted |= {"README.md", "LICENSE", ".ci/run", ".ci/sizes.txt", ".github/CONTRIBUTING.md"}
    wanted |= {"jobs/benchmarks/figures.sh", "jobs/examples/train_head.sh", "jobs/pages/report.png", "batchspec/py.typed"}
    wanted |= {f"jobs/manifests/{name}" for name in (*MANIFESTS, "Dockerfile")}
    once = {f"conf/{kind}/{name}" for kind in ("heads", "models") for name in files(ROOT / "conf" / kind)}
    assert {name for name in wanted - once if not (sources / name).is_file()} == set()
    assert not any(path.is_symlink() for path in sources.rglob("*"))


@pytest.mark.slow  # the files are all there, by the test before; this one imports torch and most helpers once more
def test_the_source_distribution_runs_its_tests(sources: Path) -> None:
    """A few of them: of the pages, of a module, of a kernel. test_tree.py is only imported, with most of the tests' helpers."""
    some = [
        "house/test_pages.py",
        "config/test_schema.py",
        "kernels/test_argmax.py::test_no_rows_is_no_work",
        "draft/test_tree.py",
    ]
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not test_tree.py"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"PYTHONPATH": str(sources)}
    done = subprocess.run(
        [*words, *(f"tests/{name}" for name in some)],
        cwd=sources,
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "deselected" in done.stdout


def test_every_module_recipe_and_prompt_file_is_in_the_wheel(unpacked: Path) -> None:
    package = unpacked / "batchspec"
    wanted = files(ROOT / "batchspec") | {f"{top}/{name}" for top in ("kernels", "conf") for name in files(ROOT / top)}
    wanted |= {f"conf/job/{path.name}" for path in (ROOT / "jobs/recipes").glob("*.yaml")}
    wanted |= {"py.typed", *(f"conf/manifests/{name}" for name in MANIFESTS)}
    assert {name for name in wanted - NOT_PACKED if not (package / name).is_file()} == set()
    assert not (unpacked / "tests").exists()
    assert not (unpacked / "kernels").exists()


def test_the_image_holds_what_the_wheel_holds(unpacked: Path, tmp_path: Path) -> None:
    """Built from what the Dockerfile copies, with the extras that the package has; the recipes run the image's Python."""
    text = (ROOT / "jobs/manifests/Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *names, into = line.split()
        folder = tmp_path / into.removeprefix("/")
        parts = [f"{ROOT / name}/." if (ROOT / name).is_dir() else str(ROOT / name) for name in names]
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", *parts, str(folder)], check=True)
    with zipfile.ZipFile(built("wheel", tmp_path / "src", tmp_path / "dist")) as archive:
        made = {name for name in archive.namelist() if name.startswith("batchspec/")}
    assert made == {path.relative_to(unpacked).as_posix() for path in (unpacked / "batchspec").rglob("*") if path.is_file()}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (given,) = re.findall(r'"/src\[(.+)\]"', text)
    assert set(given.split(",")) <= extras.keys()
    assert "demo" in given.split(","), "`+job=demo` runs in the image"
    (venv,) = re.findall(r"RUN python -m venv (\S+)", text)
    assert f"{venv}/bin/python -m batchspec.run" in (ROOT / "jobs/manifests/skypilot.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [["batchspec.run"], ["batchspec.cli", "run"]], ids=["module", "command"])
def test_the_demo_is_composed_from_the_wheel_in_any_folder(unpacked: Path, tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", *words, "--cfg", "job", "+job=demo"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(unpacked), "PATH": ""}, check=True, capture_output=True, text=True
    )
    assert "path: smollm2-135m" in done.stdout
    assert "path: pkg://demo" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_works_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "batchspec.cli", "train", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(unpacked)}, check=True, capture_output=True, text=True)
    assert "train.draft_vocab=32000" in done.stdout


def test_the_prompts_are_found_in_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    code = "from batchspec.config.compose import compose; print(compose(['+job=demo']).input.path)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(unpacked)}, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()) == unpacked / "batchspec" / "conf" / "prompts" / "demo.parquet"
    assert Path(done.stdout.strip()).is_file()


def test_the_package_names_what_it_offers_without_importing_it() -> None:
    code = "import sys, batchspec; print(*dir(batchspec), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.BatchspecError)]
    offered = {*(kind.__name__ for kind in kinds), "Completion", "Engine", "JobOutput", "Turn", "generate", "__version__"}
    assert done.stdout.split() == [*sorted(offered), "False"]


def test_all_that_the_package_offers_can_be_imported() -> None:
    assert batchspec.Turn.__module__ == "batchspec.warm.conversations"
    assert all(getattr(batchspec, name).__name__ == name for name in batchspec.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Enigne'"):
        batchspec.Enigne  # type: ignore[attr-defined]  # noqa: B018


@pytest.fixture(scope="module")
def editable(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """site-packages after `pip install -e .` of the source distribution."""
    folder = tmp_path_factory.mktemp("editable")
    with zipfile.ZipFile(built("editable", sources, folder / "dist")) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_an_editable_install_is_a_path_that_editors_and_type_checkers_follow(editable: Path, sources: Path) -> None:
    """Not an import hook, which they do not run."""
    (path,) = editable.glob("*.pth")
    assert path.read_text().split() == [str(sources)]
    assert not list(editable.glob("*.py"))


def test_a_script_beside_the_clone_imports_the_installed_package(editable: Path, sources: Path) -> None:
    """A folder of the clone's name is there too, which Python could take for a package without code."""
    (sources.parent / "batchspec").mkdir()
    code = f"import site; site.addsitedir({str(editable)!r}); import batchspec; print(batchspec.__file__)"
    words = [sys.executable, "-S", "-c", code]
    done = subprocess.run(words, cwd=sources.parent, env={}, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == sources / "batchspec/__init__.py"


@pytest.mark.slow
def test_mypy_knows_the_types_of_an_editable_install(editable: Path, tmp_path: Path) -> None:
    """In an environment of its own, in a folder apart from the clone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "all.pth").write_text("\n".join([next(editable.glob("*.pth")).read_text().strip(), *others]))
    (tmp_path / "mine.py").write_text(
        "import batchspec\nreveal_type(batchspec.generate(['a'], decode={'n': 2}))\n"
        "with batchspec.Engine(model={'path': 'm'}) as engine:\n    reveal_type(engine.generate(['a']))\nbatchspec.Enigne\n"
    )
    words = ["-m", "mypy", "--strict", "--python-executable", str(tmp_path / "env/bin/python"), "--cache-dir", "cache", "mine.py"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, check=False, capture_output=True, text=True)
    assert done.stdout.count('Revealed type is "polars.dataframe.frame.DataFrame"') == 2, done.stdout + done.stderr
    assert 'Module has no attribute "Enigne"' in done.stdout
    assert "Found 1 error in 1 file" in done.stdout
