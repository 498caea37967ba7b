"""The text of a completion with a constraint: an independent check of what the user gets. This module does not import torch."""

from __future__ import annotations

import json

from batchspec.records import CONSTRAINT_VIOLATED, Completion, RowError


def checked_text(completion: Completion) -> Completion:
    """The completion; or an error row, if the completion follows a schema, ended by itself, and its text is not valid JSON.

    Its tokens follow the schema's automaton (`engine/features/last_check.py`), so that only a defect of the automaton, or of the
    way from tokens to text, can be the reason. JSON alone is checked, not the schema: no validator reads all schemas as the
    automata do.
    """
    whole = completion.finish_reason == "stop" and completion.stop_reason is None
    if completion.constraint != "schema" or not whole or completion.text is None:
        return completion
    try:
        json.loads(completion.text, parse_int=str, parse_float=str)  # numbers may have more digits than Python converts
    except RecursionError:  # too deep for Python; nothing is wrong with it
        return completion
    except ValueError as error:
        message = (
            f"{completion.constraint}: the text of {len(completion.text):,} characters is not valid JSON ({error}), which only "
            "an error of the program can cause; report it with the schema, or drop the row"
        )
        return completion.failed(RowError(code=CONSTRAINT_VIOLATED, stage="decode", message=message, retryable=False))
    return completion
