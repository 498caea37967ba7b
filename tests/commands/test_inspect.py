"""`batchspec inspect`: one request in full, and advice if it does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.commands.inspect import main
from batchspec.data.dataset.reader import InputFile
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import OutputError
from tests.helpers.io_samples import built, completion, dataset, failed, new_folder, shards_of, stats


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Five rows in shards of two, the third of them without its last row's shard."""
    shards, columns = shards_of(dataset(5), 2)
    files = [InputFile(name=name, size_bytes=1, num_rows=rows, digest="") for name, rows in (("a.parquet", 3), ("b.parquet", 2))]
    folder = new_folder(tmp_path, 5, 2, files=files)
    rows = [
        completion(0),
        completion(1, text="red\x1b[31m\nand more", stats=stats([3, 2, 1], [3, 3, 1], num_discarded=4)),
        failed(2),
        completion(3),
        completion(3, 1, text="the other answer"),
    ]
    for shard in shards[:2]:
        mine = [row for row in rows if row.row_index in folder.rows_of(shard.index)]
        folder.commit(shard.index, built(shard, columns, mine))
    return tmp_path


def fact(text: str, name: str) -> str:
    """The rest of the line that begins with this name."""
    (value,) = [line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(f"{name} ")]
    return value


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_a_request_is_shown_with_its_place_prompt_answer_and_rounds(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(out), "q-1")
    assert fact(text, "output") == "data/part-00000.parquet row 1"
    assert fact(text, "input") == "row 1: a.parquet row 1"
    assert fact(text, "tokens") == "5 prompt, 3 completion, 0 cached, 8 total"
    assert fact(text, "kind") == "b"
    assert text.count("say 1") == 1  # nor is a copied column shown again
    assert "user\n  say 1\n" in text
    assert text.count("and more") == 1  # the answer is no part of the prompt
    assert "draft tokens            7 verified, 6 accepted, 4 emitted after the stop" in text
    table = [line.split() for line in text.split("position  drafted  rate\n")[1].splitlines()[:4]]
    assert table == [["0", "0", "0", "3", "1.000"], ["1", "1", "1", "2", "1.000"], ["2", "1", "2", "2", "0.500"], ["3", "1"]]


def test_what_a_model_wrote_cannot_steer_the_terminal(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "completion\n  red\\x1b[31m\n  and more\n" in shown(capsys, str(out), "q-1")


def test_the_samples_of_a_row_are_shown_one_by_one(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = shown(capsys, str(out), "q-3")
    assert fact(first, "sample") == "0 of 2 (--sample N shows another)"
    assert fact(first, "input") == "row 3: b.parquet row 0"
    assert "  the other answer\n" in shown(capsys, str(out), "q-3", "--sample", "1")
    with pytest.raises(OutputError, match=r"q-3 has no sample 2; --sample may be 0, 1"):
        main([str(out), "q-3", "--sample", "2"])


def test_an_error_row_says_why_and_still_shows_its_prompt(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(out), "q-2")
    assert fact(text, "status") == "error"
    assert fact(text, "  message") == "too long"
    assert "user\n  say 2" in text
    assert "speculation" not in text


def test_a_missing_id_is_one_line_with_the_nearest_ids(out: Path) -> None:
    with pytest.raises(OutputError) as caught:
        main([str(out), "q-4"])
    said = str(caught.value)
    assert "no request 'q-4' (2 of 3 shards are committed, the others not written yet); the most similar ids are q-" in said
    assert "\n" not in said
    with pytest.raises(OutputError, match="no id is similar; the first one is 'q-0'"):
        main([str(out), "something else entirely"])


def test_a_shard_is_read_from_memory_of_arrow(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Arrow may free the last part of it while the process exits: Python's memory then aborted one run in eight."""
    allocated: list[int] = []
    read = pq.read_table

    def noted(source: Any) -> pa.Table:
        allocated.append(pa.total_allocated_bytes())
        return read(source)

    monkeypatch.setattr(pq, "read_table", noted)
    file = out / "data/part-00000.parquet"
    before = pa.total_allocated_bytes()
    table, _ = OutputFolder(str(out)).written(0)
    assert table["request_id"].to_pylist() == pq.ParquetFile(file).read()["request_id"].to_pylist()
    assert allocated[0] - before >= file.stat().st_size
