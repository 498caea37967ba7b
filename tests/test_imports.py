"""Who may import whom (README, "How it is built"), read from the source: what stands under TYPE_CHECKING is free."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVERYONE = {"records", "errors", "config", "checks", "values", "text", "terminal", "__version__"}

# Package (or top module) -> what of batchspec it may import, besides itself and what everyone may.
MAY_IMPORT: dict[str, set[str]] = {
    "run": {"compose", "job", "cli", "cluster"},
    "cluster": {"io", "cli", "compose", "typed", "run", "packing", "work.signals"},
    "cli": {"arguments", "commands"},
    "api": {"compose", "job", "prepare", "work", "io", "packing", "model", "draft", "decode", "report", "commands"},
    "compose": {"arguments", "overrides", "typed"},
    "arguments": set(),
    "overrides": set(),
    "typed": set(),
    "drafters": {"adapt.limits", "packing.cost", "model", "draft"},
    "job": {"prepare", "work", "io", "packing", "report"},
    "work": {
        "prepare",
        "drafters",
        "adapt",
        "train",
        "io",
        "packing",
        "model.weights",
        "draft",
        "decode",
        "report",
        "cluster.slurm",
    },
    "adapt": {"train", "io", "draft", "model", "decode", "packing.memory"},
    "prepare": {"drafters", "adapt.limits", "io", "packing", "model", "draft", "decode", "report"},
    "commands": {
        "arguments",
        "compose",
        "typed",
        "job",
        "prepare",
        "drafters",
        "work.passes",
        "work.signals",
        "cluster.slurm",
        "io",
        "packing",
        "model",
        "draft",
        "decode",
        "cache",
        "report",
        "train",
        "kernels",
    },
    "packing": {"io", "model.spec", "model.text_bytes", "model.thinking", "model.tokenizer", "cache.pages"},
    "train": {"io.reader", "draft", "model", "cache", "kernels"},
    "decode": {"draft", "model", "cache", "kernels"},
    "draft": {"model", "cache", "kernels"},
    "model": {"cache", "kernels"},
    "cache": {"kernels"},
    "io": set(),
    "report": {"io"},
    "kernels": set(),
    "config": set(),
    "checks": set(),
    "values": set(),
    "records": set(),
    "errors": set(),
    "text": set(),
    "terminal": set(),
    "conf": set(),
    "__init__": {"api"},
}

# Third party -> the packages and modules that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "hydra": ("run", "compose", "overrides", "typed"),
    "omegaconf": ("compose", "typed"),
    "yaml": ("compose", "report"),
    "flashinfer": ("cache.flash",),
    "matplotlib": ("report.pictures",),
    "msgspec": ("io",),
    "pyarrow": ("io", "report", "packing", "api", "commands", "work"),
    "polars": ("io", "report", "packing", "api", "commands", "work"),
    "triton": ("kernels",),
}


def sources() -> list[Path]:
    return sorted(path for folder in ("batchspec", "kernels") for path in (ROOT / folder).rglob("*.py") if not _behind_link(path))


def _behind_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def module_of(path: Path) -> str:
    """batchspec/io/reader.py -> io.reader, kernels/argmax.py -> kernels.argmax."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "batchspec" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, at the top or later."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


def within(name: str, allowed: set[str] | tuple[str, ...]) -> bool:
    return any(name == item or name.startswith(item + ".") for item in allowed)


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    module = module_of(path)
    package = module.split(".")[0]
    for name in imports(path):
        top, _, inner = name.partition(".")
        if top == "batchspec":
            allowed = MAY_IMPORT[package] | EVERYONE | {package}
            assert within(inner, allowed if package != "kernels" else {"kernels"}), f"{module} imports {name}"
        elif top in ONLY_IN:
            assert within(module, ONLY_IN[top]), f"{module} imports {name}"
        if package == "kernels" and top not in sys.stdlib_module_names:
            assert top in ("torch", "triton", "batchspec"), f"{module} imports {name}"


def test_records_and_io_can_be_read_without_torch() -> None:
    modules = [module_of(path) for path in sources()]
    light = ("io", "records", "errors", "config", "checks", "values", "typed", "compose")
    names = [f"batchspec.{module}" for module in modules if within(module, light)]
    assert len(names) >= 6
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
