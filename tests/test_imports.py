"""Who may import whom (README, "How it is built"), read from the source: imports under TYPE_CHECKING are free."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVERYONE = {
    "records",
    "packed_batch",
    "request_stream",
    "errors",
    "config.draft_schema",
    "config.schema",
    "config.decode_schema",
    "config.values",
    "config.checks",
    "child_process",
    "cgroup",
    "garbage",
    "text",
    "terminal",
    "token_automaton",
    "lazy_automaton",
    "load_progress",
    "out_of_memory",
    "local_files",
    "constrained_text",
    "error_rows",
    "__version__",
}

# Package (or top module) -> what of batchspec it may import, besides itself and what everyone may.
MAY_IMPORT: dict[str, set[str]] = {
    "run": {"config", "commands.reference", "early_start", "job", "cli", "cluster", "supervise.watchdog"},
    "early_start": {"kernels.common.compiler_hash"},
    "cli": {"arguments", "commands"},
    "__main__": {"cli"},
    "api": {
        "warm",
        "config",
        "job",
        "load",
        "prepare",
        "runner",
        "dataset",
        "runstate",
        "storage",
        "packing",
        "model",
        "draft",
        "engine",
        "report",
        "commands",
        "supervise.watchdog",
    },
    "warm": {
        "cli",
        "cluster.devices",
        "config",
        "dataset",
        "distributed",
        "engine",
        "model",
        "packing",
        "load",
        "prepare",
        "report.progress_bar",
        "runner.follower",
        "runner.shard_work",
        "supervise.leave",
        "supervise.watchdog",
    },
    "job": {
        "load",
        "prepare",
        "runner",
        "dataset",
        "distributed.group",
        "engine.loop.totals",
        "runstate",
        "report",
        "supervise.signals",
        "supervise.watchdog",
    },
    "identity": {
        "dataset.schema",
        "model.config_values",
        "model.kv_calibration",
        "model.deterministic",
        "model.quant.modelopt",
        "model.weight_files",
        "packing.constraints",
        "prepare",
        "runstate.manifest",
    },
    "load": {
        "batch.automata",
        "batch.sampling_mode",
        "distributed.group",
        "draft.base",
        "engine",
        "model",
        "packing",
        "prepare",
        "report.progress_bar",
        "structured.expander",
        "tool_calls.split",
        "tuning.cpu_threads",
        "tuning.table",
    },
    "prepare": {
        "dataset",
        "distributed.group",
        "draft.spec",
        "model",
        "packing",
        "runstate.manifest",
    },
    "cluster": {
        "cli",
        "config",
        "distributed",
        "engine.ranks.lead", "engine.loop.follower",
        "engine.ranks.messages",
        "packing",
        "run",
        "runner.follower",
        "runstate",
        "storage",
        "supervise.leave",
        "supervise.signals",
        "supervise.watchdog",
    },
    "runner": {
        "cluster.slurm",
        "dataset",
        "distributed.group",
        "draft",
        "engine",
        "identity",
        "model.hub",
        "model.kv_calibration",
        "model.kv_scales",
        "model.spec",
        "model.target",
        "model.weight_files",
        "model.weight_sums",
        "packing",
        "load",
        "prepare",
        "report",
        "runstate",
        "storage",
        "supervise",
        "train",
        "tuning.table",
    },
    "supervise": {"dataset", "engine", "packing.work_plan", "prepare", "runstate", "storage"},
    "commands": {
        "arguments",
        "cache",
        "cluster.slurm",
        "cluster.devices",
        "cluster.manifests",
        "config",
        "dataset",
        "distributed",
        "draft",
        "engine",
        "batch",
        "identity",
        "job",
        "kernels",
        "model",
        "packing",
        "load",
        "prepare",
        "report",
        "runner",
        "runstate",
        "storage",
        "structured.compiler",
        "supervise",
        "train",
        "tuning",
    },
    "packing": {
        "tool_calls",
        "config.vllm_names",
        "dataset",
        "model.config_values",
        "model.generation_config",
        "model.quant.fp8_products",
        "model.spec",
        "model.unread_keys",
        "structured.channels",
        "structured.compiler",
        "model.text_bytes",
        "model.thinking",
        "model.token_texts",
        "model.tokenizer",
        "cache.groups",
        "cache.layout",
        "cache.pages",
        "runstate.journal",
        "tuning.exchange",
    },
    "train": {"dataset.reader", "draft", "model", "cache", "batch", "kernels"},
    "engine": {"draft", "model", "cache", "batch", "distributed", "kernels", "tool_calls.split", "tuning.table"},
    "draft": {"model", "cache", "batch", "tuning", "kernels"},
    "model": {"cache", "batch", "distributed", "tuning", "kernels"},
    "cache": {"batch", "tuning", "kernels"},
    "tuning": {"kernels"},
    "batch": {"kernels"},
    "distributed": {"tuning", "kernels"},
    "report": {"dataset.input_paths", "dataset.openai_responses", "runstate", "storage"},
    "runstate": {"dataset", "storage"},
    "dataset": {"storage"},
    "structured": set(),
    "tool_calls": {"dataset.json_text"},
    "lazy_automaton": set(),
    "constrained_text": set(),
    "error_rows": set(),
    "storage": set(),
    "config": {"arguments", "dataset.columns", "dataset.input_paths", "draft.registry", "tool_calls.registry"},
    "kernels": set(),
    "arguments": set(),
    "child_process": set(),
    "cgroup": set(),
    "garbage": set(),
    "records": set(),
    "packed_batch": set(),
    "request_stream": set(),
    "out_of_memory": set(),
    "local_files": set(),
    "errors": set(),
    "text": set(),
    "terminal": set(),
    "conf": set(),
    "__init__": {"api", "warm.engine"},
}

# Third party -> the packages and modules that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "hydra": ("run", "config"),
    "omegaconf": ("config.compose", "config.typed"),
    "yaml": ("config.compose", "config.reference", "dataset.hub_splits", "report"),
    "flashinfer": ("cache.flash",),
    "matplotlib": ("report.pictures",),
    "msgspec": ("dataset", "runstate", "storage", "engine.ranks.messages"),
    "pyarrow": ("dataset", "storage", "runstate", "report", "packing", "api", "commands", "runner", "warm"),
    "polars": ("dataset", "runstate", "report", "packing", "api", "commands", "runner", "warm"),
    "triton": ("kernels",),
}


def sources() -> list[Path]:
    return sorted(
        path for folder in ("batchspec", "kernels") for path in (ROOT / folder).rglob("*.py") if not _through_link(path)
    )


def _through_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def module_of(path: Path) -> str:
    """batchspec/dataset/reader.py -> dataset.reader, kernels/gemm/linear.py -> kernels.gemm.linear."""
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


# Room of the engine -> the others that it may import. None but features/ names a feature: whoever builds an engine brings them.
ROOMS: dict[str, set[str]] = {
    "step": set(),
    "rounds": {"step"},
    "prefill": {"step", "rounds"},
    "ranks": {"step", "rounds"},
    "slots": {"step", "rounds", "prefill"},
    "loop": {"step", "rounds", "prefill", "ranks", "slots"},
    "features": {"step", "rounds", "prefill", "slots"},
}


def test_a_room_of_the_engine_imports_only_those_below_it() -> None:
    paths = [path for path in sources() if within(module_of(path), {"engine"}) and module_of(path) != "engine"]
    assert {module_of(path).split(".")[1] for path in paths} == set(ROOMS)
    for path in paths:
        room = module_of(path).split(".")[1]
        for name in imports(path):
            if name.startswith("batchspec.engine."):
                inner = name.removeprefix("batchspec.engine.")
                assert within(inner, ROOMS[room] | {room}), f"{module_of(path)} imports {name}"


def test_records_and_io_can_be_read_without_torch() -> None:
    modules = [module_of(path) for path in sources()]
    light = ("dataset", "storage", "runstate", "records", "packed_batch", "errors", "config")
    names = [f"batchspec.{module}" for module in modules if within(module, light)]
    assert len(names) >= 6
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
