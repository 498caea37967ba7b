"""Conversations of several turns: the completion of a turn becomes the next turn's request, while other rows decode.

A turn's request is given to the engine before rows that have not begun, so that the pages of its earlier turns are still cached:
the K/V of the earlier prompt are reused, those of the answer are computed again.
"""

from __future__ import annotations

import json
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import pyarrow as pa

from batchspec.data.dataset.columns import PROMPTS, ColumnMap
from batchspec.data.dataset.messages import USUAL_SYSTEM, BadChat, Message, read_chat, text_of
from batchspec.data.dataset.reader import InputShard
from batchspec.data.dataset.untyped_columns import value_of
from batchspec.errors import BadRow, ConfigError
from batchspec.job.load.loaded_engine import Decoder, LoadedEngine
from batchspec.packing.admit import hash64
from batchspec.records import Completion, Request
from batchspec.request_stream import ListedRequests, RequestStream
from batchspec.warm.call import Call

POLL_S = 0.1
"""Seconds between two checks for a cancelled call while only `next_turn` is waited for."""
OF_FIRST_TURN = {"id", "n", "seed", "system", "final_assistant", *PROMPTS}
"""Columns that later turns do not take from their row: the chat contains the system's turn, and each turn has its own noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn that has ended, as it is passed to `next_turn`."""

    completion: Completion
    """`status` is ok or truncated, `text` the answer, `sample_index` which of the row's conversations this is."""
    messages: list[Message]
    """The whole chat, the answer last."""
    row: Mapping[str, Any]
    """The input row, all columns."""
    number: int
    """Number of the turn, from 0."""


NextTurn = Callable[[Turn], "Sequence[Message] | Mapping[str, Any] | None"]
"""Returns the chat of the next turn; or input columns for it, with the chat as `messages`; or None if there is no next turn."""


class _CallbackFailed(Exception):
    """`next_turn` has raised `error`, which must reach the caller unchanged: the engine must not take it for an error of its own,
    such as lack of memory."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(slots=True)
class _Conversation:
    first: Request
    """The request of its first turn."""
    chat: list[Message]
    """The prompt of the present turn."""
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A turn as it is written to the output."""

    completion: Completion
    chat: list[Message] | None
    number: int


