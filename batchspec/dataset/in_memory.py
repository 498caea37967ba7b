"""Rows in memory as an Arrow table: what `batchspec.generate` and `batchspec.Engine` take."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa

from batchspec.errors import InputError


def table_of(data: Any) -> pa.Table:
    """A polars, pyarrow or pandas table, a list of dictionaries, or anything that polars.DataFrame takes. Raises InputError."""
    try:
        frame = data if isinstance(data, pl.DataFrame) else pl.DataFrame(data, infer_schema_length=None)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"rows of type {type(data).__name__} do not make a table ({said}); give a table or a list of dictionaries"
        ) from None
    # pyarrow's kernels cannot take rows of Arrow's newer string views.
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())
