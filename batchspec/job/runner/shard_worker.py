"""A worker process: does `ShardWork` for one shard after the other, outside the process whose thread launches the rounds.

It reads and answers messages, each 8 bytes of length and a pickle. The first is the ShardWork, answered by nothing (length 0)
once it has started; the others are (a function of this module, its arguments), each answered by (True, result) or (False,
(exception, its cause if that is an OSError)). It ends when its standard input ends. Only processes of one run may exchange these
messages: a pickle from elsewhere could execute anything.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.shard_writer import UnpublishedFile, WrittenFile
from batchspec.job.runner.shard_work import ShardWork
from batchspec.packing.predict import LengthPredictor
from batchspec.records import Completion, Request, SamplingParams

COMMAND = "from batchspec.job.runner.shard_worker import main; main()"
LENGTH_BYTES = 8
PART_ROWS = 16
"""Number of admitted rows in a pickle. The thread that launches the rounds unpickles it when it needs the first of these rows; a
whole shard in one pickle would take it as long as a round."""


def send(pipe: BinaryIO, data: bytes) -> None:
    """Write one message."""
    pipe.write(len(data).to_bytes(LENGTH_BYTES, "little"))
    pipe.write(data)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes | None:
    """The next message; None if the other side has ended."""
    head = pipe.read(LENGTH_BYTES)
    size = int.from_bytes(head, "little")
    data = pipe.read(size) if len(head) == LENGTH_BYTES else b""
    return data if len(head) == LENGTH_BYTES and len(data) == size else None


def from_bytes(data: bytes) -> Any:
    """The inverse of `to_bytes`."""
    return pickle.loads(data)


def to_bytes(value: object) -> bytes:
    """A pickle. Tables are sent as the rows that they hold: pickle would send all of the buffers that a slice is part of."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return buffer.getvalue()


def _record_reducer(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Pickles a frozen record as its values only, which is three times as fast as the default for dataclasses."""
    values = attrgetter(*(item.name for item in fields(kind)))
    return lambda record: (_record, (kind, values(record)))


def _record(kind: type, values: tuple[Any, ...]) -> Any:
    made: Any = object.__new__(kind)
    put = object.__setattr__
    for name, value in zip(kind.__slots__, values, strict=True):  # type: ignore[attr-defined]
        put(made, name, value)
    return made


def _table_reducer(table: pa.Table) -> tuple[Any, ...]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return _table, (sink.getvalue().to_pybytes(),)


def _table(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


def _array_reducer(array: NDArray[Any]) -> tuple[Any, ...]:
    """Takes half as long as NumPy's own reducer for short arrays of numbers."""
    return _array, (array.tobytes(), array.dtype.str, array.shape)


def _array(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.frombuffer(bytearray(data), dtype).reshape(shape)  # a bytearray keeps the array writable


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    **copyreg.dispatch_table,
    pa.Table: _table_reducer,
    np.ndarray: _array_reducer,
    **{kind: _record_reducer(kind) for kind in (InputShard, Request, SamplingParams)},
}


def prepare(work: ShardWork) -> None:
    """Start the process that renders chat templates, before the first shard."""
    tokenizer = work.admission.tokenizer
    if tokenizer is not None:
        assert tokenizer.has_chat_template is not None


def admit(work: ShardWork, shard: InputShard, predictor: LengthPredictor) -> list[bytes]:
    """The results of admitting a shard's rows, in order, as pickles of PART_ROWS results each.

    predictor  of the run: with its present predictions, the run rarely has to predict these lengths again
    """
    work.admission.predictor = predictor
    entries = list(work.admission.admit(shard))
    return [to_bytes(entries[first : first + PART_ROWS]) for first in range(0, len(entries), PART_ROWS)]


def table(work: ShardWork, shard: InputShard, completions: list[Completion]) -> pa.Table:
    """The completions as output rows."""
    return work.table(shard, completions)


def write(work: ShardWork, shard: InputShard, completions: list[Completion], file: UnpublishedFile) -> WrittenFile:
    """Write the shard's table to the unpublished file; only the run's own process publishes it."""
    return file.write(work.compact_table(shard, completions))


def main() -> None:
    """Answer messages until standard input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the answers
    data = receive(requests)
    if data is None:  # the run has ended
        return
    work: ShardWork = from_bytes(data)
    try:
        send(answers, b"")
        while (data := receive(requests)) is not None:
            task, arguments = from_bytes(data)
            try:
                answer = to_bytes((True, task(work, *arguments)))
            except Exception as error:  # the parent raises it
                error.add_note(traceback.format_exc())
                cause = error.__cause__ if isinstance(error.__cause__, OSError) else None  # others may not be picklable
                answer = to_bytes((False, (error, cause)))
            send(answers, answer)
    except BrokenPipeError:  # the run has ended
        os._exit(0)
