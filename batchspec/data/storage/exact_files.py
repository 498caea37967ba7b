"""Paths for Arrow and polars, which read more into a path than a name: wildcards, URLs, `~`, columns of partitions.

Every Parquet file that is opened by its path is opened here, and `data/runstate/scan.py` has the only scan of polars;
tests/house/test_file_rules.py checks that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def exact_path(path: Path | str) -> str:
    """The absolute path: no library takes it for a URL, or replaces a `~` in it."""
    return os.path.abspath(path)


@contextmanager
def parquet_file(path: Path, **options: Any) -> Iterator[pq.ParquetFile]:
    """The Parquet file of this very name, with the options of pyarrow.parquet.ParquetFile."""
    with pa.OSFile(exact_path(path)) as source, pq.ParquetFile(source, **options) as file:
        yield file
