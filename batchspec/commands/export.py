"""`batchspec export`: convert a job's output to training data or OpenAI batch responses, or OpenAI batch requests to an input.

chat               {"messages": [...]}: the prompt's turns and the answer; .jsonl or .parquet
prompt_completion  {"prompt": [turns], "completion": [the answer's turn]}; .jsonl or .parquet
preference         {"prompt": [turns], "chosen": [turn], "rejected": [turn]}: of each request the answers with the highest and the
                   lowest score; .jsonl or .parquet
prompt_only        {"prompt": [turns]}, one a request; with a score also "answer", the text of the best; .jsonl or .parquet
openai             one line a request, its samples as choices; rows without a completion become `error`; .jsonl

TRL's trainers read all but openai directly: all rows have the same format, lists of turns, and by default status ok. request_id
and sample_index are written too, and the columns of --keep. With --score, chat and prompt_completion hold the best answer of each
request. The SQL of --where and --score is that of polars (pl.sql_expr), and sees all rows of the job.

Shards are converted one at a time, so that memory does not grow with the job. The file appears under its name when complete.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.checkpoint.hub import find_model
from batchspec.commands.picked_rows import NO_CHAT, SCORE, PickedRows, Wish, advice, picked_rows
from batchspec.commands.trainer_rows import (
    TURNS,
    as_openai,
    goes_on,
    kept_columns,
    other_columns,
    plain_json,
    trainer_lines,
    training_line,
)
from batchspec.config.decode_schema import DecodeConfig
from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.console.target_file import target_file
from batchspec.console.text import counted, for_shell, listed
from batchspec.data.dataset.formats import UTF8_BOM
from batchspec.data.dataset.lines import LongLine, lines_of
from batchspec.data.dataset.openai_requests import Line, defaults_note, filled, parse_request, request_row, request_schema
from batchspec.data.dataset.openai_values import BadRequest
from batchspec.data.runstate.manifest import fingerprint
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning
from batchspec.data.storage.new_file import new_file, write_lines
from batchspec.errors import BatchspecError, CheckpointError, ConfigError, InputError, OutputError
from batchspec.job.report.answers import NO_TOKEN_IDS, check_not_in_data, rows_of, write_answers
from batchspec.process.local_files import fault_of, open_regular
from batchspec.records import STATUSES, TokenText
from batchspec.tasks.registry import saved_task
from batchspec.text.token_texts import TokenTexts
from batchspec.text.tokenizer import Tokenizer

FORMATS = ("chat", "prompt_completion", "preference", "prompt_only", "openai")
SUFFIXES = {
    **dict.fromkeys(TURNS, (".jsonl", ".parquet")), "openai": (".jsonl",),
    "openai's requests": (".parquet",),
}
GROUP_ROWS = 8192
NAMES = ("status", "completion", "messages")
"""Columns that training lines are made of."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print what it contains and leaves out. Raises OutputError, InputError, ConfigError, StorageError."""
    parser = ArgumentParser(prog="batchspec export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="OUT FILE", nargs="+", help="output folder, FILE to write; --from-openai: OUT.parquet")
    parser.add_argument("--to", choices=FORMATS, help="format of FILE")
    parser.add_argument("--from-openai", metavar="FILE.jsonl", type=Path, help="OpenAI batch requests to convert to an input")
    parser.add_argument(
        "--status", action="append", help=f"rows to write, comma-separated: {', '.join(STATUSES)}; default ok, openai: all"
    )
    parser.add_argument("--where", metavar="SQL", help="rows to write: a condition over the output's columns, \"kind = 'math'\"")
    parser.add_argument("--score", metavar="SQL", help="number of a row; the best row of each request is written, or the pair")
    parser.add_argument(
        "--join", metavar="FILE",
        help=".parquet or .jsonl: request_id, sample_index and more columns, such as scores; or folder of a job that scored OUT",
    )
    parser.add_argument("--keep", metavar="COLUMNS", action="append", help="columns to write too, comma-separated")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument(
        "--drop", metavar="KEYS", action="append", default=[], help="--from-openai: ignore these keys, comma-separated"
    )
    parser.add_argument("--skip-bad", action="store_true", help="--from-openai: leave out lines that batchspec cannot follow")
    args = parser.parse_intermixed_args(argv)
    source, paths = args.from_openai, args.paths
    if (args.to is None) == (source is None) or len(paths) != (2 if source is None else 1):
        parser.error("give OUT --to FORMAT FILE.jsonl, or --from-openai FILE.jsonl OUT.parquet")
    ours = ("status", "where", "score", "join", "keep")
    unread, reads = (("drop", "skip_bad"), "--from-openai") if source is None else (ours, "--to")
    parser.refuse(args, unread, f"is read only with {reads}")
    if args.to == "openai":
        parser.refuse(args, ("score", "keep"), "has no place in --to openai")
    if args.to == "preference" and args.score is None:
        parser.error("--to preference needs --score: a column, or an expression, by which one answer is better than another")
    form = "openai's requests" if source is not None else args.to
    target = target_file(paths[-1], args.overwrite, SUFFIXES[form], form)
    if source is not None:
        for line in from_openai(source, target, _names(args.drop), skip_bad=args.skip_bad).splitlines():
            terminal.show_line(line)
    else:
        wish = Wish(
            statuses=_statuses(_names(args.status), args.to), where=args.where, score=args.score, join=args.join,
            pairs=args.to == "preference", one_each=args.to == "prompt_only",
        )
        terminal.show_line(export(OutputFolder(paths[0]), target, args.to, wish, _names(args.keep)))
    return 0


def _names(given: Sequence[str] | None) -> list[str]:
    """The names of an option that holds several, comma-separated, and may be given more than once."""
    return [name for names in given or () for name in names.split(",")]


def _statuses(wish: Sequence[str], form: str) -> set[str]:
    statuses = set(wish or (STATUSES if form == "openai" else ["ok"]))
    if unknown := statuses - set(STATUSES):
        raise ConfigError(
            f"--status {','.join(wish)}: {', '.join(sorted(unknown))} is not a status; choose from {', '.join(STATUSES)}"
        )
    return statuses


def export(output: OutputFolder, target: Path, form: str, wish: Wish, keep: Sequence[str] = ()) -> str:
    """Write the committed rows that are wished for; returns a line that says what was written and left out.

    keep  columns to write besides those of the form
    Raises OutputError if there is no such row to write, or `target` is in data/; and as `picked_rows` and `kept_columns`.
    """
    done = sorted(output.committed())
    if not done:
        raise OutputError(f"{output.path} has no committed shard yet; run the job first")
    check_not_in_data(target, output.path, str(target))
    config = output.manifest.config
    kept = config.get("output", {}).get("messages", "full")
    if not (task := saved_task(config)).has_answers:
        raise OutputError(f"{output.path} holds {task.written} of prompts and no answer; read its data/")
    if form != "openai" and kept == "none":
        raise OutputError(f"{output.path} holds no prompts, which --to {form} needs; run the job with output.messages=full")
    left_out: Counter[str] = Counter()
    picked = None if wish.is_plain else picked_rows(output, done, wish)
    if picked is not None:
        left_out.update(picked.left_out)
    with scanning(output.path):
        kinds = _scan(output, done[0], picked).collect_schema()
    scored, as_json = wish.score is not None, target.suffix == ".jsonl"
    keep = kept_columns(keep, form, kinds, scored=scored, as_json=as_json)

    def wanted(rows: Iterator[Line]) -> Iterator[Line]:
        """Those of the rows that are written. Raises OutputError after the last if there is none."""
        found = False
        for row in rows:
            good = row["status"] in wish.statuses and (form == "openai" or row["completion"] is not None)
            if good and (form == "openai" or row["messages"]):
                found = True
                yield row
            else:
                left_out[NO_CHAT if good else row["status"]] += 1
        if not found:
            why = {reason: number for reason, number in sorted(left_out.items()) if number}
            raise OutputError(f"{target} is not written: all rows of {output.path} are left out ({listed(why)}); {advice(why)}")

    if len(done) < output.num_shards:
        terminal.say(f"{len(done)} of {output.num_shards} shards are committed; the others are not in the file")
    of = None if picked is None else picked.of
    if form == "openai":
        count = write_answers(output, target, token_text=_token_text(output, done), wanted=wanted, of=of)
    else:
        given, whole = config.get("input", {}).get("final_assistant") == "continue", kept == "full"
        thinks = config.get("output", {}).get("reasoning_in_messages", False)
        names = [*([SCORE] if picked is not None else []), "request_id", "row_index", "sample_index", *NAMES, *keep]
        rows = wanted(rows_of(output, done, names, ("tool_calls",), of=of))
        turned = (
            (row, training_line(row, form, whole=whole, continues=whole and (given or (not thinks and goes_on(row)))))
            for row in rows
        )
        lines: Iterator[dict[str, Any]] = trainer_lines(turned, form, keep, scored=scored)
        if as_json:
            count = write_lines((_plain(line, form) for line in lines), target)
        else:
            with scanning(output.path):
                there = _scan(output, done[0], picked).select("messages", *keep).head(0).collect().to_arrow().schema
            turns = ((name, there.field("messages").type) for name in TURNS[form])
            columns = [*other_columns(form, scored=scored).items(), *turns, *((name, there.field(name).type) for name in keep)]
            count = _write_rows(lines, target, pa.schema(columns))
    missing = listed({why: number for why, number in sorted(left_out.items()) if number})
    what = counted(count, "row" if target.suffix == ".parquet" else "line")
    lost = _num_requests(output, done) - count if form == "prompt_only" else 0  # it has a line a request
    return (
        f"{target}: {what}"
        + (f"; rows left out: {missing}" if missing else "")
        + (f"; no row of {counted(lost, 'request')} was wanted" if lost else "")
    )


def _num_requests(output: OutputFolder, done: list[int]) -> int:
    with scanning(output.path):
        return int(output.scan(done).select(pl.col("row_index").n_unique()).collect().item())


def _scan(output: OutputFolder, shard: int, picked: PickedRows | None) -> pl.LazyFrame:
    rows = output.scan([shard])
    return rows if picked is None else picked.of(rows, output.rows_of(shard))


def _plain(line: Line, form: str) -> dict[str, Any]:
    """A line of a form as JSON has it."""
    return {
        name: [as_openai(turn) for turn in value] if name in TURNS[form] else plain_json(value) for name, value in line.items()
    }


def _token_text(output: OutputFolder, done: list[int]) -> TokenText | None:
    """The texts of the job's tokens; None, with a line that says why, where log-probabilities are left out, if there are any."""
    with scanning(output.path):
        columns = output.scan(done[:1]).collect_schema().names()
    if "logprobs" not in columns:
        return None
    try:
        if "token_ids" not in columns:
            raise ConfigError(NO_TOKEN_IDS)
        return TokenTexts(_tokenizer_of(output))
    except BatchspecError as error:
        terminal.say(f"logprobs are left out: {error}")
        return None


def _tokenizer_of(output: OutputFolder) -> Tokenizer:
    """The job's tokenizer. Raises CheckpointError if it cannot be read, or is another one now."""
    model = output.manifest.config["model"]
    found, template = find_model(model["path"], model.get("revision")), model.get("chat_template")
    tokenizer = Tokenizer(found.folder, Path(template) if template else None)
    if fingerprint({"of": tokenizer.fingerprint})["of"] != output.manifest.fingerprint.get("model.tokenizer"):
        raise CheckpointError(f"{found.where}: its tokenizer is not the job's any more; give the model's folder its old files")
    return tokenizer


def from_openai(source: Path, target: Path, drop: Collection[str] = (), *, skip_bad: bool = False) -> str:
    """Convert a file of request lines to the Parquet input of a job. The file is read twice; the first pass checks every line.

    Only columns that some line fills are written. Raises InputError for lines that batchspec cannot follow, unless `skip_bad`
    leaves them out; the first one of each kind is printed, with how many there are.
    """
    used, always = set[str](), set[str]()
    count, bad = 0, dict[str, list[str]]()
    for number, row in _requests(source, drop):
        if isinstance(row, BadRequest):
            bad.setdefault(row.kind, []).append(f"line {number}: {row}")
            continue
        always = row.keys() & (always if count else row.keys())
        used |= filled(row)
        count += 1
    num_bad = sum(map(len, bad.values()))
    kinds = [f"{first}{f' ({len(more):,} more like it)' if more else ''}" for first, *more in bad.values()]
    if bad and not skip_bad:
        verb = "is no request" if num_bad == 1 else "are no requests"
        for kind in kinds:
            terminal.say(kind)
        raise InputError(
            f"{source}: {counted(num_bad, 'line')} of {count + num_bad:,} {verb} that batchspec can follow, as the lines above "
            "say; --skip-bad leaves them out"
        )
    if not count:
        raise InputError(f"{source}: no request in it; give a file of OpenAI's batch requests")
    schema = request_schema(used)
    rows = (request_row(row, schema) for _, row in _requests(source, drop) if not isinstance(row, BadRequest))
    _write_rows(rows, target, schema)
    said = [f"{target}: {count:,} rows with {', '.join(schema.names)}; run it with input.path={for_shell(target)}"]
    if bad:
        said.append(f"{counted(num_bad, 'line')} left out: {'; '.join(kinds)}")
    return "\n".join([*said, *filter(None, [defaults_note(always, DecodeConfig())])])


def _requests(source: Path, drop: Collection[str]) -> Iterator[tuple[int, dict[str, Any] | BadRequest]]:
    """(number of the line, its row or why it has none) of each line that is not blank."""
    try:
        with open_regular(source) as file:
            file.seek(len(UTF8_BOM) if file.read(len(UTF8_BOM)) == UTF8_BOM else 0)
            for number, line in enumerate(lines_of(file), 1):
                if isinstance(line, LongLine):
                    yield number, BadRequest(f"not a batch request ({line.problem}); leave it out")
                elif line.strip():
                    try:
                        yield number, parse_request(line.strip(), drop)
                    except BadRequest as bad:
                        yield number, bad
    except OSError as error:
        refusal = InputError(f"{source}: cannot be read ({error.strerror or error}); give a file of JSON lines in UTF-8")
        raise fault_of(error, str(source), refusal) from error


def _write_rows(rows: Iterator[Line], target: Path, schema: pa.Schema) -> int:
    count = 0
    with (
        new_file(target) as path, path.open("xb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer
    ):
        while group := list(islice(rows, GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema))
            count += len(group)
    return count
