"""The journal: rows of shards that are not committed yet, so that a killed run loses about a minute of finished rows.

_batchspec/journal/<attempt>-<number>.json   an immutable segment: a header line, then one line of JSON for each row: a finished
                                             row (Completion), or the tokens of an unfinished one (Snapshot)

A thread writes the segments, because an operation of a store may take seconds; those at the end of a run are written by the
caller's thread. A segment is published atomically. Its header has the number of the following lines and their CRC-32. A segment
that does not match, cannot be read or holds anything but rows of this job is ignored with a warning, and its rows are computed
again: the journal only saves work. If several segments have the same row, a finished one is used, or else the longest unfinished
one. A segment is deleted once the run that wrote it has committed the shards of all its rows: otherwise the journal of a long job
would grow to the size of its output, and each run would read all of it.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from batchspec.console.text import quoted
from batchspec.data.runstate.in_thread import in_thread
from batchspec.data.runstate.journal_rows import from_json, to_json
from batchspec.data.storage.store import Store, for_each
from batchspec.errors import InputError, StorageError
from batchspec.records import Completion, Request, Snapshot

FOLDER = "_batchspec/journal"
NAME = re.compile(r"\w+-[0-9]{6,}\.json")
Key = tuple[int, int]
"""row_index and sample_index."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Journaled:
    """Rows that earlier runs saved of shards that are not committed, by row and sample."""

    completions: dict[Key, Completion] = field(default_factory=dict)
    snapshots: dict[Key, Snapshot] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.completions) + len(self.snapshots)

    def finish(self) -> None:
        """Drop the saved tokens of finished rows."""
        for key in self.completions:
            self.snapshots.pop(key, None)

    def with_finished(self, admitted: Iterable[Request | Completion]) -> Iterator[Request | Completion]:
        """The admitted rows, in which no error replaces a finished answer: of a row that is refused now, because the file of an
        image is missing or another one, say, the samples that were finished stay so, and each of the others has the error. A plan
        reads this, so that each sample meets its own row of the output."""
        for entry in admitted:
            if isinstance(entry, Request):
                yield entry
                continue
            samples = range(entry.sample_index, entry.sample_index + entry.num_samples)
            saved = [self.completions.get((entry.row_index, sample)) for sample in samples]
            finished = [done if done is not None and done.error is None else None for done in saved]
            if not any(finished):
                yield entry
                continue
            for sample, done in zip(samples, finished, strict=True):
                yield done or entry.replace(sample_index=sample, num_samples=1)

    def known(self, entry: Request | Completion) -> Request | Completion:
        """The saved state of an admitted row: the finished row, the request with its saved tokens, or `entry` if nothing is
        saved. Raises InputError for tokens that were saved for other images."""
        if isinstance(entry, Completion):
            return entry
        key = entry.row_index, entry.sample_index
        done, snapshot = self.completions.get(key), self.snapshots.get(key)
        for saved in (done, snapshot):
            if saved is not None and (isinstance(saved, Snapshot) or saved.error is None):
                check_images(entry, saved.image_digest)
        return done or (entry if snapshot is None else replace(entry, resumed=snapshot))


def check_images(request: Request, digest: str | None) -> None:
    """Raises InputError if tokens of this request were saved for other images than it has now. digest: of those."""
    if digest != request.image_digest:
        raise InputError(
            f"row {request.row_index} (id {quoted(request.request_id)}) has other images now than when its tokens were saved; "
            "put the old ones back, or use another output.dir"
        )


def saved_rows(journaled: Journaled) -> str:
    """A message about the number of saved completions, and of the unfinished ones among them."""
    unfinished = journaled.snapshots.values()
    tokens = sum(len(snapshot.tokens) for snapshot in unfinished)
    some = f" ({len(unfinished):,} of them unfinished, with {tokens:,} tokens)" if unfinished else ""
    number = journaled.num_rows
    completions = "1 completion is" if number == 1 else f"{number:,} completions are" if number else "no completions are"
    return f"of the other shards {completions} saved{some}"


