"""The input must not change while a job runs: what changes is noticed before a row of it is committed."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec import run
from batchspec.config.schema import InputConfig
from batchspec.data.dataset import files
from batchspec.data.dataset.reader import InputShard, Source, open_source, table_source
from batchspec.data.dataset.shard_layout import ShardLayout
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage.places import LocalPlace
from batchspec.errors import InputError
from batchspec.job.runner.shard_work import ShardWork
from batchspec.records import Completion
from tests.data.s3_lab import BUCKET, running_lab
from tests.helpers.runs import make_model, run_apart

pytestmark = pytest.mark.second

ROWS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def rows(word: str = "Say", count: int = ROWS) -> list[dict[str, str]]:
    return [{"id": f"q{i}", "prompt": f"{word} {i:03d}"} for i in range(count)]


def as_lines(word: str = "Say", count: int = ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows(word, count)).encode()


def as_parquet(word: str = "Say", count: int = ROWS) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows(word, count))
    pq.write_table(table, sink, row_group_size=4, compression="none", use_dictionary=False)
    data: bytes = sink.getvalue().to_pybytes()
    return data


MAKE = {"in.jsonl": as_lines, "in.parquet": as_parquet}


def arguments(model: Path, data: Path | str, out: Path | str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={out}", "output.shard_rows=2",
        "decode.max_new_tokens=3", "output.token_ids=true", "packing.max_num_seqs=2", "input.chat=true",
    ]


def after_first_commit(path: Path, data: bytes | None) -> None:
    """The file is written anew, or deleted, when the first shard is committed; it is read in small pieces."""
    files.BATCH_BYTES = 128
    commit = OutputFolder.publish

    def then(self: OutputFolder, *rest: Any) -> bool:
        won = commit(self, *rest)
        if data is None:
            path.unlink(missing_ok=True)
        elif path.read_bytes() != data:
            path.write_bytes(data)
        return won

    OutputFolder.publish = then  # type: ignore[method-assign, assignment]


RESIZED, REPLACED, GONE = (
    r"\([\d,]+ bytes -> [\d,]+\): nothing more of it",
    r"\(it was written anew\)",
    "is not there any more; put it back",
)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("in.jsonl", "shrinks", RESIZED),
        ("in.parquet", "shrinks", RESIZED),
        ("in.parquet", "is replaced", REPLACED),
        ("in.jsonl", "is gone", GONE),
    ],
)
def test_an_input_that_changes_ends_the_run_before_a_row_of_it_is_committed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str, said: str
) -> None:
    make, path, out = MAKE[name], tmp_path / name, tmp_path / "out"
    path.write_bytes(make())
    after = {"shrinks": make(count=6), "is replaced": make("Bye"), "is gone": None}[change]
    command = arguments(model, path, out)
    code, text = run_apart(command, tmp_path / "log", partial(after_first_commit, path, after))
    assert code == 2, text
    assert re.search(said, text.splitlines()[-1]), text
    assert len(list((out / "data").iterdir())) == 1
    assert [message[0]["content"] for message in pl.read_parquet(out / "data")["messages"]] == ["Say 000", "Say 001"]
    if after is not None:  # the next run knows by the digest
        assert run.main(command) == 2
    path.write_bytes(make())
    assert run.main(command) == 0
    assert pl.read_parquet(out / "data")["request_id"].to_list() == [f"q{i}" for i in range(ROWS)]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_commit_checks_the_input_once_more(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """All rows are read before the file changes, and nothing is committed by then. A shard's file that was written meanwhile,
    also one of a worker process, is deleted."""
    path = tmp_path / "in.parquet"
    path.write_bytes(as_parquet())
    publish = OutputFolder.publish

    def late(self: OutputFolder, *rest: Any) -> bool:
        while workers and not list((tmp_path / "out").rglob("*.parquet*")):  # the worker begins to write by itself
            time.sleep(0.01)
        path.write_bytes(as_parquet("Bye"))
        return publish(self, *rest)

    monkeypatch.setattr(OutputFolder, "publish", late)
    more = ["output.shard_rows=100", f"input.num_workers={workers}"]
    assert run.main([*arguments(model, path, tmp_path / "out"), *more]) == 2
    assert not (tmp_path / "out/data").exists()
    assert not list((tmp_path / "out").rglob("*.parquet*"))


def test_a_retry_whose_input_has_changed_leaves_the_old_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "in.parquet", tmp_path / "out"
    path.write_bytes(as_parquet())
    command = [*arguments(model, path, out), "output.shard_rows=100"]
    assert run.main(command) == 0
    (part,) = (out / "data").iterdir()
    old, make_table = part.read_bytes(), ShardWork.table

    def late(self: ShardWork, shard: InputShard, completions: Sequence[Completion]) -> pa.Table:
        path.write_bytes(as_parquet("Bye"))
        return make_table(self, shard, completions)

    longer = [*command, "decode.max_new_tokens=6", "resume=length"]
    with monkeypatch.context() as patch:
        patch.setattr(ShardWork, "table", late)
        assert run.main(longer) == 2
    assert part.read_bytes() == old
    assert not list((out / "_batchspec").rglob("tmp/*.parquet*"))
    path.write_bytes(as_parquet())
    assert run.main(longer) == 0
    assert pl.read_parquet(part)["token_ids"].list.len().max() == 6


def test_an_object_that_is_replaced_on_s3_is_noticed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_lab() as lab:
        for name, value in lab.environ().items():
            monkeypatch.setenv(name, value)

        def replace(environ: dict[str, Any]) -> None:
            if environ["REQUEST_METHOD"] == "PUT" and "/out/data/" in environ["PATH_INFO"]:
                lab.put("in/x.parquet", as_parquet("Bye"))

        lab.put("in/x.parquet", as_parquet())
        lab.faults.after = replace
        command = arguments(model, f"s3://{BUCKET}/in/x.parquet", f"s3://{BUCKET}/out")
        code, text = run_apart(command, tmp_path / "log")
        assert code == 2, text
        assert "x.parquet changed while the job runs (it was written anew)" in text.splitlines()[-1]
        assert lab.keys("out/data") == ["out/data/part-00000.parquet"]


def test_other_json_lines_are_noticed_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(as_lines())
    source, facts = open_source(InputConfig(path=str(path))), path.stat()
    assert len(list(source.shards(2))) == 12
    path.write_bytes(as_lines("Bye"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    source.check(0, ROWS)
    with pytest.raises(InputError, match=r"in\.jsonl changed while the job runs \(other text at byte 0\)"):
        list(source.shards(2))


@pytest.mark.parametrize(("name", "first"), [("0", 0), ("2", 3), ("3", 6)])
def test_only_the_files_of_the_rows_asked_for_are_checked(tmp_path: Path, name: str, first: int) -> None:
    for i in range(4):  # file 1 has no rows
        (tmp_path / f"{i}.jsonl").write_bytes(as_lines(count=0 if i == 1 else 3))
    source = open_source(InputConfig(path=str(tmp_path)))
    (tmp_path / f"{name}.jsonl").write_bytes(as_lines("Goodbye", 3))
    for row in range(9):
        if first <= row < first + 3:
            with pytest.raises(InputError, match=rf"{name}\.jsonl changed"):
                source.check(row, row + 1)
        else:
            source.check(row, row + 1)


def test_a_part_that_gives_fewer_rows_than_it_had_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = table_source(pa.Table.from_pylist(rows()))
    monkeypatch.setattr(
        files.MemoryFile, "read", lambda self, part, columns: self.table.slice(0, 20).select(columns).to_batches()
    )
    with pytest.raises(InputError, match=r"table changed while the job runs \(20 rows where 24 were\)"):
        list(source.shards(2))


class Forgetful:
    """A dataset that has fewer rows the second time it is read."""

    def __init__(self, source: Source, keeps: int) -> None:
        self.num_rows, self.files, self.lines, self.schema = source.num_rows, source.files, source.lines, source.schema
        self.filled_by_requests = source.filled_by_requests
        self.check, self.column, self.ids, self.alone = source.check, source.column, source.ids, source.alone
        self._source, self._keeps, self._reads = source, keeps, 0

    def reading(self, names: Sequence[str]) -> Source:
        return self

    def shards(self, layout: ShardLayout | int, skip: Container[int] = ()) -> Iterator[InputShard]:
        self._reads += 1
        assert self._reads < 9, "the run reads again and again what gives it no rows"
        yield from (shard for shard in self._source.shards(layout, skip) if self._reads == 1 or shard.index < self._keeps)


@pytest.mark.parametrize("keeps", [0, 3])
def test_shards_that_no_pass_gives_end_the_run(model: Path, tmp_path: Path, keeps: int) -> None:
    from batchspec.config.compose import compose
    from batchspec.job.run_job import run_job

    config = compose(arguments(model, "unused", tmp_path / "out"))
    source = Forgetful(table_source(pa.Table.from_pylist(rows())), keeps)
    with pytest.raises(InputError, match=f"gave no rows for {12 - keeps} of 12 shards, shard {keeps} among them"):
        run_job(config, source)
    assert len(list(tmp_path.glob("out/data/*"))) == keeps


# --- what tells two contents of a Parquet file apart


def digest(path: Path) -> str:
    (file,) = open_source(InputConfig(path=str(path))).files
    return file.digest


def test_a_file_up_to_the_limit_is_told_by_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    data = as_parquet("x" * 6000, 400)
    path.write_bytes(data)
    before = digest(path)
    for at in range(4, len(data) // 2, len(data) // 9):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert digest(path) != before
    path.write_bytes(data)
    assert digest(path) == before


def test_a_larger_one_is_told_by_blocks_from_its_first_to_its_last_byte_and_by_its_whole_footer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SMALLEST_BLOCK", 512)
    path = tmp_path / "in.parquet"
    data = as_parquet(count=4000)
    footer = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    assert len(data) - footer > 4 * 512

    def told(data: bytes) -> str:
        path.write_bytes(data)
        return files.digest_of(LocalPlace(path), len(data), 8 * 512, [(footer, len(data))])

    before = told(data)
    step = (len(data) - 512) / 7
    for i in range(8):
        for at in (round(i * step) + 2, round(i * step) + 509):
            assert told(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) != before, at
    for at in range(footer, len(data), 499):
        assert told(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) != before, at
    at = round(step / 2)  # between two blocks: what it costs is bounded, and so is what it tells
    assert told(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) == before
