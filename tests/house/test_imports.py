"""Who may import whom (batchspec/README.md, "Layers"), read from the source: imports under TYPE_CHECKING are free."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from batchspec.engine import features as engine_features
from batchspec.engine.features import scoring
from batchspec.engine.slots.row_feature import RowFeature

ROOT = Path(__file__).parents[2]
EVERYONE = {
    "records",
    "packed_batch",
    "request_stream",
    "errors",
    "config.draft_schema",
    "config.schema",
    "config.decode_schema",
    "config.key",
    "config.no_effect",
    "config.row_options",
    "config.values",
    "config.checks",
    "process",
    "console",
    "automata",
    "tasks",
    "version",
}

# Package (or top module) -> what of batchspec it may import, besides itself and what everyone may.
MAY_IMPORT: dict[str, set[str]] = {
    "run": {
        "config", "commands.reference", "data.dataset.input_paths", "job.run_job", "cli", "cluster",
        "data.runstate.heartbeat_writer", "job.supervise.slurm", "job.supervise.watchdog",
    },
    "process": {"kernels.common.compiler_hash"},
    "cli": {"commands"},
    "__main__": {"cli"},
    "api": {
        "warm",
        "config",
        "job.run_job",
        "job.load",
        "job.prepare",
        "job.runner",
        "data.dataset",
        "data.runstate",
        "data.storage",
        "packing",
        "model",
        "checkpoint",
        "text",
        "draft",
        "engine",
        "job.report",
        "commands",
        "job.supervise.watchdog",
    },
    "warm": {
        "job.images",
        "cli",
        "cluster.devices",
        "config",
        "data.dataset",
        "distributed",
        "engine",
        "model",
        "checkpoint",
        "text",
        "packing",
        "job.load",
        "job.prepare",
        "job.report.progress_bar",
        "job.runner.rank",
        "job.runner.shard_work",
        "job.supervise.watchdog",
    },
    "job.run_job": {
        "job.load",
        "job.prepare",
        "job.runner",
        "data.dataset",
        "distributed.group",
        "engine.loop.totals",
        "data.runstate",
        "job.report",
        "job.supervise.watchdog",
    },
    "job.load": {
        "images.prepared_images",
        "kernels.common.card",
        "batch.automata",
        "batch.sampling_mode",
        "config.draft_auto",
        "distributed.group",
        "draft.base",
        "engine",
        "model",
        "checkpoint",
        "text",
        "packing",
        "job.prepare",
        "job.report.progress_bar",
        "structured.expander",
        "tool_calls.split",
        "tuning.cpu_threads",
        "tuning.table",
    },
    "job.prepare": {
        "job.images",
        "config.draft_auto",
        "data.dataset",
        "distributed.group",
        "draft.spec",
        "model",
        "checkpoint",
        "text",
        "packing",
        "data.runstate.finished_job",
        "data.runstate.manifest",
        "kernels.common.card",
        "tuning.cards",
    },
    "cluster": {
        "cli",
        "config",
        "distributed",
        "run",
        "job.runner.rank",
        "data.runstate",
        "data.storage",
        "job.supervise.watchdog",
    },
    "job.runner": {
        "job.thumbnails",
        "config.draft_auto",
        "config.overrides",
        "images.processor",
        "data.dataset",
        "distributed.group",
        "draft",
        "engine",
        "checkpoint.config_values",
        "checkpoint.packaged",
        "model.deterministic",
        "model.dtype",
        "checkpoint.hub",
        "model.kv_calibration",
        "model.layers.attention.kv_scales",
        "model.quant.modelopt",
        "model.spec",
        "model.target",
        "checkpoint.weight_files",
        "checkpoint.weight_sums",
        "packing",
        "job.load",
        "job.prepare",
        "job.report",
        "data.runstate",
        "data.storage",
        "structured.checked_text",
        "job.supervise",
        "tuning.table",
    },
    "job.supervise": {"data.dataset", "engine", "job.load.loaded_engine", "packing.work_plan", "data.runstate", "data.storage"},
    "commands": {
        "job.thumbnails",
        "cache",
        "cluster.devices",
        "cluster.manifests",
        "config",
        "data.dataset",
        "distributed",
        "draft",
        "engine",
        "batch",
        "images.decode",
        "images.processor",
        "job.run_job",
        "kernels",
        "model",
        "checkpoint",
        "text",
        "packing",
        "job.load",
        "job.prepare",
        "job.report",
        "job.runner",
        "data.runstate",
        "data.storage",
        "structured.compiler",
        "job.supervise",
        "tuning",
    },
    "images": {"checkpoint.config_values"},
    "job.thumbnails": {"images", "config", "data", "job.prepare", "job.report"},
    "job.images": {"images", "data.dataset.columns", "checkpoint.files", "model"},
    "packing": {
        "images",
        "tool_calls",
        "config.vllm_names",
        "data.dataset",
        "checkpoint.config_values",
        "model.dtype",
        "checkpoint.generation_config",
        "model.quant.fp8_products",
        "model.layers.kind",
        "model.spec",
        "model.vision.spec",
        "text.template_process",
        "text.templates",
        "checkpoint.unread_keys",
        "structured.answer_checker",
        "structured.channels",
        "structured.compiler",
        "text.text_bytes",
        "text.thinking",
        "text.token_texts",
        "text.tokenizer",
        "cache.groups",
        "cache.layer_state",
        "cache.pages",
        "data.runstate.journal",
        "tuning.cards",
        "tuning.exchange",
        "kernels.common.card",
    },
    # No entry of another package lists these two: nothing imports what only measures or trains.
    "bench": {
        "images", "commands.doctor", "config", "distributed", "draft", "engine", "batch", "kernels", "job.load",
        "model", "checkpoint", "text",
        "packing", "job.prepare", "job.report", "job.runner", "data.storage", "structured.compiler", "job.supervise",
    },
    "heads": {
        "config", "data.dataset", "draft", "engine", "batch", "cache", "kernels", "job.load", "model", "checkpoint",
        "text", "packing",
        "job.prepare", "job.report", "job.runner.identity", "data.runstate", "data.storage",
    },
    "engine": {
        "images",
        "draft",
        "model",
        "cache",
        "batch",
        "distributed",
        "kernels",
        "structured.checked_text",
        "tool_calls.split",
        "tuning.table",
    },
    "draft": {"model", "checkpoint", "cache", "batch", "distributed.collectives", "tuning", "kernels"},
    "model": {"images", "checkpoint", "cache", "batch", "distributed", "tuning", "kernels"},
    "text": {"checkpoint", "data.dataset.messages", "tool_calls.probe"},
    "checkpoint": set(),
    "cache": {"batch", "tuning", "kernels"},
    "tuning": {"kernels"},
    "batch": {"kernels"},
    "distributed": {"tuning", "kernels"},
    "job.report": {
        "data.dataset.input_paths", "data.dataset.json_text", "data.dataset.openai_responses", "data.runstate", "data.storage",
        "tool_calls.form",
    },
    "data.runstate": {"data.dataset", "data.storage"},
    "data.dataset": {"data.storage", "images.encode"},
    "structured": {"tool_calls.form", "tool_calls.marks"},
    "tool_calls": {"data.dataset.json_text"},
    "automata": set(),
    # Imported by everyone, so it must stay as light as the configuration.
    "tasks": {"data.dataset.json_text"},
    "console": set(),
    "data.storage": set(),
    "config": set(),
    "kernels": set(),
    "records": {"images.pdf_page"},
    "packed_batch": set(),
    "request_stream": set(),
    "errors": set(),
    "job": set(),
    "data": set(),
    "version": set(),
    "conf": set(),
    "__init__": {"api", "data.dataset.job_rows", "warm.conversations", "warm.engine"},
}

# Third party -> the packages and modules that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "hydra": ("run", "config"),
    "omegaconf": ("config.compose", "config.typed"),
    "yaml": ("config.compose", "config.reference", "data.dataset.hub_splits", "job.report"),
    "flashinfer": ("model.layers.attention.flash",),
    "matplotlib": ("job.report.pictures",),
    "msgspec": (
        "records", "data.dataset", "data.runstate", "data.storage", "job.report", "distributed.wire", "engine.ranks.messages",
        "warm.messages",
    ),
    "pyarrow": (
        "data.dataset", "data.storage", "data.runstate", "job.report", "packing", "api", "commands", "job.runner", "warm",
        "bench",
        "heads",
    ),
    "polars": (
        "data.dataset", "data.runstate", "job.report", "packing", "api", "commands", "job.runner", "warm", "bench", "heads",
    ),
    "triton": ("kernels",),
}

WINGS = {"data", "job"}
"""Folders of packages: each of these has an entry of its own."""


def package_of(module: str) -> str:
    """dataset.reader -> dataset, and of a wing data.dataset.reader -> data.dataset."""
    first, *rest = module.split(".")
    return ".".join([first, *rest[: first in WINGS]])


def sources() -> list[Path]:
    return sorted(
        path for folder in ("batchspec", "kernels") for path in (ROOT / folder).rglob("*.py") if not _through_link(path)
    )


def _through_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def module_of(path: Path) -> str:
    """batchspec/data/dataset/reader.py -> data.dataset.reader, kernels/gemm/linear.py -> kernels.gemm.linear."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "batchspec" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[str]:
    """Full names of what a file imports, at the top or later."""
    return list(imported_by(parsed(path), path))


