"""Every key is documented once, at its field: conf/README.md and the help of run, plan, submit and train are made from that."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, get_type_hints

import pytest

from batchspec import cli
from batchspec.commands.reference import PAGE, help_text, keys_for, page
from batchspec.config.compose import compose, composed
from batchspec.config.key import value_of
from batchspec.config.reference import option_comment, options
from batchspec.config.schema import KEYS as JOB_KEYS
from batchspec.config.schema import RunConfig
from batchspec.config.train_schema import READ, UNREAD, TrainRun
from batchspec.config.typed import keys

KEYS = {command: {key.name: key for key in keys_for(command)} for command in ("run", "train")}


def test_the_page_of_all_keys_is_what_the_dataclasses_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m batchspec.commands.reference`"


def test_every_key_exists() -> None:
    assert list(KEYS["run"]) == keys()
    read = [key for key in keys(TrainRun()) if key in READ or (not key.startswith("draft.") and key not in UNREAD)]
    assert list(KEYS["train"]) == read
    text = page()
    assert all(f"| `{name}` |" in text for name in KEYS["run"] | KEYS["train"])


def test_the_first_sentence_is_one_line() -> None:
    for key in [*KEYS["run"].values(), *KEYS["train"].values()]:
        assert 10 < len(key.summary) <= 150, key.name
        assert key.summary.endswith("."), key.name
        assert not key.details or key.details.endswith("."), key.name
        assert "\n" not in key.summary + key.details, key.name


def test_the_default_is_what_a_job_gets_that_gives_nothing() -> None:
    job, training = compose([]), composed("train", [], schema=TrainRun)
    assert {name: key.default for name, key in KEYS["run"].items()} == {name: value_of(job, name) for name in KEYS["run"]}
    assert {name: key.default for name, key in KEYS["train"].items()} == {
        name: value_of(training, name) for name in KEYS["train"]
    }


def test_a_key_that_takes_values_of_several_types_has_them_in_words() -> None:
    def untyped(config: Any, prefix: str = "") -> list[str]:
        hints = get_type_hints(type(config))
        groups = [name for name, hint in hints.items() if hasattr(hint, "__dataclass_fields__")]
        inner = [key for name in groups for key in untyped(getattr(config, name), f"{prefix}{name}.")]
        return inner + [prefix + name for name, hint in hints.items() if hint is Any]

    assert set(untyped(RunConfig())) == {name for name, key in JOB_KEYS.items() if key.form}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.dtype", "auto, float32, bfloat16, float64"),
        ("model.max_len", "int >= 2, or null"),
        ("decode.top_p", "float above 0, up to 1"),
        ("decode.n", "int 1 .. 4,096"),
        ("decode.seed", "int of 64 bits"),
        ("decode.stop", "list of strings"),
        ("draft.synthetic", "list of floats, or null"),
        ("input.columns", "map from names to names"),
        ("input.chat", "bool"),
    ],
)
def test_a_type_is_said_with_its_limits(name: str, kind: str) -> None:
    assert KEYS["run"][name].type == kind


def test_each_key_names_the_drafters_that_read_it() -> None:
    assert KEYS["run"]["draft.tree.topk"].drafters == ("eagle3",)
    assert KEYS["run"]["draft.num_speculative_tokens"].drafters == ()


def test_every_option_of_a_group_has_a_description() -> None:
    for group, names in options().items():
        for name in names:
            assert option_comment(group, name).endswith("."), f"{group}={name}"


@pytest.mark.parametrize("command", cli.TAKE_KEYS)
def test_help_shows_every_key_with_its_default_and_its_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for key in keys_for(command):
        default = key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)
        assert f" {key.name}={default} {key.summary.removesuffix('.')}" in said


def test_help_is_as_wide_as_it_is_told() -> None:
    for width in (100, 140):
        lines = help_text("run", width=width).split("\n")
        assert max(len(line) for line in lines[lines.index("Keys (key=default):") :] if line.startswith("  ")) <= width


@pytest.mark.parametrize("words", [["batchspec.run"], *(["batchspec.cli", command] for command in cli.TAKE_KEYS)])
def test_help_needs_neither_torch_nor_hydra(words: list[str]) -> None:
    code = (
        f"import runpy, sys; sys.argv = {words} + ['--help']\n"
        f"try: runpy.run_module({words[0]!r}, run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'pyarrow', 'polars'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model.path=null" in done.stdout


def test_keys_that_few_jobs_set_are_listed_last() -> None:
    """In the help and on the page; each of them is a key."""
    advanced = [key.name for key in keys_for("run") if key.advanced]
    assert len(advanced) > 20
    for text in (help_text("run"), page().partition("## Keys of `batchspec train`")[0]):
        places = [max(text.find(f"  {name}="), text.find(f"| `{name}` |")) for name in ("output.dir", "device", *advanced)]
        assert places == sorted(places)
        assert places[0] > 0
