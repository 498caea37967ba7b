"""Structured output: compiles what a row's answer must match into an automaton: decode.schema, regex, choice and grammar, or the
row's columns.

A row's own constraint replaces the job's. Reasoning is not constrained; the answer after it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchspec.automata.lazy_automaton import LazyAutomaton
from batchspec.automata.token_automaton import (
    BEGIN_THOUGHT,
    CHANNEL,
    CONSTRAIN,
    DEAD,
    END_THOUGHT,
    START,
    TokenAutomaton,
    TokenSymbols,
)
from batchspec.config.decode_schema import DecodeConfig
from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.errors import BadRow, ConfigError
from batchspec.packing.cells import json_cell
from batchspec.process.local_files import fault_of, open_regular
from batchspec.records import Request, Thinking
from batchspec.structured.answer_checker import AnswerChecker
from batchspec.structured.channels import state_after_header
from batchspec.structured.compiler import BadConstraint, Compiler
from batchspec.tasks.choose import choice_cell
from batchspec.tasks.registry import task_of
from batchspec.text.thinking import ThinkTokens

if TYPE_CHECKING:
    from batchspec.text.tokenizer import Tokenizer

KINDS = ("schema", "regex", "choice", "grammar")
COLUMNS = (*KINDS, "response_format")
FORCED_CALL = "tool_choice"
"""The kind of a constraint that forces tool calls (`forced_calls.py`)."""
Constraint = tuple[str, str]
"""Kind, and text: a regex, a grammar, or the JSON text of a schema or of a list of strings."""


_GRAMMAR = re.compile(r"^\s*[?!]?\w[\w.-]*\s*::?[=\s]", re.MULTILINE)
"""Found in every grammar rule: a text without it is taken for the path of a file."""


class Constraints:
    """Reads and compiles the constraints of a job's rows.

    end_ids  the tokens that end any row: the model's EOS ids and decode.stop_ids
    call_marks  texts of the tokens that mark tool calls
    Raises ConfigError if the job's own constraint cannot be met, or the bytes of the tokens are unknown.
    """

    def __init__(
        self, decode: DecodeConfig, tokenizer: Tokenizer, *, vocab_size: int, think: ThinkTokens | None, end_ids: Collection[int],
        call_marks: Sequence[str] = (),
    ) -> None:
        self.of_job = job_constraint(decode)
        self.compiler = _compiler(tokenizer, vocab_size, think, end_ids, call_marks, checks=decode.schema_unsupported == "check")
        self.checker = AnswerChecker()
        self.of_job_may_hold = False
        """Whether the job's own constraint became a lazy automaton."""
        if self.of_job is not None:
            try:
                self.of_job_may_hold = isinstance(self.compiler.compile(*self.of_job), LazyAutomaton)
            except BadConstraint as error:
                raise ConfigError(f"decode.{self.of_job[0]}: {error}") from None

    def of_row(self, row: Mapping[str, Any]) -> Constraint | None:
        """The row's constraint, not compiled; None: it has none. Raises BadRow."""
        return row_constraint(row) if any(row.get(name) is not None for name in COLUMNS) else self.of_job

    def begin(self, request: Request) -> Future[Any] | None:
        """Start compiling the request's automaton; the future is done when it is compiled. None for a request without a
        constraint."""
        return None if request.constraint is None else self.compiler.begin(*request.constraint)

    def compiled(self, request: Request) -> Request:
        """The request with its automaton and the state in which its output begins; waits for the automaton. Raises BadRow."""
        if request.constraint is None:
            return request
        try:
            made = self.compiler.compile(*request.constraint)
        except BadConstraint as error:
            raise BadRow(error.code, f"{request.constraint[0]}: {error}", retryable=error.retryable) from None
        state = first_state(made, request.thinking, self.compiler.vocabulary)
        if state == DEAD:
            raise BadRow(
                "bad_parameter",
                f"{request.constraint[0]}: the prompt ends in a message that is neither in the channel analysis nor in final; "
                "with structured output no other one is written: end the prompt before that message",
            )
        return replace(request, automaton=made, automaton_state=state)


def _compiler(
    tokenizer: Tokenizer, vocab_size: int, think: ThinkTokens | None, end_ids: Collection[int], call_marks: Sequence[str], *,
    checks: bool,
) -> Compiler:
    """The compiler for constraints over this model's tokens, of which `end_ids` end a row."""
    marks, channels = {}, None if think is None else think.channels
    if think is not None:
        marks = {think.end_id: END_THOUGHT} | ({} if think.begin_id is None else {think.begin_id: BEGIN_THOUGHT})
    if channels is not None:
        marks |= {channels.start_id: START, channels.channel_id: CHANNEL}
        marks |= {} if channels.constrain_id is None else {channels.constrain_id: CONSTRAIN}
    return Compiler(
        tokenizer.symbols(vocab_size, marks, call_marks), tuple(sorted(end_ids)), thinks=think is not None,
        may_begin=think is not None and think.begin_id is not None, channels=channels is not None, checks=checks,
    )


