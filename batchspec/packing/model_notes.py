"""Lines for the user about a model's files: unread keys, a limit of the rows' length, recommended sampling that the job does not
follow, no end token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from batchspec.checkpoint.generation_config import NEARLY, NOT_FOLLOWED
from batchspec.checkpoint.unread_keys import unread_note
from batchspec.config.decode_schema import DecodeConfig
from batchspec.console.text import as_json
from batchspec.tasks.base import Task
from batchspec.tasks.registry import GENERATE

if TYPE_CHECKING:
    from batchspec.model.spec import ModelSpec

_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p")
"""Keys of generation_config.json that `decode` has too."""


def model_notes(
    decode: DecodeConfig, spec: ModelSpec, end_ids: Collection[int], task: Task = GENERATE
) -> list[tuple[str, str]]:
    """(label, line) of each note that applies. end_ids: the tokens that end every row."""
    notes = [
        ("not read", unread_note(spec.unread)),
        ("length", f"rows have at most {spec.max_len} tokens: {spec.rope.limit_note}" if spec.rope.limit_note else ""),
        ("sampling", sampling_advice(decode, spec.generation, task)),
        ("no end", _end_note(decode, end_ids, task)),
    ]
    return [(label, line) for label, line in notes if line]


def sampling_advice(decode: DecodeConfig, generation: Mapping[str, Any], task: Task = GENERATE) -> str:
    """One line about what the model's generation_config.json recommends and the job does not do; empty if there is nothing.

    generation  what that file sets (`ModelSpec.generation`), which jobs do not follow: the same command gives the same tokens
                with every copy of a model
    """
    if not task.decodes:
        return ""
    greedy = decode.temperature <= 0 and bool(generation.get("do_sample"))
    keys = [key for key in _RECOMMENDED if greedy and key in generation]
    if decode.repetition_penalty == 1 and generation.get("repetition_penalty", 1) != 1:
        keys.append("repetition_penalty")
    said = "decoding is greedy (decode.temperature=0); " * (greedy and bool(keys))
    recommended = " ".join(f"decode.{key}={as_json(generation[key])}" for key in keys)
    ignored = ", ".join(f"{key}={as_json(generation[key])}" for key in NOT_FOLLOWED if key in generation)
    like = "".join(f" ({key}: {what})" for key, what in NEARLY.items() if key in generation)
    parts = [f"recommends {recommended}"] * bool(keys) + [f"sets {ignored}, which jobs do not follow{like}"] * bool(ignored)
    return f"{said}the model's generation_config.json {' and '.join(parts)}" if parts else ""


def _end_note(decode: DecodeConfig, end_ids: Collection[int], task: Task) -> str:
    if end_ids or decode.ignore_eos or not task.decodes:
        return ""
    return (
        "no token ends a row: none is named by generation_config.json, config.json, tokenizer_config.json and decode.stop_ids; "
        f"rows end at {'a stop string or ' * bool(decode.stop)}max_new_tokens"
    )
