"""Keys that had other names before version 0.2: refused by their present name where users write them, translated in manifests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from batchspec import cli, generate, run
from batchspec.config.compose import compose, composed
from batchspec.config.renamed import GROUPS_RENAMED, RENAMED, RENAMED_VALUES, renamed, upgraded, upgraded_keys
from batchspec.config.schema import RunConfig
from batchspec.config.typed import from_dict, keys
from batchspec.config.values import CHOICES
from batchspec.errors import ConfigError
from batchspec.runstate.manifest import Manifest
from batchspec.train.settings import TrainRun

KNOWN = {*keys(), *keys(TrainRun())}
OF_A_JOB = {old: new for old, new in RENAMED.items() if not old.startswith("train.")}
GIVEN = ["model.path=m", "input.path=i.parquet", "output.dir=o"]


def message(old: str) -> str:
    new = RENAMED[old]
    return f"{old} is called {new} since version 0.2; write {new}{'.KEY' if old in GROUPS_RENAMED else ''}=..."


def test_every_new_name_is_a_key_and_no_old_one_is() -> None:
    for old, new in RENAMED.items():
        inside = [key for key in KNOWN if key == new or key.startswith(f"{new}.")]
        assert inside, f"{new} is no key"
        assert (inside != [new]) == (old in GROUPS_RENAMED)
        assert not any(key == old or key.startswith(f"{old}.") for key in KNOWN)
    for key, names in RENAMED_VALUES.items():
        assert set(names.values()) <= set(CHOICES[key])
        assert not set(names) & set(CHOICES[key])


def test_a_key_inside_a_group_that_moved_has_its_name_there() -> None:
    assert renamed("decode.opt.argmax") == "ablation.argmax"
    assert renamed("decode.optimal") is None
    assert renamed("decode.n") is None


def line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said.removeprefix("batchspec: ").strip()


SIGNED = [("+" * (i % 3), old) for i, old in enumerate(OF_A_JOB)]
OTHER_SIGNS = [(sign, old) for sign in ("", "+", "++") for old in OF_A_JOB if (sign, old) not in SIGNED]


@pytest.mark.parametrize(("sign", "old"), [*SIGNED, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_SIGNS)])
def test_an_old_key_is_refused_with_its_new_name(old: str, sign: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"{sign}{old}=1"])
    assert str(caught.value) == message(old)


def written(command: str) -> Callable[[list[str]], int]:
    """The command with these words, through the command line."""
    return run.main if command == "python -m batchspec.run" else lambda words: cli.main([command, *words])


@pytest.mark.parametrize("command", ["python -m batchspec.run", "run", "plan", "submit"])
def test_every_command_of_a_job_refuses_an_old_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, old in (("packing.slots=4", "packing.slots"), ("~draft.sink", "draft.sink")):
        assert written(command)([*GIVEN, words]) == 2
        assert line(capsys) == message(old)
    assert written(command)([*GIVEN, "decode.opt.argmax=false"]) == 2
    assert line(capsys) == "decode.opt.argmax is called ablation.argmax since version 0.2; write ablation.argmax=..."


def test_a_recipe_of_the_users_own_is_refused_by_its_old_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "draft").mkdir()
    for old in OF_A_JOB:
        group, name = old.split(".")
        (tmp_path / "job/mine.yaml").write_text(f"# @package _global_\n{group}: {{{name}: 1}}\n")
        assert run.main(["--config-dir", str(tmp_path), "+job=mine", *GIVEN]) == 2
        assert line(capsys) == f"job/mine: {message(old)}"
    (tmp_path / "draft/mine.yaml").write_text("name: lookup\nmax_ngram: 4\n")
    assert run.main(["--config-dir", str(tmp_path), "draft=mine", *GIVEN]) == 2
    assert line(capsys) == f"draft/mine: {message('draft.max_ngram')}"


def test_generate_refuses_an_old_key() -> None:
    with pytest.raises(ConfigError, match=r"input\.overlong is called input\.on_overlong since version 0\.2"):
        generate({"prompt": ["one"]}, overrides=["model.path=m", "input.overlong=skip"])


@pytest.mark.parametrize("old", ["train.taps", "draft.max_len", "model.load"])
def test_train_refuses_an_old_key(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        composed("train", [f"{old}=1"], schema=TrainRun)
    assert str(caught.value) == message(old)
    assert cli.main(["train", *GIVEN, f"{old}=1"]) == 2
    assert line(capsys) == message(old)


@pytest.mark.parametrize(("old", "new"), RENAMED_VALUES["draft.tree.rank"].items())
def test_an_old_value_is_refused_with_its_new_name(old: str, new: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["draft=tree", "draft.path=head", f"draft.tree.rank={old}"])
    assert str(caught.value) == f"draft.tree.rank={old} is called {new} since version 0.2; write draft.tree.rank={new}"


OLD_CONFIG: dict[str, Any] = {
    "model": {"path": "m", "load": "dummy", "dtype": "float32"},
    "draft": {
        "name": "eagle3", "max_len": 5, "min_ngram": 2, "max_ngram": 6, "sink": 4, "window": 512, "path": "head",
        "tree": {"topk": 4, "depth": None, "nodes": 16, "rank": "products"},
    },
    "decode": {"n": 3, "opt": {"argmax": False, "dead_rows": True, "uniform_slots": True, "dead_positions": None}},
    "packing": {"slots": 8, "pages": None, "prefill_tokens": 4096},
    "input": {"path": "i.parquet", "overlong": "skip"},
    "output": {"dir": "o"},
    "resume": {"retry": "none", "again": 2},
}  # fmt: skip
"""A configuration as version 0.1 saved it."""


def test_a_manifest_of_version_0_1_is_read_with_the_present_names() -> None:
    values = {
        "version": 2, "fingerprint": {"input.overlong": "skip", "decode.n": "3"}, "config": OLD_CONFIG,
        "recorded": {"batchspec": "0.1.0"}, "num_rows": 9, "shard_rows": 4, "publish": "link",
        "files": [], "job": "0123", "began": [], "ready": True,
    }  # fmt: skip
    found = Manifest.from_json(json.dumps(values).encode(), "out/_batchspec/manifest.json")
    assert found.fingerprint == {"input.on_overlong": "skip", "decode.n": "3"}
    config = from_dict(found.config)
    assert (config.model.load_format, config.draft.num_speculative_tokens, config.draft.sink_tokens) == ("dummy", 5, 4)
    assert (config.draft.prompt_lookup_min, config.draft.prompt_lookup_max) == (2, 6)
    assert (config.draft.tree.rank, config.draft.tree.nodes) == ("prob", 16)
    assert (config.ablation.argmax, config.ablation.dead_rows, config.ablation.dead_positions) == (False, True, None)
    assert (config.packing.max_num_seqs, config.packing.max_num_batched_tokens) == (8, 4096)
    assert (config.input.on_overlong, config.resume.retry_id, config.decode.n) == ("skip", 2, 3)


def test_a_configuration_of_today_is_left_as_it_is() -> None:
    today = asdict(RunConfig())
    assert upgraded(today) == today
    assert upgraded_keys({"decode.n": 1, "train.taps": [2]}) == {"decode.n": 1, "train.aux_layer_ids": [2]}


def test_a_new_name_wins_over_the_old_one() -> None:
    both = {"packing": {"slots": 8, "max_num_seqs": 4}, "decode": {"opt": {"argmax": False}}, "ablation": {"argmax": True}}
    assert upgraded(both) == {"packing": {"max_num_seqs": 4}, "decode": {}, "ablation": {"argmax": True}}
    assert both["packing"] == {"slots": 8, "max_num_seqs": 4}, "what was given is left as it is"


def test_every_optimisation_is_on_unless_all_are_switched_off() -> None:
    assert compose([]).ablation == compose(["ablation=none"]).ablation == RunConfig().ablation
    off = compose(["ablation=all_off"]).ablation
    assert [off.dead_rows, off.argmax, off.uniform_slots] == [False] * 3
    assert compose(["ablation=all_off", "ablation.argmax=true"]).ablation.argmax