def first_state(automaton: TokenAutomaton | LazyAutomaton, thinking: Thinking | None, vocabulary: TokenSymbols) -> int:
    """The state in which a row's output begins; DEAD if it continues a harmony message that may not be written."""
    if thinking is not None and thinking.channels is not None:
        if isinstance(automaton, LazyAutomaton):
            return state_after_header(thinking.header, vocabulary, calls=automaton.kind == FORCED_CALL)
        return automaton.walk(automaton.either, thinking.header)
    if thinking is None or thinking.opened is False:
        return automaton.answer
    return automaton.thought if thinking.opened else automaton.either


def asked_by(config: RunConfig, columns: ColumnMap) -> str | None:
    """The key or column that asks for structured output; None if none does, or nothing is decoded."""
    if not task_of(config).decodes:
        return None
    given = job_constraint(config.decode)
    mapped = next((name for name in COLUMNS if columns.get(name) is not None), None)
    return f"decode.{given[0]}" if given is not None else None if mapped is None else f"column {columns.get(mapped)!r} ({mapped})"


def check_constraints(
    config: RunConfig, name: str, tokenizer: Tokenizer | None, think: ThinkTokens | None, end_ids: Collection[int]
) -> None:
    """Raises ConfigError if what `name` asks for does not go together with another key of the job, or with its model."""
    if tokenizer is None:
        raise ConfigError(f"{name} needs a tokenizer, and the model folder has none; remove it")
    if config.draft.synthetic is not None:
        raise ConfigError(f"{name} has no effect with draft.synthetic, which makes up the accepted tokens; remove one")
    if not end_ids:
        raise ConfigError(
            f"{name} needs a token that ends an answer, and there is none; set decode.ignore_eos=false or decode.stop_ids"
        )
    for token in config.decode.stop_ids:
        if text := tokenizer.decode([token]):
            raise ConfigError(
                f"{name} with decode.stop_ids={config.decode.stop_ids}: token {token} is the text {text!r}, which no answer "
                f"could then hold; remove it, or set decode.stop=[{text!r}]"
            )


def job_constraint(decode: DecodeConfig) -> Constraint | None:
    """The job's own constraint. A schema that is not JSON text is the path of a file. Raises ConfigError."""
    if decode.regex is not None:
        return "regex", decode.regex
    if decode.choice:
        return "choice", json.dumps(decode.choice)
    if decode.grammar is not None:
        is_text = "\n" in decode.grammar or _GRAMMAR.search(decode.grammar) is not None
        return "grammar", decode.grammar if is_text else _read("grammar", decode.grammar)
    if decode.schema is None:
        return None
    schema = decode.schema
    if isinstance(schema, str):
        text = schema if schema.lstrip().startswith("{") else _read("schema", schema)
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"decode.schema={decode.schema[:60]!r} is not valid JSON ({error}); correct it") from None
    if not isinstance(schema, dict):
        raise ConfigError(f"decode.schema={json.dumps(schema)[:60]} must be a JSON Schema, an object; correct it")
    return "schema", json.dumps(schema)


def _read(key: str, path: str) -> str:
    try:
        with open_regular(os.path.expanduser(path)) as file:
            return file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        form = "JSON text" if key == "schema" else "the text of a grammar"
        where = f"decode.{key}={path}"
        refusal = ConfigError(f"{where}: cannot be read ({why}); give {form}, or the path of a file of it")
        raise fault_of(error, where, refusal) from None


def row_constraint(row: Mapping[str, Any]) -> Constraint | None:
    """The row's own constraint, from the column that is not null; None for a response_format of plain text. Raises BadRow."""
    given = [name for name in COLUMNS if row.get(name) is not None]
    if len(given) > 1:
        raise BadRow("bad_parameter", f"{given[0]} and {given[1]} are both given; leave one null")
    match given[0]:
        case "regex" | "grammar":
            return given[0], _text(given[0], row[given[0]])
        case "choice":
            return "choice", json.dumps(choice_cell(row["choice"]))
        case "schema":
            return "schema", json.dumps(json_cell(row, "schema", dict))
    return _of_response_format(json_cell(row, "response_format", dict))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRow("bad_parameter", f"{name} must be text; correct it or leave it null")
    return value


def _of_response_format(form: Mapping[str, Any]) -> Constraint | None:
    """The constraint of an OpenAI response_format: text, json_object, or json_schema with a schema; also grammar, regex,
    choice."""
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return "schema", '{"type": "object"}'
        case "json_schema":
            inner = form.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if isinstance(schema, dict):
                return "schema", json.dumps(schema)
            raise BadRow("bad_parameter", "response_format has no json_schema.schema, an object; correct it")
        case "grammar" | "regex" as name:
            return name, _text(f"response_format.{name}", form.get(name))
        case "choice":
            return "choice", json.dumps(choice_cell(form.get("choice")))
    raise BadRow(
        "bad_parameter",
        f"response_format.type={json.dumps(form.get('type'))} must be text, json_object, json_schema, grammar, "
        "regex or choice; correct it",
    )
