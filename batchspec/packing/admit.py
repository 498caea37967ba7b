"""Admission: every input row becomes requests that are ready for the engine, or one completion with the reason why not.

A bad row never raises and never reaches the engine. It is checked in this order, and the first problem gives its code
(stage "admission"; codes are stable, messages are for people):

bad_json       the line is not a JSON object, or is nested too deeply
bad_csv        the row of a CSV file does not fit the header, or is quoted wrongly
bad_pdf        the PDF is damaged, empty or needs a password: one row for the whole file
bad_value      the cell's type differs among the files, and their common type does not hold the value; or Python's does not
bad_request    a line of OpenAI's batch requests is none, or asks for something that is not supported
bad_type       a cell of JSON lines is not text, and the column must be text
null_prompt    the prompt cell is null
empty_prompt   no message, no character, no token
null_column    input.prompt or input.system needs the value of a null
bad_text       a string is not valid Unicode, or the tokenizer fails on it
bad_messages   a message without role or content, or whose content is not text; a chat that ends with the assistant's turn
bad_ids        prompt_ids holds a null or an id outside the vocabulary
bad_parameter  a per-row value is out of range, or needs something that the job lacks (a tokenizer, think tokens)
bad_schema     a schema, regex or grammar is not valid, or holds what is not supported
unsupported_schema  a schema that decode.schema_unsupported=check would accept
impossible     no text satisfies the schema, the regex or the grammar
large_schema   following the schema, regex or grammar takes more time, memory or states than allowed
missing_image, bad_image, large_image, image_count  see packing/prompt_images.py
no_vision      the row has images, and the model's vision encoder is not loaded
template_error the chat template refuses the messages (order of roles, missing variables), or input.prompt or input.system the row
too_long       prompt + max_new_tokens exceed model.max_len

max_new_tokens is never lowered silently: a prompt that fits only with a smaller max_new_tokens is too_long as well.
input.on_overlong=truncate keeps the end of such a prompt, skip gives the row the status `skipped`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchspec.config.schema import OutputConfig, RunConfig
from batchspec.console.text import quoted
from batchspec.data.dataset.columns import IMAGES, TYPES, ColumnMap
from batchspec.data.dataset.image_files import ImageFiles
from batchspec.data.dataset.messages import USUAL_SYSTEM, BadChat, with_user_turn
from batchspec.data.dataset.reader import InputShard, Source, SourceFacts, place_in_file
from batchspec.data.dataset.row_ids import request_ids
from batchspec.data.dataset.schema import output_schema
from batchspec.data.dataset.untyped_columns import is_page, json_kinds
from batchspec.errors import BadRow, CapacityError, ConfigError, TokenizerFails
from batchspec.packing.cells import number_option, plain_cell, prompt_cell, row_values
from batchspec.packing.constraints import Constraints
from batchspec.packing.predict import LengthPredictor
from batchspec.packing.prompt_encoder import PromptEncoder
from batchspec.packing.prompt_images import PromptImages
from batchspec.packing.ready_requests import RequestCompiler
from batchspec.packing.row_constraints import RowConstraints
from batchspec.packing.row_settings import RowSettings
from batchspec.packing.row_templates import RowTemplates
from batchspec.packing.tool_choice import tool_choice
from batchspec.records import NO_LOGPROBS, Completion, Request, RowError
from batchspec.tasks.base import Task
from batchspec.tasks.registry import task_of
from batchspec.text.token_texts import TokenTexts
from batchspec.tool_calls.marks import HARMONY
from batchspec.tool_calls.registry import choose_form
from batchspec.tool_calls.split import CallParser

if TYPE_CHECKING:
    from batchspec.model.spec import ModelSpec
    from batchspec.text.tokenizer import Tokenizer


ROWS_AT_ONCE = 64
"""Rows whose cells are Python objects at a time: cells may be long."""


def hash64(*parts: int | str) -> int:
    """Signed 64-bit BLAKE2b of the parts: the same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        digest.update(f"{type(part).__name__}{len(data)}:".encode() + data)
    return int.from_bytes(digest.digest(), "little", signed=True)


