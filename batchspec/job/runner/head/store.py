"""Heads that jobs have trained, in a local folder that jobs and the tasks of an array share.

KIND-DIGEST/rows.parquet   the answers that a head learns from; of the first run that had enough. Deleted after the training
KIND-DIGEST/head-DIGEST/   the folder of `batchspec train`; the digest is that of its settings and answers. Those of
                           other trainings are deleted once there is a record, or when no run continues them (`abandoned.py`)
KIND-DIGEST/train.log      what the last one printed
KIND-DIGEST/record.json    written last: what became of the training. No other one begins while it is there
KIND-DIGEST/_batchspec/    the claim of the run that trains

DIGEST is that of the model: its config.json, its weights' files and how they are quantised. A head is used for this model alone.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.checkpoint.config_values import read_text
from batchspec.checkpoint.packaged import cache_folder
from batchspec.data.runstate.claims import Claims
from batchspec.data.storage.new_file import new_file
from batchspec.data.storage.open_store import open_store
from batchspec.data.storage.store import storing
from batchspec.errors import CheckpointError, ConfigError, StorageError
from batchspec.job.prepare import Job
from batchspec.job.runner.identity import weight_parts
from batchspec.records import Ids

ROWS, RECORD, LOG, TRAINING, STATE = "rows.parquet", "record.json", "train.log", "training.json", "checkpoint.pt"
HEADS = "head-"
"""What names of heads' folders begin with."""
TAIL_BYTES = 4096
CLAIM = 0
"""Claims are by number, and there is one thing to claim."""
_JOB, _DRAFTER, _BEFORE = b"batchspec.job", b"batchspec.drafter", b"batchspec.before"
SCHEMA = pa.schema([("prompt_ids", pa.list_(pa.int32())), ("token_ids", pa.list_(pa.int32()))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The answers to train on."""

    rows: int
    tokens: int
    longest: int
    """Tokens of the longest one, its prompt included."""
    drafter: str
    """What drafted while they were decoded."""
    before: float | None
    """Drafts that a round then accepted; None: too few rounds were measured."""
    digest: str
    """Of the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecord:
    """What became of a training."""

    head: str
    """Name of the head's folder."""
    failed: str = ""
    """Why there is no head; empty: there is one."""
    accepted: float = 0.0
    """Drafts of the head that a round accepts on answers that were held out, of `draft_len`."""
    draft_len: int = 0
    drafter: str
    before: float | None
    tokens: int
    """As in `Gathered`."""
    seconds: float
    """That the training took, loading included, in the run that ended it."""


TYPES: dict[str, tuple[type, ...]] = {
    "head": (str,), "failed": (str,), "accepted": (float, int), "draft_len": (int,), "drafter": (str,),
    "before": (float, int, type(None)), "tokens": (int,), "seconds": (float, int),
}
"""Of the values of a record in JSON."""


class StoredHead:
    """The place of one model's head. Nothing is written before `put_rows`, except claims.

    model  what identifies the model and the kind of its head, as JSON values
    """

    def __init__(self, store: Path, kind: str, model: dict[str, Any]) -> None:
        """Raises ConfigError for a place where no folder can be."""
        digest = sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()
        self.path = (store / f"{kind}-{digest[:24]}").absolute()
        try:
            self._store = open_store(self.path, "_batchspec/tmp")
        except ConfigError:
            raise ConfigError(f"draft.train.store={store}: no folder can have this name; choose another one") from None

    def claims(self, attempt: str) -> Claims:
        """The claim on the training, as this run takes and renews it."""
        return Claims(self._store, attempt)

    def record(self) -> HeadRecord | None:
        """What became of the training; None: it has not ended, or the file is damaged. Raises StorageError."""
        if not self._store.exists(RECORD):
            return None
        try:
            found = json.loads(self._store.read(RECORD))
            names = {item.name for item in fields(HeadRecord)}
            record = HeadRecord(**{key: value for key, value in found.items() if key in names})
            return record if all(isinstance(getattr(record, key), kinds) for key, kinds in TYPES.items()) else None
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    def put_record(self, record: HeadRecord) -> None:
        self._store.put(RECORD, (json.dumps(asdict(record), indent=1) + "\n").encode())

    def has_rows(self, job: str) -> bool:
        """Whether the answers of this job are there. Those of another job, whose training was killed, do not count."""
        try:
            if not self._store.exists(ROWS):
                return False
            with pq.ParquetFile(self.path / ROWS) as file:
                return bool(file.schema_arrow.metadata[_JOB].decode() == job)
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
            return False

    def drop_rest(self, record: HeadRecord) -> None:
        """Delete what nothing needs once there is a record: the answers, and trainings that did not end. Runs may do so at the
        same time, and what stays of a training harms none. Raises StorageError."""
        with storing(f"deleting {self.path / ROWS}"):
            (self.path / ROWS).unlink(missing_ok=True)
            for head in heads_in(self.path):
                if head.name != record.head:
                    shutil.rmtree(head, ignore_errors=True)

    def put_rows(self, rows: Iterable[tuple[Ids, Ids]], job: str, drafter: str, before: float | None) -> None:
        """Write the answers of a job, (prompt, output) as token ids, in one step; only this user may read them. Raises
        StorageError."""
        prompts, outputs = zip(*rows, strict=True)
        schema = SCHEMA.with_metadata({_JOB: job, _DRAFTER: drafter, _BEFORE: json.dumps(before)})
        table = pa.table([pa.array([*prompts], SCHEMA.types[0]), pa.array([*outputs], SCHEMA.types[1])], schema=schema)
        file = io.BytesIO()
        pq.write_table(table, file)
        with storing(f"writing {self.path / ROWS}"):
            self.path.mkdir(parents=True, exist_ok=True)
        with new_file(self.path / ROWS) as path:
            path.touch(mode=0o600, exist_ok=False)
            path.write_bytes(file.getvalue())

    def gathered(self) -> Gathered:
        """Of the answers that a run has put there. Raises StorageError for a file that cannot be read."""
        try:
            data = self._store.read(ROWS)
            with pq.ParquetFile(pa.BufferReader(data)) as file:
                table, kept = file.read(), file.schema_arrow.metadata
            prompts, outputs = (
                np.concatenate([piece.value_lengths().to_numpy() for piece in column.chunks]) for column in table.columns
            )
            return Gathered(
                rows=len(outputs), tokens=int(outputs.sum()), longest=int((prompts + outputs).max()),
                drafter=kept[_DRAFTER].decode(), before=json.loads(kept[_BEFORE]), digest=sha256(data).hexdigest(),
            )
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{self.path / ROWS}: cannot be read ({type(error).__name__}); delete {self.path}") from error

    def new_log(self) -> BinaryIO:
        """The file for what a training prints, empty. Raises StorageError."""
        with storing(f"writing {self.path / LOG}"):
            self.path.mkdir(parents=True, exist_ok=True)
            return (self.path / LOG).open("wb")

    def last_line(self) -> str:
        """The last line that the training has printed; empty if there is none."""
        with suppress(StorageError):
            tail = self._store.tail(LOG, TAIL_BYTES)
            lines = [] if tail is None else tail.data.decode("utf-8", "replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def trained(self, head: str) -> tuple[float, int] | None:
        """Drafts that a round accepted on held-out answers at the end of the training of this head, and how many it drafted.
        None: its record does not say so. Raises StorageError."""
        name = f"{head}/{TRAINING}"
        if not self._store.exists(name):
            return None
        try:
            record = json.loads(self._store.read(name))
            last = record["acceptance"][-1]
            return (float(last["mean_length"]) - 1.0, len(last["by_position"])) if record["complete"] is True else None
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            return None


def heads_in(place: Path) -> list[Path]:
    """The folders of heads in the place of a model, complete or not. Raises OSError."""
    return [path for path in place.iterdir() if path.name.startswith(HEADS)]


def stored_head(job: Job) -> StoredHead:
    """The place of the head of a job with draft.train.kind. Its model is on this machine. Raises ConfigError."""
    own = job.config.draft.train
    assert own.kind is not None
    model = {
        "config": sha256(read_text(job.folder / "config.json").encode()).hexdigest(),
        "quantize": job.config.model.quantize,
        **weight_parts(job.folder, dummy=False),
    }
    return StoredHead(_root(own.store), own.kind, model)


def _root(given: str | None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    try:
        return cache_folder() / "heads"
    except CheckpointError:
        raise ConfigError(
            "draft.train.store: this user has no home folder to keep heads in; name a folder, or set BATCHSPEC_CACHE"
        ) from None
