"""The output of an earlier job as the input of another one (input.from_job).

request_id    the row's id: the earlier request_id, with #sample_index appended if the request has several completions
<prefix>NAME  the earlier job's own columns of KEPT, and copied columns that have the name of a column that a job may write
NAME          its other copied columns: the earlier input's, and those that it took from a job before it

The prefix is the name of the earlier job's folder and `_`, as a Jinja variable may be called. Names do not depend on the keys of
the new job, so that its templates can rely on them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchspec.config.schema import InputConfig
from batchspec.console.text import listed
from batchspec.dataset.columns import TYPES
from batchspec.dataset.files import DataFile, ParquetFile, Part
from batchspec.dataset.lines import LineNumbers
from batchspec.dataset.reader import OPENED_AT_ONCE, Source, open_files, source_of
from batchspec.dataset.schema import OWN_COLUMNS
from batchspec.errors import ConfigError, InputError
from batchspec.storage.places import place_of

ID = "request_id"
KEPT = (
    "request_id", "sample_index", "messages", "completion", "reasoning", "tool_calls", "finish_reason", "prompt_logprob_sum",
    "choice_probs",
)
"""The earlier job's own columns that the new one has. The others say how the answers were computed."""
_OF_ID = ("request_id", "sample_index")
_MARKS = pa.schema([("row_index", pa.int64()), ("status", pa.string())])
"""What decides whether a row is taken, and whether its request has several."""


def prefix_of(path: str, columns: Sequence[str]) -> str:
    """The prefix of the columns of the job at a path or URL, whose output has these columns. It is repeated until no column has
    it: an output of jobs in two folders of one name.
    """
    name = re.sub(r"\W", "_", PurePath(path.partition("://")[2] or path).name)
    prefix = once = f"{name if name.isidentifier() else f'job_{name}'}_"
    while any(f"{prefix}{own}" in columns for own in OWN_COLUMNS):
        prefix += once
    return prefix


