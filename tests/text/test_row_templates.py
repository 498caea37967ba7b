"""input.prompt and input.system as templates: a row's columns become its prompt, exactly as if a column held it."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, cast

import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchspec
from batchspec import cli
from batchspec.config.schema import InputConfig, RunConfig
from batchspec.data.dataset.reader import open_source, table_source
from batchspec.errors import ConfigError, InputError
from batchspec.packing.admit import Admission
from batchspec.packing.row_templates import RowTemplates
from batchspec.records import Completion, Request
from batchspec.text import templates as templates_module
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_tokenizer
from tests.helpers.stand_ins import ByteTokenizer, small_spec


@cache
def templates_of(prompt: str | None, system: str | None, chat: bool, *columns: tuple[str, str | None]) -> RowTemplates:
    """Each starts a process, which tests may share."""
    return RowTemplates(InputConfig(prompt=prompt, system=system, chat=chat, columns=dict(columns)))


def admitted(data: Any, **keys: Any) -> list[Request | Completion]:
    """The rows of a table, or of a file at a path, with these keys of `input`."""
    config = RunConfig(input=InputConfig(path=str(data), **keys))
    config.decode.max_new_tokens = 16
    source = table_source(data) if isinstance(data, pa.Table) else open_source(config.input)
    own = config.input
    templates = templates_of(own.prompt, own.system, own.chat, *own.columns.items())
    columns = templates.map_columns(source.schema, requests=source.filled_by_requests is not None)
    admission = Admission(
        config, source=source, columns=columns, spec=small_spec(), tokenizer=cast(Any, ByteTokenizer()), templates=templates
    )
    return [made for shard in source.shards(100) for made in admission.admit(shard)]


def said(made: Request | Completion) -> str:
    """A row's prompt, with < and > around the turns of a chat; of an error row its code and message."""
    if isinstance(made, Request):
        marks = {256: "<", 257: ">"}
        return bytes(ord(marks.get(token, chr(token))) for token in made.prompt_ids.tolist()).decode()
    assert made.error is not None
    assert "\n" not in made.error.message
    return f"{made.error.code}: {made.error.message}"


def prompts(data: Any, prompt: str, **keys: Any) -> list[str]:
    return [said(made) for made in admitted(data, prompt=prompt, **keys)]


def refusal(data: Any, **keys: Any) -> str:
    """The one line with which the keys are refused before any row is read."""
    with pytest.raises((ConfigError, InputError)) as refused:
        admitted(data, **keys)
    assert "\n" not in str(refused.value)
    return str(refused.value)


ONE = pa.table({"q": ["Name a sea."], "a": ["Aral"], "count": [3]})
OF_Q: dict[str, Any] = {"columns": {"prompt": "q"}, "chat": True}


@settings(max_examples=20)
@given(st.lists(st.tuples(st.text(max_size=9), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=6))
def test_values_come_into_the_prompt_as_they_are(rows: list[tuple[str, int]]) -> None:
    """Marks of Jinja in a value, line breaks and quotes too."""
    texts, numbers = zip(*rows, strict=True)
    wanted = [f"Q: {text} {{n}} #{number}\n" for text, number in rows]
    assert prompts(pa.table({"q": texts, "m": pa.array(numbers, pa.int64())}), "Q: {{ q }} {n} #{{ m }}\n") == wanted


def test_values_are_parsed_whatever_the_format_of_the_file(tmp_path: Path) -> None:
    row = {"meta": {"topic": "seas", "left_out": None}, "choices": ["a", "b"], "m": 3}
    listed = "{% for c in choices %}{{ loop.index }}{{ c }}{% endfor %}"
    template = f"{{{{ meta.topic }}}}{{{{ meta.left_out | default('-') }}}}{listed}{{{{ m + 1 }}}}"
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    pl.DataFrame([row]).write_parquet(tmp_path / "in.parquet")
    for name in ("in.jsonl", "in.parquet"):
        assert prompts(tmp_path / name, template) == ["seas-1a2b4"]


def test_times_and_decimals_are_text_and_maps_are_objects() -> None:
    table = pa.table(
        {
            "at": [datetime(2024, 5, 1, 12, 30)], "price": [Decimal("1.50")],
            "map": pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string())), "of_parts": pa.array(["x"]).dictionary_encode(),
        }
    )
    assert prompts(table, "{{ at }} {{ price }} {{ map.k }} {{ of_parts }}") == ["2024-05-01 12:30:00 1.50 v x"]


