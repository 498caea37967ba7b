"""Completions as output rows, and output rows as a Parquet file that every reader opens."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.config.schema import InputConfig, OutputConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import table_source
from batchspec.data.dataset.valid_text import valid_text
from batchspec.data.dataset.writer import build_table, write_parquet
from tests.helpers.io_samples import built, completion, dataset, failed, shards_of, stats


def rows_of(table: pa.Table, *, chat: bool = False, messages: str = "full", **changes: Any) -> list[dict[str, Any]]:
    """Output rows of a shard that holds the whole table, one completion each."""
    [shard] = table_source(table).shards(100)
    rows = [completion(i, **changes) for i in range(table.num_rows)]
    out = build_table(
        shard, rows, columns=map_columns(table.schema, {}), input=InputConfig(chat=chat), output=OutputConfig(messages=messages),
        attempt="a", finished_at=datetime(2026, 1, 2, tzinfo=UTC),
    )
    result: list[dict[str, Any]] = out.to_pylist()
    return result


def test_rows_come_in_input_order_with_their_input_columns() -> None:
    shards, columns = shards_of(dataset(6), 3)
    mixed = [completion(5), failed(4), completion(3, 1), completion(3, 0)]
    rows = built(shards[1], columns, mixed).to_pylist()
    assert [(row["row_index"], row["sample_index"], row["prompt"]) for row in rows] == [
        (3, 0, "say 3"), (3, 1, "say 3"), (4, 0, "say 4"), (5, 0, "say 5")
    ]
    assert [row["completion"] for row in rows] == ["answer 3.0", "answer 3.1", None, "answer 5.0"]


def test_a_completion_fills_every_column() -> None:
    shards, columns = shards_of(dataset(2), 2)
    logprobs = np.array([-0.5, -1, -2], np.float32)
    top = (np.array([[7, 1], [8, 2], [2, 3]], np.int32), np.stack([logprobs, logprobs - 1], 1))
    full = completion(0, stop_reason="END", predicted_tokens=9, cached_tokens=4, logprobs=logprobs, top_logprobs=top)
    [row, bad] = built(shards[0], columns, [full, failed(1)], token_ids=True, prompt_ids=True, logprobs=2).to_pylist()
    assert row["prompt_ids"] == [0, 1, 2, 3, 4]
    assert row["token_ids"] == [7, 8, 2]
    assert row["logprobs"] == [-0.5, -1.0, -2.0]
    assert row["top_logprobs"][1] == [{"id": 8, "logprob": -1.0}, {"id": 2, "logprob": -2.0}]
    assert row["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 3, "reasoning_tokens": None, "cached_tokens": 4, "total_tokens": 8
    }
    assert (row["stop_reason"], row["seed"], row["error"], row["reasoning"]) == ("END", 11, None, None)
    assert row["perf"].items() >= {"prefill_s": 0.25, "rounds": 3, "slot": 2, "predicted_tokens": 9, "attempt": "attempt"}.items()
    assert bad["error"] == {"code": "overlong", "stage": "admit", "message": "too long", "retryable": False}
    assert bad["messages"] == [{"role": "user", "content": "say 1"}]
    assert [bad[name] for name in ("usage", "token_ids", "logprobs", "spec_decode")] == [None] * 4
    assert bad["perf"]["rounds"] is None


def test_spec_decode_holds_the_counts_and_null_ratios() -> None:
    table = pa.table({"prompt": ["x"]})
    [row] = rows_of(table, stats=stats([0, 2, 3, 0], [3, 2, 3, 0], k=3, num_discarded=2))
    spec = row["spec_decode"]
    assert spec["acceptance_histogram"] == [2, 0, 1, 1]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] == 4
    assert sum(j * count for j, count in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"] == 5
    assert (spec["num_draft_tokens"], spec["num_spec_tokens"], spec["num_discarded_tokens"]) == (8, 3, 2)
    assert spec["mean_acceptance_length"] == pytest.approx(2.25)
    assert spec["draft_acceptance_rate"] == pytest.approx(5 / 8)
    assert spec["acceptance_per_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 2])
    assert spec["drafted_per_position"] == [3, 3, 2]
    [row] = rows_of(table, stats=stats([], []))
    assert [row["spec_decode"][name] for name in ("mean_acceptance_length", "draft_acceptance_rate")] == [None, None]
    assert row["spec_decode"]["acceptance_per_position"] == [None, None, None]
    [row] = rows_of(table, stats=stats([0], drafter="none"))
    assert row["spec_decode"] is None
    assert row["perf"]["rounds"] == 1


def test_messages_are_the_prompt_and_the_answer() -> None:
    turn = {"role": "user", "content": "hi", "name": "eve"}
    old = {"role": "system", "content": "old", "name": None}
    chats = pa.table({"messages": [[old, turn], [turn], None], "system": ["new", None, "x"]})
    answer = {"role": "assistant", "content": "ok"}
    got = [row["messages"] for row in rows_of(chats, text="ok")]
    plain = {"role": "user", "content": "hi"}
    assert got == [[{"role": "system", "content": "new"}, plain, answer], [plain, answer], None]
    assert [row["messages"] for row in rows_of(chats, messages="prompt")][1] == [plain]
    assert rows_of(pa.table({"prompt": ["hi"]}), text="ok")[0]["messages"] == [plain, answer]
    with_system = pa.table({"prompt": ["hi"], "system": ["new"]})
    assert rows_of(with_system, text="ok", chat=True)[0]["messages"][0] == {"role": "system", "content": "new"}
    assert rows_of(pa.table({"prompt_ids": [[1, 2]]}))[0]["messages"] is None


def broken(texts: list[bytes | None]) -> pa.Array:
    return pa.array(texts, pa.binary()).view(pa.string())


def test_broken_text_gets_replacement_characters_at_any_depth() -> None:
    texts = broken([b"ok", b"\xffx", None, b"y"])
    assert valid_text(texts).to_pylist() == ["ok", "\ufffdx", None, "y"]
    structs = pa.StructArray.from_arrays([texts, pa.array([1, 2, 3, 4])], names=["t", "n"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3, 4]), structs, mask=pa.array([False, False, True]))
    for array in (lists, lists.slice(1)):
        assert valid_text(array).to_pylist()[-2:] == [[{"t": "\ufffdx", "n": 2}, {"t": None, "n": 3}], None]
    assert valid_text(texts.dictionary_encode()).to_pylist()[1] == "\ufffdx"
    maps = pa.MapArray.from_arrays([0, 1, 3, 4], pa.array(list("abcd")), texts, mask=pa.array([False, False, True]))
    for array in (maps, maps.slice(1)):
        assert valid_text(array).to_pylist()[-2:] == [[("b", "\ufffdx"), ("c", None)], None]
    pairs = pa.FixedSizeListArray.from_arrays(texts, 2, mask=pa.array([False, True]))
    structs = pa.StructArray.from_arrays([texts.dictionary_encode()], names=["t"])
    json = pa.ExtensionArray.from_storage(pa.json_(), texts)
    for array, shown in ((pairs, [["ok", "\ufffdx"], None]), (structs[1:2], [{"t": "\ufffdx"}]), (json[1:2], ["\ufffdx"])):
        assert valid_text(array).to_pylist() == shown
        assert valid_text(array).type == array.type
    [row] = rows_of(pa.table({"prompt": broken([b"\xff"])}))
    assert (row["prompt"], row["messages"][0]["content"]) == ("\ufffd", "\ufffd")


@given(st.lists(st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3), max_size=8), st.integers(0, 8))
def test_valid_text_is_left_alone(rows: list[list[str | None] | None], start: int) -> None:
    array = pa.array(rows, pa.list_(pa.string())).slice(start)
    assert valid_text(array) is array


def test_a_file_round_trips_with_its_metadata(tmp_path: Path) -> None:
    shards, columns = shards_of(dataset(4), 4)
    table = built(shards[0], columns, token_ids=True)
    write_parquet(table, tmp_path / "x.parquet", {"batchspec.shard": "7"})
    file = pq.ParquetFile(tmp_path / "x.parquet")
    assert file.read().equals(table)
    assert file.schema_arrow.equals(table.schema)
    assert file.schema_arrow.metadata == {b"batchspec.shard": b"7"}
    column = file.metadata.row_group(0).column(0)
    assert column.compression == "ZSTD"
    assert column.has_offset_index
    with pytest.raises(FileExistsError):
        write_parquet(table, tmp_path / "x.parquet", {})


def test_row_groups_are_capped_by_rows_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchspec.data.dataset.writer.GROUP_BYTES", 5000)
    monkeypatch.setattr("batchspec.data.dataset.writer.GROUP_ROWS", 40)
    table = pa.table({"x": ["a"] * 100 + ["b" * 3000] * 4})
    write_parquet(table, tmp_path / "x.parquet", {})
    file = pq.ParquetFile(tmp_path / "x.parquet")
    groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    assert pa.concat_tables(groups).equals(table)
    assert all(group.num_rows <= 40 and (group.nbytes <= 5000 or group.num_rows == 1) for group in groups)


def test_every_reader_takes_shards_with_and_without_values(tmp_path: Path) -> None:
    table = dataset(4).append_column("note", pa.nulls(4)).append_column("tag", pa.array([None, None, "x", "y"]))
    shards, columns = shards_of(table, 2)
    write_parquet(built(shards[0], columns, [failed(0), failed(1)], logprobs=1), tmp_path / "a.parquet", {})
    write_parquet(built(shards[1], columns, logprobs=1), tmp_path / "b.parquet", {})
    frame = pl.read_parquet(tmp_path / "*.parquet")
    assert frame["status"].to_list() == ["error", "error", "ok", "ok"]
    assert frame["spec_decode"].struct.field("num_spec_steps").to_list() == [None, None, 3, 3]
    assert ds.dataset(tmp_path, format="parquet").to_table()["tag"].to_pylist() == [None, None, "x", "y"]
