"""A line that is too long, or holds a NUL, is one bad row wherever it is, and its neighbours are what they are without it."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec import cli
from batchspec.config.schema import InputConfig
from batchspec.data.dataset import files, lines
from batchspec.data.dataset.reader import Source, open_source
from batchspec.errors import InputError

LIMIT = 100
LONG = "x" * 150


def written(path: Path, prompts: list[str]) -> Path:
    """Rows of one column, prompt; a NUL stays a byte in JSON, where its escape would be text."""
    if ".csv" in path.name:
        text = "prompt\n" + "".join(f'"{prompt}"\n' for prompt in prompts)
    else:
        text = "".join(json.dumps({"prompt": prompt}).replace("\\u0000", "\0") + "\n" for prompt in prompts)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def source_of(path: Path) -> Source:
    return open_source(InputConfig(path=str(path)))


def read(source: Source, shard_rows: int = 3) -> list[str]:
    """The prompt of each row, or what is said of a bad one."""
    found = []
    for shard in source.shards(shard_rows):
        for row, prompt in enumerate(shard.table["prompt"].to_pylist(), shard.first_row):
            found.append(shard.bad[row].message if row in shard.bad else prompt)
    return found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines may have 100 bytes, and parts have 60."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", LIMIT)
    monkeypatch.setattr(files, "BATCH_BYTES", 60)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.jsonl.gz", "in.csv.gz"])
@pytest.mark.parametrize("places", [[0], [1], [9], [10], [0, 1, 2], [4, 5], [0, 10], [*range(5)]])
def test_a_line_that_is_too_long_is_one_bad_row(tmp_path: Path, name: str, places: list[int]) -> None:
    prompts = [f"p{i}" for i in range(11)]
    for place in places:
        prompts[place] = LONG + str(place)
    source = source_of(written(tmp_path / name, prompts))
    assert source.num_rows == 11
    for again in range(2):
        for row, found in enumerate(read(source, shard_rows=3 + again)):
            assert "bytes, and at most 100 are read; correct the" in found if row in places else found == f"p{row}"


@pytest.mark.usefixtures("short")
@settings(max_examples=30)
@given(lengths=st.lists(st.sampled_from([0, 1, 40, 84, 85, 86, 87, 88, 97, 98, 99, 100, 101, 400]), min_size=1, max_size=12))
def test_whether_a_line_is_too_long_depends_on_its_length_alone(
    lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for name, frame in (("in.jsonl", len('{"prompt": ""}')), ("in.csv", 2)):
        prompts = [chr(97 + i) * length for i, length in enumerate(lengths)]
        good = [length + frame <= LIMIT for length in lengths]
        if any(good) or name == "in.csv":
            found = read(source_of(written(folder / name, prompts)))
            assert [one == prompt for one, prompt in zip(found, prompts, strict=True)] == good


@pytest.mark.usefixtures("short")
def test_a_long_line_in_the_middle_of_a_quoted_cell_does_not_swallow_the_rows_after_it(tmp_path: Path) -> None:
    """The cell that it ends is a bad row too: its text is not known."""
    (tmp_path / "in.csv").write_text(f'prompt,n\na,1\n"b\n{LONG}\nc,3\nd,4\n')
    source = source_of(tmp_path / "in.csv")
    found = read(source)
    assert [found[0], *found[3:]] == ["a", "c", "d"]
    assert "a quote in it is never closed" in found[1]
    assert "151 bytes, and at most 100 are read" in found[2]


@pytest.mark.usefixtures("short")
def test_a_long_line_that_changes_while_the_job_runs_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", ["a", LONG, "b"])
    source = source_of(path)
    before = path.stat()
    written(path, ["a", LONG.replace("x", "y"), "b"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputError, match=r"in.jsonl changed while the job runs \(other text at byte 16\)"):
        read(source)


@pytest.mark.usefixtures("short")
def test_a_file_of_long_lines_alone_and_a_long_header_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no line is a JSON object .the first: the line has 165 bytes, and at most 100 are read"
    ):
        source_of(written(tmp_path / "in.jsonl", [LONG]))
    (tmp_path / "array.json").write_text(json.dumps([{"prompt": LONG}]))
    with pytest.raises(InputError, match="is one JSON array, and JSON lines hold an object a line"):
        source_of(tmp_path / "array.json")
    (tmp_path / "in.csv").write_text(f"{LONG}\na\n")
    with pytest.raises(InputError, match=r"the header cannot be read \(the line has 151 bytes"):
        source_of(tmp_path / "in.csv")
    (tmp_path / "openai.jsonl").write_text(LONG)
    assert cli.main(["export", "--from-openai", str(tmp_path / "openai.jsonl"), str(tmp_path / "new.parquet")]) == 2


@pytest.mark.second
def test_a_long_line_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 256 MiB: NULs, which the disk does not hold."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    with (tmp_path / "in.jsonl").open("wb") as file:
        file.write(b'{"prompt": "a"}\n')
        file.seek(256 << 20)
        file.write(b'\n{"prompt": "b"}\n')
    tracemalloc.start()
    try:
        source = source_of(tmp_path / "in.jsonl")
        assert source.num_rows == 3
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# --- NUL


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
@pytest.mark.parametrize("prompt", ["\0", "a\0b", "\0" * 5000])
@pytest.mark.parametrize("place", [0, 1, 299])
def test_a_nul_is_in_one_bad_row_at_the_beginning_of_a_file_as_anywhere(
    tmp_path: Path, name: str, prompt: str, place: int
) -> None:
    prompts = [f"p{i}" for i in range(300)]
    prompts[place] = prompt
    found = read(source_of(written(tmp_path / name, prompts)), shard_rows=300)
    assert found[:place] + found[place + 1 :] == prompts[:place] + prompts[place + 1 :]
    assert "correct the" in found[place]


def test_nuls_before_the_first_row_are_a_bad_row(tmp_path: Path) -> None:
    """As a machine leaves them that lost its power while a log was written."""
    (tmp_path / "in.jsonl").write_bytes(b"\0" * 4096 + b'{"prompt": "torn"}\n{"prompt": "a"}\n')
    assert read(source_of(tmp_path / "in.jsonl"))[1:] == ["a"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_text_in_wide_characters_without_a_mark_is_refused_as_a_whole(tmp_path: Path, name: str, encoding: str) -> None:
    path = written(tmp_path / name, ["a", "b"])
    path.write_bytes(path.read_text().encode(encoding))
    with pytest.raises(InputError, match=f"{name} is not UTF-8 text .*; write it as UTF-8"):
        source_of(path)
