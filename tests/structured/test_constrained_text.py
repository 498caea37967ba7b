"""The text of a constrained row is that of its tokens' bytes, and JSON where it follows a schema to its end."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import batchspec
from batchspec.automata.token_automaton import BREAKS_AFTER_THOUGHT, OTHER, TokenSymbols
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import table_source
from batchspec.job.runner.shard_work import ShardWork
from batchspec.kernels.rounds.accept import FULL, STOPPED
from batchspec.packing.admit import Admission
from batchspec.records import CONSTRAINT_VIOLATED, Completion, Request, RowError, RowStats, Thinking
from batchspec.structured.checked_text import checked_text
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.text.tokenizer import Tokenizer
from tests.engine.test_admit import job
from tests.helpers.automata import BEGIN, END, EOS, TOKENS, VOCABULARY, automaton, constrained_tokens
from tests.helpers.engines import request
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.one_row import OneRow
from tests.helpers.stand_ins import small_spec
from tests.structured.test_json_schema import schemas
from tests.structured.test_structured import SCHEMAS, samples, schema_dfa
from tests.text.test_tokenizer import byte_fallback

STATS = RowStats(
    drafter="none", draft_len=0, num_prefills=1, num_rounds=5, num_drafted=0, num_accepted=0, num_discarded=0, histogram=(5,),
    drafted_at=(), accepted_at=(), prefill_s=0.0, decode_s=0.0, slot=1,
)


def ended(text: str | None, *, kind: str = "schema", finish: str = "stop", stop: str | None = None) -> Completion:
    return Completion(
        request_id="r", row_index=4, sample_index=1, shard=2, status="ok", finish_reason=finish, stop_reason=stop, text=text,
        token_ids=np.array([1, 2], np.int32), prompt_ids=np.array([3], np.int32), constraint=kind, seed=5, stats=STATS,
    )


@pytest.mark.parametrize("text", ["", "{", '{"a": 1,}', '{"a": "\x01"}', "{'a': 1}", '{"a": 1} ]', "\ufffd"])
def test_a_whole_text_of_a_schema_that_is_no_json_is_an_error_row(text: str) -> None:
    out = checked_text(ended(text))
    assert out.error is not None
    assert (out.error.code, out.error.stage, out.error.retryable) == (CONSTRAINT_VIOLATED, "decode", False)
    assert out.error.message.startswith(f"schema: the text of {len(text)} characters is not valid JSON (")
    assert (out.status, out.finish_reason, out.text, out.token_ids) == ("error", "error", None, None)
    assert (out.request_id, out.row_index, out.sample_index, out.shard, out.seed) == ("r", 4, 1, 2, 5)
    assert out.stats == STATS.replace(num_discarded=6)


def test_an_error_row_keeps_the_fields_of_the_request_and_the_statistics() -> None:
    error = RowError(code="code", stage="decode", message="why", retryable=True)
    done = ended("{}").replace(
        logprobs=np.zeros(2, np.float32), reasoning="so", tool_calls="[]", num_undecoded=2, cached_tokens=3
    )
    kept = {"prompt_ids", "seed", "predicted_tokens", "cached_tokens", "request_id", "row_index", "sample_index", "shard"}
    out = done.failed(error)
    for field in msgspec.structs.fields(Completion):
        if field.name in kept:
            assert getattr(out, field.name) is getattr(done, field.name)
        elif field.name not in ("status", "finish_reason", "stats", "error"):
            assert getattr(out, field.name) == field.default, field.name
    assert (out.status, out.finish_reason, out.error) == ("error", "error", error)
    assert out.stats == STATS.replace(num_discarded=6)


@pytest.mark.parametrize(
    "done",
    [
        ended("", stop="}"), ended(None), ended("{", kind="regex"), ended("{", finish="length"),
        ended("[" * 100_000 + "]" * 100_000), ended("9" * 10_000), ended("1e99999"), ended("-0.0"), ended('"\\ud800"'),
    ],
)
def test_what_was_cut_off_or_is_hard_to_read_is_kept(done: Completion) -> None:
    assert checked_text(done) is done


@pytest.mark.parametrize("schema", SCHEMAS)
def test_texts_of_schemas_are_kept(schema: Any) -> None:
    for text in samples(schema_dfa(schema), 30):
        done = ended(text.decode())
        assert checked_text(done) is done


@pytest.mark.second
@settings(max_examples=80, deadline=None)
@given(schemas())
def test_texts_of_any_schema_are_kept(schema: Any) -> None:
    try:
        assume(schema_rules(schema).inlined() is not None)  # one that refers to itself has no finite automaton
        dfa = schema_dfa(schema)
    except ValueError:
        return
    for text in samples(dfa, 8):
        done = ended(text.decode())
        assert checked_text(done) is done


@given(st.lists(st.integers(0, 319), max_size=20))
def test_the_text_of_bytes_is_what_a_byte_level_tokenizer_decodes(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int]
) -> None:
    tokenizer = _byte_level(tmp_path_factory)
    assert tokenizer.symbols(320, {}).text(ids) == tokenizer.decode(ids)


_FOUND: list[Tokenizer] = []


def _byte_level(factory: pytest.TempPathFactory) -> Tokenizer:
    if not _FOUND:
        _FOUND.append(Tokenizer(make_tokenizer(factory.mktemp("model"))))
    return _FOUND[0]


def test_tokens_that_are_no_text_are_left_out_and_half_a_character_is_marked() -> None:
    symbols = TokenSymbols.of([OTHER, b"ab", b"\xc3", b"\xa9", b"c"])
    assert symbols.text([0, 1, 2, 3, 0, 4, 2]) == "ab\u00e9c\ufffd"
    assert symbols.text([]) == ""


@pytest.fixture(scope="module")
def spaces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_fallback(tmp_path_factory.mktemp("spaces"))


@pytest.mark.second
@pytest.mark.parametrize("defers_text", [False, True])
def test_an_answer_that_begins_with_a_space_keeps_it(spaces: Path, defers_text: bool) -> None:
    """The decoder of Llama 2 and Mistral drops it, and " Hello" is the one answer that matches."""
    tokenizer = Tokenizer(spaces)
    table = pa.table({"prompt_ids": pa.array([[4, 5]], pa.list_(pa.int32()))})
    source, config = table_source(table), job(decode__choice=[" Hello"])
    columns = map_columns(source.schema, {})
    spec = small_spec(vocab_size=len(tokenizer._tokenizer.get_vocab()), eos_ids=(2,))
    admission = Admission(config, source=source, columns=columns, spec=spec, tokenizer=tokenizer)
    shard = next(source.shards(1))
    (made,) = admission.admit_compiled(shard)
    assert isinstance(made, Request)
    assert made.automaton is not None
    vocab = tokenizer._tokenizer.get_vocab()
    tokens = [vocab[piece] for piece in ("\u2581H", "e", "l", "lo")]
    assert tokenizer.decode(tokens) == "Hello"
    symbols = tokenizer.symbols(spec.vocab_size, {})
    row = OneRow(made, decode=tokenizer.decode, defers_text=defers_text, symbols=symbols)
    for token in (*tokens, 2):
        row.add_round(0, 0, [token])
    done = row.completion(eos_ids=frozenset({2}))
    work = ShardWork(admission=admission, columns=columns, input=config.input, output=config.output, attempt="a")
    due = 4 if defers_text else None
    assert (done.text, done.num_undecoded, done.constraint) == (None if defers_text else " Hello", due, "choice")
    assert work.table(shard, [done])["completion"].to_pylist() == [" Hello"]


@pytest.mark.second
@pytest.mark.parametrize(("stop", "cut"), [("lo", " Hel"), (" H", ""), ("H", " ")])
def test_stop_strings_of_a_constrained_answer_are_found_in_its_exact_bytes(tmp_path: Path, stop: str, cut: str) -> None:
    """The space that the decoder drops stays before a stop string, and a stop string may begin with it."""
    folder = byte_fallback(make_checkpoint(tmp_path, "llama", vocab=269, num_hidden_layers=1))
    options = [f"model.path={folder}", "decode.regex=' Hello'", "decode.max_new_tokens=12", "model.max_len=32"]
    rows = {"prompt_ids": [[4, 5]], "stop": [[stop]]}
    found = batchspec.generate(rows, overrides=options)
    assert found.select("completion", "stop_reason").rows() == [(cut, stop)]


@pytest.mark.second
def test_the_table_has_an_error_row_where_a_text_is_no_json(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer(tmp_path))
    table = pa.table({"prompt_ids": pa.array([[4, 5], [6]], pa.list_(pa.int32()))})
    source, config = table_source(table), job(decode__schema={"type": "boolean"})
    columns = map_columns(source.schema, {})
    spec = small_spec(vocab_size=320, eos_ids=tokenizer.eos_ids)
    admission = Admission(config, source=source, columns=columns, spec=spec, tokenizer=tokenizer)
    shard = next(source.shards(2))
    texts = ("true", "{true")
    rows = []
    for index, text in enumerate(texts):
        tokens = tokenizer.encode_part(text)
        ids = np.array([*tokens, tokenizer.eos_ids[0]], np.int32)
        rows.append(ended(None).replace(row_index=index, sample_index=0, token_ids=ids, num_undecoded=len(tokens)))
    work = ShardWork(admission=admission, columns=columns, input=config.input, output=config.output, attempt="a")
    found = work.table(shard, rows)
    assert found["completion"].to_pylist() == ["true", None]
    assert found["status"].to_pylist() == ["ok", "error"]
    assert [error and error["code"] for error in found["error"].to_pylist()] == [None, CONSTRAINT_VIOLATED]


@pytest.mark.parametrize("finish", [STOPPED, FULL])
def test_the_kind_of_a_constraint_is_told_with_its_completion(finish: int) -> None:
    pattern = "(ab|c)*d"
    req = request(0, [5, 9], cap=14, stop_ids=(EOS,))
    made = automaton(pattern)
    req = replace(req, automaton=made, automaton_state=made.answer, constraint=("regex", pattern))
    row = OneRow(req, symbols=VOCABULARY)
    row.state.tokens = constrained_tokens(req, pattern)
    row.state.set_finish_reason(finish)
    assert row.completion(eos_ids=frozenset({EOS})).constraint == "regex"


@pytest.mark.second
@pytest.mark.parametrize(
    ("pattern", "written", "answer"),
    [
        ("\\na", "\na", "\na"), ("\\na", "\n\na", "\na"), ("\\na", "\n\n\na", "\na"), ("\\n?a", "\na", "a"),
        ("\\nab|abc", "\nab", "\nab"),
        ("(ab|c)*d", "\nd", "d"), ("[a-d]{3}", "abc", "abc"),
    ],
)
def test_a_line_break_after_the_thought_is_left_out_where_the_answer_matches_without_it(
    pattern: str, written: str, answer: str
) -> None:
    made = automaton(pattern, thinks=True, breaks=BREAKS_AFTER_THOUGHT)
    tokens = [END, *(TOKENS.index(char.encode()) for char in written), EOS]
    how = Thinking(begin_id=BEGIN, end_id=END, opened=True, budget=None, closing=(END,))
    req = request(0, [5, 9], cap=14, stop_ids=(EOS,))
    req = replace(req, automaton=made, automaton_state=made.thought, thinking=how)
    assert made.num_allowed(made.thought, tokens) == len(tokens)
    row = OneRow(req, decode=VOCABULARY.text, symbols=VOCABULARY)
    for token in tokens:
        row.add_round(0, 0, [token])
    done = row.completion(eos_ids=frozenset({EOS}))
    assert (done.text, done.reasoning) == (answer, "")
    assert re.fullmatch(pattern, answer)
