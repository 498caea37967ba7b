"""Whole jobs of grammars and recursive schemas: every completed row is a text of its grammar, whatever drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import lark
import polars as pl
import pytest
import torch

from batchspec import run
from batchspec.commands import plan
from batchspec.config.checks import check
from batchspec.errors import ConfigError
from tests.engine.test_admit import job
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.job.test_job import arguments

pytestmark = pytest.mark.second

SUMS = """
start: sum
sum: product | sum ("+" | "-") product
product: atom | product ("*" | "/") atom
atom: NUMBER | "-" atom | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""
VALUES = r"""
root ::= value
value ::= "[" (value ("," value){0,3})? "]" | "{" (pair ("," pair)*)? "}" | "0" | [1-9] [0-9]{0,2} | "true" | "null"
pair ::= "\"" [a-z]{1,4} "\":" value
"""
TREE = {
    "$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 99},
                    "c": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "required": ["v", "c"]}},
    "$ref": "#/$defs/t",
}
LONG = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 90_000}}, "required": ["text"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder)


def parses(kind: str, source: str, text: str) -> bool:
    """By others: Lark's parser, Python's JSON, jsonschema."""
    try:
        if kind == "schema":
            jsonschema.validate(json.loads(text), json.loads(source))
        elif source == SUMS:
            lark.Lark(SUMS, parser="earley").parse(text)
        else:
            json.loads(text)
    except (lark.LarkError, ValueError, jsonschema.ValidationError):
        return False
    return True


def decoded(model: Path, data: Path, out: Path, *keys: str) -> pl.DataFrame:
    assert run.main([*arguments(model, data, out), *keys]) == 0
    return pl.read_parquet(out / "data").sort("row_index")


def test_every_completed_row_parses_whatever_drafts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms: list[dict[str, Any]] = [
        {"type": "grammar", "grammar": SUMS}, {"type": "grammar", "grammar": VALUES},
        {"type": "json_schema", "json_schema": {"schema": TREE}}, {"type": "json_schema", "json_schema": {"schema": LONG}},
        {"type": "choice", "choice": ["a", "b"]}, {"type": "grammar", "grammar": 'root ::= "a" root'},
        {"type": "grammar", "grammar": "start: ("}, {"type": "text"},
    ]
    wanted = [forms[i % len(forms)] for i in range(32)]
    data = tmp_path / "in.parquet"
    frame = pl.DataFrame({"prompt": [f"row {i}" for i in range(32)], "response_format": [json.dumps(one) for one in wanted]})
    frame.write_parquet(data)
    keys = ["decode.temperature=1", "decode.max_new_tokens=120", "input.max_error_fraction=1"]
    found = [decoded(model, data, tmp_path / drafter, f"draft={drafter}", *keys) for drafter in ("none", "lookup")]
    assert found[0]["completion"].to_list() == found[1]["completion"].to_list()
    num_ok = dict.fromkeys(range(8), 0)
    for row in found[0].iter_rows(named=True):
        kind = row["row_index"] % 8
        if kind in (5, 6):
            assert row["error"]["code"] == {5: "impossible", 6: "bad_schema"}[kind]
        elif row["status"] == "ok" and kind < 4:
            form = wanted[row["row_index"]]
            source = form.get("grammar") or json.dumps(form["json_schema"]["schema"])
            assert parses("grammar" if "grammar" in form else "schema", source, row["completion"]), row["completion"]
            num_ok[kind] += 1
    assert min(num_ok[kind] for kind in (0, 1, 2)) >= 1, num_ok
    capsys.readouterr()
    assert plan.main([*arguments(model, data, tmp_path / "plan", "draft=none"), *keys]) == 0
    said = capsys.readouterr().out
    assert "structured   1 distinct constraint; compiling one took " in said
    assert "lazy         3 distinct constraints, states computed while rows wait for them: it is recursive\n" in said
    assert "lazy         1 distinct constraint, states computed while rows wait for them: it has more than 250,000 pos" in said


def test_a_thousand_rows_of_a_recursive_grammar_all_parse(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "values.gbnf").write_text(VALUES)
    data = tmp_path / "in.parquet"
    pl.DataFrame({"prompt": [f"row {i}" for i in range(1000)]}).write_parquet(data)
    keys = [
        f"decode.grammar={tmp_path / 'values.gbnf'}", "decode.temperature=1", "decode.max_new_tokens=40", "output.shard_rows=250",
        "packing.max_num_seqs=64", "draft=lookup",
    ]
    found = decoded(model, data, tmp_path / "out", *keys)
    texts = found.filter(pl.col("status") == "ok")["completion"].to_list()
    assert len(found) == 1000
    assert not found["error"].is_not_null().any()
    assert len(texts) >= 600
    for text in texts:
        json.loads(text)
    assert len(set(texts)) > 200
    capsys.readouterr()
    assert plan.main([*arguments(model, data, tmp_path / "plan"), *keys]) == 0
    said = capsys.readouterr().out
    assert "structured   1 distinct constraint, states computed while rows wait for them: it is recursive" in said


def test_a_job_s_grammar_is_read_from_a_file_or_as_text_and_refused_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "in.parquet"
    pl.DataFrame({"prompt": ["a", "b"]}).write_parquet(data)
    (tmp_path / "list.lark").write_text('start: "x" ("," "x")*')
    done = decoded(model, data, tmp_path / "file", f"decode.grammar={tmp_path / 'list.lark'}", "decode.temperature=1")
    assert all(set(text) <= {"x", ","} for text in done["completion"])
    given = 'decode.grammar=\'root ::= "ab" | "ba"\''
    assert set(decoded(model, data, tmp_path / "text", given)["completion"]) <= {"ab", "ba"}
    for key, said in (
        ("decode.grammar=none.lark", "decode.grammar=none.lark: cannot be read"),
        ("decode.grammar='start: x'", "decode.grammar: it is not a Lark grammar"),
        ("decode.grammar='root ::= \"a\" root'", "decode.grammar: no text matches"),
    ):
        capsys.readouterr()
        assert run.main([*arguments(model, data, tmp_path / "refused"), key]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"decode.regex and decode.grammar are both given"):
        check(job(decode__regex="a", decode__grammar='start: "a"'))