def imported_by(tree: ast.AST, path: Path | None = None) -> Iterator[str]:
    todo: list[ast.AST] = [tree]
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


@pytest.mark.second
def test_a_module_imports_only_what_its_place_allows() -> None:
    assert [f"{module_of(path)} imports {name}" for path in sources() for name in imports(path) if not allowed(path, name)] == []


def allowed(path: Path, name: str) -> bool:
    """Whether the module may import it."""
    module, (top, _, inner) = module_of(path), name.partition(".")
    package = package_of(module)
    if package == "kernels" and top not in sys.stdlib_module_names and top not in ("torch", "triton", "batchspec"):
        return False
    if top == "batchspec":
        return within(inner, MAY_IMPORT[package] | EVERYONE | {package} if package != "kernels" else {"kernels"})
    return top not in ONLY_IN or within(module, ONLY_IN[top])


ENTRY_POINTS = {"run", "cli", "commands", "cluster"}


def test_only_the_entry_points_import_in_a_circle() -> None:
    """A process of `cluster/worker.py` runs what `run.py` runs."""

    def place(name: str) -> str:
        package = package_of(name)
        return "entry points" if package in ENTRY_POINTS else package

    graph: dict[str, set[str]] = {}
    for package, allowed in MAY_IMPORT.items():
        graph.setdefault(place(package), set()).update({*map(place, allowed)} - {place(package)})
    TopologicalSorter(graph).prepare()  # raises CycleError