class Admission:
    """Turns input shards into requests; the rules are in the module's docstring.

    task       what is done to each row; it knows the model. None: that of the configuration, which needs not know it
    source     the dataset that the shards come from; messages name its files
    tokenizer  may be None for `prompt_ids` input without stop strings
    constraints  compiler to share with another admission of the same configuration and model; None: make one
    templates    those that mapped the columns; None: make them
    logprobs_of_all  as for `RowSettings`
    It can be pickled: worker processes admit too (job/runner/shard_workers.py).
    Raises ConfigError when the configuration does not fit the model or the tokenizer.
    """

    def __init__(
        self, config: RunConfig, task: Task | None = None, *, source: Source, columns: ColumnMap, spec: ModelSpec,
        tokenizer: Tokenizer | None, constraints: Constraints | None = None, templates: RowTemplates | None = None,
        logprobs_of_all: bool = True,
    ) -> None:
        self.task = task or task_of(config)
        self.templates = templates or RowTemplates(config.input, self.task.texts)
        self.decode, self.input = config.decode, self.task.with_chats(self.templates.input)
        self.source, self.columns = SourceFacts(source.files, source.schema, source.lines), columns
        self.tokenizer, self.vocab_size = tokenizer, spec.vocab_size
        self.token_texts = None if tokenizer is None else TokenTexts(tokenizer)
        self.max_len = job_max_len(config, spec)
        self.settings = RowSettings(config, columns, spec, tokenizer, logprobs_of_all=logprobs_of_all)
        self.predictor = LengthPredictor()
        if tokenizer is None and (self.columns.prompt_kind != "prompt_ids" or self.decode.stop):
            raise ConfigError("decode.stop and text prompts need a tokenizer, and the model folder has none; use prompt_ids")
        self.tool_form = None
        """How the model writes tool calls in its answers; None: it is unknown, calls stay text, or have channels of their own."""
        if tokenizer is not None:
            self.tool_form = choose_form(config.model.tool_calls, tokenizer.chats.answer_samples, channels=self.has_channels)
        self._constraints = RowConstraints(
            config, columns, tokenizer, vocab_size=self.vocab_size, think=self.settings.think, end_ids=self.settings.end_ids,
            tool_form=self._form_name, shared=constraints,
        )
        self._rows_of_task = self.task.rows(config, frozenset(columns.names), tokenizer, self.settings.think)
        self.length_note = ""
        """Where the rows have a limit besides the model's: a line about it, for the user."""
        if (own := self._rows_of_task.limit) is not None and own[0] < self.max_len:
            self.max_len = own[0]
            self.length_note = f"prompts have at most {own[0]:,} tokens, as {own[1]} says; model.max_len sets another"
        if config.output.logprob_tokens and tokenizer is None:
            raise ConfigError("output.logprob_tokens needs a tokenizer, and the model folder has none; remove the key")
        self.encoder = PromptEncoder(
            self.input, columns, tokenizer, vocab_size=self.vocab_size, max_len=self.max_len,
            cuts_end=self._rows_of_task.cuts_end,
            images=None if spec.vision is None else PromptImages(
                spec.vision.processor, columns.get(IMAGES) is not None,
                ImageFiles.of(root) if (root := config.input.image_root) else None,
                (column := columns.get(IMAGES)) is not None and is_page(source.schema.field(column)),
            ),
        )
        self.fields = {name: source.schema.field(column) for name, column in columns.names.items()}

    @property
    def constraints(self) -> Constraints | None:
        """Compiles what answers must match; None: no row can have a constraint."""
        return self._constraints.compiler

    @property
    def _form_name(self) -> str | None:
        """The form in which the model writes tool calls; None if it is unknown."""
        return HARMONY if self.has_channels else None if self.tool_form is None else self.tool_form.name

    def expect_constraints(self, constraints: Constraints | None = None) -> None:
        """Prepare for constraints in rows that another admission admits for the same engine, or in later turns of conversations.
        Without effect if the tokenizer allows no constraint.

        constraints  compiler to share; None: make one
        """
        self._constraints.expect(constraints)

    @property
    def has_channels(self) -> bool:
        """Whether the model's outputs have channels (harmony)."""
        return self.settings.think is not None and self.settings.think.channels is not None

    @property
    def call_parser(self) -> CallParser | None:
        """Finds the tool calls in the text of answers; None: calls stay text, or have channels of their own."""
        form = self.tool_form
        return None if form is None or self.tokenizer is None else CallParser(form, self.tokenizer.decode)

    def has_calls(self, columns: ColumnMap) -> bool:
        """Whether the output of rows with these columns has a column of tool calls. It is null where calls stay text."""
        return self.has_channels or columns.get("tools") is not None

    def schema_of(self, input_schema: pa.Schema, columns: ColumnMap, output: OutputConfig) -> pa.Schema:
        """The schema of the output of rows with these columns, as `output_schema`."""
        calls, channels = self.has_calls(columns), self.has_channels
        return output_schema(input_schema, columns, output, calls=calls, channels=channels, task=self.task)

    def observe(self, completion: Completion) -> None:
        """Update the predicted output length with a finished row."""
        self.predictor.observe(completion)

    def predicted(self, request: Request) -> Request:
        """The request with its predicted output length: the present prediction, or max_new_tokens if nothing can end it early. An
        earlier prediction is kept if it differs by at most a sixteenth, because a new request takes some microseconds."""
        if not request.may_end_early:
            return request
        predicted, before = self.predictor.predict(request.max_new_tokens), request.predicted_tokens
        return request if 16 * abs(predicted - before) <= before else replace(request, predicted_tokens=predicted)

    def admit(self, shard: InputShard) -> Iterator[Request | Completion]:
        """Yield for each row, in input order, its requests (samples 0 .. n-1), or one completion with the reason why it has none.

        Constraints are not compiled here: `compiled` does that, and may refuse a row's samples (bad_schema,
        unsupported_schema, impossible, large_schema).
        """
        ids = request_ids(self.source, self.columns, shard)
        for place, (request_id, row) in enumerate(zip(ids, self._rows(shard), strict=True)):
            row_index = shard.first_row + place
            try:
                if row_index in shard.bad:
                    raise BadRow(shard.bad[row_index].code, shard.bad[row_index].message)
                yield from self._requests(self._values(row, shard, place), request_id, row_index, shard.index)
            except (BadRow, TokenizerFails) as error:
                yield self._refused(error, request_id, row_index, shard.index)

    def admit_turn(self, values: Mapping[str, Any], first: Request) -> Request | Completion:
        """The request for a later turn of the conversation that `first` began, or a completion with the reason why there is none.
        Waits until its automaton is compiled.

        values  cells under batchspec's names, parsed; the prompt column holds the whole chat
        """
        try:
            unknown = sorted(values.keys() - {*TYPES, USUAL_SYSTEM})
            if unknown or values.get("n") not in (None, 1):
                problem = f"has no column {unknown[0]!r}" if unknown else f"has n={values['n']}; one answer continues it"
                raise BadRow("bad_parameter", f"a turn {problem}; its columns are those of the input")
            self._constraints.check_turn(values)
            (request,) = self._requests({**values, "n": 1}, first.request_id, first.row_index, first.shard)
            return self.compiled(replace(request, sample_index=first.sample_index))
        except (BadRow, TokenizerFails) as error:
            refused = self._refused(error, first.request_id, first.row_index, first.shard)
            return refused.replace(sample_index=first.sample_index)

    @property
    def compiling(self) -> RequestCompiler | None:
        """The compiler of admitted requests' automata; None if no row can have a constraint."""
        return None if self.constraints is None else self

    def begin(self, request: Request) -> Future[Any] | None:
        """Start compiling the request's automaton. The future is done once `compiled` need not wait; None: it needs none."""
        return None if self.constraints is None else self.constraints.begin(request)

    def compiled(self, request: Request) -> Request | Completion:
        """The request with its automaton, or the reason why it has none; waits for the automaton."""
        if self.constraints is None:
            return request
        try:
            return self.constraints.compiled(request)
        except BadRow as bad:
            refused = self._refused(bad, request.request_id, request.row_index, request.shard)
            return refused.replace(sample_index=request.sample_index)

    def admit_compiled(self, shard: InputShard) -> Iterator[Request | Completion]:
        """As `admit`, with all automata compiled."""
        entries = list(self.admit(shard))
        for entry in entries:
            if isinstance(entry, Request):
                self.begin(entry)
        for entry in entries:
            yield self.compiled(entry) if isinstance(entry, Request) else entry

    def _refused(self, error: BadRow | TokenizerFails, request_id: str, row_index: int, shard: int) -> Completion:
        bad = error if isinstance(error, BadRow) else BadRow("bad_text", str(error))
        place = place_in_file(self.source, row_index)
        return Completion(
            request_id=request_id, row_index=row_index, sample_index=0, shard=shard,
            status=bad.status, finish_reason="error", prompt_ids=bad.prompt_ids, num_samples=bad.num_samples,
            error=RowError(
                code=bad.code, stage="admission", message=f"{place} (id {quoted(request_id)}): {bad}",
                retryable=bad.retryable,
            ),
        )

    def cells(self, shard: InputShard) -> Iterator[dict[str, Any]]:
        """Each row's values under batchspec's names, as `admit` reads them. Raises BadRow at a cell that cannot be read."""
        return (self._values(row, shard, place) for place, row in enumerate(self._rows(shard)))

    def _values(self, row: Mapping[str, Any], shard: InputShard, place: int) -> dict[str, Any]:
        """The values of a row of the shard, with the texts that templates make of it. Raises BadRow."""
        values = row_values(row, self.fields, self.columns.prompt_kind)
        values |= self.templates.texts(self.columns, shard.table, place, values, chat=self.encoder.is_chat)
        if self.columns.adds_turn and (chat := values["messages"]):
            try:
                values["messages"] = with_user_turn(chat, values["prompt"])
            except BadChat as error:
                raise BadRow("bad_messages", str(error)) from None
        return values

    def texts(self, shard: InputShard, row_index: int) -> dict[str, str]:
        """What the templates make of one row of the shard; empty if they refuse it.

        Raises CapacityError if the machine has too little memory to render it.
        """
        try:
            values = next(self.cells(shard.only(row_index)))
        except BadRow as bad:
            if bad.retryable:
                raise CapacityError(f"{place_in_file(self.source, row_index)}: {bad}; run the same command again") from bad
            return {}
        return {name: values[name] for name in ("prompt", USUAL_SYSTEM) if name in values}

    def _rows(self, shard: InputShard) -> Iterator[dict[str, Any]]:
        """Each row's cells under batchspec's names; prompt_ids stay an Arrow array."""
        names = {name: column for name, column in self.columns.names.items() if name not in ("id", "prompt_ids")}
        table = shard.table.select(list(names.values())).rename_columns(list(names))
        pieces = (table.slice(first, ROWS_AT_ONCE) for first in range(0, table.num_rows, ROWS_AT_ONCE))
        rows = itertools.chain.from_iterable(map(_cells, pieces)) if names else iter([{}] * shard.table.num_rows)
        if self.columns.prompt_kind != "prompt_ids":
            return rows
        cells = shard.table.column(self.columns.prompt_column)
        if json_kinds(self.fields["prompt_ids"]):
            prompts: Iterator[Any] = (cell.as_py() for cell in cells)
        else:
            prompts = (cell.values for cell in cells)
        return ({**row, "prompt_ids": prompt} for row, prompt in zip(rows, prompts, strict=True))

    def _requests(self, row: dict[str, Any], request_id: str, row_index: int, shard: int) -> Iterator[Request]:
        prompt, values = prompt_cell(row, self.columns.prompt_kind), self.settings.values(row)
        try:
            yield from self._samples(row, prompt, values, request_id, row_index, shard)
        except BadRow as bad:
            bad.num_samples = int(values["n"])
            raise

    def _samples(
        self, row: dict[str, Any], prompt: Any, values: Mapping[str, Any], request_id: str, row_index: int, shard: int
    ) -> Iterator[Request]:
        """The requests of a row. values: its numbers, as from `RowSettings.values`."""
        settings = self.settings
        stop, stop_ids = settings.stops(row.get("stop"))
        max_new_tokens = int(values["max_new_tokens"]) if self.task.decodes else 0
        min_new_tokens = min(int(values["min_new_tokens"]), max_new_tokens)
        choices = self._rows_of_task.choices(row)
        room, taken_by = self._rows_of_task.room(choices, max_new_tokens)
        max_prompt_tokens = self.max_len - room
        if max_prompt_tokens < 1:
            raise BadRow("bad_parameter", f"{taken_by} leaves no room for a prompt in model.max_len={self.max_len}; lower it")
        adapter = settings.adapter(row.get("adapter"))
        choice = tool_choice(row, self._form_name)
        prompt = self._rows_of_task.prompt(prompt, row)
        found = self.encoder.encode(prompt, {**row, "tools": choice.tools}, max_prompt_tokens)
        prompt_ids = self._rows_of_task.ids(found.ids)
        tools = None if self.tool_form is None else choice.readable
        sampling = settings.sampling(values, row)
        thinking = settings.thinking(prompt_ids, values, row) if max_new_tokens else None
        constraint = self._constraints.of_row(row, choice)
        if thinking is not None and choice.forces:
            end = thinking.closing.index(thinking.end_id)  # in harmony the closing tokens go on to the channel final
            thinking = replace(thinking, closing=thinking.closing[: end + 1])
        num_logprobs = settings.num_logprobs(row)
        base = hash64(self.decode.seed, request_id) if row.get("seed") is None else int(values["seed"])
        own_len = number_option("synthetic_len", row)
        synthetic_len = None if own_len is None else int(own_len)
        may_end_early = bool(stop_ids or stop or settings.repetition) or synthetic_len is not None
        predicted = self.predictor.predict(max_new_tokens) if may_end_early else max_new_tokens
        for sample_index in range(int(values["n"])):
            yield Request(
                request_id=request_id, row_index=row_index, sample_index=sample_index, shard=shard, prompt_ids=prompt_ids,
                images=found.images, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
                sampling=sampling, stop_ids=stop_ids, stop=stop,
                seed=hash64(base, sample_index) if sample_index else base, predicted_tokens=predicted,
                thinking=thinking, synthetic_len=synthetic_len, constraint=constraint, adapter=adapter, choices=choices,
                tools=json.dumps(tools, ensure_ascii=False) if tools else None, one_call=choice.one_call,
                repetition=settings.repetition,
                num_logprobs=NO_LOGPROBS if num_logprobs is None else num_logprobs,
            )


def _cells(table: pa.Table) -> list[dict[str, Any]]:
    """Each row's cells. Text that is not UTF-8 stays bytes."""
    try:
        return table.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        names = table.column_names
        return [{name: plain_cell(table.column(name)[index]) for name in names} for index in range(table.num_rows)]


def job_max_len(config: RunConfig, spec: ModelSpec) -> int:
    """Longest prompt + output of the job: model.max_len, or the model's own limit.

    Raises ConfigError if model.max_len or decode.max_new_tokens exceeds the model's limit.
    """
    limit = config.model.max_len or spec.max_len
    why = f" ({spec.rope.limit_note})" if spec.rope.limit_note else ""
    if limit > spec.max_len:
        raise ConfigError(f"model.max_len={limit} exceeds the model's own limit of {spec.max_len} tokens{why}; lower it")
    cap = task_of(config).output_limit(config.decode)
    if cap >= limit:
        raise ConfigError(f"decode.max_new_tokens={cap} leaves no room for a prompt in the model's {limit} tokens{why}; lower it")
    return limit
