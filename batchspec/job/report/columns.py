"""The meaning of each output column, for the dataset card."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from batchspec.tasks.base import Task
from batchspec.tasks.registry import TASKS

MEANINGS = {
    "request_id": "`id` of the input, or made from the input file's name and the row",
    "row_index": "row of the input, from 0",
    "sample_index": "number of the completion of one input row, from 0",
    "status": "`ok`; `truncated`: cut off at the token limit, or at a repetition; `error`; `skipped`: prompt too long",
    "messages": "the conversation as turns of role and content; the last turn is the answer if the job stores it there",
    "completion": "the answer, without stop string, stop id and special tokens",
    "reasoning": "the reasoning block before the answer, if the model has tokens for one",
    "reasoning_truncated": "whether the reasoning block was cut off",
    "tool_calls": "tool calls of the answer as JSON text, in the form of OpenAI's chat format",
    "finish_reason": "`stop`, `length`, `repetition` or `error`",
    "stop_reason": "the stop string or token id that ended the answer",
    "prompt_ids": "token ids of the prompt",
    "token_ids": "token ids of the answer, including the one that ended it",
    "logprobs": "log-probability of each answer token, before temperature and filters",
    "top_logprobs": "the most likely tokens at each position and their log-probabilities",
    "prompt_logprob_sum": "log-probability of the prompt: the sum over its tokens but the first",
    "prompt_logprobs": "log-probability of each prompt token after the first",
    "prompt_top_logprobs": "the most likely tokens at each position of the prompt and their log-probabilities",
    "scores": "each label of the model, and its score after the row's last token, as the score matrix gives it",
    "score": "how well the row's document answers its query, from 0 to 1",
    "embedding": "the vector of the prompt",
    "choice_probs": "each of the texts that were compared, its share of their probabilities, and its log-probability",
    "usage": "token counts, named as in OpenAI's API",
    "seed": "seed of the row; the same value as the input's per-row seed gives the same tokens",
    "image_digest": "what determines the pixels of the row's images, 16 bytes of each in hexadecimal",
    "error": "why there is no answer: code, stage, message, and whether a retry may help",
    "spec_decode": "counts and rates of speculative decoding for this row",
    "perf": "times in seconds and batch slots; differs from run to run",
}
COPIED = "copied from the input"


def type_name(kind: pl.DataType) -> str:
    """The name of a column's type without the fields of structs: list of struct, int32, timestamp."""
    if isinstance(kind, pl.List | pl.Array):
        return f"list of {type_name(kind.inner)}"  # type: ignore[arg-type,unused-ignore]
    if isinstance(kind, pl.Datetime):
        return "timestamp"
    name = kind.base_type().__name__
    return "bool" if name == "Boolean" else name.lower()


def meaning(name: str, task: Task) -> str:
    """The meaning of a column of a job with this task: one with the name of another task's column is the input's."""
    is_others = name not in task.columns and any(name in other.columns for other in TASKS.values())
    return COPIED if is_others else MEANINGS.get(name, COPIED)


def type_names(schema: Mapping[str, pl.DataType]) -> dict[str, str]:
    return {name: type_name(kind) for name, kind in schema.items()}
