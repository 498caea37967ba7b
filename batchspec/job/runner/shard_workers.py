"""`ShardWork` in worker processes: tokenising a row and making its output takes more time than an engine of many slots can spare.

A thread of this process would not help: chat templates, checks and tables are Python code, which only one thread executes at a
time, and the thread that launches the rounds would wait for it.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pyarrow as pa

from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.shard_writer import PendingFile, UnpublishedFile, WrittenFile
from batchspec.errors import CapacityError, WorkerLost
from batchspec.job.prepare import Job
from batchspec.job.runner import shard_worker
from batchspec.job.runner.shard_work import PendingTable, ShardWork
from batchspec.job.runner.shard_worker import COMMAND, from_bytes, receive, send, to_bytes
from batchspec.packing.work_plan import AdmittedShard, AdmittedShards
from batchspec.process.child_process import python_command, signals_blocked
from batchspec.process.machine import num_cpus
from batchspec.process.own_process import finalize_here
from batchspec.records import Completion

AHEAD = 2
"""Number of shards read ahead for each worker: one that it works on and one that waits."""

_Begun = tuple[InputShard, "Future[bytes]"]
"""A shard, and the worker's answer."""

MOST_WORKERS = 4
"""Default number of processes that admit rows and make tables: enough for about 6,000 short chats a second."""

log = logging.getLogger(__name__)


def workers_of(job: Job, attempt: str) -> ShardWork | ShardWorkers:
    """What admits rows and makes tables in a run: input.num_workers processes, or this one."""
    work, num_workers = ShardWork.of(job, attempt), job.config.input.num_workers
    if num_workers is None:
        num_workers = 0 if job.device.type == "cpu" else min(MOST_WORKERS, num_cpus() // 2)
    return ShardWorkers(work, num_workers) if num_workers else work


class ShardWorkers:
    """Does `ShardWork` with the same results in `num_workers` processes, which start, and import modules, at once.

    A worker that dies is replaced, with a warning, and its shard is done again; if that kills the second worker too, the run
    ends with WorkerLost, or with CapacityError if that one did not start.
    """

    def __init__(self, work: ShardWork, num_workers: int) -> None:
        self._first_message, self._num_workers, self._closed = to_bytes(work), num_workers, False
        self._without_images = work.without_images
        self._predictor = work.admission.predictor
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all = [_Process(self._first_message) for _ in range(num_workers)]
        for process in self._all:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="shard worker")
        self._tables = ThreadPoolExecutor(num_workers, thread_name_prefix="shard table")
        self._reader, self._settling = ThreadPoolExecutor(1, thread_name_prefix="shard reader"), False
        for _ in self._all:
            self._submit("begin", shard_worker.prepare)

    def admitted(self, shards: Iterator[InputShard]) -> AdmittedShards:
        """The shards, in order, with the results of admitting their rows.

        Some shards are read ahead and admitted meanwhile. A thread reads them, because claiming a shard waits for a disk or a
        network.
        """
        return _ReadAhead(lambda: self._reader.submit(self._begin, shards), AHEAD * self._num_workers)

    def _begin(self, shards: Iterator[InputShard]) -> _Begun | None:
        """Read the next shard and have it admitted; None at the end. Only the reader's thread uses `shards`."""
        if self._settling or (shard := next(shards, None)) is None:
            return None
        admitted = self._submit(f"admit shard {shard.index}", shard_worker.admit, shard, self._predictor)
        return self._without_images(shard), admitted

    def settle(self) -> None:
        """Stop reading the shards that were given so far; after this no other thread uses them."""
        self._settling = True
        self._reader.submit(lambda: None).result()
        self._settling = False

    def begin_table(self, shard: InputShard, completions: Sequence[Completion]) -> PendingTable:
        """The completions as output rows, which the next free worker makes before it admits more rows."""
        return _WorkerTable(self.begin_output(f"make the table of shard {shard.index}", shard_worker.table, shard, completions))

    def begin_file(self, shard: InputShard, completions: Sequence[Completion], file: UnpublishedFile) -> PendingFile:
        """The same rows in `file`, which the next free worker writes.

        A worker that dies leaves at most an unfinished file, which the next one replaces: only `OutputFolder.publish` gives
        final names.
        """
        return _WorkerFile(self, shard, completions, file)

    def begin_output(
        self, what: str, task: Callable[..., Any], shard: InputShard, completions: Sequence[Completion], *more: Any
    ) -> Future[bytes]:
        """Have the next free worker do a task with the output of a shard. The task is pickled by the thread that waits for the
        worker."""
        return self._tables.submit(lambda: self._ask(to_bytes((task, (shard, list(completions), *more))), what))

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        self._closed = self._settling = True
        for process in self._all:
            process.kill()
        self._reader.shutdown()
        for threads in (self._threads, self._tables):
            threads.shutdown(cancel_futures=True)
        for process in self._all:  # one that was started meanwhile
            process.kill()

    def _submit(self, what: str, task: Callable[..., Any], *arguments: Any) -> Future[bytes]:
        return self._threads.submit(self._ask, to_bytes((task, arguments)), what)

    def _ask(self, message: bytes, what: str) -> bytes:
        process = self._idle.get()
        try:
            for last in (False, True):
                answer = process.ask(message)
                if answer is not None:
                    return answer
                doing = f"was to {what}" if process.has_started else "started"
                died = f"worker process {process.pid} ended with {process.code()} while it {doing}"
                if last or self._closed:
                    break
                # If none can be started, the dead one stays, and is replaced at the next message.
                started = _Process(self._first_message)
                self._all[self._all.index(process)] = process = started
                log.warning("%s: another one does it again", died)
            if not process.has_started:
                raise CapacityError(
                    f"{died}; look for a lack of memory, and run the same command again, or with input.num_workers=0"
                )
            raise WorkerLost(
                f"{died}, and so did one before it; look for a lack of memory, and run the same command again, or with "
                "input.num_workers=0 to find the row"
            )
        finally:
            self._idle.put(process)


