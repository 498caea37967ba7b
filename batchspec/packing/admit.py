"""Admission: every input row becomes requests that are ready for the engine, or one completion with the reason why not.

A bad row never raises and never reaches the engine. It is checked in this order, and the first problem gives its code
(stage "admission"; codes are stable, messages are for people):

bad_json       the line is not a JSON object, or is nested too deeply
bad_csv        the row of a CSV file does not fit the header, or is quoted wrongly
bad_type       a cell of JSON lines is not text, and the column must be text
null_prompt    the prompt cell is null
empty_prompt   no message, no character, no token
bad_text       a string is not valid Unicode
bad_messages   a message without role or content, or with a content that is not text; a chat that ends with the assistant's turn
bad_ids        prompt_ids holds a null or an id outside the vocabulary
bad_parameter  a per-row value is out of range, or needs something that the job lacks (a tokenizer, think tokens)
bad_schema     a schema, regex or grammar is not valid, or holds what is not built
impossible     no text is valid by the schema, matches the regex, or is of the grammar
large_schema   following the schema, regex or grammar takes more time, memory or states than allowed
template_error the chat template refuses the messages (order of roles, missing variables)
too_long       prompt + max_new_tokens exceed model.max_len

max_new_tokens is never lowered silently: a prompt that fits only with a smaller max_new_tokens is too_long as well.
input.on_overlong=truncate keeps the end of such a prompt, skip gives the row the status `skipped`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchspec.config.schema import RunConfig
from batchspec.config.values import violation
from batchspec.dataset.columns import TYPES, ColumnMap, request_ids
from batchspec.dataset.reader import InputShard, Source, SourceFacts, locate
from batchspec.dataset.untyped_columns import json_kinds
from batchspec.errors import ConfigError
from batchspec.model.thinking import find_think_tokens
from batchspec.packing.awaited import Compiling
from batchspec.packing.cells import (
    BadRow,
    bias_cell,
    checked_biases,
    number_cell,
    plain_cell,
    prompt_cell,
    row_values,
    synthetic_len_cell,
)
from batchspec.packing.constraints import Constraints, asked_by, check_constraints
from batchspec.packing.predict import LengthPredictor
from batchspec.packing.prompt_encoder import PromptEncoder
from batchspec.records import MAX_STOP_IDS, Completion, Ids, Request, RowError, SamplingParams, Thinking

if TYPE_CHECKING:
    from batchspec.model.spec import ModelSpec
    from batchspec.model.tokenizer import Tokenizer


SAMPLING = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "n",
)  # fmt: skip
"""Numbers that a row may have of its own."""


def hash64(*parts: int | str) -> int:
    """Signed 64-bit BLAKE2b of the parts: the same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        digest.update(f"{type(part).__name__}{len(data)}:".encode() + data)
    return int.from_bytes(digest.digest(), "little", signed=True)


