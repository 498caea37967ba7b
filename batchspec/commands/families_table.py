"""The table that `batchspec families` prints. After a change of a family: python -m batchspec.commands.families_table"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from batchspec.commands.families import TABLE
from batchspec.config.drafters import named
from batchspec.errors import ConfigError
from batchspec.model.families.base import Family
from batchspec.model.families.registry import ASSISTANTS, FAMILIES
from batchspec.model.families.shapes import COMMON, SHAPES, shape_spec
from batchspec.model.layers.base import Shard
from batchspec.model.layers.kind import Use
from batchspec.model.shard import part_of
from batchspec.model.spec import ModelSpec

RANKS = (1, 2, 4, 8)
_NOTES = (
    f"drafters: all are {', '.join(name for name in named() if name != 'mtp')} and trees of eagle3; mtp is the layer of the "
    "checkpoint or the model's assistant (draft.path); no window, no trees: its layers cannot",
    "GPUs: how many can compute one copy of the model of this size in bf16 together (cluster.tensor_parallel); other weights may "
    "allow fewer, see `batchspec plan`; none: it runs on a CPU alone",
    "a first job: batchspec run model.path=MODEL input.path=PROMPTS output.dir=OUT; its speed, with random weights: "
    "batchspec bench OUT.jsonl NAME --shape SHAPE",
)


class Row(NamedTuple):
    """What is known of one family, as texts."""

    models: str
    model_type: str
    weights: str
    drafters: str
    gpus: str
    model: str
    """Hub id of a model to begin with."""
    shape: str
    """Its name in `batchspec bench` and `batchspec doctor`."""


def table() -> str:
    """A line of each family, and notes."""
    rows = [Row(*(name.replace("_", " ") for name in Row._fields)), *(row_of(family) for family in FAMILIES.values())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(Row._fields))]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([*lines, "", *_NOTES])


def row_of(family: Family) -> Row:
    """The facts, from the shape of a published model."""
    shape = next(name for name, config in SHAPES.items() if {**COMMON, **config}["model_type"] == family.name)
    spec = shape_spec(shape)
    uses: tuple[tuple[Use, str], ...] = ("self_draft", "no window"), ("tree", "no trees")
    drafters = ", ".join(text for use, text in uses if spec.refuses(use) is not None) or "all"
    has_assistant = family.name in {assistant.text for assistant in ASSISTANTS.values()}
    return Row(
        models=family.models, model_type=family.name, weights=", ".join(weights_of(spec)),
        drafters=f"{drafters}, mtp" if spec.mtp is not None or has_assistant else drafters,
        gpus=", ".join(map(str, ranks_of(spec))) if spec.refuses("gpu") is None else "none", model=family.example, shape=shape,
    )


def weights_of(spec: ModelSpec) -> tuple[str, ...]:
    """The formats in which a checkpoint may hold all of its products: experts of a layer in one tensor are plain or in MXFP4."""
    stacked = any(grouped.stacked for _, block in spec.blocks() for grouped in block.grouped)
    return ("bf16", "MXFP4") if stacked else ("bf16", "FP8", "INT4", "NVFP4")


def ranks_of(spec: ModelSpec) -> Iterator[int]:
    """The numbers of GPUs that can divide a model of this shape: each kind of layer once, as all of a kind are divided alike."""
    kinds = replace(spec, layers=tuple(dict.fromkeys(spec.layers)))
    for ranks in RANKS:
        try:
            part_of(kinds, Shard(0, ranks))
        except ConfigError:
            continue
        yield ranks


if __name__ == "__main__":
    TABLE.write_text(f"{table()}\n", encoding="utf-8")
