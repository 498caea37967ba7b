"""Whether a shard is committed: the metadata in its file's footer names the job and the rows that the file holds.

Key-value metadata of every shard file; the footer's statistics of row_index must agree with it:

batchspec.job         id of the job, as in its manifest: the folder may have held another job before
batchspec.generation  0, or the number of the retry that wrote the file
batchspec.shard       number of the shard
batchspec.rows        first and last input row: `84-167`
batchspec.attempt     uuid of the run that wrote it
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.data.dataset.shard_layout import ShardLayout
from batchspec.data.runstate.manifest import Manifest
from batchspec.data.storage.store import Store, Tail, for_each
from batchspec.errors import BatchspecError, OneLine, OutputError, StorageError
from batchspec.process.refusals import raise_refusal

TAIL_BYTES = 64 << 10
"""Most footers are shorter, so that one request reads one."""
MOST_BYTES = 1 << 28
READS = 3
"""Maximum number of reads of a footer: a second one if it is longer than TAIL_BYTES, another one if the bytes are damaged."""
PREFIX = b"batchspec."
ANEW = "delete the file and run the same command again, which computes its rows anew"

log = logging.getLogger(__name__)

_KNOWN: dict[tuple[str, str], dict[int, tuple[str, int]]] = {}
"""(folder, job) -> committed shard -> (version, generation) of its file. A cache of this process: files are listed several times
at the end of a job, and a version of a file does not change."""


def part_name(index: int) -> str:
    return f"part-{index:05d}.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """The content of a file's footer."""

    version: str
    """The file's version in the store when the footer was read."""
    job: str | None
    """None in a file of another program."""
    generation: int
    shard: int | None
    attempt: str
    rows: str
    """First and last input row by the metadata; empty in a file without `job`."""
    found: str
    """The same according to the statistics of the column row_index; empty without statistics."""


def identity(manifest: Manifest, generation: int, index: int, attempt: str) -> dict[str, str]:
    """The key-value metadata of a shard's file, without PREFIX."""
    rows = manifest.layout.rows_of(index)
    return {
        "job": manifest.job, "generation": str(generation), "shard": str(index),
        "rows": f"{rows.start}-{rows.stop - 1}", "attempt": attempt,
    }


class DamagedFooter(OneLine):
    """The bytes at the end of a file are no footer of a Parquet file."""


def read_shard_file(store: Store, name: str) -> ShardFile | None:
    """The footer of a file; None if there is no such file. Raises StorageError if the footer cannot be read."""
    try:
        return read_footer(lambda count: store.tail(name, count))
    except DamagedFooter as error:
        raise StorageError(f"{store.where}/{name}: its footer cannot be read ({error}); {ANEW}") from error


def read_footer(read: Callable[[int], Tail | None]) -> ShardFile | None:
    """The footer of a file by a function that reads so many bytes at its end, None if there is no such file.

    Raises DamagedFooter, and what `read` raises.
    """
    count, reason = TAIL_BYTES, "it is not a Parquet file"
    for _ in range(READS):
        tail = read(count)
        if tail is None:
            return None
        data = tail.data
        length = int.from_bytes(data[-8:-4], "little") + 8
        if data[-4:] == b"PAR1" and len(data) == count < length < MOST_BYTES:
            count = length
            continue
        try:
            return _parsed(pq.read_metadata(pa.BufferReader(data)), tail.version)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise_refusal(error)
            reason = re.split(r"\n|\. ", str(error))[0] or type(error).__name__
    raise DamagedFooter(reason)


def _parsed(footer: pq.FileMetaData, version: str) -> ShardFile:
    metadata: Mapping[bytes, bytes] = footer.metadata or {}
    facts = {
        key.removeprefix(PREFIX).decode(errors="replace"): value.decode(errors="replace")
        for key, value in metadata.items() if key.startswith(PREFIX)
    }
    numbers = {key: int(facts[key]) for key in ("generation", "shard") if facts.get(key, "").isdecimal()}
    return ShardFile(
        version=version,
        job=facts.get("job"),
        generation=numbers.get("generation", 0),
        shard=numbers.get("shard"),
        attempt=facts.get("attempt", ""),
        rows=facts.get("rows", ""),
        found=_span(footer),
    )


def _span(footer: pq.FileMetaData) -> str:
    with pq.ParquetFile(pa.BufferReader(b""), metadata=footer) as file:
        schema = file.schema_arrow  # not footer.schema: the two keep each other, and 100 KB, until garbage is collected
    place, leaves = schema.get_field_index("row_index"), [_num_leaves(field.type) for field in schema]
    if place < 0 or sum(leaves) != footer.num_columns:
        return ""
    groups = [footer.row_group(number).column(sum(leaves[:place])).statistics for number in range(footer.num_row_groups)]
    if not all(group is not None and group.has_min_max for group in groups):
        return ""
    return f"{min(group.min for group in groups)}-{max(group.max for group in groups)}"


def _num_leaves(kind: pa.DataType) -> int:
    """Number of columns of a file that hold values of a type."""
    return sum(_num_leaves(kind.field(number).type) for number in range(kind.num_fields)) or 1


