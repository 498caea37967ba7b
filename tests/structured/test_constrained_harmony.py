"""Structured output of gpt-oss: the text of the final channel matches, analysis is free."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from batchspec import run
from batchspec.automata.token_automaton import DEAD, TokenAutomaton
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import table_source
from batchspec.engine.features.thinking import split_thoughts
from batchspec.packing.admit import Admission
from batchspec.packing.constraints import first_state
from batchspec.records import Completion, Request
from batchspec.text.thinking import ThinkTokens, find_think_tokens
from batchspec.text.tokenizer import Tokenizer
from tests.engine.test_admit import job
from tests.helpers.automata import finite
from tests.helpers.harmony import SPECIAL, make_harmony_model
from tests.helpers.stand_ins import small_spec
from tests.text.test_harmony import ASKED, USER, arguments

PATTERN = "(rain| sun)*[0-9]{1,3}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_harmony_model(tmp_path_factory.mktemp("model"), likely=4.0)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture(scope="module")
def think(tokenizer: Tokenizer) -> ThinkTokens:
    found = find_think_tokens("auto", tokenizer, 352)
    assert found is not None
    return found


def admitted(tokenizer: Tokenizer, prompt: str) -> Request | Completion:
    table = pa.table({"prompt_ids": pa.array([tokenizer.encode_part(prompt)], pa.list_(pa.int32()))})
    source, config = table_source(table), job(decode__regex=PATTERN)
    spec = small_spec(vocab_size=352, eos_ids=(tokenizer.added_ids["<|return|>"],))
    admission = Admission(config, source=source, columns=map_columns(source.schema, {}), spec=spec, tokenizer=tokenizer)
    (made,) = admission.admit_compiled(next(source.shards(1)))
    return made


@pytest.fixture(scope="module")
def made(tokenizer: Tokenizer) -> TokenAutomaton:
    found = admitted(tokenizer, ASKED)
    assert isinstance(found, Request)
    return finite(found.automaton)


WRITTEN = (
    ("<|channel|>final<|message|>rain7<|return|>", True),
    ("<|channel|>final<|message|>7<|call|>", True),
    ("<|channel|>final <|constrain|>json<|message|>7<|return|>", True),
    ("<|channel|>final<|constrain|>json<|message|>7<|return|>", True),
    ("<|message|>7<|return|>", True),
    ("<|channel|>analysis<|message|>any <|message|> thing?<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>", True),
    (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>analysis<|message|>b<|channel|>final<|message|>7<|return|>",
        True,
    ),
    ("<|channel|>final<|message|>rain<|return|>", False),
    ("<|channel|>final<|message|>7<|end|>", False),
    ("<|channel|>final to=functions.add<|message|>7<|return|>", False),
    ("<|channel|>commentary<|message|>I see<|end|>", False),
    (" to=functions.add<|channel|>commentary<|message|>{}<|call|>", False),
    ("<|channel|>analysis to=python<|message|>7<|end|>", False),
    ("<|channel|>analysis<|message|>a<|return|>", False),
    ("<|channel|>analysis<|message|>a<|end|>b", False),
    ("<|channel|>finally<|message|>7<|return|>", False),
    ("7<|return|>", False),
)


@pytest.mark.second
@pytest.mark.parametrize(("text", "can_be"), WRITTEN, ids=[text for text, _ in WRITTEN])
def test_the_final_channel_matches_and_no_other_one_but_analysis_is_written(
    text: str, can_be: bool, made: TokenAutomaton, tokenizer: Tokenizer, think: ThinkTokens
) -> None:
    prompt, end_ids = np.array(tokenizer.encode_part(ASKED), np.int32), set(think.stop_ids)
    state, follows = first_state(made, think.of_row(prompt, None, ()), made.vocabulary), True
    for token in tokenizer.encode_part(text):
        follows = follows and bool(made.allowed(state)[token])
        state = made.walk(state, [token])
        assert follows == (state != DEAD) or token in end_ids
    assert follows == can_be


@pytest.mark.parametrize(
    ("prompt", "can_be"),
    [
        (USER, True), (f"{ASKED}<|channel|>analysis<|message|>Let me", True), (f"{ASKED}<|channel|>final<|message|>", True),
        (f"{ASKED}<|channel|>analy", True), (f"{ASKED} to=functions.add<|channel|>commentary<|message|>", False),
        ("<|start|>user<|message|>Hi", False),
    ],
)
def test_the_output_continues_the_prompt_s_last_message_or_the_row_is_refused(
    prompt: str, can_be: bool, tokenizer: Tokenizer
) -> None:
    found = admitted(tokenizer, prompt)
    if can_be:
        assert isinstance(found, Request)
        assert found.automaton_state != DEAD
    else:
        assert isinstance(found, Completion)
        assert found.error is not None
        assert (found.error.code, "end the prompt before that message" in found.error.message) == ("bad_parameter", True)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_drawn_the_answer_is_found_again_and_matches(
    seed: int, made: TokenAutomaton, tokenizer: Tokenizer, think: ThinkTokens
) -> None:
    rng = random.Random(seed)
    how = think.of_row(np.array(tokenizer.encode_part(ASKED), np.int32), None, ())
    special, out = {tokenizer.added_ids[f"<|{name}|>"] for name in SPECIAL}, list[int]()
    state = first_state(made, how, made.vocabulary)
    while not out or out[-1] not in think.stop_ids:
        allowed = np.flatnonzero(made.allowed(state)).tolist()
        marks = [token for token in allowed if token in special]
        out.append(rng.choice(marks if marks and rng.random() < 0.3 else allowed))
        state = made.walk(state, out[-1:])
    parts = split_thoughts(out, how)
    assert re.fullmatch(PATTERN, tokenizer.decode(parts.answer))
    assert not parts.calls


@pytest.mark.second
@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_a_job_whose_answers_follow_a_schema(model: Path, drafter: str, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    rows = [{"id": f"q{i}", "messages": [{"role": "user", "content": f"rain {i}"}]} for i in range(24)]
    pl.DataFrame(rows).write_parquet(tmp_path / "prompts.parquet")
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    keys = [f"decode.schema={tmp_path / 'schema.json'}", "decode.thinking_token_budget=4", "decode.max_new_tokens=120"]
    assert run.main([*arguments(model, tmp_path, "out", f"draft={drafter}"), *keys]) == 0
    found = pl.read_parquet(tmp_path / "out" / "data").sort("row_index")
    thoughts = 0
    for row in found.iter_rows(named=True):
        if row["status"] == "ok":
            jsonschema.validate(json.loads(row["completion"]), schema)
        assert row["tool_calls"] is None
        thoughts += bool(row["reasoning"])
    assert found["status"].to_list().count("ok") >= 20
    assert thoughts >= 5