class Conversations:
    """All conversations of one call, and the `RequestStream` of their turns.

    threads  number of threads that call `next_turn`, besides the one that decodes
    Raises ConfigError for rows that are not chats.
    """

    num_ready = 0
    """A turn that becomes ready goes before rows that have not begun."""

    def __init__(self, call: Call, next_turn: NextTurn, threads: int) -> None:
        self.call, self._job, self._next_turn, self._threads = call, call.job, next_turn, threads
        self._kind = self._job.columns.prompt_kind
        if self._kind != "messages" and not (self._kind == "prompt" and self._job.config.input.chat):
            raise ConfigError(
                f"conversations need chats, and the rows have {self._kind}; give messages, or prompt with input.chat=true"
            )
        if self._job.spec.vision is not None:
            raise ConfigError("conversations are not supported with images (input.columns.images, model.vision); use generate")
        self._job.admission.expect_constraints(call.constraints)  # a turn may bring a constraint, even if no row has one
        self._open: dict[tuple[int, int], _Conversation] = {}
        self._ready: deque[Request] = deque()
        self._answers: queue.SimpleQueue[tuple[_Conversation, Request | Completion | BaseException | None]] = queue.SimpleQueue()
        self._first: RequestStream = ListedRequests(())
        """Requests of rows that have not begun."""
        self._turns: list[_Ended] = []

    def frame(self, engine: LoadedEngine[Decoder]) -> pl.DataFrame:
        """One row for each turn: the output columns of a job, and `turn` after `sample_index`.

        Raises what `next_turn` raises, after cancelling the other conversations.
        """
        self._first = self.call.feed(engine.batch.num_slots).requests
        pool, of_user = ThreadPoolExecutor(self._threads, thread_name_prefix="next_turn"), None
        try:
            for completion in self.call.run(engine, self):
                self._end_turn(completion, pool)
        except _CallbackFailed as failed:
            of_user = failed.error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # does not wait for tools whose results are not needed
        if of_user is not None:
            raise of_user  # out here, where its own cause and context stay
        return self._output()

    @property
    def ended(self) -> bool:
        return self._first.ended and not self._open

    def next_ready(self) -> Request | None:
        """A turn that is ready, or else a new row. Waits itself while only `next_turn` can make more requests."""
        while True:
            while not self._answers.empty():
                self._take(*self._answers.get())
            if self._ready:
                return self._ready.popleft()
            if (request := self._first.next_ready()) is not None:
                key = request.row_index, request.sample_index
                self._open[key] = _Conversation(request, self._first_chat(request.row_index))
                return request
            if not self._first.ended or self.call.num_unfinished or not self._open:
                return None
            self._wait()

    def _wait(self) -> None:
        while self._answers.empty():
            self.call.check()
            with suppress(queue.Empty):
                return self._take(*self._answers.get(timeout=POLL_S))

    def _take(self, conversation: _Conversation, answer: Request | Completion | BaseException | None) -> None:
        """Process the result of `next_turn` for a conversation."""
        if isinstance(answer, BaseException):
            raise _CallbackFailed(answer)
        if isinstance(answer, Request):
            self._ready.append(answer)
            return
        del self._open[conversation.first.row_index, conversation.first.sample_index]
        if answer is not None:
            self._turns.append(_Ended(completion=answer, chat=conversation.chat, number=conversation.number))

    def _end_turn(self, completion: Completion, pool: ThreadPoolExecutor) -> None:
        key = completion.row_index, completion.sample_index
        conversation = self._open.get(key)
        if conversation is None:  # the row was refused at admission
            self._turns.append(_Ended(completion=completion, chat=None, number=0))
            return
        self._turns.append(_Ended(completion=completion, chat=conversation.chat, number=conversation.number))
        if completion.status == "error":
            del self._open[key]
        else:
            pool.submit(self._advance, conversation, completion)

    def _advance(self, conversation: _Conversation, completion: Completion) -> None:
        """Ask for the next turn, in a thread of the pool, and admit it."""
        answer: Request | Completion | BaseException | None
        try:
            chat = self._with_answer(deepcopy(conversation.chat), completion)  # next_turn may edit its copy
            row = self._row(completion.row_index)
            given = self._next_turn(Turn(completion=completion, messages=chat, row=row, number=conversation.number))
            answer = None if given is None else self._admitted(conversation, given)
        except BaseException as error:
            answer = error
        self._answers.put((conversation, answer))

    def _admitted(self, conversation: _Conversation, given: Any) -> Request | Completion:
        """The request for the next turn, or the error row that it becomes."""
        own = dict(given) if isinstance(given, Mapping) else {"messages": given}
        chat, first = own.pop("messages", []), conversation.first
        if not isinstance(chat, list | tuple):
            raise TypeError(
                f"next_turn returned {type(chat).__name__} as the next chat; return a list of messages, or a dictionary of input "
                "columns with it as `messages`, or None after the last turn"
            )
        conversation.chat, conversation.number = list(chat), conversation.number + 1
        usual = next(self._job.admission.cells(self._shard(first.row_index)))
        values = {name: cell for name, cell in usual.items() if name not in OF_FIRST_TURN} | own | {self._kind: list(chat)}
        admitted = self._job.admission.admit_turn(values, first)
        if isinstance(admitted, Completion):
            return admitted
        conversation.chat = self._chat(chat, values)
        if own.get("seed") is not None:
            return admitted
        return replace(admitted, seed=hash64(first.seed, "turn", conversation.number))

    def _first_chat(self, row_index: int) -> list[Message]:
        """The chat of an admitted row."""
        values = next(self._job.admission.cells(self._shard(row_index)))
        prompt = values[self._kind]
        return self._chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, values)

    def _chat(self, messages: Any, values: Mapping[str, Any]) -> list[Message]:
        """The turns that the prompt of an admitted chat has. values: the other cells of its row."""
        usual = self._job.admission.input
        final = values.get("final_assistant") or usual.final_assistant
        return read_chat(messages, values.get("system"), final, values.get(USUAL_SYSTEM, usual.system))

    def _with_answer(self, chat: list[Message], completion: Completion) -> list[Message]:
        answer: Message = {"role": "assistant", "content": completion.text}
        if completion.reasoning is not None:
            answer["reasoning_content"] = completion.reasoning
        if completion.tool_calls is not None:
            answer["tool_calls"] = json.loads(completion.tool_calls)
        if chat and chat[-1]["role"] == "assistant":  # input.final_assistant=continue
            return [*chat[:-1], {**chat[-1], **answer, "content": f"{text_of(chat[-1]['content'])}{completion.text}"}]
        return [*chat, answer]

    def _rows(self, row_index: int) -> pa.Table:
        return self.call.rows.table.slice(row_index, 1)

    def _row(self, row_index: int) -> dict[str, Any]:
        """The row as it was given."""
        table, schema = self._rows(row_index), self._job.source.schema
        return {name: value_of(cell, schema.field(name)) for name, cell in table.to_pylist()[0].items()}

    def _shard(self, row_index: int) -> InputShard:
        return InputShard(index=0, first_row=row_index, table=self._rows(row_index))

    def _output(self) -> pl.DataFrame:
        """Every turn is written as a row of its own, whose prompt is the turn's chat."""
        turns = sorted(self._turns, key=lambda ended: (ended.completion.row_index, ended.completion.sample_index, ended.number))
        rows = [ended.completion.row_index for ended in turns]
        chats = [self._chat_of(ended) for ended in turns]
        table = self.call.rows.table.take(pa.array(rows, pa.int64()))
        own, text = "messages", pa.array(chats, pa.large_string())
        place = table.schema.get_field_index(own)
        table = table.append_column(own, text) if place < 0 else table.set_column(place, own, text)
        names = {name: column for name, column in self._job.columns.names.items() if name not in ("system", *PROMPTS)}
        work = replace(self.call.work, columns=ColumnMap(names=names | {own: own}, prompt_kind=own))
        completions = [ended.completion.replace(row_index=place) for place, ended in enumerate(turns)]
        frame = work.frame(InputShard(index=0, first_row=0, table=table), completions)
        frame = frame.with_columns(pl.Series("row_index", rows, pl.Int64))
        return with_turns(frame, [ended.number for ended in turns])

    def _chat_of(self, ended: _Ended) -> str | None:
        """JSON text of the prompt's messages; None where they cannot be read."""
        chat = ended.chat
        if chat is None:
            try:
                chat = self._first_chat(ended.completion.row_index)
            except (BadRow, BadChat, TypeError):
                return None
        return json.dumps(chat, default=str)


def with_turns(frame: pl.DataFrame, numbers: Sequence[int]) -> pl.DataFrame:
    """The frame with a column `turn` after `sample_index`."""
    return frame.insert_column(frame.get_column_index("sample_index") + 1, pl.Series("turn", numbers, pl.Int32))
