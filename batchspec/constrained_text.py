"""The text of a completion with a constraint: an independent check of what the user gets. This module does not import torch."""

from __future__ import annotations

import json
from dataclasses import replace

from batchspec.records import CONSTRAINT_VIOLATED, Completion, RowError


def checked_text(completion: Completion) -> Completion:
    """The completion, whose text is there; an error row where it follows a schema to its end and is no JSON.

    Its tokens follow the schema's automaton (`engine/last_check.py`), so that only a defect of the automaton, or of the way from
    tokens to text, can be the reason. JSON alone is checked, not the schema: no validator reads all schemas as the automata do.
    """
    whole = completion.finish_reason == "stop" and completion.stop_reason is None
    if completion.constraint != "schema" or not whole or completion.text is None:
        return completion
    try:
        json.loads(completion.text, parse_int=str, parse_float=str)  # numbers may have more digits than Python converts
    except RecursionError:  # too deep for Python; nothing is wrong with it
        return completion
    except ValueError as error:
        return _violation(completion, f"the text of {len(completion.text):,} characters is no JSON ({error})")
    return completion


def _violation(completion: Completion, problem: str) -> Completion:
    stats = completion.stats
    emitted = 0 if stats is None else stats.num_prefills + stats.num_accepted + stats.num_rounds
    return Completion(
        request_id=completion.request_id, row_index=completion.row_index, sample_index=completion.sample_index,
        shard=completion.shard, status="error", finish_reason="error", prompt_ids=completion.prompt_ids, seed=completion.seed,
        predicted_tokens=completion.predicted_tokens, cached_tokens=completion.cached_tokens,
        stats=None if stats is None else replace(stats, num_discarded=emitted),
        error=RowError(
            code=CONSTRAINT_VIOLATED, stage="decode", retryable=False,
            message=f"{completion.constraint}: {problem}, which only an error of the program can cause; report it with the "
            "schema, or drop the row",
        ),
    )  # fmt: skip
