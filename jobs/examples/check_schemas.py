"""Validate every completion of a job with JSON schemas by the package jsonschema, which batchspec asks only for
`decode.schema_unsupported=check`.

    python jobs/examples/check_schemas.py OUT [--column schema] [--schema FILE]

OUT is the output folder of a job with `input.columns.schema=COLUMN` (and that column in the output, as by default) or with
`decode.schema=FILE`. Counted are rows by status, and of those with status ok how many are valid. A row with a constraint of its
own in the column `response_format` is checked by that one, except for a regex or a grammar. Rows that have one of these, or a
value in a column `regex`, `choice` or `grammar`, are counted as not checked. A row that a stop string ended may have been cut,
and is counted by itself. Rows with status invalid and error rows are counted by their code: `error unsupported_schema` are those
that `decode.schema_unsupported=check` would decode. Exit code 1 if a row with status ok is not valid.

Ten thousand rows:

    python -m batchspec.run model.path=MODEL input.path=rows.parquet input.columns.schema=schema output.dir=OUT \
        decode=sampled decode.max_new_tokens=1024 input.max_error_fraction=1
    python jobs/examples/check_schemas.py OUT
"""

import argparse
import json
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for

SHOWN = 5
OTHERS = ("regex", "choice", "grammar")
"""Columns that may hold a row's own constraint of another kind than a schema: only a job with input.columns.NAME reads them."""
FORMAT = "response_format"


@lru_cache(maxsize=1000)
def validator(schema: str) -> Validator:
    made = json.loads(schema)
    return validator_for(made, default=Draft202012Validator)(made)


def constraint(row: dict[str, Any], column: str, usual: str | None) -> tuple[str, Any]:
    """Kind and value of what the row's answer must match: of the row's own constraint, which replaces the job's, or of the job's
    schema. A schema is JSON text, a choice a list of strings. Other kinds are the names by which such rows are counted.
    """
    for name in OTHERS:
        if row.get(name) is not None:
            return f"not checked: a {name} of its own", None
    if row.get(column) is not None:
        return "schema", row[column]
    if row.get(FORMAT) is None:
        return ("free" if usual is None else "schema"), usual
    form = json.loads(row[FORMAT])
    match form["type"]:
        case "json_object":
            return "schema", '{"type": "object"}'
        case "json_schema":
            return "schema", json.dumps(form["json_schema"]["schema"])
        case "choice":
            return "choice", form["choice"]
        case "regex" | "grammar" as name:
            return f"not checked: a {name} of its own", None
    return "free", None


def verdict(row: dict[str, Any], kind: str, wanted: Any) -> str:
    """How a row is counted: its status, or valid, invalid, stopped, or the kind of a constraint that is not checked.

    kind, wanted  as `constraint` returns them
    """
    if row["status"] != "ok":
        code = row["error"]["code"] if row["error"] else ""
        return f"{row['status']} {code}".strip()
    if kind not in ("schema", "choice"):
        return kind
    if row["finish_reason"] == "stop" and row["stop_reason"] is not None and not row["stop_reason"].isdigit():
        return "stopped"
    if kind == "choice":
        return "valid" if row["completion"] in wanted else "invalid"
    try:
        value = json.loads(row["completion"])
    except ValueError:
        return "invalid"
    return "valid" if validator(wanted).is_valid(value) else "invalid"


def check(out: Path, column: str, usual: str | None) -> tuple[Counter[str], list[str]]:
    """The numbers of rows by verdict, and the first lines about invalid ones."""
    frame = pl.scan_parquet(out / "data")
    own = [name for name in dict.fromkeys((column, *OTHERS, FORMAT)) if name in frame.collect_schema().names()]
    names = ["request_id", "status", "error", "finish_reason", "stop_reason", "completion", *own]
    counts, shown = Counter[str](), list[str]()
    for row in frame.select(names).collect().iter_rows(named=True):
        # The constraint of an error row may be what is wrong with it.
        kind, wanted = constraint(row, column, usual) if row["status"] == "ok" else ("", None)
        found = verdict(row, kind, wanted)
        counts[found] += 1
        if found == "invalid" and len(shown) < SHOWN:
            shown.append(f"{row['request_id']}: {row['completion'][:200]!r} is not valid by {str(wanted)[:200]}")
    return counts, shown


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--column", default="schema", help="column of the output that holds each row's schema, as JSON text")
    parser.add_argument("--schema", type=Path, help="the schema of rows without one of their own")
    args = parser.parse_args(argv)
    if not (args.out / "data").is_dir():
        parser.error(f"{args.out} has no folder data, so no job has committed a shard there; give the output.dir of a job")
    counts, shown = check(args.out, args.column, args.schema.read_text(encoding="utf-8") if args.schema else None)
    print("\n".join([*shown, *(f"{count:>9,}  {name}" for name, count in counts.most_common())]))
    return 1 if counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
