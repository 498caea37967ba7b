"""Text of others on a terminal and in Markdown: what the functions do, and a whole job whose every name is hostile."""

from __future__ import annotations

import ast
import io
import json
import re
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec import cli, run
from batchspec.console import terminal
from batchspec.console.text import counted, for_markdown, for_terminal, one_line
from batchspec.data.runstate.output_folder import OutputFolder
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import drawing, run_apart
from tests.house.test_imports import module_of, sources

RED = "\x1b[31m\x9b2J\r\x07\u202e\u2028\u200b"
HEADING = f"a\n# Owned\n\n<img src=x>|**b**`c`{RED}"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def test_control_and_direction_characters_are_written_out() -> None:
    assert for_terminal("a\tb\n\x1b[31m\r\x7f\x9b\u202e\u2067\ud800") == "a\tb\n\\x1b[31m\\r\\x7f\\x9b\\u202e\\u2067\\ud800"
    assert for_terminal("na\u00efve \u65e5\u672c \U0001f468\u200d\U0001f469 \u0646\u200c") == (
        "na\u00efve \u65e5\u672c \U0001f468\u200d\U0001f469 \u0646\u200c"
    )


def test_a_count_of_one_has_no_plural() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]


def test_one_line_is_one_line_and_short() -> None:
    assert one_line("a\nb\tc\u2028d") == "a\\nb\\tc\\u2028d"
    assert one_line("x" * 50, 10) == "xxxxxxxxxx... (40 more characters)"
    assert one_line(7) == "7"


@given(st.text(st.characters(), max_size=40))
def test_nothing_raw_is_left_of_any_text(text: str) -> None:
    for shown in (for_terminal(text).replace("\n", "").replace("\t", ""), one_line(text), for_markdown(text)):
        assert not RAW.search(shown)
        shown.encode()
    assert "\n" not in one_line(text) + for_markdown(text)


@given(st.text("`ab |<*_ \\", max_size=12))
def test_a_code_span_ends_where_it_is_meant_to(text: str) -> None:
    """CommonMark 6.1: a span ends at the first run of backticks as long as the one it began with."""
    span = for_markdown(text)
    fence = re.match("`+", span)
    assert fence is not None
    inner = span[len(fence[0]) : -len(fence[0])]
    assert span == f"{fence[0]}{inner}{fence[0]}"
    assert fence[0] not in re.findall("`+", inner)
    assert inner.strip() == text.strip()


def test_columns_stay_in_their_columns_whatever_a_cell_holds() -> None:
    lines = terminal.table([("name", "n"), ("a\nb\x1b[0m", 12), ("c" * 200, 3)], limit=20)
    assert len(lines) == 3
    assert lines[1].startswith("  a\\nb\\x1b[0m ")
    assert all(len(line) == len(lines[0]) for line in lines)


def test_what_the_stream_cannot_encode_is_written_out() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal.say("na\u00efve\nrow", stream=stream)
    stream.seek(0)
    assert stream.read() == "na\\xefve\\nrow\n"


def test_json_is_ascii_and_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_json({"id": HEADING + "\x7f"})
    said = capsys.readouterr().out
    assert said.isascii()
    assert not RAW.search(said.rstrip("\n"))
    assert json.loads(said) == {"id": HEADING + "\x7f"}


def test_a_crash_of_a_command_prints_no_raw_data_either(capsys: pytest.CaptureFixture[str]) -> None:
    def crash() -> int:
        raise RuntimeError(HEADING)

    assert cli.guarded(crash) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert not RAW.search(said)


