"""A job from OpenAI's requests to a data set that others read: by `datasets`, as JSON lines, and made once more from its card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from batchspec import cli, run
from batchspec.config.checks import check
from batchspec.config.compose import compose
from batchspec.config.decode_schema import DecodeConfig
from batchspec.config.schema import InputConfig, ModelConfig, OutputConfig, RunConfig
from batchspec.config.typed import from_json, to_json
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.schema import output_schema
from batchspec.job.report.card import _without_local_paths, _yaml
from batchspec.job.report.columns import COPIED, meaning
from batchspec.tasks.registry import TASKS
from tests.helpers.int4_layouts import make, of_gptq
from tests.helpers.models import make_checkpoint, make_tokenizer

ROWS = 7


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with requests.jsonl, one of them bad, and the job `out` that answers them."""
    folder = tmp_path_factory.mktemp("made")
    model = make_tokenizer(make_checkpoint(folder / "model", "llama", dtype=torch.float64))
    bodies: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": f"Say word{i} again"}]} for i in range(ROWS)]
    bodies[1] |= {"max_tokens": 3, "temperature": 0.8, "seed": 5, "n": 2}
    bodies[3] |= {"max_tokens": -4}
    lines = [{"custom_id": f"r/{9 - i}", "url": "/v1/chat/completions", "body": body} for i, body in enumerate(bodies)]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["export", "--from-openai", str(folder / "requests.jsonl"), str(folder / "in.parquet")]) == 0
    words = [
        f"model.path={model}", "model.dtype=float64", f"input.path={folder}/in.parquet", f"output.dir={folder}/out",
        "output.shard_rows=3", "decode.max_new_tokens=9", "packing.max_num_seqs=3", "output.token_ids=true",
        r"decode.stop=['a: b','#','\${draft.name}','\${nothing','\\\${x}']",
    ]
    assert run.main(words) == 0
    return folder


def test_the_card_says_what_each_column_of_a_job_means() -> None:
    """A column of the input may have the name of another task's column."""
    plain = pa.schema([("prompt", pa.string()), ("kind", pa.string())])
    output = OutputConfig(messages="full", token_ids=True, prompt_ids=True, logprobs=2, prompt_logprobs=2)
    for task in TASKS.values():
        given = plain if "score" in task.columns else plain.append(pa.field("score", pa.float64()))
        schema = output_schema(given, map_columns(given, {}), output, calls=True, task=task)
        assert [name for name in schema.names if meaning(name, task) == COPIED] == given.names
        assert task.columns <= {*schema.names}


@pytest.mark.second
def test_the_card_and_the_statistics_say_how_the_weights_were_kept(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "| Weights | `float64` |" in (made / "out" / "README.md").read_text()
    model = make_tokenizer(make(tmp_path / "int4", of_gptq(32))[0])
    pl.DataFrame({"prompt": ["a b", "c"]}).write_parquet(tmp_path / "in.parquet")
    words = [f"model.path={model}", "model.dtype=float32", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out"]
    assert run.main([*words, "decode.max_new_tokens=3"]) == 0
    assert "| Weights | `INT4 weights, the rest in float32` |" in (tmp_path / "out" / "README.md").read_text()
    capsys.readouterr()
    assert cli.main(["stats", str(tmp_path / "out")]) == 0
    assert re.search(r"^ *weights +INT4 weights, the rest in float32$", capsys.readouterr().out, re.MULTILINE)


def test_openai_requests_are_exported_as_openai_responses_in_their_order(made: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(made / "out"), "--to", "openai", str(tmp_path / "responses.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r/{9 - i}" for i in range(ROWS)]
    assert [line["error"] and line["error"]["code"] for line in lines] == [None, None, None, "bad_parameter", None, None, None]
    assert lines[3]["response"] is None
    two = lines[1]["response"]["body"]
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    frame = pl.read_parquet(made / "out/data").filter(request_id="r/8")
    assert [choice["message"]["content"] for choice in two["choices"]] == frame["completion"].to_list()
    assert two["usage"]["completion_tokens"] == frame["token_ids"].list.len().sum() <= 6


def test_datasets_reads_the_folder_by_its_card_and_chat_lines_as_they_are(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")
    frame = pl.read_parquet(made / "out/data")
    ok = datasets.load_dataset(str(made / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert ok["request_id"][:] == frame.filter(status="ok")["request_id"].to_list(), "no error row, and none that was cut off"
    assert 0 < ok.num_rows < frame.filter(pl.col("status") != "error").height
    rows = datasets.load_dataset(str(made / "out"), "all", cache_dir=str(tmp_path / "cache"))
    assert list(rows) == ["train"]
    assert rows["train"].num_rows == frame.height == ROWS + 1
    assert rows["train"].column_names == frame.columns
    assert rows["train"]["request_id"][:] == frame["request_id"].to_list()
    features = rows["train"].features
    assert features["messages"].feature == {"role": datasets.Value("string"), "content": datasets.Value("large_string")}
    assert features["token_ids"].feature == datasets.Value("int32")
    assert features["reasoning"] == datasets.Value("large_string"), "null in every row, and text all the same"
    assert features["error"]["code"] == datasets.Value("string")
    assert rows["train"][0]["messages"] == frame["messages"][0].to_list()

    chat = tmp_path / "chat.jsonl"
    assert cli.main(["export", str(made / "out"), "--to", "chat", str(chat), "--status", "ok,truncated"]) == 0
    turns = datasets.load_dataset("json", data_files=str(chat), cache_dir=str(tmp_path / "cache"))["train"]["messages"][:]
    assert turns == frame.filter(pl.col("status") != "error")["messages"].to_list()


def test_a_user_s_value_is_not_parsed_whatever_it_looks_like(made: Path) -> None:
    manifest = json.loads((made / "out/_batchspec/manifest.json").read_text())
    assert manifest["config"]["decode"]["stop"] == ["a: b", "#", "${draft.name}", "${nothing", r"\${x}"]


ODD = "\\${}'\"`#:-[]{},&*!|>%@ \n\t\x00\x85\u2028\ufeffocenv."
ODD_WORDS = ["1e5", "yes", "~", "0x1f", "1_0", "=", "2001-01-01", "${oc.env:HOME}", "${x", "null"]
TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(ODD)))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS, st.sampled_from(ODD_WORDS))
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)), max_leaves=8
)
QUESTION = "???"
"""What omegaconf calls a value that is missing: no configuration can hold it."""