class _WorkerTable:
    """A `PendingTable` that a worker makes. answer: the worker's"""

    def __init__(self, answer: Future[bytes]) -> None:
        self._answer = answer

    def make(self) -> pa.Table:
        return cast(pa.Table, _result(self._answer.result()))


class _WorkerFile:
    """A `PendingFile` that a worker writes, from now on."""

    def __init__(
        self, workers: ShardWorkers, shard: InputShard, completions: Sequence[Completion], file: UnpublishedFile
    ) -> None:
        self._workers, self._shard, self._completions, self._file = workers, shard, completions, file
        self._answer: Future[bytes] | None = self._begin()

    def write(self) -> WrittenFile:
        answer, self._answer = self._answer or self._begin(), None
        return cast(WrittenFile, _result(answer.result()))

    def _begin(self) -> Future[bytes]:
        what = f"write shard {self._shard.index}"
        return self._workers.begin_output(what, shard_worker.write, self._shard, self._completions, self._file)


class _ReadAhead(AdmittedShards):
    """Shards that a thread reads and workers admit, up to `num_ahead` of them in advance.

    begin  starts reading the next shard
    """

    def __init__(self, begin: Callable[[], Future[_Begun | None]], num_ahead: int) -> None:
        self._begin, self._num_ahead, self._ended = begin, num_ahead, False
        self._ahead: deque[Future[_Begun | None]] = deque()

    def __next__(self) -> AdmittedShard:
        self._fill()
        begun = self._ahead.popleft().result() if self._ahead else None
        if begun is None:
            self._ended = True
            self._ahead.clear()
            raise StopIteration
        self._fill()
        shard, answer = begun
        return AdmittedShard(shard, itertools.chain.from_iterable(map(from_bytes, _result(answer.result()))))

    def is_ready(self) -> bool:
        self._fill()
        if not self._ahead or not self._ahead[0].done():
            return not self._ahead
        begun = self._ahead[0].result()
        return begun is None or begun[1].done()

    def _fill(self) -> None:
        while len(self._ahead) < self._num_ahead and not self._ended:
            self._ahead.append(self._begin())


class _Process:
    """One worker process."""

    def __init__(self, first_message: bytes) -> None:
        with signals_blocked():
            self._process = subprocess.Popen(
                python_command("-c", COMMAND), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self._greeting: bytes | None = first_message
        self.has_started = False
        """Whether it has answered the first message: if it dies before, no row is the cause."""
        self.pid = self._process.pid
        finalize_here(self, self._process.kill)

    def ask(self, message: bytes) -> bytes | None:
        """The answer; None if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if self._greeting is not None:
                send(self._process.stdin, self._greeting)  # type: ignore[arg-type]
                self._greeting = None
                if receive(self._process.stdout) is None:  # type: ignore[arg-type]
                    return None
                self.has_started = True
            send(self._process.stdin, message)  # type: ignore[arg-type]
            return receive(self._process.stdout)  # type: ignore[arg-type]
        except BrokenPipeError:
            return None
        except BaseException:  # the answer may still come: it must not be taken for that of the next message
            self.kill()
            raise

    def code(self) -> int:
        """The exit code of a process that has died; negative: the signal."""
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _result(answer: bytes) -> Any:
    """What the worker returned; raises what it raised."""
    succeeded, value = from_bytes(answer)
    if not succeeded:
        error, cause = value
        raise error from cause
    return value
