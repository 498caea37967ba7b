"""Which files of a hub dataset are read: config and split as `datasets` finds them, and a list where there are several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from batchspec.config.schema import InputConfig
from batchspec.data.dataset.hub_splits import files_of_split
from batchspec.data.dataset.reader import open_source
from batchspec.errors import BatchspecError, ConfigError, InputError
from tests.data.hub_lab import Hub, running_hub
from tests.data.test_remote_input import set_endpoint, set_times, table

SHARDS = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"]


def card(text: str) -> str:
    return f"---\nlicense: mit\n{text}---\n# A dataset\n---\nconfigs: no\n"


MAIN_AND_SOCRATIC = card(
    "configs:\n"
    "- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n"
    "- config_name: socratic\n  data_files:\n  - split: train\n    path: socratic/train-*\n"
)
TWO = ["main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet"]


def found(files: list[str], text: str = "", config_name: str | None = None, split: str | None = None) -> list[str]:
    return files_of_split(files, text, config_name, split, "W")


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (SHARDS, {"train": SHARDS[:2], "test": SHARDS[2:]}),
        (["data/spring-00000-of-00001.parquet"], {"spring": ["data/spring-00000-of-00001.parquet"]}),
        (["train/a.jsonl", "dev/b.jsonl", "x.jsonl"], {"train": ["train/a.jsonl"], "validation": ["dev/b.jsonl"]}),
        (["v2/my-test-set/a.csv", "v2/training.1/b.csv"], {"train": ["v2/training.1/b.csv"], "test": ["v2/my-test-set/a.csv"]}),
        (
            ["train.csv", "my.eval.csv", "val_1.csv"],
            {"train": ["train.csv"], "validation": ["val_1.csv"], "test": ["my.eval.csv"]},
        ),
        (["a/train.csv", "a/contest.csv"], {"train": ["a/train.csv"]}),
        (["contest.csv", "a/developers.csv"], {"train": ["a/developers.csv", "contest.csv"]}),
    ],
)
def test_names_of_folders_and_files_make_splits(files: list[str], splits: dict[str, list[str]]) -> None:
    for split, expected in splits.items():
        assert found(files, split=split) == expected
    if len(splits) == 1:
        assert found(files) == next(iter(splits.values()))
        assert found(files, config_name="default") == found(files)
    else:
        with pytest.raises(
            InputError, match=rf"^W has the splits {', '.join(splits)}; choose one: input.split={next(iter(splits))}$"
        ):
            found(files)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("'a.*'", ["a.csv"]),
        ("['a.csv', 'x/*.csv']", ["a.csv", "x/b.csv"]),
        ("{train: '**/*.csv'}", ["a.csv", "x/b.csv", "x/y/c.csv"]),
        ("[{split: train, path: [a.csv, x/y/c.csv]}]", ["a.csv", "x/y/c.csv"]),
        ("[{split: train, path: './x/b.csv'}]", ["x/b.csv"]),
    ],
)
def test_a_card_names_files_in_every_form(given: str, expected: list[str]) -> None:
    files = ["a.csv", "x/b.csv", "x/y/c.csv", "test.csv"]
    if "**" in given:
        files = files[:3]
    assert found(files, card(f"configs:\n- config_name: default\n  data_files: {given}\n")) == expected


def test_configs_of_a_card_are_chosen_by_name() -> None:
    assert found(TWO, MAIN_AND_SOCRATIC, "socratic") == ["socratic/train-0.parquet"]
    assert found(TWO, MAIN_AND_SOCRATIC, "main", "test") == ["main/test-0.parquet"]
    for default in ("- config_name: main\n  default: true\n", "- config_name: default\n"):
        text = card(f"configs:\n{default}  data_files: main/test-*\n- config_name: socratic\n  data_files: socratic/*\n")
        assert found(TWO, text) == ["main/test-0.parquet"]


def test_a_config_that_holds_only_some_rows_of_its_files_is_refused_and_another_one_named() -> None:
    some = "- config_name: ok\n  default: true\n  data_files: data/*\n  filters: [[status, '==', ok]]\n"
    text = card(f"configs:\n{some}- config_name: all\n  data_files: data/*\n")
    said = r"W: its config 'ok' holds only the rows that pass \[\['status', '==', 'ok'\]\], .*: input.config_name=all"
    with pytest.raises(InputError, match=said):
        found(SHARDS, text)
    assert found(SHARDS, text, "all") == sorted(SHARDS)
    with pytest.raises(InputError, match="batchspec reads whole files; give files of it"):
        found(SHARDS, card(f"configs:\n{some}"))


def test_a_config_of_a_folder_has_the_splits_of_its_names() -> None:
    files = ["v1/train.csv", "v1/test.csv", "v2/all.csv"]
    text = card("configs:\n- config_name: one\n  data_dir: v1\n- config_name: two\n  data_dir: v2/\n")
    assert found(files, text, "one", "test") == ["v1/test.csv"]
    assert found(files, text, "two") == ["v2/all.csv"]


@pytest.mark.parametrize(
    ("text", "config_name", "split", "said"),
    [
        (MAIN_AND_SOCRATIC, None, None, "W has the configs main, socratic; choose one: input.config_name=main"),
        (MAIN_AND_SOCRATIC, "x", None, "W has no config 'x'; its configs are main, socratic"),
        (MAIN_AND_SOCRATIC, "main", None, "W has the splits train, test of the config 'main'; choose one: input.split=train"),
        (MAIN_AND_SOCRATIC, "main", "dev", "W has no split 'dev'; the splits of the config 'main' are train, test"),
        (MAIN_AND_SOCRATIC, "main", "train[:9]", "parts of splits are not supported: use input.limit for the first rows"),
        ("", None, "validation", "W has no split 'validation'; the splits are train, test"),
        ("", "main", None, "W has no config 'main'; its configs are default"),
        (card("configs:\n- config_name: a\n  data_files: none/*\n"), None, None, "no data file is in the split 'train'"),
        (card("configs: [7]\n"), None, None, "holds '7', which is not a config"),
        (card("configs:\n- config_name: a\n  data_files: [{split: train}]\n"), None, None, "not a split and a path"),
        (card("configs: [\n"), None, None, "the YAML on its card cannot be read"),
    ],
)
def test_what_is_not_there_or_not_one_is_refused_with_the_choices(
    text: str, config_name: str | None, split: str | None, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        found(TWO, text, config_name, split)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# --- on a hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    set_times(monkeypatch, deadline_s=15.0)
    with running_hub() as server:
        set_endpoint(monkeypatch, server.server_port)
        yield server


def ids(**keys: Any) -> list[str]:
    source = open_source(InputConfig(**{"path": "hf://datasets/org/name", **keys}))
    return [one for shard in source.shards(9) for one in shard.table["id"].to_pylist()]


def test_a_split_of_a_revision_is_read(hub: Hub) -> None:
    files = {"main/train-0.parquet": table(0, 3), "main/test-0.parquet": table(3, 2), "socratic/train-0.parquet": table(9, 1)}
    hub.commit({**files, "README.md": MAIN_AND_SOCRATIC.encode()}, "v1")
    hub.commit({"data/train-00000-of-00001.parquet": table(50, 2), "data/test-00000-of-00001.parquet": table(60, 1)})
    assert ids(split="test") == ["q-60"]
    assert ids(path="hf://datasets/org/name/", split="train") == ["q-50", "q-51"]
    assert ids(path="hf://datasets/org/name@v1", config_name="main", split="test") == ["q-3", "q-4"]
    assert ids(path="hf://datasets/org/name@v1", config_name="socratic") == ["q-9"]
    assert ids(path="hf://datasets/org/name@v1/main") == ["q-3", "q-4", "q-0", "q-1", "q-2"]  # a folder is all of its files


def refusal(kind: type[BatchspecError], **keys: Any) -> str:
    with pytest.raises(kind) as caught:
        ids(**keys)
    return str(caught.value)


def test_splits_are_listed_and_belong_to_whole_datasets(hub: Hub, tmp_path: Any) -> None:
    hub.commit({"data/train-00000-of-00001.parquet": table(50, 2), "data/test-00000-of-00001.parquet": table(60, 1)})
    assert "hf://datasets/org/name has the splits train, test; choose one: input.split=train" in refusal(InputError)
    (tmp_path / "x.parquet").write_bytes(table(0, 1))
    for path in (str(tmp_path), "hf://datasets/org/name/data"):
        assert "input.split=train is for a whole dataset of the hub" in refusal(ConfigError, path=path, split="train")
    assert "input.config_name=main is for a whole dataset" in refusal(ConfigError, path=str(tmp_path), config_name="main")
