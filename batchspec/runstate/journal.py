"""The journal: rows of shards that are not committed yet, so that a killed run loses at most a minute of finished rows.

_batchspec/journal/<attempt>-<number>.json   an immutable segment: a header line, then one line of JSON for each row: a finished
                                             row (Completion), or the tokens of an unfinished one (Snapshot)

A segment is published atomically. Its header has the number of the following lines and their CRC-32. A segment that does not
match, cannot be read or holds anything but rows of this job is ignored with a warning, and its rows are computed again: the
journal only saves work. If several segments have the same row, a finished one is used, or else the longest unfinished one.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from batchspec.errors import StorageError
from batchspec.records import Completion, Request, RowError, RowStats, Snapshot
from batchspec.storage.store import Store, for_each

FOLDER = "_batchspec/journal"
NAME = re.compile(r"\w+-[0-9]{6,}\.json")
VERSION = 2
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

    def known(self, entry: Request | Completion) -> Request | Completion:
        """The saved state of an admitted row: the finished row, the request with its saved tokens, or `entry` if nothing is
        saved."""
        if isinstance(entry, Completion):
            return entry
        key = entry.row_index, entry.sample_index
        snapshot = self.snapshots.get(key)
        return self.completions.get(key) or (entry if snapshot is None else replace(entry, resumed=snapshot))


def saved_rows(num_rows: int, unfinished: Collection[Snapshot]) -> str:
    """A message about the number of saved rows; `unfinished` are the unfinished ones among them."""
    tokens = sum(len(snapshot.tokens) for snapshot in unfinished)
    some = f", {len(unfinished):,} of them unfinished with {tokens:,} tokens" if unfinished else ""
    return f"{num_rows:,} more rows are saved{some}"


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
        self._number = 0
        self._known: set[str] = set()
        self._waiting: list[Completion] = []
        self._flushed_at = time.monotonic()

    def add(self, completion: Completion) -> None:
        """Keep a finished row for the next segment."""
        self._waiting.append(completion)

    def forget(self, shard: int) -> None:
        """Drop the unsaved rows of a committed shard."""
        self._waiting = [completion for completion in self._waiting if completion.shard != shard]

    def flush_every(self, seconds: float) -> None:
        """`flush` if the last flush was at least `seconds` ago. Raises StorageError."""
        if time.monotonic() - self._flushed_at >= seconds:
            self.flush()

    def flush(self, snapshots: Iterable[Snapshot] = ()) -> int:
        """Publish the rows added since the last flush, and these unfinished ones, as a segment. Returns its number of rows.
        Raises StorageError.
        """
        self._flushed_at = time.monotonic()
        lines = [json.dumps({"done": _plain(done)}) for done in self._waiting]
        lines += [json.dumps({"left": asdict(snapshot)}) for snapshot in snapshots]
        if lines:
            body = "\n".join(lines).encode()
            header = {"version": VERSION, "job": self._job, "rows": len(lines), "crc32": zlib.crc32(body)}
            name = f"{FOLDER}/{self._attempt}-{self._number:06d}.json"
            self._check_own()
            self._store.put_if_absent(name, json.dumps(header).encode() + b"\n" + body)
            self._number += 1
            self._waiting = []
        return len(lines)

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
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
                self._warn(name, f"is malformed ({type(error).__name__}: {error})")
                continue
            for row in rows:
                _take(row, found, skip)
        for key in found.completions:
            found.snapshots.pop(key, None)

    def _row(self, line: bytes) -> Completion | Snapshot:
        """One line of a segment. Raises one of several errors if it is not a row of this job."""
        values = json.loads(line)
        row = _completion(values["done"]) if "done" in values else _snapshot(values["left"])
        if not (fits(row, type(row)) and self._holds(row.shard, row.row_index) and row.sample_index >= 0):
            raise ValueError("neither a completion nor a snapshot, or a row of another shard")
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
    """The lines of a segment; none if it is damaged, of another job or of another version."""
    head, _, body = data.partition(b"\n")
    try:
        header = json.loads(head)
        sound = header["version"] == VERSION and header.get("job", "") == job and header["crc32"] == zlib.crc32(body)
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


def _snapshot(values: Mapping[str, Any]) -> Snapshot:
    snapshot = Snapshot(**_tuples(values))
    counts = (*snapshot.tokens, *snapshot.accepted, *snapshot.drafted)
    if len(snapshot.accepted) != len(snapshot.drafted) or min(counts, default=0) < 0:
        raise ValueError("counts that do not fit")
    return snapshot


def fits(value: object, kind: Any) -> bool:
    """Whether a value has the type of a record's annotation, checked recursively."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    if origin is not None:
        return isinstance(value, origin)
    if is_dataclass(kind):
        return type(value) is kind and all(fits(getattr(value, name), hint) for name, hint in _hints(kind))
    return type(value) is kind or (kind is float and type(value) is int)


@cache
def _hints(record: type) -> list[tuple[str, Any]]:
    return [*get_type_hints(record).items()]


def _plain(completion: Completion) -> dict[str, Any]:
    """A completion as JSON values: arrays as base64, records as dicts."""
    values = {item.name: getattr(completion, item.name) for item in fields(Completion)}
    for name in ("stats", "error"):
        values[name] = None if values[name] is None else asdict(values[name])
    for name in ("prompt_ids", "token_ids", "logprobs"):
        values[name] = None if values[name] is None else _packed(values[name])
    if completion.top_logprobs is not None:
        values["top_logprobs"] = [completion.top_logprobs[0].shape, *map(_packed, completion.top_logprobs)]
    return values


def _packed(array: np.ndarray[Any, Any]) -> str:
    """The array's bytes as base64: a hundred times faster than decimal numbers."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).decode("ascii")


def _completion(values: dict[str, Any]) -> Completion:
    def array(name: str, dtype: str) -> Any:
        return None if values[name] is None else _unpacked(values[name], dtype)

    stats, error, top = values["stats"], values["error"], values["top_logprobs"]
    arrays: dict[str, Any] = {
        "prompt_ids": array("prompt_ids", "<i4"),
        "token_ids": array("token_ids", "<i4"),
        "logprobs": array("logprobs", "<f4"),
        "top_logprobs": top and (_unpacked(top[1], "<i4").reshape(top[0]), _unpacked(top[2], "<f4").reshape(top[0])),
        "stats": None if stats is None else RowStats(**_tuples(stats)),
        "error": None if error is None else RowError(**error),
    }
    return Completion(**(values | arrays))


def _unpacked(text: str, dtype: str) -> Any:
    found = np.frombuffer(base64.b64decode(text), dtype)
    return found.astype(found.dtype.newbyteorder("="), copy=False)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
