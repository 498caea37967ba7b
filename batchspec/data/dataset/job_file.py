"""A file of the output of an earlier job as a new job reads it: its taken rows, with the names that columns have there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchspec.data.dataset.files import DataFile, Part
from batchspec.data.dataset.lines import LineNumbers
from batchspec.data.dataset.schema import OWN_COLUMNS

Flags = NDArray[np.bool_]

ID = "request_id"
"""Column of the row's id."""
KEPT = (
    "request_id", "sample_index", "messages", "completion", "reasoning", "tool_calls", "finish_reason", "prompt_logprob_sum",
    "choice_probs", "scores", "score", "embedding",
)
"""The earlier job's own columns that the new one has. The others say how the answers were computed."""
COMMON = frozenset({"score"})
"""Names of columns that jobs of one task write, and many inputs have: copied ones keep them, and a job of that task refuses them
by name (`output_schema`)."""
_OF_ID = ("request_id", "sample_index")


def prefix_of(path: str, columns: Sequence[str]) -> str:
    """The prefix of the columns of the job at a path or URL, whose output has these columns. It is repeated until no column has
    it: an output of jobs in two folders of one name.
    """
    name = re.sub(r"\W", "_", PurePath(path.partition("://")[2] or os.path.abspath(path)).name)
    prefix = once = f"{name if name.isidentifier() else f'job_{name}'}_"
    while any(f"{prefix}{own}" in columns for own in OWN_COLUMNS):
        prefix += once
    return prefix


class JobFile:
    """The rows and columns of one file: a `DataFile`.

    taken    of each row of the file: whether the new job has it
    several  whether its request has several completions, so that the id has the number of the sample
    """

    def __init__(self, file: DataFile, prefix: str, taken: Flags, several: Flags) -> None:
        self._file = file
        self.name, self.size_bytes, self.digest = file.name, file.size_bytes, file.digest
        self.check, self.digest_of = file.check, file.digest_of
        self._old = _old_names(file.schema.names, prefix)
        own = [file.schema.field(old).with_name(name) for name, old in self._old.items()]
        self.schema = pa.schema([pa.field(ID, _text_type(file.schema.field("request_id").type)), *own])
        ends = np.cumsum([part.num_rows for part in file.parts])[:-1]
        parts = zip(file.parts, np.split(taken, ends), np.split(several, ends), strict=True)
        self._rows = {part.place: (part, of_part, numbered) for part, of_part, numbered in parts}
        """By the place of a part: the whole part of the file, and `taken` and `several` of its rows."""
        self.parts: Sequence[Part] = tuple(replace(part, num_rows=int(rows.sum())) for part, rows, _ in self._rows.values())
        self.lines = LineNumbers("row")
        rows = np.flatnonzero(taken)
        for row in np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist():
            self.lines.add(row, int(rows[row]))

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        whole, taken, several = self._rows[part.place]
        old = [name for column in columns for name in (_OF_ID if column == ID else (self._old[column],))]
        first = 0
        for batch in self._file.read(whole, list(dict.fromkeys(old))):
            rows = slice(first, first + batch.num_rows)
            arrays = [
                _ids(batch.column("request_id"), batch.column("sample_index"), several[rows])
                if name == ID
                else batch.column(self._old[name])
                for name in columns
            ]
            yield pa.RecordBatch.from_arrays([array.filter(pa.array(taken[rows])) for array in arrays], columns)
            first = rows.stop


def _old_names(names: list[str], prefix: str) -> dict[str, str]:
    """Column of the new job -> that of the earlier one, whose copied columns come after its own."""
    num_own = names.index(OWN_COLUMNS[-1]) + 1 if OWN_COLUMNS[-1] in names else len(names)
    own = [name for place, name in enumerate(names[:num_own]) if name in OWN_COLUMNS and not _is_added(name, names[:place])]
    kept = {f"{prefix}{name}": name for name in own if name in KEPT}
    taken = set(OWN_COLUMNS) - COMMON
    return kept | {f"{prefix}{name}" if name in taken else name: name for name in names if name not in own}


def _is_added(name: str, before: list[str]) -> bool:
    """Whether a column with a usual name was added to rows in memory: those that a job writes are in the order of OWN_COLUMNS."""
    return name in COMMON and not set(OWN_COLUMNS[OWN_COLUMNS.index(name) :]).isdisjoint(before)


def _text_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _ids(request_ids: pa.Array, samples: pa.Array, several: Flags) -> pa.Array:
    plain = request_ids.cast(_text_type(request_ids.type))
    numbered = pc.binary_join_element_wise(plain, samples.cast(plain.type), pa.scalar("#", plain.type))
    return pc.if_else(pa.array(several), numbered, plain)