class ShardFiles:
    """The files in data/ of one job. A process reads the footer of each version of a file once.

    written  returns the number of the retry for each shard that a retry has written
    present  returns the layout with the extensions that began since the manifest was read; default: there are none
    """

    def __init__(
        self, store: Store, manifest: Manifest, written: Callable[[], Mapping[int, int]] = dict,
        present: Callable[[], ShardLayout] | None = None,
    ) -> None:
        self._store, self._manifest, self._written = store, manifest, written
        self._layout, self._present = manifest.layout, present or (lambda: manifest.layout)
        self._known = _KNOWN.setdefault((store.where, manifest.job), {})
        self._said: set[str] = set()

    def listed(self) -> dict[int, str]:
        """Shard -> version of its file, from a listing alone; shards of later extensions are left out. Raises OutputError for a
        file whose name is not a shard's.
        """
        found: dict[int, str] = {}
        num_shards = num_present = self._layout.num_shards
        for name, version in self._store.versions("data").items():
            match = re.fullmatch(r"part-(\d{5,18})\.parquet", name)
            index = int(match[1]) if match else -1
            if index >= num_present == num_shards:
                num_present = self._present().num_shards
            if not (0 <= index < num_present and name == part_name(index)):
                raise OutputError(
                    f"{self._store.where}/data/{name} is not a shard of this job, and readers would read it too; move it away"
                )
            if not version:
                raise OutputError(f"{self._path(index)} is a folder, not a file; move it away and run the same command again")
            if index < num_shards:
                found[index] = version
        return found

    def committed(self) -> set[int]:
        """Shards whose files hold exactly their rows of this job. On S3 a file of another job is not counted, with one warning.

        Raises the first error that `faults` gives.
        """
        listed, written = self.listed(), self._written()
        done = set()
        for index, fault in self._faults(listed, written):
            if fault is not None:
                raise fault
            if index in self._known:
                done.add(index)
        return done

    def faults(self) -> Iterator[tuple[int, BatchspecError]]:
        """(shard, error) for each file whose footer is wrong: OutputError for another job's file, StorageError for damage."""
        for index, fault in self._faults(self.listed(), self._written()):
            if fault is None and index not in self._known:
                fault = OutputError(f"{self._path(index)} is of another job, and the next run of this one replaces it")
            if fault is not None:
                yield index, fault

    def is_committed(self, index: int) -> bool:
        """Whether this shard is committed, by its file alone. False for a file that is not the job's."""
        self._known.pop(index, None)
        return self._fault(index, 0) is None and index in self._known

    def _faults(self, listed: Mapping[int, str], written: Mapping[int, int]) -> Iterator[tuple[int, BatchspecError | None]]:
        for index in [index for index, known in [*self._known.items()] if listed.get(index) != known[0]]:
            self._known.pop(index, None)
        new = [index for index in sorted(listed) if index not in self._known or self._known[index][1] < written.get(index, 0)]
        yield from ((index, None) for index in sorted(self._known.keys() - set(new)))
        faults = for_each(self._store, new, lambda index: self._fault(index, written.get(index, 0)))
        yield from zip(new, faults, strict=True)

    def _fault(self, index: int, generation: int) -> BatchspecError | None:
        """Why the file is not the job's; None if it is (then it is cached), if it does not exist, or if it will be replaced."""
        try:
            file = self.read(index, generation)
        except (OutputError, StorageError) as error:
            return error
        if file is not None and not self.is_foreign(file):
            self._known[index] = file.version, file.generation
        return None

    def read(self, index: int, generation: int = 0) -> ShardFile | None:
        """The shard's file; None if there is none. `generation` is the retry that is known to have written it.

        Raises StorageError if the footer cannot be read, OutputError for a file that is not the job's. On S3 a file of another
        job is only reported: there, a run that was suspended can publish into the job that took over its folder.
        """
        file = read_shard_file(self._store, f"data/{part_name(index)}")
        if file is None:
            return None
        if self.is_foreign(file) and self._store.method == "put":
            self._say_once(f"{self._path(index)} was published by a run of another job; it is computed anew and replaced")
            return file
        said = self._misfit(index, file, generation)
        if said:
            raise OutputError(f"{self._path(index)} {said}")
        return file

    def is_foreign(self, file: ShardFile) -> bool:
        """Whether the file was written by a run of another job."""
        return file.job is not None and file.job != self._manifest.job

    def _misfit(self, index: int, file: ShardFile, generation: int) -> str:
        rows = self._layout.rows_of(index)
        wanted = f"{rows.start}-{rows.stop - 1}"
        if self.is_foreign(file):
            return "is a shard of another job; move it away and run the same command again, which computes its rows"
        if file.job is None:
            return "was not written by a run of this job, or written anew by another program; " + ANEW
        spans = {span for span in (file.rows, file.found) if span}
        if file.shard != index or spans != {wanted}:
            held = " and ".join(f"rows {span.replace('-', ' .. ')}" for span in sorted(spans)) or "no known rows"
            return f"holds {held} of shard {file.shard}, not rows {wanted.replace('-', ' .. ')} of shard {index}; {ANEW}"
        if file.generation < generation:
            return f"is older than retry {generation}, which had written this shard; {ANEW}"
        return ""

    def _path(self, index: int) -> str:
        return f"{self._store.where}/data/{part_name(index)}"

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.warning("%s", line)