def columns_of(prefix: str, own: Mapping[str, str | None]) -> dict[str, str | None]:
    """input.columns for the rows of a job: id and chat, and no option of a row, because its options were those of its answer.

    own  what the user says, which has precedence; a prompt takes the place of the chat
    """
    has_prompt = any(own.get(name) for name in ("prompt", "prompt_ids"))
    return {**dict.fromkeys(TYPES), "id": ID, "messages": None if has_prompt else f"{prefix}messages", **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """The rows of an earlier job, as an input."""

    source: Source
    input: InputConfig
    """The keys of `input` with input.columns for these rows."""
    note: str
    """How many rows are taken and left out, for the user."""


def open_job_rows(files: Sequence[str], of_job: Mapping[str, Any], input: InputConfig) -> JobRows:
    """The rows of the files of the job input.from_job, all of which are committed.

    of_job  its configuration
    Raises InputError if no row has a status of input.from_status, or if its rows hold no chats and input.columns hides none;
    ConfigError if nothing says what follows the answers; InputError and StorageError for files that cannot be read.
    """
    assert input.from_job is not None
    found = {PurePath(file).name: place_of(file) for file in files}
    opened = open_files(found, lambda name, place, share: ParquetFile(place, name, share))
    prefix = prefix_of(input.from_job, opened[0].schema.names)
    with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
        made = list(pool.map(lambda file: JobFile(file, prefix, input.from_status), opened))
    counts, wanted = sum((file.counts for file in made), Counter[str]()), input.from_status
    taken = listed({name: counts[name] for name in sorted(counts) if name in wanted})
    left_out = listed({name: counts[name] for name in sorted(counts) if name not in wanted})
    where = f"input.from_job={input.from_job}"
    if not taken:
        raise InputError(f"{where}: its rows are {left_out}, and input.from_status={wanted} takes none of them")
    columns = columns_of(prefix, input.columns)
    source = source_of(made, input.limit)
    if "messages" not in input.columns and (name := columns["messages"]) is not None:
        _check_chats(source, name, of_job, input)
    note = f"{where}: {taken}; left out: {left_out or 'none'}; its answers are the column {prefix}completion"
    return JobRows(source=source, input=replace(input, columns=columns), note=note)


def _check_chats(source: Source, name: str, of_job: Mapping[str, Any], input: InputConfig) -> None:
    """Raises InputError if the column does not hold chats that end with the answers, ConfigError if nothing follows these."""
    where = f"input.from_job={input.from_job}"
    hide = "set input.columns.messages=null, so that input.prompt makes whole prompts"
    kept = of_job.get("output", {}).get("messages", "full")
    if name not in source.schema.names or kept == "prompt":
        raise InputError(f"{where}: its messages lack the answers (output.messages={kept}); {hide}")
    if not any(values.null_count < len(values) for values in source.column(name)):
        raise InputError(f"{where}: its messages are null, as its prompts were prompt_ids; {hide}")
    answers = of_job.get("decode", {}).get("score") != "prompts" and not {"ok", "truncated"}.isdisjoint(input.from_status)
    if answers and input.prompt is None and input.final_assistant == "error" and not input.columns.get("final_assistant"):
        raise ConfigError(
            f"{where}: its chats end with the answers; input.prompt=TEMPLATE makes the next user turn, "
            "input.final_assistant=continue goes on with the answer, drop answers once more"
        )


class JobFile:
    """One of the files of an earlier job's output as the rows and columns that a new job reads: a `DataFile`.

    statuses  of the rows that are taken
    """

    def __init__(self, file: DataFile, prefix: str, statuses: Collection[str]) -> None:
        self._file = file
        self.name, self.size_bytes, self.digest = file.name, file.size_bytes, file.digest
        self.check, self.digest_of = file.check, file.digest_of
        self._old = _old_names(file.schema.names, prefix)
        own = [file.schema.field(old).with_name(name) for name, old in self._old.items()]
        self.schema = pa.schema([pa.field(ID, pa.string()), *own])
        marks = pa.Table.from_batches(
            [batch.select(_MARKS.names).cast(_MARKS) for part in file.parts for batch in file.read(part, _MARKS.names)], _MARKS
        )
        self.counts = Counter(marks.column("status").to_pylist())
        """Number of rows of each status, taken or not."""
        taken = pc.is_in(marks.column("status"), pa.array(statuses, pa.string())).to_numpy()
        several = _are_several(marks.column("row_index").to_numpy())
        ends = np.cumsum([part.num_rows for part in file.parts])[:-1]
        self._rows = {
            part.place: (part, *rows)
            for part, *rows in zip(file.parts, np.split(taken, ends), np.split(several, ends), strict=True)
        }
        """Place of a part -> the part of the file, and of each of its rows: is it taken, has its request several."""
        self.parts: Sequence[Part] = tuple(replace(part, num_rows=int(rows.sum())) for part, rows, _ in self._rows.values())
        self.lines = LineNumbers("row")
        rows = np.flatnonzero(taken)
        for row in np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist():
            self.lines.add(row, int(rows[row]))

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        whole, taken, several = self._rows[part.place]
        of_id = _OF_ID if ID in columns else ()
        first = 0
        for batch in self._file.read(whole, list(dict.fromkeys([*of_id, *(self._old[name] for name in columns if name != ID)]))):
            rows = slice(first, first + batch.num_rows)
            arrays = [
                _ids(*map(batch.column, _OF_ID), several[rows]) if name == ID else batch.column(self._old[name])
                for name in columns
            ]
            yield pa.RecordBatch.from_arrays([array.filter(pa.array(taken[rows])) for array in arrays], columns)
            first = rows.stop


def _old_names(names: list[str], prefix: str) -> dict[str, str]:
    """Column of the new job -> that of the earlier one."""
    num_own = names.index(OWN_COLUMNS[-1]) + 1
    kept = {f"{prefix}{name}": name for name in names[:num_own] if name in KEPT}
    return kept | {f"{prefix}{name}" if name in OWN_COLUMNS else name: name for name in names[num_own:]}


def _are_several(rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each completion: whether its request, whose completions are next to each other, has others."""
    found = np.zeros(len(rows), bool)
    same = rows[1:] == rows[:-1]
    found[1:] |= same
    found[:-1] |= same
    return found


def _ids(request_ids: pa.Array, samples: pa.Array, several: NDArray[np.bool_]) -> pa.Array:
    if pa.types.is_dictionary(request_ids.type):
        request_ids = request_ids.dictionary_decode()
    numbered = pc.binary_join_element_wise(request_ids, samples.cast(pa.string()), "#")
    return pc.if_else(pa.array(several), numbered, request_ids)
