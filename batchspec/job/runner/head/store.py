"""Heads that jobs have trained, in a local folder that jobs and the tasks of an array share.

KIND-DIGEST/rows.parquet   the answers that a head learns from; of the first run that had enough
KIND-DIGEST/head-DIGEST/   the folder of `batchspec train`; the digest is that of its settings
KIND-DIGEST/train.log      what the last one printed
KIND-DIGEST/record.json    written last: what became of the training. No other one begins while it is there
KIND-DIGEST/_batchspec/    the claim of the run that trains

DIGEST is that of the model: its config.json, its weights' files and how they are quantised. A head is used for this model alone.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.checkpoint.config_values import read_text
from batchspec.checkpoint.packaged import cache_folder
from batchspec.data.runstate.claims import Claims
from batchspec.data.storage.open_store import open_store
from batchspec.data.storage.store import storing
from batchspec.errors import CheckpointError, ConfigError, StorageError
from batchspec.job.prepare import Job
from batchspec.job.runner.identity import weight_parts
from batchspec.records import Ids

ROWS, RECORD, LOG, TRAINING = "rows.parquet", "record.json", "train.log", "training.json"
TAIL_BYTES = 4096
CLAIM = 0
"""Claims are by number, and there is one thing to claim."""
_DRAFTER, _BEFORE = b"batchspec.drafter", b"batchspec.before"
SCHEMA = pa.schema([("prompt_ids", pa.list_(pa.int32())), ("token_ids", pa.list_(pa.int32()))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The answers to train on."""

    rows: int
    tokens: int
    drafter: str
    """What drafted while they were decoded."""
    before: float
    """Drafts that a round then accepted."""


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
    before: float
    tokens: int
    """As in `Gathered`."""
    seconds: float
    """That the training took, loading included, in the run that ended it."""


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
            return HeadRecord(**{key: value for key, value in found.items() if key in names})
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    def put_record(self, record: HeadRecord) -> None:
        self._store.put(RECORD, (json.dumps(asdict(record), indent=1) + "\n").encode())

    @property
    def has_rows(self) -> bool:
        return self._store.exists(ROWS)

    def put_rows(self, rows: Iterable[tuple[Ids, Ids]], drafter: str, before: float) -> None:
        """Write the answers, (prompt, output) as token ids, in one step. Raises StorageError."""
        prompts, outputs = zip(*rows, strict=True)
        schema = SCHEMA.with_metadata({_DRAFTER: drafter, _BEFORE: repr(before)})
        table = pa.table([pa.array([*prompts], SCHEMA.types[0]), pa.array([*outputs], SCHEMA.types[1])], schema=schema)
        file = io.BytesIO()
        pq.write_table(table, file)
        self._store.put(ROWS, file.getvalue())

    def gathered(self) -> Gathered:
        """Of the answers that a run has put there. Raises StorageError for a file that cannot be read."""
        try:
            with pq.ParquetFile(pa.BufferReader(self._store.read(ROWS))) as file:
                found, kept = file.metadata, file.schema_arrow.metadata
            tokens = sum(found.row_group(i).column(1).num_values for i in range(found.num_row_groups))
            return Gathered(
                rows=found.num_rows, tokens=tokens, drafter=kept[_DRAFTER].decode(), before=float(kept[_BEFORE])
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
