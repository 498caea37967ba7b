"""Columns of every Arrow type: copied through a whole job and all commands, or refused in one line before any work."""

from __future__ import annotations

import io
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from batchspec import cli, run
from batchspec.config.schema import OutputConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.in_memory import table_of
from batchspec.data.dataset.schema import output_schema
from batchspec.data.storage.local_store import LocalStore
from batchspec.errors import InputError
from tests.helpers.runs import make_model

WIDE = Decimal("1" * 50)
FAR = 2**62
"""As a time in microseconds a year that Python's datetime does not have; as a number of days polars panics on it."""


def extension(kind: pa.DataType, value: Any) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array([value, None], kind.storage_type))


def of(value: Any, kind: pa.DataType) -> pa.Array:
    return pa.array([value, None], kind)


TENSOR = pa.fixed_shape_tensor(pa.int8(), [2, 2])
UUID = extension(pa.uuid(), uuid.UUID(int=5).bytes)
COPIED: dict[str, pa.Array] = {
    "decimal128": of(Decimal("1.5"), pa.decimal128(38, 2)),
    "decimal256_few_digits": of(Decimal("1.5"), pa.decimal256(20, 2)),
    "decimal256": of(WIDE, pa.decimal256(60)),
    "decimal256_in_list": of([WIDE], pa.list_(pa.decimal256(60))),
    "decimal256_in_struct": of({"a": WIDE}, pa.struct([("a", pa.decimal256(60))])),
    "duration": of(FAR, pa.duration("us")),
    "duration_ns": of(5, pa.duration("ns")),
    "timestamp_ns": of(5, pa.timestamp("ns")),
    "timestamp_zone": of(5, pa.timestamp("us", tz="Europe/Berlin")),
    "timestamp_far": of(FAR, pa.timestamp("us")),
    "timestamp_zone_far": of(FAR, pa.timestamp("us", tz="UTC")),
    "timestamps_far": of([FAR], pa.list_(pa.timestamp("us"))),
    "date32_far": of(2**30, pa.date32()),
    "time32": of(5, pa.time32("ms")),
    "time64": of(5, pa.time64("ns")),
    "half": of(1.5, pa.float16()),
    "uint64": of(2**64 - 1, pa.uint64()),
    "dictionary": of("a", pa.string()).dictionary_encode(),
    "dictionary_in_struct": pa.StructArray.from_arrays([of("a", pa.string()).dictionary_encode()], ["d"]),
    "large_list": of([1], pa.large_list(pa.int8())),
    "fixed_size_list": of([1, 2], pa.list_(pa.int8(), 2)),
    "map": of([("a", 1), ("a", 2)], pa.map_(pa.string(), pa.int8())),
    "nested": of({"a": [{"b": 1}]}, pa.struct([("a", pa.list_(pa.struct([("b", pa.int8())])))])),
    "binary": of(b"\xff", pa.binary()),
    "fixed_size_binary": of(b"\xff\xfe", pa.binary(2)),
    "text_view": of("x", pa.string_view()),
    "binary_view": of(b"\xff", pa.binary_view()),
    "text_views": of(["x"], pa.list_(pa.string_view())),
    "null": pa.nulls(2),
    "uuid": UUID,
    "uuids": pa.ListArray.from_arrays([0, 1, 2], UUID),
    "json": extension(pa.json_(), '{"a": 1}'),
    "bool8": extension(pa.bool8(), 1),
    "tensor": extension(TENSOR, [1, 2, 3, 4]),
}
BY = {"decimal128", "decimal256_few_digits", "timestamp_ns", "timestamp_zone", "timestamp_far", "timestamp_zone_far", "time32",
      "time64", "half", "uint64", "dictionary", "text_view", "null"}
"""Columns by whose values statistics can be grouped, in a local folder."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def job(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job of two shards, the second of which was computed by a second run."""
    folder = tmp_path_factory.mktemp("job")
    pq.write_table(pa.table({"id": ["q0", "q1"], "prompt": ["Say it", "Say it again"], **COPIED}), folder / "in.parquet")
    arguments = [
        f"model.path={model}", "model.dtype=float64", f"input.path={folder / 'in.parquet'}", f"output.dir={folder / 'out'}",
        "output.shard_rows=1", "decode.max_new_tokens=4", "draft=lookup",
    ]
    assert run.main(arguments) == 0
    (folder / "out/data/part-00001.parquet").unlink()
    assert run.main(arguments) == 0
    return folder


def copied(files: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in sorted(files.iterdir())])


