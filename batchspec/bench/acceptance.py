"""Made-up acceptance of `--accept`: rates by position, or those of each row of a finished job.

A job's output says of each row how often it accepted its drafts, by position (`spec_decode.acceptance_per_position`). Request i
of the benchmark accepts its drafts as often as row i did; after the last row the first one comes again. So rows differ as in the
job, on any shape, while the rounds of a row are drawn anew. Use a job with draft.adaptive=false: one that chose which drafts to
verify has rates of later positions from its better rounds only.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from batchspec.data.storage.exact_files import parquet_file
from batchspec.data.storage.local_tree import files_below
from batchspec.errors import ConfigError
from batchspec.process.local_files import fault_of

Kinds = list[list[float]]
"""Of each kind of row, or of each row, the share of rounds that accept at least so many drafts: 1, 2, .. K."""
COLUMN, RATES = "spec_decode", "acceptance_per_position"


def read_accept(text: str) -> Kinds:
    """Raises ConfigError for what is neither numbers nor a job's output, or for rates that increase."""
    numbers = _numbers(text)
    return rates_of_rows(Path(text)) if numbers is None else numbers


def _numbers(text: str) -> Kinds | None:
    try:
        kinds = [[float(rate) for rate in kind.split(",")] for kind in text.split(";")]
    except ValueError:
        return None
    for kind in kinds:
        if kind != sorted(kind, reverse=True) or len(kind) != len(kinds[0]):
            raise ConfigError(
                f"--accept {kind} must be non-increasing, because a draft token is accepted only after accepted ones, and as "
                "long as those of other kinds of rows"
            )
    return kinds


def rates_of_rows(path: Path) -> Kinds:
    """The rates of each row of a job that had drafts, in the order of its output, all as long as the longest.

    path  a Parquet file of rows, or the job's output.dir
    A position that the row never drafted counts as never accepted. Of rates that increase, because positions were drafted in
    different rounds, the later ones are lowered.
    """
    files = sorted(file.path for file in files_below(path / "data")) if path.is_dir() else [path]
    found = [rates for file in files for rates in _rates_of_file(file)]
    if not found:
        raise ConfigError(
            f"--accept {path}: no row has {COLUMN}.{RATES}; give the output.dir of a job with drafts, or one of its files"
        )
    width = max(map(len, found))
    return [list(accumulate(rates + [0.0] * (width - len(rates)), min)) for rates in found]


def _rates_of_file(file: Path) -> list[list[float]]:
    try:
        with parquet_file(file) as reader:
            rows = reader.read(columns=[f"{COLUMN}.{RATES}"]).to_pylist()
    except (OSError, pa.ArrowException) as error:
        said = " ".join(str(error).split())
        where = f"--accept {file}"
        refusal = ConfigError(f"{where} is neither numbers, as .6,.28,.12, nor Parquet that can be read: {said}")
        raise fault_of(error, where, refusal) from None
    lists = [(row.get(COLUMN) or {}).get(RATES) or [] for row in rows]
    return [[rate or 0.0 for rate in rates] for rates in lists if any(rate is not None for rate in rates)]
