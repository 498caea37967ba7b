"""`batchspec`: words go to the module of the command, and only that module is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from batchspec import __version__, cli
from batchspec.errors import ConfigError, OutputError


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the stand-in of `stats` was called with."""
    calls: list[list[str]] = []

    def main(argv: list[str]) -> int:
        calls.append(argv)
        if argv == ["elsewhere"]:
            raise OutputError("elsewhere holds no job; give the folder of one")
        return 7

    module = ModuleType("batchspec.commands.stats")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "batchspec.commands.stats", module)
    return calls


def test_a_command_gets_the_words_after_it_and_gives_the_exit_code(heard: list[list[str]]) -> None:
    assert cli.main(["stats", "out", "--json"]) == 7
    assert heard == [["out", "--json"]]


def test_an_error_of_a_command_is_one_line(heard: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "elsewhere"]) == 2
    assert capsys.readouterr().err == "batchspec: elsewhere holds no job; give the folder of one\n"


def test_an_unknown_command_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stast"]) == 2
    assert capsys.readouterr().err == "batchspec: stast is not a command; did you mean stats?\n"
    assert cli.main(["stauts"]) == 2
    assert capsys.readouterr().err == "batchspec: stauts is not a command; did you mean status?\n"
    assert cli.main(["xyzzy"]) == 2
    assert "commands: run, plan, status, stats, verify, bench, doctor" in capsys.readouterr().err


MISTAKES = {
    "stats": "required: OUT; `batchspec stats --help`",
    "stats --by": "argument --by: expected one argument (a value that begins with - follows =, as in '--by=-...');",
    "export out --to chat c.jsonl --score -LENGTH(completion)": "a value that begins with - follows =, as in '--score=-...'",
    "inspect out id --sample x": "argument --sample: invalid int value: 'x'; `batchspec inspect --help`",
    "status out --watch 0": "--watch 0: must be at least 1 second; `batchspec status --help`",
    "verify out --dtype int8": "argument --dtype: invalid choice: 'int8' ",
    "export out --to zip file": "argument --to: invalid choice: 'zip' ",
    "export out file": "give OUT --to FORMAT FILE.jsonl, or --from-openai FILE.jsonl OUT.parquet; `batchspec export --help`",
    "prompts": "required: FILE.parquet; `batchspec prompts --help`",
    "probe model head --rows many": "argument --rows: invalid int value: 'many'; `batchspec probe --help`",
    "bench out.jsonl name --gen": "argument --gen: expected one argument (a value that begins with - follows =",
    "plan --config-dir": "argument --config-dir/-cd: expected one argument; `batchspec run --help`",
    "submit --cfg all-of-it": "argument --cfg/-c: invalid choice: 'all-of-it' ",
    "run --conf x": "ambiguous option: --conf could match ",
    "train --layers": "--layers is not an option of train; keys are written without dashes, `batchspec train --help`",
    "--versoin": "unrecognized arguments: --versoin; `batchspec --help`",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_in_the_words_of_a_command_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("batchspec: ")
    assert said.count("\n") == 1
    assert MISTAKES[words] in said
    assert "--help` " in said


def test_help_has_a_line_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in cli.COMMANDS)


def test_the_package_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "batchspec", "stast"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "batchspec: stast is not a command; did you mean stats?\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"batchspec {__version__}\n"


def test_run_and_plan_take_hydra_s_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "decode.max_tokns=3"]) == 2
    assert "did you mean decode.max_new_tokens?" in capsys.readouterr().err
    assert cli.main(["plan", "--cfg", "job", "+job=demo"]) == 0
    assert "path: smollm2-135m" in capsys.readouterr().out


def test_listing_commands_and_options_imports_no_heavy_package() -> None:
    code = "import sys, batchspec.cli; batchspec.cli.main([]); assert not {'torch', 'hydra', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.second
def test_every_command_s_module_can_be_imported() -> None:
    modules = [module for module, _ in cli.COMMANDS.values()]
    code = f"import importlib; assert all(callable(importlib.import_module(name).main) for name in {modules})"
    subprocess.run([sys.executable, "-c", code], check=True)


GIVEN = ["model.path=m", "input.path=no/such.parquet", "output.dir=o"]
MISSING = "input.path no/such.parquet: does not exist"


@pytest.mark.second
@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        *((command, ["max_tokens=5"], "max_tokens") for command in cli.TAKE_KEYS),
        *((command, GIVEN, MISSING) for command in cli.TAKE_KEYS),
        *((command, [*GIVEN, "device=cpu", "cluster.workers=2"], MISSING) for command in ("run", "plan", "submit")),
        ("train", [*GIVEN, "train.lr=-1"], "train.lr=-1.0 must be"),
        (
            "train", [*GIVEN, "draft=lookup"],
            "draft=lookup cannot be trained; use draft=eagle3, draft=parallel, draft=block or draft=mtp",
        ),
    ],
)
def test_a_wrong_key_or_a_missing_input_is_refused_before_torch_is_imported(command: str, words: list[str], said: str) -> None:
    code = (
        f"import sys; from batchspec.cli import main; code = main({[command, *words]!r}); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()  # none from workers: there are none yet
    assert said in line


@pytest.mark.parametrize(
    ("raised", "said"),
    [(ConfigError("bad\x1b[2J\nkey"), r"mine.py: bad\x1b[2J\nkey"), (KeyboardInterrupt(), "mine.py: interrupted")],
)
def test_a_script_ends_with_one_line_after_an_error_or_ctrl_c(
    raised: BaseException, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(words: Sequence[str]) -> None:
        assert words == ["a=1"]
        raise raised

    monkeypatch.setattr(sys, "argv", ["jobs/mine.py", "a=1"])
    with pytest.raises(SystemExit) as ended:
        cli.script(fails, "what it does")
    assert ended.value.code == said