def plain(column: pa.Array) -> pa.Array:
    """The column as the output has it: dictionaries and views as their values."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"x": column}), buffer)
    column = pq.read_table(buffer).column("x").combine_chunks()
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    if pa.types.is_list(column.type) and column.type.value_type in views:
        return column.cast(pa.list_(views[column.type.value_type]))
    return column.cast(views.get(column.type, column.type))


@pytest.mark.second
@pytest.mark.parametrize("name", COPIED)
def test_a_column_is_in_the_output_as_it_was_in_the_input(job: Path, name: str) -> None:
    found = copied(job / "out/data").column(name).combine_chunks()
    expected = plain(COPIED[name])
    assert found.type == expected.type
    assert found.equals(expected)


@pytest.mark.second
def test_every_command_accepts_columns_of_every_type(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, few = str(job / "out"), tmp_path / "few"
    exports = [
        ["export", out, "--status", "ok,truncated", "--to", to, str(tmp_path / f"{to}.jsonl")] for to in ("chat", "openai")
    ]
    commands = [["stats", out], ["status", out], ["report", out], ["verify", out], ["verify", out, "--files"]]
    for command in [*commands, *exports, ["compact", out, str(few)]]:
        assert cli.main(command) == 0, command
    assert copied(few / "data").equals(copied(job / "out/data"))
    card = (job / "out/README.md").read_text()
    assert all(f"`{name}`" in card for name in COPIED)


def test_inspect_shows_every_value_as_it_is(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(job / "out"), "q0"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    shown = {
        "decimal256": f'"{WIDE}"', "decimal256_in_list": f'["{WIDE}"]', "decimal256_in_struct": f'{{"a": "{WIDE}"}}',
        "timestamp_ns": "1970-01-01 00:00:00.000000005", "timestamp_far": f"<value out of range: {FAR}>", "duration_ns": "5",
        "timestamp_zone": '"1970-01-01 01:00:00.000005+01:00"', "timestamps_far": f"[<value out of range: {FAR}>]",
        "date32_far": f"<value out of range: {2**30}>", "uuid": '"00000000-0000-0000-0000-000000000005"',
    }
    assert {name: facts[name] for name in shown} == shown


@pytest.mark.second
@pytest.mark.parametrize("store", ["a local folder", "an object store"])
def test_statistics_by_a_column_group_its_values_or_are_refused_in_one_line(
    job: Path, store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by = BY
    if store == "an object store":  # polars reads those through Arrow
        monkeypatch.setattr(LocalStore, "arrow_paths", through_arrow)
        by = BY - {"decimal256_few_digits"}
    grouped = set()
    for name in COPIED:
        code = cli.main(["stats", str(job / "out"), "--by", name])
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("batchspec: ")]
        assert (code, len(said)) in ((0, 0), (2, 1)), name
        grouped |= {name} if code == 0 else set()
    assert grouped == by


def through_arrow(self: LocalStore, names: list[str]) -> tuple[list[str], pafs.FileSystem]:
    return [str(self._path(name)) for name in names], pafs.LocalFileSystem()


REFUSED: dict[str, tuple[pa.DataType, str]] = {
    "timestamp with an offset": (pa.timestamp("us", tz="+05:30"), "polars does not know the time zone '\\+05:30'"),
    "unknown time zone": (pa.list_(pa.timestamp("us", tz="No/Where")), "polars does not know the time zone 'No/Where'"),
    "view of a list": (pa.list_view(pa.string()), "views of lists cannot be copied"),
    "extension of a view": (pa.json_(pa.string_view()), "an extension of string_view cannot be copied"),
    "struct without fields": (pa.struct([]), "structs without fields cannot be copied"),
    "month interval": (pa.month_day_nano_interval(), "Unhandled type for Arrow to Parquet"),
    "run-end encoded": (pa.run_end_encoded(pa.int32(), pa.string()), "no kernel matching input types|Unhandled type|Unsupported"),
    "list of intervals": (pa.list_(pa.month_day_nano_interval()), "Unhandled type for Arrow to Parquet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_cannot_be_written_or_read_is_refused_before_any_work(name: str) -> None:
    kind, why = REFUSED[name]
    schema = pa.schema([("prompt", pa.string()), ("x", kind)])
    with pytest.raises(InputError, match=rf"^column 'x' has type .*: .*({why}).*leave it out: output.passthrough=\[prompt\]$"):
        output_schema(schema, map_columns(schema, {}), OutputConfig())
    output_schema(schema, map_columns(schema, {}), OutputConfig(passthrough=["prompt"]))


def test_a_refused_column_of_a_file_leaves_no_output_folder(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"prompt": ["Say"], "x": pa.array([5], pa.timestamp("us", tz="+05:30"))})
    pq.write_table(table, tmp_path / "in.parquet")
    arguments = [f"model.path={model}", f"input.path={tmp_path / 'in.parquet'}", f"output.dir={tmp_path / 'out'}", "draft=none"]
    assert run.main(arguments) == 2
    assert capfd.readouterr().err.startswith("batchspec: column 'x' has type timestamp[us, tz=+05:30]: polars does not know")
    assert not (tmp_path / "out").exists()


def test_a_table_in_memory_on_which_polars_panics_is_refused() -> None:
    """The others are refused by polars with an error of its own."""
    table = pa.table({"prompt": ["Say"], "x": pa.array([[(1, 2, 3)]], pa.list_(pa.month_day_nano_interval()))})
    with pytest.raises(InputError, match="do not make a table"):
        table_of(table)


def test_a_panic_of_polars_is_one_line(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", str(job / "out"), "--by", "date32_far"]) == 2
    assert capsys.readouterr().err.endswith(
        "/out: polars cannot process a value (out-of-range date); read the files with pyarrow\n"
    )
