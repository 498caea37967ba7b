"""The work on a shard's rows besides decoding: admission before it, the output table after it. Neither needs torch.

A worker process gets only a `ShardWork` (`shard_workers.py`), so it can be pickled and does the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import polars as pl
import pyarrow as pa

from batchspec.config.schema import InputConfig, OutputConfig
from batchspec.data.dataset.columns import IMAGES, ColumnMap
from batchspec.data.dataset.reader import InputShard
from batchspec.data.dataset.writer import build_table, plain_table
from batchspec.data.runstate.shard_writer import PendingFile, UnpublishedFile, WrittenFile
from batchspec.packing.admit import Admission
from batchspec.packing.work_plan import AdmittedShard, AdmittedShards
from batchspec.records import Completion
from batchspec.structured.checked_text import checked_text

if TYPE_CHECKING:
    from batchspec.job.prepare import Job

IN_PROCESS = "in-process"
"""Stands in the column `perf` for a run's id, where there is no run: rows come back to a caller in Python."""


class PendingTable(Protocol):
    """Output rows of a shard that are to be made."""

    def make(self) -> pa.Table:
        """Make the rows, or wait until a worker process has done so. Call it once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWork:
    """Admission and output tables of one run."""

    admission: Admission
    columns: ColumnMap
    input: InputConfig
    output: OutputConfig
    attempt: str
    """Id of the run, for the column `perf`."""

    @classmethod
    def of(cls, job: Job, attempt: str = IN_PROCESS) -> ShardWork:
        admission, output = job.admission, job.config.output
        return cls(admission=admission, columns=job.columns, input=admission.input, output=output, attempt=attempt)

    def admitted(self, shards: Iterator[InputShard]) -> AdmittedShards:
        """The shards, in order, with the results of admitting their rows."""
        return AdmittedShards(AdmittedShard(self.without_images(shard), self.admission.admit(shard)) for shard in shards)

    def without_images(self, shard: InputShard) -> InputShard:
        """The shard as it is kept until it is committed: without the cells of images, unless the output copies them."""
        name, copied = self.columns.get(IMAGES), self.output.passthrough
        if name is None or self.columns.templates or (not isinstance(copied, str) and name in copied):
            return shard  # templates may read any column, and do so again for the output
        table = shard.table
        index = table.schema.get_field_index(name)
        field = table.schema.field(index).with_nullable(True)
        return replace(shard, table=table.set_column(index, field, pa.nulls(table.num_rows, field.type)))

    def begin_table(self, shard: InputShard, completions: Sequence[Completion]) -> PendingTable:
        """The completions as output rows. Worker processes begin to make them at once; here they are made when asked for."""
        return _TableHere(self, shard, completions)

    def begin_file(self, shard: InputShard, completions: Sequence[Completion], file: UnpublishedFile) -> PendingFile:
        """The same rows in `file`. Worker processes begin to write at once; here the file is written when asked for.

        If it is never asked for, what a worker has written stays in the scratch folder until a later run deletes it.
        """
        return _FileHere(self, shard, completions, file)

    def table(self, shard: InputShard, completions: Sequence[Completion]) -> pa.Table:
        """The completions as output rows; texts that the engine has not decoded are decoded here."""
        return plain_table(self.compact_table(shard, completions))

    def frame(self, shard: InputShard, completions: Sequence[Completion]) -> pl.DataFrame:
        """The same rows for a caller in Python."""
        frame = pl.from_arrow(self.table(shard, completions))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def compact_table(self, shard: InputShard, completions: Sequence[Completion]) -> pa.Table:
        """The same rows; columns of the input that are dictionaries stay so."""
        think = self.admission.settings.think
        texts = [self.checked(self._with_text(completion)) for completion in completions]
        # A later turn of a conversation may bring tools of its own.
        calls = self.admission.has_calls(self.columns) or any(completion.tool_calls is not None for completion in texts)
        return build_table(
            shard,
            texts,
            columns=self.columns,
            input=self.input,
            output=self.output,
            attempt=self.attempt,
            think_tokens=None if self.admission.has_channels else (think.opening, think.end) if think else ("", ""),
            calls=calls,
            task=self.admission.task,
            token_text=self.admission.token_texts,
            texts=self._texts(shard, completions),
        )

    def _texts(self, shard: InputShard, completions: Sequence[Completion]) -> dict[int, dict[str, str]]:
        """Row index -> what templates made of the row. They are rendered again: a shard's texts would take memory while its rows
        decode."""
        if not self.columns.templates or self.output.messages == "none":
            return {}
        refused = {one.row_index for one in completions if one.error is not None and one.error.code == "template_error"}
        rows = {completion.row_index for completion in completions} - refused  # one that loops would do so again
        return {row: self.admission.texts(shard, row) for row in rows}

    def checked(self, completion: Completion) -> Completion:
        """The completion, which is marked if its answer violates a schema that its automaton did not obey as a whole."""
        constraints = self.admission.constraints
        return completion if constraints is None else constraints.checker.checked(completion)

    def _with_text(self, completion: Completion) -> Completion:
        if completion.num_undecoded is None:
            return completion
        assert completion.token_ids is not None
        tokens, constraints = completion.token_ids[: completion.num_undecoded].tolist(), self.admission.constraints
        if completion.constraint is not None and constraints is not None:
            return checked_text(completion.replace(text=constraints.compiler.vocabulary.text(tokens), num_undecoded=None))
        assert self.admission.tokenizer is not None
        return completion.replace(text=self.admission.tokenizer.decode(tokens), num_undecoded=None)

    def settle(self) -> None:
        """Does nothing: no work is running."""

    def close(self) -> None:
        """Does nothing: no resource is held."""


@dataclass(frozen=True, slots=True)
class _TableHere:
    """A `PendingTable` that this process makes."""

    work: ShardWork
    shard: InputShard
    completions: Sequence[Completion]

    def make(self) -> pa.Table:
        return self.work.table(self.shard, self.completions)


@dataclass(frozen=True, slots=True)
class _FileHere:
    """A `PendingFile` that this process writes."""

    work: ShardWork
    shard: InputShard
    completions: Sequence[Completion]
    file: UnpublishedFile

    def write(self) -> WrittenFile:
        return self.file.write(self.work.compact_table(self.shard, self.completions))
