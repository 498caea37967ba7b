"""Experts that a file holds in two tensors a layer, read as if each projection of each expert were a tensor of its own.

    experts.gate_up_proj [E, 2 I, H], the gate's rows first      experts.N.gate_proj.weight, experts.N.up_proj.weight [I, H]
    experts.down_proj    [E, H, I]                               experts.N.down_proj.weight [H, I]

Granite 4 calls them `input_linear.weight` and `output_linear.weight`; of experts without a gate the first is `experts.up_proj`.
The same for FP8 scales, `experts.gate_up_proj_scale_inv` and `experts.N.gate_proj.weight_scale_inv`, for the scales that ModelOpt
names `experts.gate_up_proj_weight_scale`, `_weight_scale_2` and `_input_scale` (one number holds for all experts), and for
symmetric INT4 of compressed-tensors, `experts.gate_up_proj_packed` and `_scale`.
transformers 5 holds experts so in memory; files have either form. gpt-oss has a form of its own (`GroupedSpec.stacked`).
Source: transformers 5, conversion_mapping.py (qwen2_moe), models/qwen3_5_moe (Qwen3_5MoeExperts); ModelOpt,
torch/quantization/utils/core_utils.py (quantizer_attr_names); vLLM's pull request 40886 (INT4 of Gemma 4 26B-A4B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from torch import Tensor

from batchspec.checkpoint.files import Entry, StoredTensor
from batchspec.model.checkpoint_part import CheckpointPart
from batchspec.model.layers.base import GroupedSpec, Projection
from batchspec.model.quant.fp8_products import BLOCK

_SCALE = "_scale_inv"
_OWN = {
    "": "weight", _SCALE: f"weight{_SCALE}", "_weight_scale": "weight_scale", "_weight_scale_2": "weight_scale_2",
    "_input_scale": "input_scale", "_packed": "weight_packed", "_scale": "weight_scale",
}
"""What follows the name of a tensor of all experts -> the name of the tensor of one projection of one expert."""
_FUSED = {
    ("gate_proj", "up_proj"): ("gate_up_proj", "input_linear.weight"), ("up_proj",): ("up_proj",),
    ("down_proj",): ("down_proj", "output_linear.weight"),
}
"""Names of an expert's projections -> the names that the tensor with those of all experts may have."""

Item = TypeVar("Item")


def separate_experts(
    part: CheckpointPart, items: Mapping[str, Item], shape_of: Callable[[Item], tuple[int, ...]],
    cut: Callable[[Item, Entry], Item],
) -> dict[str, Item]:
    """The tensors of a checkpoint, those of all experts of a layer replaced by those of each.

    items  by plain names (`wrapped.py`); cut: makes an entry of one of them
    """
    found = dict(items)
    for prefix, block in part.blocks():
        for grouped in block.grouped:
            if grouped.parts in _FUSED and not grouped.stacked:
                for fused, (ending, own) in product(_FUSED[grouped.parts], _OWN.items()):
                    name = f"{prefix}{grouped.name}.{fused}{ending}"
                    if name in items and _fits(grouped, ending, shape_of(items[name])):
                        whole, shape = found.pop(name), shape_of(items[name])
                        for entry, projection in _entries(grouped, shape[1] if len(shape) == 3 else 0):
                            found[f"{prefix}{projection.name}.{own}"] = cut(whole, entry) if len(shape) == 3 else whole
    return found


def _entries(grouped: GroupedSpec, rows: int) -> Iterator[tuple[Entry, Projection]]:
    """Every projection of every expert, and the part of a tensor [E, rows, k] that is its own."""
    each = rows // len(grouped.parts)
    for expert in range(grouped.num_experts):
        for place, projection in enumerate(grouped.of(expert).parts):
            yield Entry(expert, slice(place * each, (place + 1) * each)), projection


def _fits(grouped: GroupedSpec, ending: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be cut into those of its experts; what their shapes must be is checked later."""
    if ending in ("_weight_scale_2", "_input_scale"):
        return shape in ((), (1,))
    parts = len(grouped.parts)
    shared_block = ending == _SCALE and parts > 1 and grouped.part_rows % BLOCK != 0  # of the gate's last rows and up's first
    return len(shape) == 3 and shape[0] == grouped.num_experts and shape[1] % parts == 0 and not shared_block


def tensors_of(part: CheckpointPart, where: str, items: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a part of a checkpoint by the names that its blocks give them.

    items  all tensors of the checkpoint: `stored_tensors`
    Raises CheckpointError as `CheckpointPart.own`.
    """

    def cut(whole: StoredTensor, own: Entry) -> StoredTensor:
        return replace(whole, shape=(own.rows.stop - own.rows.start, whole.shape[2]), entry=own)

    return separate_experts(part.complete, part.own(where, items), lambda tensor: tensor.shape, cut)


class EntrySlice:
    """Reads parts of a matrix that is an entry of a tensor in a file."""

    def __init__(self, parts: Any, entry: Entry) -> None:
        self._parts, self._entry = parts, entry

    def __getitem__(self, part: tuple[slice, slice]) -> Tensor:
        (expert, rows), (own, columns) = self._entry, part
        first, end, _ = own.indices(rows.stop - rows.start)
        found: Tensor = self._parts[expert : expert + 1, rows.start + first : rows.start + end, columns]
        return found[0]