BY_HEADS_ALONE = "batchspec.kernels.train"
BY_NOTHING = "batchspec.kernels.benchmarks"


def test_nothing_imports_benchmarks_and_only_heads_kernels_of_training() -> None:
    for path in sources():
        module = module_of(path)
        for name in imports(path):
            assert within(module, {"kernels.benchmarks"}) or not name.startswith(BY_NOTHING), f"{module}: {name}"
            assert within(module, {"kernels.train", "heads"}) or not name.startswith(BY_HEADS_ALONE), f"{module}: {name}"


# Room of the engine -> the others that it may import.
ROOMS: dict[str, set[str]] = {
    "step": set(),
    "rounds": {"step"},
    "prefill": {"step", "rounds"},
    "ranks": {"step", "rounds"},
    "slots": {"step", "rounds", "prefill"},
    "loop": {"step", "rounds", "prefill", "ranks", "slots"},
    "features": {"step", "rounds", "prefill", "slots"},
}


# What only features/ may import. The other rooms, the core, know fields of slots, rules and readers of logits, and commands of
# rows; whoever builds an engine brings the features.
OF_FEATURES = (
    "automata", "batch.automata", "batch.bad_words", "batch.logit_bias", "batch.no_repeat_ngram", "kernels.lora",
    "kernels.sampling.advance_states", "kernels.sampling.constrain", "kernels.sampling.cut_ngrams",
    "kernels.sampling.forbid_ngrams", "kernels.sampling.token_walk", "model.adapter_config", "model.lora", "model.lora_products",
    "model.lora_shape", "text.text_bytes", "text.thinking", "text.token_bytes", "text.token_texts", "text.tokenizer",
    "records.Channels", "records.Choice", "records.CONSTRAINT_VIOLATED", "records.Repetition", "records.Thinking",
    "records.TokenText", "structured", "tool_calls",
)
# What no name in the core is made of.
WORDS_OF_FEATURES = {
    "adapter", "adapters", "automata", "automaton", "channels", "constrain", "constrained", "constraint", "constraints",
    "grammar", "harmony", "lazy", "logprob", "logprobs", "lora", "reasoning", "repetition", "schema", "scored", "scoring",
    "thinking", "thought", "thoughts", "tools",
}
NAMES_OF_FEATURES = ("bad_words", "no_repeat_ngram", "stop_strings")