@pytest.mark.second
def test_only_one_module_writes_to_the_terminal() -> None:
    """Whatever is printed goes through `terminal`; template_process speaks to its parent over a pipe."""
    found = set()
    for path in sources():
        module = module_of(path)
        if module.startswith("kernels") or module in ("console.terminal", "text.template_process"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("print", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc", "warnings.warn"):
                    found.add(f"{module}: {called}")
    assert found == set()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A finished job whose file, ids, groups, columns, prompts and host are hostile, and the words that run it."""
    folder = tmp_path_factory.mktemp("hostile")
    model = make_tokenizer(make_checkpoint(folder / "model", "llama"))
    rows = {
        "id": [f"{HEADING}{i}" for i in range(4)] + ["x" * 5000],
        "prompt": [f"say {HEADING}", None, "again", "and again", "once more"],
        f"group\n{RED}": [f"g{HEADING}", "b", "b", f"g{HEADING}", "c"],
    }
    name = f"in\n# Owned {RED}`|`.parquet"
    pl.DataFrame(rows).write_parquet(folder / name)
    words = [
        f"model.path={model}", f'input.path="{folder}/in*.parquet"', f"output.dir={folder}/out", "output.token_ids=true",
        "decode.max_new_tokens=6", "packing.max_num_seqs=2", "output.shard_rows=2", 'decode.stop=["```\\n# Owned"]',
    ]
    with drawing():
        assert run.main(words) == 0
    said = {"host": f"node{HEADING}", "pid": 7, "end": "failed", "said": HEADING, "task": RED, "at": 5.0}
    OutputFolder(folder / "out").heartbeats().write(said)
    return folder, words


@pytest.mark.second
def test_no_command_prints_what_a_job_holds_as_it_is(
    hostile: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = hostile
    out, group = str(folder / "out"), f"group\n{RED}"
    capsys.readouterr()
    other = tmp_path / f"x{RED}.jsonl"
    commands = [
        ["run", *words], ["run", *words, "decode.seed=9"], ["run", f"input.{RED}=3"], ["run", "model.path=a\nb", *words[1:]],
        ["plan", *words], ["status", out], ["status", out, "--json"], ["stats", out], ["stats", out, "--by", group],
        ["stats", out, "--by", HEADING], ["stats", out, "--json", "--by", group], ["stats", HEADING], [HEADING],
        ["inspect", out, f"{HEADING}0"], ["inspect", out, f"{HEADING}1"], ["inspect", out, f"{HEADING}9"],
        ["inspect", out, f"{HEADING}0", "--sample", "3"], ["verify", out], ["verify", out, "--files"],
        ["export", out, "--to", "openai", str(other)], ["export", "--from-openai", str(other), str(tmp_path / "y.parquet")],
        ["report", out],
    ]
    for command in commands:
        cli.main(command)
        both = capsys.readouterr()
        said = both.out + both.err
        assert said, command
        assert not RAW.search(said), (command, RAW.search(said), said)
        assert not re.search("^# ?Owned", said, re.MULTILINE), (command, said)
        assert len(both.err.splitlines()) <= 8, both.err


@pytest.mark.second
def test_a_run_in_another_process_prints_nothing_raw(hostile: tuple[Path, list[str]], tmp_path: Path) -> None:
    _, words = hostile
    _, said = run_apart([*words, "cluster.workers=2"], tmp_path / "log")
    assert re.search(r"^\[[01]\] ", said, re.MULTILINE)
    assert not RAW.search(said)


def test_no_page_of_it_holds_markup_of_others(hostile: tuple[Path, list[str]]) -> None:
    out = hostile[0] / "out"
    card = (out / "README.md").read_text(encoding="utf-8")
    assert not RAW.search(card)
    headings = re.findall("^#+ .*", card, re.MULTILINE)
    assert headings == [
        "# Completions by `model`", "## Columns", "## Train on it", "## Run it again", "# @package _global_"
    ]
    assert card.count("<img") == card.count("`<img") + card.count("\\n<img"), "in a code span alone"
    assert str(hostile[0]) not in card, "a path of this machine"
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert not RAW.search(page)
    assert "<img" not in page


def test_what_an_error_advises_to_install_is_on_an_index() -> None:
    """batchspec itself is on none: its extras are for clones."""
    advised = [found for path in sources() for found in re.findall(r"pip install [^,\"\n]*", path.read_text(encoding="utf-8"))]
    assert len(advised) >= 4
    assert not [line for line in advised if "batchspec" in line]
