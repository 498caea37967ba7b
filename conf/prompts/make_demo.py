"""Write demo.parquet, the prompts of `+job=demo`, from the texts of demo.toml: python conf/prompts/make_demo.py

Four rows are bad on purpose, so that the demo shows what a bad row gets.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("kind", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("max_new_tokens", pa.int32()),
        ("temperature", pa.float64()),
        ("n", pa.int32()),
        ("stop", pa.list_(pa.string())),
        ("seed", pa.int64()),
    ]
)

TEXTS = tomllib.loads(Path(__file__).with_name("demo.toml").read_text(encoding="utf-8"))
OWN_VALUES: dict[str, dict[str, Any]] = {
    "question-02": {"temperature": 0.7, "n": 2},
    "question-06": {"max_new_tokens": 32, "stop": [",", "."]},
    "question-09": {"temperature": 0.8, "seed": 11},
    "list-00": {"stop": ["6."]},
    "list-02": {"temperature": 0.9, "n": 3, "seed": 2026},
    "list-05": {"max_new_tokens": 160, "stop": ["Sunday"]},
    "multi_turn-01": {"temperature": 0.7, "n": 3, "max_new_tokens": 40},
    "multi_turn-05": {"temperature": 0.8, "n": 2, "seed": 7},
    "summary-03": {"max_new_tokens": 48, "stop": ["\n\n\n"]},
    "extraction-02": {"max_new_tokens": 200},
    "extraction-05": {"max_new_tokens": 160},
    "extraction-11": {"max_new_tokens": 64},
    "code_edit-03": {"max_new_tokens": 200},
    "code_edit-08": {"max_new_tokens": 96},
    "rewrite-04": {"temperature": 0.6, "max_new_tokens": 80},
}


def row(kind: str, number: int, messages: list[dict[str, str]] | None, **values: Any) -> dict[str, Any]:
    return {"id": f"{kind}-{number:02d}", "kind": kind, "messages": messages, **values}


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def about(passage: str, task: str) -> list[dict[str, str]]:
    return ask(f"{task}\n\nText:\n{' '.join(TEXTS['passages'][passage].split())}")


def copy(document: str, task: str) -> list[dict[str, str]]:
    text = re.sub("\n +", " ", TEXTS["documents"][document])
    return ask(f"{task}\n\n{text.strip()}")


def edit(task: str, language: str, file: str) -> list[dict[str, str]]:
    request = f"```{language}\n{file.strip()}\n```\n\n{task}"
    return [{"role": "system", "content": TEXTS["editor"]}, *ask(request)]


def rows() -> list[dict[str, Any]]:
    """70 good rows, kinds mixed, and 4 bad ones at fixed places among them."""
    kinds = [
        [row("question", i, ask(text)) for i, text in enumerate(TEXTS["question"])],
        [row("extraction", i, copy(*item)) for i, item in enumerate(TEXTS["extraction"])],
        [row("code_edit", i, edit(**item)) for i, item in enumerate(TEXTS["code_edit"])],
        [row("summary", i, about(*item)) for i, item in enumerate(TEXTS["summary"])],
        [row("list", i, ask(text)) for i, text in enumerate(TEXTS["list"])],
        [row("multi_turn", i, [{"role": ("user", "assistant")[j % 2], "content": text} for j, text in enumerate(turns)])
         for i, turns in enumerate(TEXTS["multi_turn"])],
        [row("rewrite", i, ask(text), max_new_tokens=48) for i, text in enumerate(TEXTS["rewrite"])],
    ]
    good = [kind[place] for place in range(max(map(len, kinds))) for kind in kinds if place < len(kind)]
    for item in good:
        item.update(OWN_VALUES.get(item["id"], {}))
    shelves = [f"Shelf {i} holds {i * 7 % 90 + 3} boxes of nails and {i * 13 % 50 + 1} boxes of screws." for i in range(140)]
    inventory = " ".join(shelves)
    bad = {
        9: row("bad", 0, []),
        24: row("bad", 1, None),
        41: row("bad", 2, ask("How tall is a giraffe?"), temperature=-1.0),
        60: row("bad", 3, ask(f"Which shelf holds the most nails?\n\n{inventory}")),
    }
    for place, item in bad.items():
        good.insert(place, item)
    return good


def table() -> pa.Table:
    return pa.Table.from_pylist(rows(), SCHEMA)


if __name__ == "__main__":
    path = Path(__file__).with_name("demo.parquet")
    pq.write_table(table(), path, compression="zstd")
    print(f"{path}: {table().num_rows} rows")