class Journal:
    """The segments of one job, as the run `attempt` reads and writes them.

    job        id of the job, from the manifest: segments of an earlier job in the folder are ignored
    check_own  called before a segment is published; raises when the folder holds another job now
    holds      whether a shard holds an input row
    """

    def __init__(
        self,
        store: Store,
        attempt: str,
        job: str = "",
        check_own: Callable[[], None] = lambda: None,
        holds: Callable[[int, int], bool] = lambda shard, row: True,
    ) -> None:
        self._store, self._attempt, self._job, self._check_own, self._holds = store, attempt, job, check_own, holds
        self._numbers = itertools.count()
        self._known: set[str] = set()
        self._waiting: list[Completion] = []
        """Finished rows for the next segment."""
        self._writing: list[Completion] = []
        """Finished rows of the segment that the thread is writing; they may not be saved yet."""
        self._segments: dict[str, list[Completion | Snapshot]] = {}
        """By segment of this run, its rows whose shard the run has not committed."""
        self._write: Future[str] | None = None
        """The thread's write, which may have ended; None once `flush_every` has taken its result."""
        self._flushed_at = time.monotonic()

    def add(self, completion: Completion) -> None:
        """Keep a finished row for the next segment."""
        self._waiting.append(completion)

    def forget(self, shard: int) -> None:
        """Drop the rows of a committed shard."""
        self._waiting, self._writing = (
            [completion for completion in rows if completion.shard != shard] for rows in (self._waiting, self._writing)
        )
        for name, rows in self._segments.items():
            self._segments[name] = [row for row in rows if row.shard != shard]

    def flush_every(self, seconds: float) -> None:
        """Begin to publish the added rows as a segment in a thread, if the last one was begun at least `seconds` ago.

        Does not wait for the store. Raises the error of the previous write, whose rows are still to be saved.
        """
        if self._write is not None:
            if not self._write.done():
                return
            ended, self._write = self._write, None
            if ended.exception() is None:
                self._segments[ended.result()] = [*self._writing]
            else:
                self._waiting = self._writing + self._waiting
            self._writing = []
            ended.result()
        if time.monotonic() - self._flushed_at >= seconds:
            self._flushed_at = time.monotonic()
            if self._waiting:
                self._writing, self._waiting = self._waiting, []
                self._write = in_thread(partial(self._publish, tuple(self._writing), self._take_committed()), "journal")

    def flush(self, snapshots: Iterable[Snapshot] = ()) -> int:
        """Publish the rows that are not known to be saved, and these unfinished ones, as a segment. Returns its number of rows.
        Raises StorageError.

        It does not wait for the thread, whose store may hang: rows of a segment that the thread is writing are in this one too.
        """
        self._flushed_at = time.monotonic()
        own = [*self._writing, *self._waiting]
        rows: list[Completion | Snapshot] = [*own, *snapshots]
        if rows:
            self._segments[self._publish(rows)] = rows
            self._writing, self._waiting = [], []
        return len(rows)

    def settle(self) -> None:
        """Wait until the thread has ended its write. The next call of `flush_every` raises the error of that write."""
        if self._write is not None:
            wait([self._write])

    def _take_committed(self) -> list[str]:
        """The segments that hold no row any more which this run has not committed, once each."""
        names = [name for name, rows in self._segments.items() if not rows]
        for name in names:
            del self._segments[name]
        return names

    def _publish(self, rows: Sequence[Completion | Snapshot], committed: Sequence[str] = ()) -> str:
        """Publish a segment, then delete those that are not needed any more. Returns its name."""
        body = "\n".join(json.dumps(to_json(row)) for row in rows).encode()
        header = {"job": self._job, "rows": len(rows), "crc32": zlib.crc32(body)}
        name = f"{FOLDER}/{self._attempt}-{next(self._numbers):06d}.json"
        self._check_own()
        self._store.put_if_absent(name, json.dumps(header).encode() + b"\n" + body)
        for one in committed:
            with suppress(StorageError):  # one that stays costs time alone
                self._store.delete(one, self._store.version(one))
        return name

    def saved(self, earlier: Journaled, snapshots: Iterable[Snapshot], committed: Container[int]) -> Journaled:
        """What the next run will read: the rows of this run's segments and those of earlier runs.

        earlier    what this run read
        snapshots  the unfinished rows of the last flush
        committed  shards whose rows are not counted
        """
        found = Journaled()
        own = itertools.chain(*self._segments.values())
        for row in (*earlier.completions.values(), *earlier.snapshots.values(), *own, *snapshots):
            _take(row, found, committed)
        found.finish()
        return found

    def read(self, skip: Container[int]) -> Journaled:
        """The rows of all segments, except those of the shards in `skip`."""
        self._known.clear()
        found = Journaled()
        self.refresh(found, skip)
        return found

    def refresh(self, found: Journaled, skip: Container[int] = ()) -> None:
        """Add the rows of segments that were published since the last read. Called after this run took over a shard."""
        new = [name for name in self._store.list(FOLDER) if NAME.fullmatch(name) and name not in self._known]
        self._known.update(new)
        for name, data in zip(new, for_each(self._store, [f"{FOLDER}/{name}" for name in new], self._segment), strict=True):
            try:
                rows = [self._row(line) for line in _lines(data, self._job)]
            except (ValueError, RecursionError) as error:
                self._warn(name, f"is malformed ({type(error).__name__}: {error})")
                continue
            for row in rows:
                _take(row, found, skip)
        found.finish()

    def _row(self, line: bytes) -> Completion | Snapshot:
        """One line of a segment. Raises one of several errors if it is not a row of this job."""
        row = from_json(json.loads(line))
        if not (self._holds(row.shard, row.row_index) and row.sample_index >= 0):
            raise ValueError("a row of another shard")
        return row

    def _segment(self, name: str) -> bytes:
        """A segment; b"" if it cannot be read or was deleted: the run that completes the job deletes them all."""
        try:
            return self._store.read(name)
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                self._warn(name.removeprefix(f"{FOLDER}/"), f"cannot be read ({error.__cause__.strerror})")
            elif self._store.exists(name):
                raise
            return b""

    def _warn(self, name: str, why: str) -> None:
        log.warning("%s", f"{self._store.where}/{FOLDER}/{name} {why}: the rows in it are computed again")


def _lines(data: bytes, job: str) -> list[bytes]:
    """The lines of a segment; none if it is damaged or of another job."""
    head, _, body = data.partition(b"\n")
    try:
        header = json.loads(head)
        sound = header["job"] == job and header["crc32"] == zlib.crc32(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return body.split(b"\n") if sound else []


def _take(row: Completion | Snapshot, found: Journaled, skip: Container[int]) -> None:
    if row.shard in skip:
        return
    key = row.row_index, row.sample_index
    if isinstance(row, Completion):
        found.completions[key] = row
    elif (known := found.snapshots.get(key)) is None or len(known.tokens) < len(row.tokens):
        found.snapshots[key] = row
