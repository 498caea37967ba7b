"""Which rows `batchspec export` writes: by status, by a condition, and of a request the best by a score, or best and worst.

Conditions and scores are SQL expressions of polars over the output's columns and those of a file that is joined to them. They see
the rows of the whole job, so that AVG(x) and OVER (PARTITION BY row_index) mean what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from batchspec.data.dataset.job_file import prefix_of
from batchspec.data.dataset.job_rows import open_job_files
from batchspec.data.dataset.row_expressions import RowExpression, said_of
from batchspec.data.runstate.finished_job import FinishedJob
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning
from batchspec.errors import InputError
from batchspec.process.local_files import fault_of
from batchspec.records import ANSWERED
from batchspec.tasks.registry import saved_task

KEY = ["row_index", "sample_index"]
ROW_ID = ["request_id", "sample_index"]
SCORE, _PLACE = "batchspec.score", "batchspec.place"
"""Names with a dot are columns that are made here: no column of a job that the expressions see is replaced."""
BY_WHERE, NO_SCORE, NO_CHAT = "by --where", "without a score", "without messages"
NO_PAIR = "of requests without a better and a worse answer"
_ADVICE = {
    NO_PAIR: "a request needs answers with different texts and scores, by decode.n; --join adds a judge's scores "
    "(jobs/pages/input.md)",
    NO_SCORE: "give one that is a number for some answer",
    BY_WHERE: "give a condition that is true of some",
    NO_CHAT: "a row has messages if its prompt was a chat or text",
}
"""Reason for which rows are left out -> what to do if no row is written."""
READERS: Mapping[str, Callable[[Path], pl.DataFrame]] = {".parquet": pl.read_parquet, ".jsonl": pl.read_ndjson}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the command asks for."""

    statuses: Collection[str]
    where: str | None = None
    score: str | None = None
    join: str | None = None
    """A file, or the folder of a job over the output."""
    pairs: bool = False
    """Of each request the best and the worst row by the score; else, with a score, the best."""
    one_each: bool = False
    """Of each request one row, also without a score."""

    @property
    def is_plain(self) -> bool:
        """Whether the status alone decides."""
        return not (self.where or self.score or self.join or self.one_each)


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedRows:
    """The rows to write."""

    rows: pl.DataFrame
    """row_index, sample_index, SCORE (null without one), columns of the joined file, _PLACE; of a pair the best row is first.
    In the order of the input."""
    left_out: dict[str, int]
    """Reason -> number of rows."""

    def of(self, rows: pl.LazyFrame, inputs: range) -> pl.LazyFrame:
        """Those of these rows that are picked, with the joined columns and SCORE, in their order.

        inputs  the input rows that they belong to: each shard is joined with its part of the picked rows, not with those of the
                whole job
        """
        row_index = self.rows["row_index"]
        first, stop = (int(row_index.search_sorted(row)) for row in (inputs.start, inputs.stop))
        here = self.rows[first:stop]
        return rows.join(here.lazy(), on=KEY, how="inner").sort(_PLACE).drop(_PLACE)


def picked_rows(output: OutputFolder, shards: Sequence[int], wish: Wish) -> PickedRows:
    """The rows of these shards that the command asks for.

    Memory grows with the job: by a few numbers a row, and by the columns that the expressions name. Raises ConfigError for an
    expression that cannot be computed, InputError for a file that cannot be joined, StorageError.
    """
    every = output.scan(shards)
    with scanning(output.path):
        own = list(every.collect_schema())
    joined = None if wish.join is None else _joined(wish.join, output, own)
    names = [*own, *(name for name in (joined.columns if joined is not None else ()) if name not in ROW_ID)]
    if joined is not None and (twice := [name for name in joined.columns if name in own and name not in ROW_ID]):
        instead = "rename it in the file" if Path(str(wish.join)).suffix in READERS else "join a file with it under another name"
        raise InputError(f"--join {wish.join}: the output has a column {twice[0]!r} too; {instead}")
    asked = {option: text for option, text in (("--where", wish.where), ("--score", wish.score)) if text is not None}
    made = {option: RowExpression(text, f"{option} {text}", names) for option, text in asked.items()}
    needed = dict.fromkeys([*ROW_ID, "row_index", "status", *(name for one in made.values() for name in one.names)])
    with scanning(output.path):
        picked = [name for name in needed if name in own]
        text = pl.when(pl.col("completion").is_not_null()).then(pl.col("completion").hash())
        rows = every.select(*picked, text.alias("batchspec.text")).collect()
    if joined is not None:
        rows = _with_columns(rows, joined, wish.join)
    left_out: dict[str, int] = {}
    rows = _only(rows, pl.col("status").is_in(list(wish.statuses)), left_out)
    if (where := made.get("--where")) is not None:
        passes = where.condition(rows)
        left_out[BY_WHERE] = int((~passes).sum())
        rows = rows.filter(passes)
    score = pl.Series([None] * rows.height, dtype=pl.Float64)
    if (expression := made.get("--score")) is not None:
        score = expression.score(rows)
    rows = rows.with_columns(score.alias(SCORE))
    more = [] if joined is None else [name for name in joined.columns if name not in ROW_ID]
    kept = _best(rows, wish, left_out).select(*KEY, SCORE, *more).with_row_index(_PLACE)
    return PickedRows(rows=kept, left_out={why: count for why, count in left_out.items() if count})


def advice(left_out: Collection[str]) -> str:
    """What to do if rows were left out for these reasons, and none was written."""
    statuses = ",".join(status for status in ANSWERED if status in left_out)
    by_status = f"--status {statuses} takes them" if statuses else "no row has an answer; batchspec stats counts the errors"
    return next((said for reason, said in _ADVICE.items() if reason in left_out), by_status)


