"""A job's output folder: which shards there are, which are committed, and the one way to commit one.

data/part-00042.parquet   the rows of shard 42; nothing else lies in data/
README.md                 the dataset card, written at the end; report.html beside it
_batchspec/manifest.json  what the job is; made first, so that a folder with a manifest is a job
_batchspec/tmp            files under construction
_batchspec/logs           run-<attempt>.json: how fast each run was; run-<attempt>.timeline.jsonl: what it did when
_batchspec/journal        rows of shards that are not committed yet, see journal.py
_batchspec/claims         which run works on which shard, see claims.py
_batchspec/attempts       what runs were at when they died, see attempts.py
_batchspec/sums           sha256 of each shard as a run committed it, in the format of sha256sum
_batchspec/progress       what every run says of itself, see progress.py
_batchspec/retry          what was computed again, see generations.py
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.errors import OutputError
from batchspec.io.attempts import Attempts
from batchspec.io.claims import REMOTE_STALE_S, STALE_S, Claims
from batchspec.io.generations import Generation, Generations
from batchspec.io.journal import Journal
from batchspec.io.manifest import Manifest, differences
from batchspec.io.progress import ProgressFiles
from batchspec.io.reader import InputFile
from batchspec.io.store import Store, open_store, scanning
from batchspec.io.verified import write_verified

MANIFEST = "_batchspec/manifest.json"
TMP = "_batchspec/tmp"
SUMS = "_batchspec/sums"


def default_shard_rows(num_rows: int) -> int:
    """Rows a shard when output.shard_rows is not set: depends on the input alone, so that every run cuts alike."""
    return min(max(num_rows // 256, 16), 512)


def part_name(index: int) -> str:
    return f"part-{index:05d}.parquet"


class OutputFolder:
    """The output of one job. Nothing is made or changed in it before `create`.

    path     the folder, as the user names it
    attempt  uuid of this run; temporary files carry it
    """

    def __init__(self, path: Path | str) -> None:
        self.attempt = uuid.uuid4().hex
        self._store: Store = open_store(path, TMP)
        self.path = self._store.where
        self._generations = Generations(self._store)
        self._manifest: Manifest | None = None
        self._generation: Generation | None = None

    @property
    def manifest(self) -> Manifest:
        """The job's manifest. Raises OutputError where the folder holds no job."""
        if self._manifest is None:
            if not self.is_job():
                raise OutputError(f"{self.path} holds no batchspec job; give the output.dir of a run")
            first = Manifest.from_json(self._store.read(MANIFEST), f"{self.path}/{MANIFEST}")
            self._store.method = first.publish
            self._generation = self._generations.latest()
            self._manifest = first if self._generation is None else self._generation.of(first)
        return self._manifest

    @property
    def generation(self) -> Generation | None:
        """The job's latest retry, done or not; None where there was none."""
        if self._manifest is None and not self.is_job():
            return None
        return self._generation if self.manifest else None

    @property
    def _work(self) -> Store:
        """Where claims, journal and attempts are: each retry has its own."""
        if self.generation is None:
            return self._store
        store = open_store(f"{self.path}/{self.generation.folder}", TMP)
        store.method = self.manifest.publish
        return store

    def retries(self) -> list[Generation]:
        """Every retry of the job, the latest last."""
        return self._generations.all()

    def retry(self, generation: Generation) -> None:
        """Begin a retry, or join in where another run began the same. Raises OutputError where it began another one."""
        self._store.probe_replace()
        begun = self._generations.begin(generation)
        self._manifest = None
        if begun.identity != generation.identity:
            raise OutputError(f"{self.path}: another run began a retry; run the command with {begun} to its end first")

    @property
    def num_shards(self) -> int:
        return -(-self.manifest.num_rows // self.manifest.shard_rows)

    def is_job(self) -> bool:
        return self._store.exists(MANIFEST)

    def is_untouched(self) -> bool:
        """Nothing is there: no run has begun."""
        return not self.is_job() and not set(self._store.list("")) - {"_batchspec"}

    def check(
        self,
        *,
        fingerprint: Mapping[str, str],
        num_rows: int,
        shard_rows: int | None,
        overwrite: bool = False,
        may_differ: Container[str] = (),
    ) -> None:
        """Raise OutputError where `create` with the same arguments would, or with other values of the keys in `may_differ`;
        touches nothing.

        The folder may be absent, empty, or a job with the same fingerprint; with `overwrite` any job. What is not a job is never
        overwritten.
        """
        self._store.check_root()
        other = set(self._store.list("")) - {"_batchspec"}
        if not self.is_job():
            if other:
                raise OutputError(f"output.dir {self.path} exists and is no batchspec job; empty it or choose another folder")
            return
        if overwrite:
            return
        now = _compared(fingerprint, num_rows, shard_rows)
        now |= {key: value for key, value in self.manifest.fingerprint.items() if key in may_differ}
        changed = differences(self.manifest.fingerprint, now)
        if changed and self.generation is not None and self._was_before_a_retry(now):
            raise OutputError(
                f"output.dir {self.path} holds this job, retried since ({'; '.join(changed)}); "
                f"run the command with {self.generation}"
            )
        if changed:
            raise OutputError(
                f"output.dir {self.path} holds another job ({'; '.join(changed)}); use another output.dir, "
                "or output.overwrite=true to delete that job and start anew"
            )

    def _was_before_a_retry(self, fingerprint: Mapping[str, str]) -> bool:
        """Whether the job was this one once."""
        first = Manifest.from_json(self._store.read(MANIFEST), f"{self.path}/{MANIFEST}")
        before = [first.fingerprint, *(retry.fingerprint for retry in self.retries()[:-1])]
        return any(not differences(one, fingerprint) for one in before)

    def create(
        self,
        *,
        fingerprint: Mapping[str, str],
        config: Mapping[str, Any],
        recorded: Mapping[str, Any],
        num_rows: int,
        shard_rows: int | None,
        files: Sequence[InputFile],
        overwrite: bool = False,
    ) -> Manifest:
        """Make the folder and its manifest, or go on with the job that is there. Raises as `check` does, and StorageError."""
        self.check(fingerprint=fingerprint, num_rows=num_rows, shard_rows=shard_rows, overwrite=overwrite)
        resumed = self.is_job() and not overwrite
        if not resumed:
            self._store.probe()
            manifest = Manifest(
                fingerprint=_compared(fingerprint, num_rows, shard_rows),
                config=config,
                recorded=recorded,
                num_rows=num_rows,
                shard_rows=shard_rows or default_shard_rows(num_rows),
                publish=self._store.method,
                files=tuple(files),
            )
            if self.is_job():
                self._delete_work()
                self._store.put(MANIFEST, manifest.to_json())
            else:
                self._store.put_if_absent(MANIFEST, manifest.to_json())
        self._manifest = None  # another process may have made it first: read what is there
        self.check(fingerprint=fingerprint, num_rows=num_rows, shard_rows=shard_rows)
        self._store.clean()
        return self.manifest

    def _delete_work(self) -> None:
        """Delete a job's work but not its manifest: a run that dies here leaves a job without shards behind."""
        self._generations.delete()
        self._store.delete_tree("data")
        for name in self._store.list("_batchspec"):
            if name not in ("manifest.json", "tmp"):
                self._store.delete_tree(f"_batchspec/{name}")

    def rows_of(self, index: int) -> range:
        """The input rows of a shard."""
        size = self.manifest.shard_rows
        return range(index * size, min((index + 1) * size, self.manifest.num_rows))

    def committed(self) -> set[int]:
        """Shards that are done. Raises OutputError for a file in data/ that is no shard of this job."""
        done = set()
        num_shards = self.num_shards
        for name in self._store.list("data"):
            match = re.fullmatch(r"part-(\d{5,})\.parquet", name)
            index = int(match[1]) if match else -1
            if not (0 <= index < num_shards and name == part_name(index)):
                raise OutputError(f"{self.path}/data/{name} is no shard of this job, and readers would take it; move it away")
            done.add(index)
        return done

    def scan(self, shards: Iterable[int] | None = None) -> pl.LazyFrame:
        """The rows of committed shards (default all), in the order of the input."""
        done = sorted(self.committed() if shards is None else shards)
        if not done:
            raise OutputError(f"{self.path} has no committed shard yet; run the job first")
        return self._store.scan([f"data/{part_name(index)}" for index in done])

    def commit(self, index: int, table: pa.Table, metadata: Mapping[str, str] | None = None) -> bool:
        """Publish a shard's rows, once: False where another attempt was first (its rows are equivalent, ours are dropped).

        The whole file is written aside, fsynced, read back with its checksums and compared before it gets its name. `metadata`
        is added to its key-value metadata under `batchspec.` names.
        Raises ValueError unless the table holds exactly the shard's rows, by (row_index, sample_index) with samples from 0 on;
        StorageError where writing fails, and then nothing is visible in data/.
        """
        path = self._written(index, table, metadata)
        return self._published(index, path, lambda: self._store.publish(path, f"data/{part_name(index)}"))

    def _written(self, index: int, table: pa.Table, metadata: Mapping[str, str] | None = None) -> Path:
        path = self._store.scratch() / f"{part_name(index)}.{self.attempt}"
        facts = {**(metadata or {}), "version": self.manifest.version, "shard": index, "attempt": self.attempt}
        write_verified(table, path, self.rows_of(index), facts)
        return path

    def written(self, index: int) -> tuple[pa.Table, str]:
        """The rows of a committed shard, and what `recommit` tells the file by."""
        name = f"data/{part_name(index)}"
        version = self._store.version(name)
        with scanning(f"{self.path}/{name}"):
            return pq.read_table(io.BytesIO(self._store.read(name))).replace_schema_metadata(None), version

    def recommit(self, index: int, table: pa.Table | None, version: str) -> bool:
        """A retry's shard is done: `table` takes the place of its file in one step; None keeps the file as it is.

        False where the file is not the one of `version` any more: another run was first. Raises as `commit` does.
        """
        assert self.generation is not None
        name, facts = f"data/{part_name(index)}", {"generation": str(self.generation.number)}
        if table is not None:
            path = self._written(index, table, facts)
            if not self._published(index, path, lambda: self._store.replace(path, name, version)):
                return False
        self._generations.mark(self.generation, index)
        return True

    def _published(self, index: int, path: Path, publish: Callable[[], bool]) -> bool:
        """The file's sum is kept before it gets its name; an empty one says that it did not."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        sums = f"{SUMS}/{part_name(index)}.{self.attempt}"
        self._store.put(sums, f"{digest}  data/{part_name(index)}\n".encode())
        won = publish()
        if not won:
            self._store.put(sums, b"")
        return won

    def damage(self) -> Iterator[str]:
        """What is wrong with committed shards, read whole: a line for each whose bytes are not those that were committed."""
        sums = self._store.list(SUMS)
        for index in sorted(self.committed()):
            name = part_name(index)
            known = {self._store.read(f"{SUMS}/{one}").split(b" ")[0] for one in sums if one.startswith(f"{name}.")}
            data = self._store.read(f"data/{name}")
            if hashlib.sha256(data).hexdigest().encode() not in known:
                yield (
                    f"{self.path}/data/{name}: its {len(data):,} bytes are not those that were committed; delete the file and "
                    "run the same command again, which computes its rows anew"
                )

    def claims(self) -> Claims:
        """Which run works on which shard."""
        stale_s = REMOTE_STALE_S if self._store.method == "put" else STALE_S
        return Claims(self._work, self.attempt, stale_s=stale_s)

    def attempts(self) -> Attempts:
        """Which rows runs died with."""
        return Attempts(self._work, self.attempt)

    def progress(self) -> ProgressFiles:
        """What runs say of themselves."""
        return ProgressFiles(self._store, self.attempt)

    def missing(self) -> set[int]:
        """Shards that are not committed, or that a retry has still to write anew."""
        again = set() if self.generation is None else self._generations.missing(self.generation)
        return set(range(self.num_shards)) - self.committed() | again

    def finished(self) -> set[int]:
        """Shards that need no work."""
        return set(range(self.num_shards)) - self.missing()

    def journal(self) -> Journal:
        """What runs keep of shards that they do not commit."""
        return Journal(self._work, self.attempt)

    def log_run(self, facts: Mapping[str, float]) -> None:
        """Keep what a run says of itself at its end. Raises StorageError."""
        self._store.put(f"_batchspec/logs/run-{self.attempt}.json", (json.dumps(dict(facts)) + "\n").encode())

    def log_timeline(self, text: str) -> None:
        """Keep what a run says of its course so far. Raises StorageError."""
        self._store.put(f"_batchspec/logs/run-{self.attempt}.timeline.jsonl", text.encode())

    def logs(self, ending: str) -> Iterator[str]:
        """What runs of this job kept under names with this ending: `.timeline.jsonl`, or `.json` for how fast they were."""
        for name in self._store.list("_batchspec/logs"):
            if re.fullmatch(r"run-[0-9a-f]+" + re.escape(ending), name):
                yield self._store.read(f"_batchspec/logs/{name}").decode("utf-8", "replace")

    def put_report(self, page: str) -> None:
        """Write report.html."""
        self._store.put("report.html", page.encode())

    def has_card(self) -> bool:
        """Whether the card was written, since the latest retry if there was one."""
        return self._store.exists("README.md") and (self.generation is None or self._generations.has_card(self.generation))

    def finish(self, card: str) -> None:
        """Write the dataset card, README.md."""
        self._store.put("README.md", card.encode())
        if self.generation is not None:
            self._generations.mark_card(self.generation)


def _compared(fingerprint: Mapping[str, str], num_rows: int, shard_rows: int | None) -> dict[str, str]:
    """The fingerprint with the two numbers that decide which rows a shard holds."""
    rows = str(shard_rows or default_shard_rows(num_rows))
    return {**fingerprint, "input.rows": str(num_rows), "output.shard_rows": rows}
