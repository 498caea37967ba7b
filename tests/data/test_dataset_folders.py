"""Folders as other programs write them: their rows are read, and nothing that lies beside the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import open_source
from batchspec.errors import ConfigError, InputError


def put(path: Path, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def parquet(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": prompts}), path)
    return path


def arrow(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pa.table({"prompt": prompts})
    with ipc.new_stream(str(path), data.schema) as writer:
        writer.write_table(data)
    return path


def saved(folder: Path, files: dict[str, Sequence[str]], **more: Any) -> Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    for name, prompts in files.items():
        arrow(folder / name, *prompts)
    put(folder / "dataset_info.json", json.dumps({"features": {"prompt": {"dtype": "string", "_type": "Value"}}}, indent=2))
    state = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "75b2f95f25fdc097", "_split": None, **more}
    put(folder / "state.json", json.dumps(state, indent=2))
    return folder


def splits(folder: Path, **prompts: Sequence[str]) -> Path:
    """A folder as `DatasetDict.save_to_disk` writes it."""
    for name, of_split in prompts.items():
        saved(folder / name, {"data-00000-of-00001.arrow": of_split})
    put(folder / "dataset_dict.json", json.dumps({"splits": [*prompts]}))
    return folder


def read(*paths: Path | str, **keys: Any) -> list[str]:
    source = open_source(InputConfig(path=[*map(str, paths)], **keys))
    return [prompt for shard in source.shards(9) for prompt in shard.table["prompt"].to_pylist()]


def refusal(*paths: Path | str, kind: type[Exception] = InputError, **keys: Any) -> str:
    with pytest.raises(kind) as caught:
        read(*paths, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- metadata


@pytest.mark.parametrize(
    "name",
    [
        "dataset_infos.json", "dataset_info.json", "data/dataset_info.json", "datapackage.json", "dataset-metadata.json",
        "croissant.json", "README.md", ".gitattributes", ".cache/huggingface/download/data/a.parquet.json", "_SUCCESS",
        "_metadata", "_common_metadata.parquet", "_started_123.json", ".a.parquet.crc", "data/a.parquet.crc", "report.html",
        "__MACOSX/data/._a.parquet", "data/._a.parquet", "_temporary/0/a.parquet",
    ],
)  # fmt: skip
def test_what_describes_a_dataset_is_no_row(tmp_path: Path, name: str) -> None:
    parquet(tmp_path / "data/a.parquet", "x")
    put(tmp_path / name)
    for path in (tmp_path, tmp_path / "**", tmp_path / "**/*.*"):
        assert read(path) == ["x"]


def test_metadata_alone_are_no_data_but_a_file_named_in_full_is_read(tmp_path: Path) -> None:
    path = put(tmp_path / "dataset_info.json", '{"prompt": "x"}\n')
    assert "no data file there" in refusal(tmp_path)
    assert read(path) == ["x"]


def test_an_output_folder_of_a_job_is_its_data(tmp_path: Path) -> None:
    parquet(tmp_path / "out/data/part-00000.parquet", "x")
    put(tmp_path / "out/_batchspec/manifest.json")
    put(tmp_path / "out/answers.jsonl", '{"prompt": "no row"}\n')
    for path in (tmp_path / "out", tmp_path, tmp_path / "**"):
        assert read(path) == ["x"]


# --- save_to_disk


def test_of_a_saved_dataset_the_files_of_its_state_are_read_in_their_order(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in/saved", {"data-2.arrow": ["a", "b"], "data-1.arrow": ["c"]})
    arrow(folder / "cache-a124ad5079e776bb.arrow", "of map")
    parquet(tmp_path / "in/a.parquet", "first")
    parquet(tmp_path / "in/z.parquet", "last")
    for path in (folder, folder / "*", folder / "*.arrow"):
        assert read(path) == ["a", "b", "c"]
    assert read(tmp_path / "in") == ["first", "a", "b", "c", "last"]
    assert read(folder / "data-1.arrow") == ["c"]
    assert [file.name for file in open_source(InputConfig(path=str(tmp_path / "in"))).files] == [
        "a.parquet", "saved/data-2.arrow", "saved/data-1.arrow", "z.parquet"
    ]


def test_a_saved_dataset_that_lacks_a_file_or_selects_rows_by_indices_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "lacks", {"data-0.arrow": ["a"], "data-1.arrow": ["b"]})
    (folder / "data-0.arrow").unlink()
    assert "lacks/data-0.arrow is not there" in refusal(folder)
    folder = saved(tmp_path / "indices", {"data-0.arrow": ["a", "b"]}, _indices_data_files=[{"filename": "indices.arrow"}])
    assert "selects rows of its files by indices" in refusal(folder)


def test_other_files_named_state_are_rows(tmp_path: Path) -> None:
    put(tmp_path / "state.json", '{"prompt": "Ohio"}\n')
    assert read(tmp_path) == ["Ohio"]
    arrow(tmp_path / "a.arrow", "x")
    assert read(tmp_path) == ["x", "Ohio"]


def test_a_split_of_a_saved_dataset_dict_is_chosen_as_one_of_the_hub(tmp_path: Path) -> None:
    folder = splits(tmp_path / "dict", train=["a"], test=["b"])
    assert read(folder, split="test") == ["b"]
    assert read(folder / "train") == ["a"]
    assert "dict has the splits train, test; choose one: input.split=train" in refusal(folder)
    assert "has no split 'dev'; the splits are train, test" in refusal(folder, split="dev")
    assert "input.config_name=main is for a whole dataset of the hub" in refusal(folder, kind=ConfigError, config_name="main")
    for path in (tmp_path, tmp_path / "**"):
        assert "dict has several splits; let input.path end there and choose one" in refusal(path)
    assert read(splits(tmp_path / "one", train=["c"])) == ["c"]


# --- tables with a log


def delta(table: Path) -> None:
    put(table / "_delta_log/00000000000000000000.json")


def hudi(table: Path) -> None:
    put(table / ".hoodie/hoodie.properties")


def iceberg(table: Path) -> None:
    put(table / "metadata/00000-c2f5.metadata.json")


@pytest.mark.parametrize(
    ("make", "said"),
    [(delta, "a Delta Lake table"), (hudi, "a Hudi table"), (iceberg, "an Iceberg table")],
)
def test_a_table_whose_log_says_which_rows_it_has_is_refused(tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    """Files of rows that were deleted still lie in its folder."""
    table = tmp_path / "in/table"
    file = parquet(table / "data/day=1/part-0.parquet", "x")
    parquet(tmp_path / "in/a.parquet", "y")
    make(table)
    for path in (table, tmp_path / "in", table / "data", table / "data/day=1", table / "data/*/*.parquet", tmp_path / "in/**"):
        assert f"{table} is {said}" in refusal(path), path
    assert read(file) == ["x"]
    assert read(tmp_path / "in/*.parquet") == ["y"]


def test_a_folder_named_metadata_is_no_iceberg_table(tmp_path: Path) -> None:
    parquet(tmp_path / "metadata/a.parquet", "x")
    parquet(tmp_path / "data/a.parquet", "y")
    assert read(tmp_path) == ["y", "x"]
