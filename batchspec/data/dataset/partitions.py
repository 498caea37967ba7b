"""Hive partitions: the folders `key=value` in the name of an input file are columns of its rows.

Names begin at the folder that input.path names, or that all its entries have in common: below `data/`, all rows of
`lang=en/year=2024/part-0.parquet` have lang 'en' and year 2024. The types are those that polars reads.

Source: polars 2.1, `scan_parquet(hive_partitioning=True)`. Where polars drops a column (a value with `=` or with %FF) or stops (a
time, different keys, integers of 128 bits in Arrow), the value is text here, and null in files without the key.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from batchspec.data.dataset.files import DataFile
from batchspec.data.dataset.untyped_columns import as_text
from batchspec.errors import InputError

NULL = "__HIVE_DEFAULT_PARTITION__"
_SEPARATOR = "\x1f"


def partition_texts(name: str) -> dict[str, str | None]:
    """Key -> text of the value, of each partition in a file's name. Raises InputError if it has a key twice."""
    found: dict[str, str | None] = {}
    for folder in PurePosixPath(name).parts[:-1]:
        key, mark, text = folder.partition("=")
        if mark and key in found:
            raise InputError(f"{name} lies in two folders named {key}=...: which of them its rows have is not clear; rename one")
        if mark:
            found[key] = None if text == NULL else _decoded(text)
    return found


def partition_values(names: Sequence[str]) -> list[dict[str, pa.Scalar]]:
    """Of each file: key -> value. A key has the same type in all of them."""
    texts = [partition_texts(name) for name in names]
    columns = {
        key: _typed({file[key] for file in texts if key in file})
        for key in dict.fromkeys(key for file in texts for key in file)
    }
    return [{key: columns[key][text] for key, text in file.items()} for file in texts]


def check_partitions(file: DataFile, keys: Sequence[str]) -> None:
    """Raise InputError if the file's own columns of these names have other values than its folders say. polars writes the keys of
    partitions into the files too: then the file's columns are read.
    """
    texts = partition_texts(file.name)
    for key in keys:
        for part in file.parts:
            for batch in file.read(part, [key]):
                is_bad = b"code" in (batch.schema.metadata or {})
                if not is_bad and not _all_are(as_text(batch.column(0), file.schema.field(key)), texts[key]):
                    raise InputError(
                        f"{file.name} lies in a folder {key}={NULL if texts[key] is None else texts[key]}, and its own column "
                        f"{key!r} has another value; rename one, or let input.path end in that folder: it is no column then"
                    )


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def _typed(texts: set[str | None]) -> dict[str | None, pa.Scalar]:
    """The values of a key, which have the type that polars gives all of them together."""
    given = sorted(text for text in texts if text)
    values = _as_polars(given)
    kind = values.type
    found: dict[str | None, pa.Scalar] = {None: pa.scalar(None, kind), "": pa.scalar("" if kind == pa.string() else None, kind)}
    return found | dict(zip(given, values, strict=True))


def _as_polars(texts: Sequence[str]) -> pa.Array:
    """The texts in the type that polars infers; text if it infers none that Arrow has."""
    plain = pa.array(texts, pa.string())
    if not texts or any(mark in text for text in texts for mark in ("\n", "\r", _SEPARATOR)):
        return plain
    try:
        column = pl.read_csv(
            io.BytesIO("\n".join(texts).encode()), has_header=False, separator=_SEPARATOR, quote_char=None,
            infer_schema_length=None, try_parse_dates=True,
        ).to_series()
    except pl.exceptions.PolarsError:
        return plain
    return plain if column.dtype in (pl.String, pl.Int128, pl.Time) else column.to_arrow()


def _all_are(column: pa.Array, text: str | None) -> bool:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if text is None or column.null_count:
        return text is None and column.null_count == len(column)
    try:
        return bool(pc.all(pc.equal(column, pa.scalar(text).cast(column.type))).as_py() is not False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