class Admission:
    """Turns input shards into requests; the rules are in the module's docstring.

    source     the dataset that the shards come from; messages name its files
    tokenizer  may be None for `prompt_ids` input without stop strings
    constraints  of another admission of the same configuration and model, which keep what they compiled; None: its own
    It can be pickled: worker processes admit too (runner/shard_workers.py).
    Raises ConfigError when the configuration does not fit the model or the tokenizer.
    """

    def __init__(
        self, config: RunConfig, *, source: Source, columns: ColumnMap, spec: ModelSpec, tokenizer: Tokenizer | None,
        constraints: Constraints | None = None,
    ) -> None:  # fmt: skip
        self.decode, self.input = config.decode, config.input
        self.source, self.columns = SourceFacts(source.files, source.schema), columns
        self.tokenizer, self.vocab_size = tokenizer, spec.vocab_size
        self.max_len = job_max_len(config, spec)
        special_ids = tokenizer.special_ids if tokenizer else {}
        self.special_ids: Mapping[str, int] = {text: token for text, token in special_ids.items() if token < self.vocab_size}
        self.think = find_think_tokens(config.model.think_tokens, tokenizer, spec.vocab_size)
        if self.think is not None:  # their texts are not part of an answer's text, so a stop string must become a stop id
            self.special_ids |= self.think.tokens()
        self.predictor = LengthPredictor()
        of_answer = self.think.stop_ids if self.think is not None else ()
        eos = set() if self.decode.ignore_eos else {*spec.eos_ids, *(tokenizer.eos_ids if tokenizer else ()), *of_answer}
        outside = [token for token in self.decode.stop_ids if token >= self.vocab_size]
        if outside:
            raise ConfigError(f"decode.stop_ids={outside} exceed the vocabulary of {self.vocab_size} tokens; remove them")
        # A tokenizer may have more tokens than the model; these are never drawn.
        self.end_ids = {token for token in eos if token < self.vocab_size} | set(self.decode.stop_ids)
        if len(self.end_ids) > MAX_STOP_IDS:
            raise ConfigError(
                f"decode.stop_ids={self.decode.stop_ids} and the model's {len(eos)} EOS ids are {len(self.end_ids)} stop ids, "
                f"at most {MAX_STOP_IDS} fit; remove some or use decode.stop"
            )
        if tokenizer is None and (self.columns.prompt_kind != "prompt_ids" or self.decode.stop):
            raise ConfigError("decode.stop and text prompts need a tokenizer, and the model folder has none; use prompt_ids")

        try:
            self.logit_bias = checked_biases(self.decode.logit_bias, self.vocab_size)
        except BadRow as error:
            raise ConfigError(f"decode.{error}") from None
        self.adapters = {name: number for number, name in enumerate(config.model.adapters, 1)}
        self.usual_adapter = 1 if spec.lora is not None and spec.lora.of_all_rows else 0
        if (column := columns.get("adapter")) is not None and not self.adapters:
            raise ConfigError(
                f"column {column!r} names LoRA adapters, and model.adapters has none; give them, model.adapters={{NAME:FOLDER}}, "
                "or hide the column: input.columns.adapter=null"
            )
        self.constraints: Constraints | None = None
        """What answers must match; None: no key and no column asks for structured output."""
        asked = asked_by(config, columns)
        if asked is not None and self.decode.max_new_tokens:
            check_constraints(config, asked, tokenizer, self.think, self.end_ids)
            self.constraints = constraints or self._own_constraints()
        self.encoder = PromptEncoder(self.input, columns, tokenizer, vocab_size=self.vocab_size, max_len=self.max_len)
        self.fields = {name: source.schema.field(column) for name, column in columns.names.items()}
        self.closing = self._closing()
        chat = self.columns.prompt_kind == "messages" or (self.columns.prompt_kind == "prompt" and self.input.chat)
        if chat and tokenizer is not None and not tokenizer.has_chat_template:
            raise ConfigError("a chat needs a template, and the model has none; set model.chat_template, or give plain prompts")

    def _own_constraints(self) -> Constraints:
        assert self.tokenizer is not None
        return Constraints(
            self.decode, self.tokenizer, vocab_size=self.vocab_size, think=self.think, end_ids=self.end_ids
        )  # fmt: skip

    def expect_constraints(self) -> None:
        """Other rows, which another admission admits for the same engine, may have constraints, if the tokenizer allows any."""
        if self.constraints is None and self.tokenizer is not None and self.decode.max_new_tokens:
            with suppress(ConfigError):
                self.constraints = self._own_constraints()

    def _closing(self) -> tuple[int, ...]:
        """The tokens of the text that is forced when a thought has used its budget, before those that end the thought."""
        text, budget = self.decode.thinking_closing, self.decode.thinking_token_budget
        if self.think is None:
            if budget is not None:
                raise ConfigError(
                    f"decode.thinking_token_budget={budget} needs think tokens, and the tokenizer has no known ones; "
                    "name them, model.think_tokens=[<think>,</think>], or remove the key"
                )
            return ()
        if text and self.tokenizer is None:
            raise ConfigError("decode.thinking_closing needs a tokenizer, and the model folder has none; remove the key")
        ids = self.tokenizer.encode_part(text) if text and self.tokenizer is not None else []
        if {self.think.begin_id, self.think.end_id, *self.think.tokens().values(), *self.end_ids} & set(ids):
            raise ConfigError(f"decode.thinking_closing={text!r} holds a think token or one that ends the output; take it out")
        return tuple(ids)

    @property
    def has_channels(self) -> bool:
        """Whether the model's outputs have channels (harmony): tool calls are told from the answer."""
        return self.think is not None and self.think.channels is not None

    def observe(self, completion: Completion) -> None:
        """Update the predicted output length with a finished row."""
        self.predictor.observe(completion)

    def predicted(self, request: Request) -> Request:
        """The request with its expected output length: the present prediction, or max_new_tokens if nothing can end it early."""
        if not request.may_end_early:
            return request
        predicted = self.predictor.predict(request.max_new_tokens)
        return request if predicted == request.predicted_tokens else replace(request, predicted_tokens=predicted)

    def admit(self, shard: InputShard) -> Iterator[Request | Completion]:
        """For each row, in input order: its requests (samples 0 .. n-1), or one completion with the reason why it has none.

        Constraints are not compiled yet: `compiled` does that, and may refuse each sample of a row (bad_schema, impossible,
        large_schema).
        """
        ids = request_ids(self.source, self.columns, shard)
        for row_index, (request_id, row) in enumerate(zip(ids, self._rows(shard), strict=True), shard.first_row):
            try:
                if row_index in shard.bad:
                    raise BadRow(shard.bad[row_index].code, shard.bad[row_index].message)
                values = row_values(row, self.fields, self.columns.prompt_kind)
                yield from self._requests(values, request_id, row_index, shard.index)
            except BadRow as bad:
                yield self._refused(bad, request_id, row_index, shard.index)

    def admit_turn(self, values: Mapping[str, Any], first: Request) -> Request | Completion:
        """The request for a later turn of the conversation that `first` began, or a completion with the reason why it has none;
        waits for its automaton.

        values  cells under batchspec's names, parsed; the prompt column holds the whole chat
        """
        try:
            unknown = sorted(values.keys() - TYPES.keys())
            if unknown or values.get("n") not in (None, 1):
                problem = f"has no column {unknown[0]!r}" if unknown else f"has n={values['n']}; one answer continues it"
                raise BadRow("bad_parameter", f"a turn {problem}; its columns are those of the input")
            (request,) = self._requests({**values, "n": 1}, first.request_id, first.row_index, first.shard)
            return self.compiled(replace(request, sample_index=first.sample_index))
        except BadRow as bad:
            refused = self._refused(bad, first.request_id, first.row_index, first.shard)
            return replace(refused, sample_index=first.sample_index)

    @property
    def compiling(self) -> Compiling | None:
        """What makes admitted requests ready for the engine; None where they are, because no row can have a constraint."""
        return None if self.constraints is None else self

    def begin(self, request: Request) -> Future[Any] | None:
        """Have the automaton of an admitted request compiled; done once `compiled` need not wait. None: it needs none."""
        return None if self.constraints is None else self.constraints.begin(request)

    def compiled(self, request: Request) -> Request | Completion:
        """An admitted request that is ready for the engine, or the reason why there is none; waits for its automaton."""
        if self.constraints is None:
            return request
        try:
            return self.constraints.compiled(request)
        except BadRow as bad:
            refused = self._refused(bad, request.request_id, request.row_index, request.shard)
            return replace(refused, sample_index=request.sample_index)

    def admit_compiled(self, shard: InputShard) -> Iterator[Request | Completion]:
        """As `admit`, with the automata of all requests, which are compiled first."""
        entries = list(self.admit(shard))
        for entry in entries:
            if isinstance(entry, Request):
                self.begin(entry)
        for entry in entries:
            yield self.compiled(entry) if isinstance(entry, Request) else entry

    def _refused(self, bad: BadRow, request_id: str, row_index: int, shard: int) -> Completion:
        file, place = locate(self.source.files, row_index)
        return Completion(
            request_id=request_id, row_index=row_index, sample_index=0, shard=shard,
            status=bad.status, finish_reason="error", prompt_ids=bad.prompt_ids,
            error=RowError(
                code=bad.code, stage="admission", message=f"{file} row {place} (id {request_id!r}): {bad}", retryable=False
            ),
        )  # fmt: skip

    def cells(self, shard: InputShard) -> Iterator[dict[str, Any]]:
        """Each row's values under batchspec's names, as `admit` reads them. Raises BadRow at a cell that cannot be read."""
        return (row_values(row, self.fields, self.columns.prompt_kind) for row in self._rows(shard))

    def _rows(self, shard: InputShard) -> Iterator[dict[str, Any]]:
        """Each row's cells under batchspec's names; prompt_ids stay an Arrow array."""
        names = {name: column for name, column in self.columns.names.items() if name not in ("id", "prompt_ids")}
        table = shard.table.select(list(names.values())).rename_columns(list(names))
        try:
            rows = table.to_pylist()
        except UnicodeDecodeError:
            rows = [{name: plain_cell(table.column(name)[index]) for name in names} for index in range(table.num_rows)]
        if self.columns.prompt_kind != "prompt_ids":
            return iter(rows)
        cells = shard.table.column(self.columns.prompt_column)
        if json_kinds(self.fields["prompt_ids"]):
            prompts: Iterator[Any] = (cell.as_py() for cell in cells)
        else:
            prompts = (cell.values for cell in cells)
        return ({**row, "prompt_ids": prompt} for row, prompt in zip(rows or [{}] * len(cells), prompts, strict=True))

    def _requests(self, row: dict[str, Any], request_id: str, row_index: int, shard: int) -> Iterator[Request]:
        prompt = prompt_cell(row, self.columns.prompt_kind)
        values = self._values(row)
        stop, stop_ids = self._stops(row.get("stop"))
        max_new_tokens = int(values["max_new_tokens"])
        self._check_scored(max_new_tokens, int(values["n"]))
        room = self.max_len - max_new_tokens
        if room < 1:
            said = f"max_new_tokens={max_new_tokens} leaves no room for a prompt in model.max_len={self.max_len}; lower it"
            raise BadRow("bad_parameter", said)
        adapter = self._adapter(row.get("adapter"))
        prompt_ids = self.encoder.encode(prompt, row, room)
        sampling = SamplingParams(
            temperature=values["temperature"], top_k=min(int(values["top_k"]), self.vocab_size),
            top_p=values["top_p"], min_p=values["min_p"],
            repetition_penalty=values["repetition_penalty"], presence_penalty=values["presence_penalty"],
            frequency_penalty=values["frequency_penalty"],
            logit_bias=bias_cell(row, self.logit_bias, self.vocab_size),
        )  # fmt: skip
        thinking = self._thinking(prompt_ids, row.get("thinking_token_budget")) if max_new_tokens else None
        constraint = None
        if self.constraints is not None:
            constraint = self.constraints.of_row(row)
        base = hash64(self.decode.seed, request_id) if row.get("seed") is None else int(values["seed"])
        synthetic_len = synthetic_len_cell(row)
        may_end_early = bool(stop_ids or stop) or synthetic_len is not None
        predicted = self.predictor.predict(max_new_tokens) if may_end_early else max_new_tokens
        for sample_index in range(int(values["n"])):
            yield Request(
                request_id=request_id, row_index=row_index, sample_index=sample_index, shard=shard, prompt_ids=prompt_ids,
                max_new_tokens=max_new_tokens, min_new_tokens=min(self.decode.min_new_tokens, max_new_tokens),
                sampling=sampling, stop_ids=stop_ids, stop=stop,
                seed=hash64(base, sample_index) if sample_index else base, predicted_tokens=predicted,
                thinking=thinking, synthetic_len=synthetic_len, constraint=constraint, adapter=adapter,
            )  # fmt: skip

    def _check_scored(self, max_new_tokens: int, num_samples: int) -> None:
        """All rows of a job are scored, or none."""
        scores = self.decode.max_new_tokens == 0
        if scores != (max_new_tokens == 0):
            whole = (
                "a job that scores prompts" if scores else "a job that decodes; decode.max_new_tokens=0 scores all its prompts"
            )
            raise BadRow("bad_parameter", f"max_new_tokens={max_new_tokens} in {whole}; leave it null")
        if scores and num_samples > 1:
            raise BadRow("bad_parameter", f"n={num_samples} in a job that scores prompts; leave it null")

    def _adapter(self, own: Any) -> int:
        """The number of the row's LoRA adapter."""
        if own is None:
            return self.usual_adapter
        number = self.adapters.get(own) if isinstance(own, str) else None
        if number is None:
            known = ", ".join(list(self.adapters)[:20])
            raise BadRow("bad_parameter", f"adapter={own!r} is none of model.adapters ({known}); correct it or leave it null")
        return number

    def _thinking(self, prompt_ids: Ids, own: Any) -> Thinking | None:
        think, budget = self.think, self.decode.thinking_token_budget
        if own is not None:
            budget = int(number_cell("thinking_token_budget", own, whole=True))
            problem = violation("decode.thinking_token_budget", budget)
            if problem or think is None:
                said = f"thinking_token_budget={budget} needs think tokens, and the tokenizer has none; leave it null"
                raise BadRow("bad_parameter", problem.removeprefix("decode.") if problem else said)
        if think is None:
            return None
        return think.of_row(prompt_ids, budget, self.closing)

    def _values(self, row: dict[str, Any]) -> dict[str, float]:
        """The sampling values of a row: the row's own, or else the job's."""
        values: dict[str, float] = {}
        for name in SAMPLING:
            own, usual = row.get(name), getattr(self.decode, name)
            if own is None:
                values[name] = usual
                continue
            values[name] = number_cell(name, own, whole=isinstance(usual, int))
            problem = violation(f"decode.{name}", values[name])
            if problem:
                raise BadRow("bad_parameter", problem.removeprefix("decode."))
        return values

    def _stops(self, own: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Stop strings to search for in the text, and stop ids. A stop string that is a special token becomes a stop id."""
        strings: list[Any] = list(self.decode.stop)
        if own is not None:
            strings = [own] if isinstance(own, str) else own if isinstance(own, list) else [None]
            if not all(isinstance(item, str) and item for item in strings):
                raise BadRow("bad_parameter", f"stop={own!r} must hold non-empty strings; correct it or leave it null")
            if strings and self.tokenizer is None:
                raise BadRow("bad_parameter", f"stop={own!r} needs a tokenizer, and the model folder has none; leave it null")
        ids = self.end_ids | {self.special_ids[item] for item in strings if item in self.special_ids}
        if len(ids) > MAX_STOP_IDS:
            raise BadRow("bad_parameter", f"stop={own!r} makes {len(ids)} stop ids, at most {MAX_STOP_IDS} fit; shorten the list")
        return tuple(item for item in strings if item not in self.special_ids), tuple(sorted(ids))


def job_max_len(config: RunConfig, spec: ModelSpec) -> int:
    """Longest prompt + output of the job: model.max_len, or the model's own limit.

    Raises ConfigError if model.max_len or decode.max_new_tokens exceeds the model's limit.
    """
    limit = config.model.max_len or spec.max_len
    if limit > spec.max_len:
        raise ConfigError(f"model.max_len={limit} exceeds the model's own limit of {spec.max_len} tokens; lower it")
    cap = config.decode.max_new_tokens
    if cap >= limit:
        raise ConfigError(f"decode.max_new_tokens={cap} leaves no room for a prompt in the model's {limit} tokens; lower it")
    return limit
