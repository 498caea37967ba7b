"""The drafters that `draft.name` chooses from, and the keys that each reads.

A new drafter is `draft/NAME.py`, which defines SPEC (a `DrafterSpec`), `conf/draft/NAME.yaml` and an entry here. auto is no
drafter: `draft_auto.py` replaces it by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_LOOKUP_KEYS = tuple(f"draft.{key}" for key in ("prompt_lookup_min", "prompt_lookup_max", "corpus_tokens"))
_HEAD_KEYS = (
    *(f"draft.{key}" for key in ("path", "aux_layers", "window", "sink_tokens", "cache_dtype", "parallel", "coupled")),
    "ablation.dead_positions",
    "ablation.sharded_draft",
)
_TREE_KEYS = tuple(f"draft.tree.{key}" for key in ("topk", "depth", "nodes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of a drafter before its module is imported."""

    reads: tuple[str, ...] = ()
    """Config keys that it reads and that not every drafter reads: a drafter that does not read a key refuses other values."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Config keys that it requires -> what to give."""
    dummy: bool = False
    """Whether model.load_format=dummy makes random weights for it too; draft.path may then be null."""
    trained: bool = False
    """Whether `batchspec train` makes its checkpoint."""
    chooses: tuple[str, ...] = ()
    """The drafters that may take its place, if it is none itself. It takes the keys that any of them reads, but no draft.path."""


DRAFTERS: dict[str, Entry] = {
    "auto": Entry(chooses=("mtp", "lookup")),
    "none": Entry(),
    "lookup": Entry(reads=_LOOKUP_KEYS),
    "eagle3": Entry(
        reads=(*_HEAD_KEYS, *_TREE_KEYS),
        needs={"draft.path": "the folder or hub id of an EAGLE-3 head made for the model"},
        dummy=True,
        trained=True,
    ),
    "block": Entry(
        reads=tuple(f"draft.{key}" for key in ("path", "aux_layers", "window", "sink_tokens", "cache_dtype", "coupled")),
        needs={"draft.path": "the folder or hub id of a DFlash, DFlash2 or DSpark head made for the model"},
        dummy=True,
        trained=True,
    ),
    "mtp": Entry(
        reads=(
            *(f"draft.{key}" for key in ("path", "vocab_size", "window", "sink_tokens", "cache_dtype", "coupled")),
            "ablation.dead_positions",
        ),
        dummy=True,
        trained=True,
    ),
    "hybrid": Entry(
        reads=(*_LOOKUP_KEYS, *_HEAD_KEYS),
        needs={"draft.path": "the folder or hub id of an EAGLE-3 head made for the model"},
        dummy=True,
    ),
    "pard": Entry(
        reads=("draft.path", "draft.parallel", "draft.coupled"),
        needs={"draft.path": "the folder or hub id of a small model with the target's tokenizer"},
    ),
    "window": Entry(
        reads=("draft.window", "draft.sink_tokens", "draft.coupled"),
        needs={"draft.window": "how many of its newest keys the model drafts with; 512 to 2048 works well"},
    ),
}


def named() -> tuple[str, ...]:
    """The drafters themselves, without those that choose one."""
    return tuple(name for name, entry in DRAFTERS.items() if not entry.chooses)


def readers() -> dict[str, tuple[str, ...]]:
    """Each key that not every drafter reads -> the drafters that do."""
    keys = dict.fromkeys(key for entry in DRAFTERS.values() for key in entry.reads)
    return {key: tuple(name for name, entry in DRAFTERS.items() if key in entry.reads) for key in keys}
