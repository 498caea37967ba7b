"""One call of a warm engine: rows in memory become requests, and completions a frame in the order of the rows."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing

import polars as pl
import pyarrow as pa

from batchspec.data.dataset.reader import InputShard, table_source
from batchspec.data.dataset.row_ids import NUMBER_THEM, OF_SAMPLES, check_ids
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import CapacityError, EngineInUse, InputError
from batchspec.job.images import of_call
from batchspec.job.load.loaded_engine import Decoder, LoadedEngine
from batchspec.job.prepare import Job, JobModel, job_of
from batchspec.job.runner.shard_work import ShardWork
from batchspec.packing.admit import Admission
from batchspec.packing.feed import Feed
from batchspec.process.out_of_memory import OutOfMemoryGuard
from batchspec.records import Completion, Request
from batchspec.request_stream import RequestStream, WrappedStream
from batchspec.warm.stream import Stream


class Cancelled(EngineInUse):
    """The call was cancelled while it ran."""


class Call:
    """The rows of one call, checked; `run` may be called once.

    named   input.columns of these rows; None: the engine's
    opened  the engine's job without rows. What the call learns about output lengths, and automata that it compiles, stay there
    Raises ConfigError or InputError, as a job over these rows would.
    """

    def __init__(self, model: JobModel, opened: Job, table: pa.Table, named: Mapping[str, str | None] | None = None) -> None:
        source = table_source(table)
        templates = opened.admission.templates
        columns = of_call(model.config, templates.map_columns(source.schema, named=named))
        check_ids(source, columns, NUMBER_THEM if named is None else OF_SAMPLES)
        self.constraints = opened.admission.constraints
        self.job: Job = job_of(model, source, columns, opened.tokenizer, self.constraints, templates)
        self.work = ShardWork.of(self.job)
        self.job.admission.predictor = opened.admission.predictor
        self.rows = next(source.shards(source.num_rows))
        self.cancelled = threading.Event()
        self.stream: weakref.ref[Stream] | None = None
        self._bad: list[Completion] = []
        self.num_unfinished = 0
        """Number of requests that the engine has, including those of later turns."""

    def feed(self, slots: int) -> Feed:
        """The requests of all rows, as a job feeds them to its engine.

        slots  of the batch
        """
        job = self.job
        return Feed(
            job.source.shards(job.layout), self.work.admitted, rows=self._with_bad_rows_noted,
            predicted=job.admission.predicted, num_shards=job.layout.num_shards, shard_rows=job.layout.last_shard_rows,
            slots=slots, compiling=job.admission.compiling, busy=lambda: self.num_unfinished > 0, refused=self._bad.append,
        )

    def _with_bad_rows_noted(
        self, shard: InputShard, admitted: Iterator[Request | Completion]
    ) -> Iterator[Request | Completion]:
        for planned in admitted:
            if isinstance(planned, Completion):
                self._bad.append(planned)
            yield planned

    def run(self, engine: LoadedEngine[Decoder], requests: RequestStream | None = None) -> Generator[Completion]:
        """Yield the completions of all requests as they end, including those of bad rows.

        requests  None: those of the rows
        Raises Cancelled at the next round after `give_up`, and CapacityError if memory runs out; the engine can then be used
        again.
        """
        if requests is None:
            requests = self.feed(engine.batch.num_slots).requests
        running = engine.steps(_CallRequests(self, requests), self.check)
        with OutOfMemoryGuard() as guard, closing(running) as steps:
            for step in steps:
                self.num_unfinished -= len(step)
                yield from self._bad_rows()
                yield from map(self.work.checked, step)
        if guard.message:
            raise CapacityError(
                f"out of memory with {engine.batch.num_slots} slots ({guard.message}); make an engine with a lower "
                "packing.max_num_seqs, packing.memory_gb or packing.max_num_batched_tokens"
            )
        yield from self._bad_rows()

    def check(self, totals: EngineTotals | None = None) -> None:
        if self.cancelled.is_set():
            raise Cancelled("the call was given up before its end: its stream or its engine was closed")

    def give_up(self) -> None:
        """End the call at its next round; if it is a stream, wait for that."""
        self.cancelled.set()
        if self.stream is not None and (stream := self.stream()) is not None:
            stream.close()

    def _bad_rows(self) -> Iterator[Completion]:
        while self._bad:
            yield self._bad.pop(0)

    def frame(self, completions: Sequence[Completion]) -> pl.DataFrame:
        """The completions in the output columns of a job, in the order of the rows."""
        return self.work.frame(self.rows, completions)


class _CallRequests(WrappedStream):
    """A `RequestStream` that counts the call's unfinished requests, and ends the call if it was cancelled."""

    def __init__(self, call: Call, requests: RequestStream) -> None:
        super().__init__(requests)
        self._call = call

    def next_ready(self) -> Request | None:
        request = super().next_ready()
        self._call.check()
        self._call.num_unfinished += request is not None
        return request


def empty_frame(model: JobModel, table: pa.Table, admission: Admission) -> pl.DataFrame:
    """The output for a table without rows. Raises InputError if it has no columns either, or not those of an input.

    admission  of any rows of this engine
    """
    if not table.num_columns:
        raise InputError("there are no rows and no columns; give a table with a column messages, prompt or prompt_ids")
    columns = of_call(model.config, admission.templates.map_columns(table.schema))
    schema = admission.schema_of(table.schema, columns, model.config.output)
    frame = pl.from_arrow(schema.empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame
