"""Keys and values that had other names before version 0.2.

If a user writes an old name, it is refused and the error gives the present name. In the manifest of an earlier version it is
translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: dict[str, str] = {
    "model.load": "model.load_format",
    "draft.max_len": "draft.num_speculative_tokens",
    "draft.min_ngram": "draft.prompt_lookup_min",
    "draft.max_ngram": "draft.prompt_lookup_max",
    "draft.sink": "draft.sink_tokens",
    "decode.opt": "ablation",
    "packing.slots": "packing.max_num_seqs",
    "packing.prefill_tokens": "packing.max_num_batched_tokens",
    "input.overlong": "input.on_overlong",
    "resume.again": "resume.retry_id",
    "train.taps": "train.aux_layer_ids",
}
"""Old key or group -> its present name."""
GROUPS_RENAMED = ("decode.opt",)
"""Old names that are groups of keys."""
RENAMED_VALUES: dict[str, dict[Any, str]] = {"draft.tree.rank": {"sums": "logprob", "products": "prob"}}
"""Key -> old value -> its present name."""


def renamed(key: str) -> str | None:
    """The present name of a dotted key, or of a key inside a group, that was renamed; None for all other keys."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(old + "."):
            return new + key.removeprefix(old)
    return None


def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration, group by group, with present names for old ones. If it has both, the value of the present name is
    kept."""
    out = _copied(values)
    for old, new in RENAMED.items():
        *path, last = old.split(".")
        group = _group(out, path)
        if group is None or last not in group:
            continue
        value, target = group.pop(last), new.split(".")
        place = out
        for name in target[:-1]:
            place = place.setdefault(name, {})
        if isinstance(value, dict) and isinstance(place.get(target[-1]), dict):
            place[target[-1]] = {**value, **place[target[-1]]}
        else:
            place.setdefault(target[-1], value)
    for key, names in RENAMED_VALUES.items():
        *path, last = key.split(".")
        group = _group(out, path)
        if group is not None and isinstance(group.get(last), str):
            group[last] = names.get(group[last], group[last])
    return out


def upgraded_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with present names for old dotted ones."""
    return {renamed(key) or key: value for key, value in values.items()}


def _group(values: dict[str, Any], path: list[str]) -> dict[str, Any] | None:
    for name in path:
        inner = values.get(name)
        if not isinstance(inner, dict):
            return None
        values = inner
    return values


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in values.items()}
