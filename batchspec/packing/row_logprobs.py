"""Log-probabilities that rows ask for, by the column `num_logprobs`, in a job whose key output.logprobs is not set."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from batchspec.config.schema import KEYS, RunConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.data.dataset.reader import Source
from batchspec.tasks.registry import task_of


def with_logprobs_of_rows(config: RunConfig, columns: ColumnMap, source: Source) -> tuple[RunConfig, bool]:
    """The configuration with an output.logprobs that is enough for each row, and whether all rows have log-probabilities: those
    that do not ask for any have some only if the configuration's own key is set."""
    column = columns.get("num_logprobs")
    if column is None or config.output.logprobs is not None or not task_of(config).decodes:
        return config, True
    asked = [number for values in source.column(column) for number in _valid(values)]
    output = replace(config.output, logprobs=max(asked, default=None))
    return replace(config, output=output), False


def _valid(values: pa.Array) -> list[int]:
    """The different numbers of likeliest tokens among these values."""
    found = pc.unique(values).drop_null().to_pylist()
    texts = [int(one) for one in found if isinstance(one, str) and one.strip().isdecimal()]  # of CSV, or JSON of several kinds
    numbers = texts + [int(one) for one in found if isinstance(one, int | float) and one == one // 1]
    return [number for number in numbers if not KEYS["output.logprobs"].violation("num_logprobs", number)]
