"""Which modules may open files, and how: by exact names, and regular files. Read from the source, as by test_imports.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from batchspec import errors
from tests.house.test_imports import module_of, sources

# Modules that open files, and which; those that a job's user names are opened by local_files.
OPENS: dict[str, str] = {
    "process.local_files": "opens regular files alone",
    "process.program": "/dev/null",
    "data.runstate.claims": "/proc",
    "job.report.start_up": "/proc",
    "process.load_progress": "/proc",
    "process.bytecode": "the package's own list of modules",
    "commands.families": "the package's own table",
    "distributed.rank_ends": "/proc",
    "process.cgroup": "/proc and the control groups",
    "tuning.cpu_threads": "/proc and the control groups",
    "packing.device_memory": "/proc",
    "config.reference": "the package's own conf",
    "cluster.manifests": "the package's own recipes",
    "tuning.cards": "the package's own table",
    "tuning.table": "the package's own tables, and that of doctor --tune",
    "heads.folder": "the record that a training wrote",
    "checkpoint.packaged": "the wheel, after is_file",
    "checkpoint.from_gguf": "the file of that wheel",
    "checkpoint.weight_files": "after open_regular",
    "bench.profile": "what torch's profiler wrote",
    "data.storage.hub_push": "shards of this job",
    "data.storage.new_file": "the file that it has just made",
    "data.storage.s3_store": "shards that this run made",
    "data.runstate.shard_writer": "shards that this run made",
    "data.storage.local_store": "folders, to sync them",
    "commands.compact": "the new file, to sync it",
}
READERS = ("safe_open", "GGUFReader", "load_file", "torch.load", "os.open", "open")

PARQUET = {
    "data.storage.exact_files": "by exact paths",
    "data.dataset.files": "remote files, which are open already",
    "data.runstate.footers": "a buffer",
    "data.runstate.output_folder": "a buffer",
    "job.runner.head.store": "a buffer",
}
BUFFERS = {"data.dataset.partitions": "names of folders, as a text"}
GLOBS = {
    "process.early_start": "/dev",
    "cluster.devices": "/dev",
    "process.load_progress": "/proc",
    "config.reference": "the package's own conf",
    "checkpoint.packaged": "a folder that pip filled",
    "checkpoint.hub": "a folder of the hub's cache",
    "data.storage.object_store": "the folder for temporary files",
}
REFUSALS = [name for name, kind in vars(errors).items() if isinstance(kind, type) and getattr(kind, "exit_code", None) == 2]
NO_DISK = {
    "process.child_process": "limits of processes",
    "data.storage.store": "a name that is too long",
    "data.storage.remote_files": "a URL",
    "data.storage.s3_client": "a bucket",
    "data.dataset.schema": "a type of Arrow's",
}
"""Modules that refuse something for an OSError of another kind."""


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Module, name of what is called, and the call."""
    for path in sources():
        module = module_of(path)
        if not module.startswith("kernels"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield module, ast.unparse(node.func), node


CALLS = [*calls()]


def last(name: str) -> str:
    return name.rpartition(".")[2]


def reads(name: str, call: ast.Call) -> bool:
    """Whether a call opens a file by its path for reading. The method `open` of batchspec's own classes has no mode."""
    modes = [str(item.value) for item in call.args[name == "open" :] if isinstance(item, ast.Constant)]
    if any(set(mode) & set("wxa") for mode in modes):
        return False
    method = last(name) if "." in name else ""
    return name in READERS or method in ("read_text", "read_bytes") or (method == "open" and bool(modes))


def test_files_are_opened_for_reading_by_local_files_alone() -> None:
    for module, name, call in CALLS:
        if reads(name, call):
            assert module in OPENS, f"{module}: {ast.unparse(call)}"
    assert {module for module, name, call in CALLS if reads(name, call)} == OPENS.keys()


def test_polars_and_arrow_get_exact_paths() -> None:
    scans = []
    for module, name, call in CALLS:
        if name.startswith("pl.") and last(name).startswith(("scan_", "read_")) and module not in BUFFERS:
            assert module == "data.runstate.scan", f"{module}: {ast.unparse(call)}"
            scans.append(call)
        if name in ("pq.ParquetFile", "pq.read_table", "pq.read_metadata", "pq.read_schema", "pq.ParquetDataset"):
            assert module in PARQUET, f"{module}: {ast.unparse(call)}"
        if name.startswith("ds."):
            assert module == "data.runstate.scan", f"{module}: {ast.unparse(call)}"
    exact = [scan for scan in scans if last(ast.unparse(scan.func)) == "scan_parquet"]
    assert exact
    for scan in exact:
        assert {"glob=False", "hive_partitioning=False"} <= {ast.unparse(keyword) for keyword in scan.keywords}


@pytest.mark.parametrize("name", ["glob", "iglob", "rglob"])
def test_patterns_of_users_are_looked_up_in_one_place(name: str) -> None:
    """`data/storage/local_tree.py`, which leaves out nothing without a word, as glob and pathlib do."""
    for module, called, call in CALLS:
        if last(called) == name and called not in ("place.glob", "self.path.glob"):
            assert module in GLOBS, f"{module}: {ast.unparse(call)}"


@pytest.mark.second
def test_an_io_error_is_not_taken_for_a_wrong_file() -> None:
    """Who catches an OSError and refuses something for it (exit code 2) asks first whether the disk failed (74)."""
    asking = set()
    for path in sources():
        module = module_of(path)
        for handler in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
                continue
            body = "\n".join(ast.unparse(statement) for statement in handler.body)
            if "OSError" in ast.unparse(handler.type) and re.search(rf"\b({'|'.join(REFUSALS)})\(", body):
                if module not in NO_DISK:
                    assert re.search(r"\b(fault_of|passes)\(", body), f"{module}: {body}"
                asking.add(module)
    assert "checkpoint.config_values" in asking
    assert NO_DISK.keys() <= asking


def guarded(tree: ast.Module) -> Iterator[ast.AST]:
    """What stands in a block that turns an OSError into an error of batchspec: `try` with such a handler, or a `with`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any("OSError" in ast.unparse(each.type) for each in node.handlers if each.type):
            yield from (inner for statement in node.body for inner in ast.walk(statement))
        if isinstance(node, ast.With):
            blocks = [bool(re.match(r"(readable|storing|reading)\(", ast.unparse(item.context_expr))) for item in node.items]
            if any(blocks):
                inside = [item.context_expr for item in node.items[blocks.index(True) :]]
                yield from (inner for part in [*inside, *node.body] for inner in ast.walk(part))


@pytest.mark.second
def test_what_opens_a_file_turns_its_errors_into_one_line() -> None:
    for path in sources():
        module, tree = module_of(path), ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "open_regular"]
        if calls and module != "data.storage.places":  # whoever opens a place does it within `reading`
            inside = {*guarded(tree)}
            assert all(call in inside for call in calls), module


def test_these_tables_have_no_module_that_is_gone() -> None:
    there = {module_of(path) for path in sources()}
    assert {*OPENS, *PARQUET, *GLOBS, *NO_DISK} <= there
