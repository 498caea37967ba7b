"""Rows of committed Parquet files as a lazy frame of polars, in whatever store they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import polars as pl
import pyarrow as pa

from batchspec.data.storage.retry import reason
from batchspec.data.storage.store import Store
from batchspec.errors import OutputError, StorageError
from batchspec.process.refusals import raise_refusal


def scan(store: Store, names: Sequence[str]) -> pl.LazyFrame:
    """The rows of these Parquet files and of no others, in the order of their names. Raises StorageError."""
    with scanning(store.where):
        found, files = store.arrow_paths(names)
        paths = list(found)
        if files is None:
            return pl.scan_parquet(paths, glob=False, hive_partitioning=False)
        import pyarrow.dataset as ds  # imports pandas too, where that is installed

        return pl.scan_pyarrow_dataset(ds.dataset(paths, filesystem=files, format="parquet"))


@contextmanager
def scanning(where: str) -> Iterator[None]:
    """Turn errors of polars and Arrow about files under a root into a StorageError of one line, and panics of polars, which some
    values cause, into an OutputError. What the machine refuses is a CapacityError."""
    try:
        yield
    except (pl.exceptions.ComputeError, pl.exceptions.InvalidOperationError, pa.ArrowException, OSError) as error:
        raise_refusal(error)
        raise StorageError(f"reading {where} failed: {reason(error)}; run the same command again after the repair") from error
    except pl.exceptions.PanicException as error:
        raise_refusal(error)
        raise OutputError(f"{where}: polars cannot process a value ({reason(error)}); read the files with pyarrow") from error