def _only(rows: pl.DataFrame, good: pl.Expr, left_out: dict[str, int]) -> pl.DataFrame:
    for status, count in sorted(rows.filter(~good)["status"].value_counts().iter_rows()):
        left_out[str(status)] = count
    return rows.filter(good)


def _best(rows: pl.DataFrame, wish: Wish, left_out: dict[str, int]) -> pl.DataFrame:
    """Of each request the rows that its score decides for."""
    if wish.score is None:
        kept = rows.unique("row_index", keep="first", maintain_order=True) if wish.one_each else rows
        if wish.one_each:
            left_out["other samples"] = rows.height - kept.height
        return kept
    rated = rows.filter(
        pl.col("batchspec.text").is_not_null() & pl.col(SCORE).is_not_nan()
    )  # a comparison with null is null: left out too
    left_out[NO_SCORE] = rows.height - rated.height
    order = rated.sort(["row_index", SCORE, "sample_index"], descending=[False, True, False])
    best = order.unique("row_index", keep="first", maintain_order=True)
    if not wish.pairs:
        left_out["other samples"] = rated.height - best.height
        return best
    top = best.select("row_index", pl.col(SCORE).alias("batchspec.top"), pl.col("batchspec.text").alias("batchspec.top_text"))
    lower = order.join(top, on="row_index", how="left", maintain_order="left").filter(
        (pl.col(SCORE) < pl.col("batchspec.top")) & (pl.col("batchspec.text") != pl.col("batchspec.top_text"))
    )
    worst = lower.unique("row_index", keep="last", maintain_order=True).select(best.columns)
    paired = best.filter(pl.col("row_index").is_in(worst["row_index"].implode()))
    pairs = pl.concat([paired, worst]).sort(["row_index", SCORE], descending=[False, True])
    left_out["other samples"] = rated.filter(pl.col("row_index").is_in(worst["row_index"].implode())).height - pairs.height
    left_out[NO_PAIR] = rated.height - pairs.height - left_out["other samples"]
    return pairs


def _joined(path: str, output: OutputFolder, own: Sequence[str]) -> pl.DataFrame:
    """The rows to join. own: columns of the output. Raises InputError, and for a job OutputError and StorageError."""
    reader = READERS.get(Path(path).suffix)
    if reader is None:
        if "://" not in path and not Path(path).is_dir():
            raise InputError(
                f"--join {path}: not {' or '.join(READERS)}, and no folder of a job; give such a file with "
                f"{' and '.join(ROW_ID)}"
            )
        rows = _of_job(path, output, own)
    else:
        try:
            rows = reader(Path(path))
        except (pl.exceptions.PolarsError, OSError) as error:
            where = f"--join {path}"
            raise fault_of(error, where, InputError(f"{where}: cannot be read ({said_of(error)})")) from None
    if missing := [name for name in ROW_ID if name not in rows.columns]:
        raise InputError(
            f"--join {path}: no column {missing[0]!r}; a line is joined to the output row with its {' and '.join(ROW_ID)}"
        )
    rows = rows.cast({"request_id": pl.String, "sample_index": pl.Int32}, strict=False)
    if (twice := rows.filter(pl.struct(ROW_ID).is_duplicated())).height:
        name, sample = twice.row(0, named=True)["request_id"], twice.row(0, named=True)["sample_index"]
        raise InputError(f"--join {path}: several lines for request {name!r}, sample {sample}; give one line each")
    return rows


def _of_job(folder: str, output: OutputFolder, own: Sequence[str]) -> pl.DataFrame:
    """The scores of a finished job that read this output (input.from_job), by the rows of this output."""
    judge = FinishedJob(folder, "--join")
    answers = judge.config.get("input", {}).get("from_job")
    scored = saved_task(judge.config).score_column
    if not answers or not scored:
        raise InputError(
            f"--join {folder}: not a job that scores answers of another one; run one with input.from_job and task=reward, or "
            "decode.score"
        )
    _check_read(judge, folder, output)
    prefix = prefix_of(answers, own)
    with scanning(folder):
        rows = OutputFolder(folder).scan()
        names = [f"{prefix}{name}" for name in ROW_ID]
        if missing := [name for name in names if name not in rows.collect_schema()]:
            raise InputError(f"--join {folder}: no column {missing[0]!r}, which names the answers' rows; keep it in that job")
        found = rows.select(*(pl.col(name).alias(own) for name, own in zip(names, ROW_ID, strict=True)), scored).collect()
    judge.check_unchanged()
    return found


def _check_read(judge: FinishedJob, folder: str, output: OutputFolder) -> None:
    """Raises InputError unless the judge read the files that this output has now: ids alone are also those of another job with
    the same input, and of answers before a retry. Of an output that was extended since, it read some."""
    answers = FinishedJob(output.path, "OUT")
    present = {(file.name, file.digest) for file in open_job_files(answers.files)}
    if other := next((file.name for file in judge.read_files if (file.name, file.digest) not in present), None):
        raise InputError(
            f"--join {folder}: its scores are of another job's answers or of older ones, as it read another {other}; judge those "
            f"of {output.path} in a new output.dir"
        )
    answers.check_unchanged()


def _with_columns(rows: pl.DataFrame, joined: pl.DataFrame, path: str | None) -> pl.DataFrame:
    found = rows.join(
        joined.with_columns(pl.lit(value=True).alias("batchspec.there")), on=ROW_ID, how="left", maintain_order="left"
    )
    if rows.height and not found["batchspec.there"].any():
        raise InputError(f"--join {path}: none of its lines has the {' and '.join(ROW_ID)} of a row of this job")
    return found.drop("batchspec.there")