@pytest.mark.second
def test_a_null_costs_its_row_unless_the_template_says_what_to_write_then(tmp_path: Path) -> None:
    row = {"q": "two", "a": None, "meta": {"b": None, "c": 1}}
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    pl.DataFrame([row], schema_overrides={"a": pl.String}).write_parquet(tmp_path / "in.parquet")
    for path in (tmp_path / "in.jsonl", tmp_path / "in.parquet"):
        handled = "{{ q }}{% if a %} {{ a }}{% endif %} {{ meta.b or '-' }} {{ a | default('?') }}{% if a is none %}!{% endif %}"
        assert prompts(path, handled) == ["two - ?!"]
        (found,) = prompts(path, "{{ q }}{% if a or meta.b ~ 'x' %}{% endif %}")
        assert found.startswith("null_column: ")
        assert found.endswith(
            "meta.b is null, and input.prompt needs its value; drop the row, or have the template say what to write then: "
            "{% if meta.b %}"
        )
    pl.DataFrame({"q": ["one", "two"], "a": ["x", ""]}).write_csv(tmp_path / "in.csv")
    assert prompts(tmp_path / "in.csv", "{{ q }} {{ a or '-' }}") == ["one x", "two -"]
    assert prompts(tmp_path / "in.csv", "{{ q }} {{ a }}")[1].startswith("null_column: ")


@pytest.mark.parametrize(
    ("cell", "template", "problem"),
    [
        ({"b": 1}, "{{ x.c }}", "template_error: input.prompt refuses the row (x has no field 'c'); correct"),
        ([1, None], "{{ x | join }}", "null_column: x[1] is null, and input.prompt needs its value; drop"),
        ({"b": 1}, "{{ x.get('c') }}", "null_column: x.c is null, and input.prompt needs its value; "),
        (1, "{{ x }}{{ none }}", "template_error: input.prompt refuses the row (it writes a null, which it may test: "),
        (1, "{{ x }}{{ range }}", "template_error: input.prompt refuses the row (it writes a function); correct the row"),
        (1, "{{ x + 'a' }}", "template_error: input.prompt refuses the row (unsupported operand type"),
        (1, "{{ raise_exception('too\nbad') if x }}", "template_error: input.prompt refuses the row (too bad); correct the row"),
        ("", "{{ x }}", "empty_prompt: prompt is empty; drop the row"),
    ],
)
def test_what_is_not_there_costs_its_row_instead_of_becoming_none(cell: Any, template: str, problem: str) -> None:
    (found,) = prompts(pa.table({"x": [cell]}), template)
    assert found.replace("table row 0 (id 'table:0'): ", "").startswith(problem)


def test_text_that_is_not_utf_8_costs_its_row() -> None:
    table = pa.table({"q": pa.array([b"\xff", b"good"], pa.binary()).view(pa.string())})
    bad, good = prompts(table, "{{ q }}")
    assert bad.startswith("bad_text: ")
    assert good == "good"


def test_a_time_that_python_does_not_hold_costs_its_row() -> None:
    (bad,) = prompts(pa.table({"at": pa.array([1 << 62], pa.timestamp("s"))}), "{{ at }}")
    assert bad.startswith("bad_value: ")


@pytest.mark.second
def test_a_template_that_loops_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates_module, "CPU_S", 1)
    template = "{% for a in range(m) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ m }}"
    one, loops, two = prompts(pa.table({"m": [1, 99999, 2]}), template)
    assert (one, two) == ("1", "2")
    assert "input.prompt refuses the row (it computes for more than 1 s)" in loops


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"prompt": "{{ Q }}"}, "input.prompt reads 'Q', and the input has no such column; did you mean 'q'? its columns are"),
        ({"prompt": "{{ q }}{% include 'x' %}"}, "input.prompt includes another template, which is not supported"),
        ({"prompt": "{{ q"}, "input.prompt is no valid Jinja template, line 1: "),
        ({"prompt": "{{ q | shuffled }}"}, "input.prompt is no valid Jinja template: No filter named 'shuffled'"),
        ({"prompt": "{{ q | random }}"}, "input.prompt is no valid Jinja template: No filter named 'random'"),
        ({"prompt": "q"}, "input.prompt=q reads no column, so that all prompts would be equal; write columns as {{ q }}, or "),
        ({"prompt": ""}, "input.prompt= reads no column"),
        ({"prompt": "@no.j2"}, "input.prompt=@no.j2: cannot be read (No such file or directory); give the path of a Jinja "),
        ({"system": "{{ topic }}", **OF_Q}, "input.system reads 'topic', and the input has no such column; its columns are"),
        ({"system": 'As {{ {"a": 1} }}', **OF_Q}, "input.system has marks of Jinja ({{, {%) and reads no column; if it is "),
        ({"system": "{#1 is me", **OF_Q}, "input.system is no valid Jinja template, line 1: "),
        ({"prompt": "{{ q }}", **OF_Q}, "exactly one prompt is allowed but input.prompt is given beside prompt (column 'q'); "),
    ],
)
def test_a_template_that_does_not_fit_is_refused_before_the_job_starts(keys: dict[str, Any], problem: str) -> None:
    assert refusal(ONE, **keys).startswith(problem)


