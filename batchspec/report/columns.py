"""What the columns of a job's output mean, in words: for the dataset card."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

MEANINGS = {
    "request_id": "the input's id, or the input file's name and row",
    "row_index": "row of the input, from 0",
    "sample_index": "which of the completions of one input row, from 0",
    "status": "`ok`; `truncated`: cut off at the token limit; `error`; `skipped`: prompt too long; `cancelled`: the job ended",
    "messages": "the conversation as turns of role and content, the answer last if the job kept it there",
    "completion": "the answer, without stop strings and special tokens",
    "reasoning": "what the model thought before the answer, where it has tokens for that",
    "reasoning_truncated": "whether the thought was cut off",
    "finish_reason": "`stop`, `length` or `error`",
    "stop_reason": "the stop string or token that ended the answer",
    "prompt_ids": "token ids of the prompt",
    "token_ids": "token ids of the answer, the one that ended it among them",
    "logprobs": "log-probability of each answer token, before temperature and filters",
    "top_logprobs": "the likeliest tokens at each place and their log-probabilities",
    "usage": "token counts, named as in OpenAI's API",
    "seed": "gives the same tokens again as a row's own seed",
    "error": "why there is no answer: code, stage, message, and whether a retry may help",
    "spec_decode": "what speculative decoding did for this row",
    "perf": "times and batch slots; differs from run to run",
}
COPIED = "copied from the input"


def type_name(kind: pl.DataType) -> str:
    """A column's type, the fields of a struct left out: list of struct, int32, timestamp."""
    if isinstance(kind, pl.List | pl.Array):
        return f"list of {type_name(kind.inner)}"  # type: ignore[arg-type,unused-ignore]
    if isinstance(kind, pl.Datetime):
        return "timestamp"
    name = kind.base_type().__name__
    return "bool" if name == "Boolean" else name.lower()


def meaning(name: str) -> str:
    return MEANINGS.get(name, COPIED)


def type_names(schema: Mapping[str, pl.DataType]) -> dict[str, str]:
    return {name: type_name(kind) for name, kind in schema.items()}
