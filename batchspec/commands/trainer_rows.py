"""The forms of `batchspec export` for trainers other than chat and prompt_completion, and the columns that --keep adds to each.

Source: TRL 1.16, docs/source/dataset_formats (prompt-only, preference); a reward function of GRPO gets the other columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import polars as pl
import pyarrow as pa

from batchspec.commands.picked_rows import SCORE
from batchspec.data.dataset.messages import THINKING_FIELD
from batchspec.errors import ConfigError

Line = Mapping[str, Any]
TURNS = {
    "chat": ("messages",), "prompt_completion": ("prompt", "completion"), "preference": ("prompt", "chosen", "rejected"),
    "prompt_only": ("prompt",),
}
"""Form -> its columns that hold turns."""
TAKEN = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns from which TRL tells the form of a row: --keep may add none of them."""


def other_columns(form: str, *, scored: bool) -> dict[str, pa.DataType]:
    """The columns of a form other than its turns and those that --keep names."""
    if form == "preference":
        samples = dict.fromkeys(("chosen_sample_index", "rejected_sample_index"), pa.int32())
        return {"request_id": pa.string(), **samples, "score_chosen": pa.float64(), "score_rejected": pa.float64()}
    answer = {"answer": pa.large_string()} if form == "prompt_only" and scored else {}
    sample = {"sample_index": pa.int32()} if form != "prompt_only" or scored else {}
    return {"request_id": pa.string(), **sample, **answer, **({"score": pa.float64()} if scored else {})}


def kept_columns(keep: Sequence[str], form: str, schema: Mapping[str, pl.DataType], *, scored: bool, as_json: bool) -> list[str]:
    """The columns that --keep names. Raises ConfigError for one that is not there, or has no place in the file."""
    for name in keep:
        if name not in schema:
            raise ConfigError(f"--keep {name}: the output has no such column; it has {', '.join(schema)}")
        if name in TAKEN or name in other_columns(form, scored=scored):
            raise ConfigError(
                f"--keep {name}: --to {form} has a column of that name, or trainers read it as one of another format"
            )
        if as_json and "Binary" in str(schema[name]):
            raise ConfigError(f"--keep {name}: it holds bytes, which JSON lines cannot; write a .parquet file")
    return list(dict.fromkeys(keep))


def trainer_lines(
    rows: Iterable[tuple[Line, Line]], form: str, keep: Sequence[str], *, scored: bool
) -> Iterator[dict[str, Any]]:
    """The lines of a form. rows: output rows and their turns in the form prompt_completion (of chat: chat); of a pair the better
    one comes first."""
    if form != "preference":
        for row, turns in rows:
            own = {name: row.get(name) for name in other_columns(form, scored=scored)}
            own |= {name: row[column] for name, column in (("answer", "completion"), ("score", SCORE)) if name in own}
            yield own | {name: turns[name] for name in TURNS[form]} | {name: row[name] for name in keep}
        return
    for _, pair in groupby(rows, lambda both: both[0]["row_index"]):
        (best, good), (worst, bad) = pair
        numbers = {f"{side}_sample_index": row["sample_index"] for side, row in (("chosen", best), ("rejected", worst))}
        scores = {"score_chosen": best[SCORE], "score_rejected": worst[SCORE]}
        turns = {"prompt": good["prompt"], "chosen": good["completion"], "rejected": bad["completion"]}
        yield {"request_id": best["request_id"], **numbers, **scores, **turns, **{name: best[name] for name in keep}}


def plain_json(value: Any) -> Any:
    """A kept value as JSON has it: times as ISO 8601, decimals as text, NaN and infinities as null."""
    if isinstance(value, dict):
        return {name: plain_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else getattr(value, "isoformat", lambda: str(value))()


def training_line(row: Line, form: str, *, whole: bool, continues: bool) -> dict[str, Any]:
    """One row of training data.

    whole      `messages` ends with the answer's turn, which is cut off
    continues  the answer may continue a final assistant turn of the prompt: then the last message is the complete answer
    """
    prompt = row["messages"][:-1] if whole else row["messages"]
    answer = row["messages"][-1:] if continues else [_answer(row, whole)]
    if not whole and prompt[-1]["role"] == "assistant":  # a row has an answer only if it continues this turn
        begun, (rest,) = prompt[-1], answer
        prompt, answer = prompt[:-1], [begun | rest | {"content": f"{begun['content']}{rest['content']}"}]
    return {"messages": prompt + answer} if form == "chat" else {"prompt": prompt, "completion": answer}


def goes_on(row: Line) -> bool:
    """Whether the answer continues a turn of the prompt, by the column final_assistant."""
    said: str = row["messages"][-1].get("content") or ""
    return len(said) > len(row["completion"]) and said.endswith(row["completion"])


def _answer(row: Line, whole: bool) -> dict[str, Any]:
    answer = {"role": "assistant", "content": row["completion"]}
    if row.get("tool_calls") is not None:
        answer["tool_calls"] = row["tool_calls"]
    if whole and (thought := row["messages"][-1].get(THINKING_FIELD)) is not None:
        answer[THINKING_FIELD] = thought
    return answer


def as_openai(turn: Line) -> dict[str, Any]:
    """The turn as OpenAI's chat format has it: tool calls as a list, and no null fields."""
    turn = {name: value for name, value in turn.items() if value is not None or name == "content"}
    return turn | ({"tool_calls": json.loads(turn["tool_calls"])} if "tool_calls" in turn else {})
