"""The chats of the output's column `messages`: the turns of a row's prompt, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchspec.config.schema import InputConfig, OutputConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.data.dataset.json_text import BadJson
from batchspec.data.dataset.messages import (
    THINKING_FIELD,
    USUAL_SYSTEM,
    BadChat,
    Message,
    kept_turn,
    messages_of,
    read_chat,
    with_user_turn,
    without_nulls,
)
from batchspec.data.dataset.reader import InputShard
from batchspec.data.dataset.schema import messages_type
from batchspec.data.dataset.untyped_columns import value_of
from batchspec.data.dataset.valid_text import valid_text
from batchspec.records import Completion

Turn = Message


class Chats:
    """The prompt's turns and the answer as the assistant's turn, for the completions of a shard.

    A plain `prompt` becomes a user turn whether or not a chat template wrapped it, because a user/assistant pair is what training
    on the output needs. Rows given as prompt_ids have no messages.

    think_tokens  put around a thought if output.reasoning_in_messages asks for it; None: the model's outputs have channels, and
                  thoughts are a separate field
    calls  tool calls are a separate field
    texts  row index -> what templates made of the row (USUAL_SYSTEM, prompt), if columns.templates has some
    """

    def __init__(
        self, shard: InputShard, columns: ColumnMap, input: InputConfig, output: OutputConfig,
        think_tokens: tuple[str, str] | None, *, calls: bool, texts: Mapping[int, Mapping[str, str]],
    ) -> None:
        kind = messages_type(shard.table.schema, columns, output, calls=calls, channels=think_tokens is None)
        self._prompts = _prompt_turns(shard, columns, input, [field.name for field in kind.value_type], texts)
        self._first_row, self._output, self._think_tokens, self._calls = shard.first_row, output, think_tokens, calls

    def of(self, completion: Completion) -> list[Turn] | None:
        """The turns of a completion's chat; None if its prompt has none or they cannot be read."""
        prompt = self._prompts[completion.row_index - self._first_row]
        if completion.text is None or self._output.messages != "full":
            return prompt
        answer: Turn = {"content": completion.text}
        if self._calls:
            answer |= {"tool_calls": completion.tool_calls}
        if self._output.reasoning_in_messages and completion.reasoning is not None:
            own = {THINKING_FIELD: completion.reasoning}
            answer |= own if self._think_tokens is None else {"content": _with_thought(completion, self._think_tokens)}
        return _messages(prompt, answer)


def _prompt_turns(
    shard: InputShard, columns: ColumnMap, input: InputConfig, names: Sequence[str], texts: Mapping[int, Mapping[str, str]]
) -> list[list[Turn] | None]:
    """The turns of every row's prompt; None if it has none or they cannot be read."""
    table, kind = shard.table, columns.prompt_kind
    if kind not in ("messages", "prompt"):
        return [None] * table.num_rows
    made = [texts.get(shard.first_row + place, {}) for place in range(table.num_rows)]
    column = columns.prompt_column
    prompts = [text.get("prompt") for text in made] if column is None else _values(table, column)
    if columns.adds_turn:
        prompts = [_with_turn(prompt, text.get("prompt")) for prompt, text in zip(prompts, made, strict=True)]
    own_system = columns.get("system") if kind == "messages" or input.chat else None
    systems = [None] * table.num_rows if own_system is None else _values(table, own_system, optional=True)
    own = columns.get("final_assistant")
    finals = [None] * table.num_rows if own is None else _values(table, own, optional=True)
    if kind == "prompt":
        prompts = [[{"role": "user", "content": text}] if isinstance(text, str) else None for text in prompts]
    usual = input.system if kind == "messages" or input.chat else None
    return [
        _turns(
            prompt, system if isinstance(system, str) else None, final or input.final_assistant, names,
            text.get(USUAL_SYSTEM, usual), images=columns.has_images,
        )
        for prompt, system, final, text in zip(prompts, systems, finals, made, strict=True)
    ]


def _with_turn(prompt: Any, text: str | None) -> list[Any] | None:
    """The chat with the turn that input.prompt made; of a row that has none, because it was refused, the chat as it is."""
    try:
        messages = messages_of(prompt)
        return messages if text is None or not messages else with_user_turn(messages, text)
    except BadChat:
        return None


def _values(table: pa.Table, name: str, *, optional: bool = False) -> list[Any]:
    """The cells of a text or messages column as admission reads them (`value_of`), with U+FFFD for invalid text; None for JSON
    text that has no value."""
    field = table.schema.field(name)
    cells = valid_text(table.column(name).combine_chunks()).to_pylist()
    if pa.types.is_nested(field.type):
        return [without_nulls(cell) for cell in cells]
    values: list[Any] = []
    for cell in cells:
        try:
            values.append(value_of(cell, field, optional=optional))
        except BadJson:
            values.append(None)
    return values


def _turns(
    prompt: Any, system: str | None, final: str, names: Sequence[str], usual: str | None, *, images: bool
) -> list[Turn] | None:
    try:
        given: list[Any] | None = [] if images else None
        messages = messages_of(prompt)
        keep = "drop" if final == "drop" else "continue"  # a row that is refused keeps all its turns
        return None if messages is None else [kept_turn(turn, names) for turn in read_chat(messages, system, keep, usual, given)]
    except BadChat:
        return None


def _messages(prompt: list[Turn] | None, answer: Turn) -> list[Turn] | None:
    """The chat with its answer, which continues a final assistant turn: a row whose chat ends with one has an answer only
    then."""
    if prompt is None:
        return None
    if prompt and prompt[-1]["role"] == "assistant":
        return [*prompt[:-1], {**prompt[-1], **answer, "content": f"{prompt[-1]['content']}{answer['content']}"}]
    return [*prompt, {"role": "assistant", **answer}]


def _with_thought(completion: Completion, think_tokens: tuple[str, str]) -> str:
    """The thought between its tokens, then the answer, with the line breaks that chat templates put there."""
    thought = f"{think_tokens[0]}\n{completion.reasoning}\n"
    unfinished = completion.status == "truncated" and not completion.text
    return thought if unfinished else f"{thought}{think_tokens[1]}\n\n{completion.text}"
