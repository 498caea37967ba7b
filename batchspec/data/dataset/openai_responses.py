"""Output rows as the response lines of OpenAI's batch files.

A response line   {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}
Source: https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from batchspec.records import TokenText

Line = Mapping[str, Any]

NAMES = (
    "request_id", "row_index", "sample_index", "status", "completion", "finish_reason", "reasoning", "usage", "error", "perf",
)
"""The columns of output rows that are read."""
OPTIONAL = ("tool_calls", "token_ids", "logprobs", "top_logprobs")
"""Those that a job may lack."""


def response_line(samples: Sequence[Line], model: str, token_text: TokenText | None = None) -> dict[str, Any]:
    """The response to one request from the output rows of its samples, which share a row_index.

    token_text  to write log-probabilities, which need the column token_ids too; None: they are left out

    It has a choice for each sample with a completion, with `error` if that violates its schema; if no sample has one, it has
    `error` and no response. As in OpenAI's responses, tokens are summed over the choices and the prompt's are counted once.
    """
    first = samples[0]
    good = [row for row in samples if row["completion"] is not None]
    line = {"id": f"batch_req_{first['row_index']}", "custom_id": first["request_id"], "response": None, "error": None}
    if not good:
        error = first["error"] or {"code": first["status"], "message": f"the row was {first['status']}"}
        return line | {"error": {"code": error["code"], "message": error["message"]}}
    body = {
        "id": f"chatcmpl-{first['row_index']}",
        "object": "chat.completion",
        "created": _created(good[0]),
        "model": model,
        "choices": [_choice(row, token_text) for row in good],
        "usage": _usage([row["usage"] for row in good]),
    }
    return line | {"response": {"status_code": 200, "request_id": f"req_{first['row_index']}", "body": body}}


def _created(row: Line) -> int | None:
    when = (row["perf"] or {}).get("finished_at")
    return int(when.timestamp()) if isinstance(when, datetime) else None


def _choice(row: Line, token_text: TokenText | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": row["completion"]}
    if row["reasoning"] is not None:
        message["reasoning_content"] = row["reasoning"]
    reason = "length" if row["finish_reason"] == "repetition" else row["finish_reason"]
    if row.get("tool_calls") is not None:
        message |= {"content": row["completion"] or None, "tool_calls": json.loads(row["tool_calls"])}
        reason = "tool_calls" if reason == "stop" else reason
    logprobs = None
    if token_text is not None and row.get("logprobs") is not None and row.get("token_ids") is not None:
        logprobs = {"content": _logprobs(row, token_text), "refusal": None}
    choice = {"index": row["sample_index"], "message": message, "logprobs": logprobs, "finish_reason": reason}
    if row["status"] == "invalid":
        choice["error"] = {"code": row["error"]["code"], "message": row["error"]["message"]}
    return choice


def _logprobs(row: Line, token_text: TokenText) -> list[dict[str, Any]]:
    """An entry for each output token, those of reasoning and the end token included. The log-probability of a token that closed a
    thought which had used up its budget is null."""
    tops = row.get("top_logprobs") or [[]] * len(row["token_ids"])
    return [
        _entry(token, logprob, token_text) | {"top_logprobs": [_entry(one["id"], one["logprob"], token_text) for one in top]}
        for token, logprob, top in zip(row["token_ids"], row["logprobs"], tops, strict=True)
    ]


def _entry(token: int, logprob: float | None, token_text: TokenText) -> dict[str, Any]:
    text, data = token_text(token)
    return {"token": text, "logprob": logprob, "bytes": data}


def _usage(usages: Sequence[Line]) -> dict[str, Any]:
    prompt, answer = usages[0]["prompt_tokens"], sum(usage["completion_tokens"] for usage in usages)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    usage["prompt_tokens_details"] = {"cached_tokens": usages[0]["cached_tokens"]}
    thought = [item["reasoning_tokens"] for item in usages if item["reasoning_tokens"] is not None]
    if thought:
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(thought)}
    return usage