def rooms() -> list[tuple[str, Path]]:
    """The room of each module of the engine, and its file."""
    found = [(module_of(path), path) for path in sources()]
    return [(module.split(".")[1], path) for module, path in found if module.startswith("engine.")]


def test_a_room_of_the_engine_imports_only_those_below_it() -> None:
    assert {room for room, _ in rooms()} == set(ROOMS)
    for room, path in rooms():
        for name in imports(path):
            if name.startswith("batchspec.engine."):
                inner = name.removeprefix("batchspec.engine.")
                assert within(inner, ROOMS[room] | {room}), f"{module_of(path)} imports {name}"


def test_the_core_of_the_engine_names_no_feature() -> None:
    for room, path in rooms():
        if room == "features":
            continue
        for name in imports(path):
            assert not within(name.removeprefix("batchspec."), OF_FEATURES), f"{module_of(path)} imports {name}"
        for name in names(parsed(path)):
            words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}
            assert words.isdisjoint(WORDS_OF_FEATURES), f"{module_of(path)} names {name}"
            assert not any(part in name for part in NAMES_OF_FEATURES), f"{module_of(path)} names {name}"


def test_no_member_of_the_seam_is_there_for_one_feature_alone() -> None:
    """`poll` is the exception: any feature may let rows wait, but today only lazy automata do."""
    named = {**vars(engine_features), **vars(scoring)}
    features = [one for one in named.values() if isinstance(one, type) and issubclass(one, RowFeature)]
    for member in vars(RowFeature):
        if not member.startswith("_"):
            users = {one for one in features if getattr(one, member) is not getattr(RowFeature, member)}
            assert len(users) > 1 or member == "poll", f"RowFeature.{member} is defined by {[one.__name__ for one in users]}"


def names(tree: ast.AST) -> set[str]:
    """Every name of a file: of modules, classes, functions, arguments, variables and attributes, also those that getattr, hasattr
    and setattr are called with; not the words of its texts."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            found |= {text for own in node.args if isinstance(own, ast.Constant) and isinstance(text := own.value, str)}
        for of_node in ("id", "attr", "arg", "name", "module"):
            if isinstance(name := getattr(node, of_node, None), str):
                found.add(name)
    return found


@pytest.mark.second
def test_records_and_io_can_be_read_without_torch() -> None:
    modules = [module_of(path) for path in sources()]
    light = ("data.dataset", "data.storage", "data.runstate", "records", "packed_batch", "errors", "config", "tasks")
    names = [f"batchspec.{module}" for module in modules if within(module, light)]
    assert len(names) >= 6
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