@pytest.mark.second
@settings(max_examples=250)
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_every_value_of_a_configuration_is_read_unchanged_from_the_card(values: dict[str, Any]) -> None:
    assume(QUESTION not in repr(values))
    text = "\n".join(_yaml({"group": {"values": values}}))
    assert "```" not in text
    text.encode()
    read = OmegaConf.to_object(OmegaConf.create(text))
    assert read == {"group": {"values": values}}
    assert repr(read) == repr({"group": {"values": values}}), "types too: 1 is not true, and 1.0 is not 1"


def test_a_configuration_of_odd_strings_is_the_same_when_its_card_is_run(tmp_path: Path) -> None:
    """Through Hydra's own command line, and through the manifest."""
    odd = [
        "${draft.name}", "\\${x}", "\\\\${oc.decode:1}\\", "'\"", "a\nb", "#", "\u2028 é 😀", "```", "1e5",
        "- x: y", "${", "{}", " ",
    ]
    variables = {text: {text: [text, 1e-05, 3, True, None]} for text in odd}
    config = RunConfig(
        model=ModelConfig(path="m ${a}"),
        input=InputConfig(path=odd, columns={"prompt": "a: b"}, template_kwargs=variables),
        decode=DecodeConfig(stop=odd, thinking_token_budget=3, thinking_closing="".join(odd)),
        output=OutputConfig(dir="out/${draft.name}"),
    )
    check(config)
    text = "\n".join(["# @package _global_", *_yaml(json.loads(to_json(config)))])
    (tmp_path / "job").mkdir()
    (tmp_path / "job/again.yaml").write_text(text, encoding="utf-8")
    assert compose([f"hydra.searchpath=[file://{tmp_path}]", "+job=again"]) == config
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("key", "value", "is_path"),
    [
        ("schema", "/home/me/secret/person.json", True),
        ("schema", "~/person.json", True),
        ("schema", "person.json", False),
        ("schema", '{"type": "object"}', False),
        ("schema", {"$id": "/persons", "type": "object"}, False),
        ("grammar", "/home/me/secret/sums.lark", True),
        ("grammar", '// sums\nstart: "1"', False),
        ("grammar", 'root ::= "1"', False),
    ],
)
def test_a_card_holds_a_schema_or_grammar_but_not_the_path_of_its_file(key: str, value: Any, is_path: bool) -> None:
    config = {"decode": {key: value, "seed": 3}}
    kept, left_out = _without_local_paths(config)
    assert left_out == ([f"decode.{key}"] if is_path else [])
    assert kept == ({"decode": {"seed": 3}} if is_path else config)


@pytest.mark.second
def test_the_settings_on_the_card_make_the_same_rows_again(made: Path, tmp_path: Path) -> None:
    written = (made / "out/README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "mine/job").mkdir(parents=True)
    (tmp_path / "mine/job/again.yaml").write_text(written)
    assert str(made) not in (made / "out/README.md").read_text(), "a card is published: no path of this machine is in it"
    command = (made / "out/README.md").read_text().split("and run `")[1].split("`")[0]
    assert command == "python -m batchspec.run --config-dir mine +job=again model.path=... input.path=... output.dir=..."
    paths = [f"model.path={made}/model", f"input.path={made}/in.parquet", f"output.dir={tmp_path}/again"]
    assert run.main(["--config-dir", str(tmp_path / "mine"), "+job=again", *paths]) == 0
    columns = pl.exclude("perf", "spec_decode")
    first, again = (pl.read_parquet(folder / "data").select(columns) for folder in (made / "out", tmp_path / "again"))
    assert again.equals(first)