def test_bytes_are_no_text_for_a_template() -> None:
    images = pa.table({"image": [{"bytes": b"1", "path": "x"}]})
    problem = refusal(images, prompt="{{ image.path }}")
    assert problem.startswith("input.prompt reads column 'image', whose type struct<bytes: binary, path: string> is no text; ")


@pytest.mark.parametrize("name", ["prompt", "messages", "prompt_ids"])
def test_a_column_of_prompts_beside_the_template_is_refused_until_it_is_hidden(name: str) -> None:
    cell = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "prompt_ids": [1]}[name]
    table = pa.table({"q": ["y"], name: [cell]})
    problem = refusal(table, prompt="{{ q }}")
    assert f"beside {name} (column '{name}'); set input.columns.{name}=null" in problem
    assert prompts(table, "{{ q }}", columns={name: None}) == ["y"]


def test_a_hidden_column_may_be_read_under_its_name() -> None:
    assert prompts(pa.table({"prompt": ["y"]}), "As told: {{ prompt }}", columns={"prompt": None}) == ["As told: y"]


def test_openai_requests_are_refused_in_one_line(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    problem = refusal(tmp_path / "in.jsonl", prompt="{{ messages }}")
    assert problem.startswith("input.prompt makes prompts of columns, and the input holds OpenAI's batch requests")


def test_a_file_holds_the_template_and_the_line_break_at_its_end_is_the_editor_s(tmp_path: Path) -> None:
    texts = ["Q: {{ q }}\n", "Q: {{ q }}\r\n", "Q: {{ q }}\n\n", "{{ q }}"]
    for place, text in enumerate(texts):
        (tmp_path / f"{place}.j2").write_bytes(text.encode())
    made = [prompts(pa.table({"q": ["x"]}), f"@{tmp_path}/{place}.j2") for place in range(len(texts))]
    assert made == [["Q: x"], ["Q: x"], ["Q: x\n"], ["x"]]


def test_with_chat_the_text_is_the_user_turn() -> None:
    assert prompts(ONE, "{{ q }} {{ a }}", chat=True) == ["<Name a sea. Aral><"]


def test_a_system_prompt_is_rendered_for_each_row_that_has_none_of_its_own() -> None:
    chats = pa.array(
        [[{"role": "user", "content": "1"}], [{"role": "system", "content": "S"}, {"role": "user", "content": "2"}]] * 2,
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
    )
    table = pa.table({"messages": chats, "topic": ["seas", None, None, "x"], "system": [None, None, "own", "own"]})
    made = [said(each) for each in admitted(table, system="On {{ topic }}.")]
    assert made == ["<On seas.><1><", "<S><2><", "<own><1><", "<own><2><"]
    without = [said(each) for each in admitted(table.drop(["system"]), system="On {{ topic }}.")]
    assert without[2].startswith("null_column: table row 2 (id 'table:2'): topic is null, and input.system needs its value")


@pytest.mark.parametrize("text", ["Be brief.", "{a} %} $x }}\n", "@file"])
def test_a_system_prompt_without_marks_of_jinja_stays_as_it_is(text: str) -> None:
    assert [said(each) for each in admitted(ONE, system=text, **OF_Q)] == [f"<{text}><Name a sea.><"]


def test_marks_of_jinja_in_a_plain_system_prompt_go_between_raw_marks() -> None:
    assert [said(each) for each in admitted(ONE, system="{% raw %}{{1}}{% endraw %}", **OF_Q)] == ["<{{1}}><Name a sea.><"]


def test_a_column_named_like_a_function_of_jinja_is_the_column() -> None:
    assert prompts(pa.table({"range": [5], "dict": ["d"]}), "{{ range }}{{ dict }}") == ["5d"]


def test_options_of_a_row_work_beside_templates() -> None:
    (made,) = admitted(pa.table({"q": ["x"], "max_new_tokens": [5], "id": ["own"]}), prompt="{{ q }} {{ max_new_tokens }}")
    assert isinstance(made, Request)
    assert (made.request_id, made.max_new_tokens, said(made)) == ("own", 5, "x 5")


# Whole jobs


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    model = make_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    keys = ["decode.max_new_tokens=4", "draft=none", "packing.max_num_seqs=4", "output.token_ids=true", "output.prompt_ids=true"]
    return [f"model.path={model}", *keys]


ROWS = pl.DataFrame({"q": ["Name a sea.", "Name a {{ river }}.", None, "y" * 5000], "topic": ["seas", "rivers", "hills", "y"]})
TEMPLATE = "Question: {{ q }}\nAnswer:"
KEYS = [f"input.prompt='{TEMPLATE}'", "input.system='On {{ topic }}.'", "input.chat=true", "output.passthrough=[topic]"]


def as_columns() -> pl.DataFrame:
    """The same rows with their texts as columns."""
    prompt = "Question: " + pl.col("q") + "\nAnswer:"
    return ROWS.select("topic", prompt=prompt, system="On " + pl.col("topic") + ".")


def same(found: pl.DataFrame, wanted: pl.DataFrame) -> bool:
    """Whether both jobs had the same prompts, answers and bad rows, apart from the code for a null."""
    code = pl.col("error").struct.field("code").replace("null_prompt", "null_column")
    one, other = (
        each.select("row_index", "status", "messages", "prompt_ids", "token_ids", "topic", code).sort("row_index")
        for each in (found, wanted)
    )
    return one.equals(other)


def test_a_job_s_output_is_that_of_the_texts_as_columns(words: list[str]) -> None:
    found = batchspec.generate(ROWS, overrides=[*words, *KEYS])
    assert [turn["content"] for turn in found["messages"][1]][:2] == ["On rivers.", "Question: Name a {{ river }}.\nAnswer:"]
    assert found["error"].struct.field("code").to_list() == [None, None, "null_column", "too_long"]
    wanted = batchspec.generate(as_columns(), overrides=[*words, "input.chat=true", "output.passthrough=[topic]"])
    assert same(found, wanted)


@pytest.mark.second
def test_an_engine_renders_each_call_s_rows_with_one_process(words: list[str]) -> None:
    with batchspec.Engine([*words, *KEYS]) as engine:
        wanted = batchspec.generate(ROWS, overrides=[*words, *KEYS])
        assert same(engine.generate(ROWS), wanted)
        process = engine._opened.admission.templates._templates._process
        assert process is not None
        assert same(engine.generate(ROWS.to_arrow()), wanted)
        assert engine._opened.admission.templates._templates._process is process
        with pytest.raises(ConfigError, match=r"input.system reads 'topic'"):
            engine.generate(ROWS.drop("topic"))


@pytest.mark.second
def test_later_turns_keep_the_system_prompt_of_their_row(words: list[str]) -> None:
    seen = []

    def next_turn(turn: batchspec.Turn) -> list[dict[str, str]] | None:
        seen.append([message["content"] for message in turn.messages][:2])
        return [{"role": "user", "content": "And now?"}] if turn.number == 0 else None

    with batchspec.Engine([*words, *KEYS]) as engine:
        found = engine.converse(ROWS[:1], next_turn)
    assert seen == [["On seas.", "Question: Name a sea.\nAnswer:"], ["On seas.", "And now?"]]
    assert [turn["content"] for turn in found["messages"][1]][:2] == ["On seas.", "And now?"]


@pytest.mark.second
def test_worker_processes_render_and_a_changed_template_is_another_job(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ROWS.write_parquet(tmp_path / "in.parquet")
    (tmp_path / "prompt.j2").write_text(TEMPLATE + "\n")
    paths = [f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out", f"input.prompt=@{tmp_path}/prompt.j2"]
    job = [*words, *KEYS, *paths]
    assert cli.main(["run", *job, "input.num_workers=1"]) == 0
    assert same(pl.read_parquet(tmp_path / "out/data/*.parquet"), batchspec.generate(ROWS, overrides=[*words, *KEYS]))
    capsys.readouterr()
    (tmp_path / "prompt.j2").write_text(TEMPLATE + " \n")
    assert cli.main(["run", *job]) == 2
    assert "input.prompt" in capsys.readouterr().err


def test_plan_counts_the_tokens_of_rendered_prompts(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for rows, keys in ((ROWS, KEYS), (as_columns(), ["input.chat=true"])):
        rows[:2].write_parquet(tmp_path / "in.parquet")
        assert cli.main(["plan", *words, f"input.path={tmp_path}/in.parquet", *keys]) == 0
        lines = capsys.readouterr().out.splitlines()
        plans.append([line for line in lines if line.startswith(("prompts", " ", "shape", "pages"))])
    assert plans[0] == plans[1]
