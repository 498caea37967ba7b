"""Scales of an e4m3 K/V cache, from the checkpoint or a calibration: one for K and one for V of each layer and head.

    NAME.k_scale, NAME.v_scale            [], [1] or one a head, where NAME is as in model.layers.N.self_attn (compressed-tensors)
    NAME.k_proj.k_scale, NAME.v_proj.v_scale          modelopt
    NAME.k_proj.output_scale, NAME.v_proj.output_scale       older compressed-tensors

A stored number is multiplied by its scale. Source: vLLM, model_loader/weight_utils.py (maybe_remap_kv_scale_name).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from batchspec.checkpoint.config_values import shown
from batchspec.checkpoint.files import LocalFiles, StoredTensor
from batchspec.checkpoint.weight_files import opened_weights
from batchspec.checkpoint.wrapped import model_tensors
from batchspec.errors import CheckpointError, OutputError
from batchspec.model.layers.attention.of_model import keepers_of
from batchspec.model.spec import ModelSpec, layer_prefix

_NAMES = {part: (f"{part}_scale", f"{part}_proj.{part}_scale", f"{part}_proj.output_scale") for part in ("k", "v")}
"""Relative to the attention of a layer."""
SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Endings of the names of all scales of an FP8 K/V cache, including those of the queries, which are not used."""


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """All scales of a model."""

    values: Tensor
    """fp32 [num_paged_layers, 2 (K, V), KVH], positive, on the CPU; a layer with fewer heads than others has 1 beyond its own"""

    def __post_init__(self) -> None:
        assert self.values.dtype is torch.float32
        assert self.values.device.type == "cpu"

    @property
    def fingerprint(self) -> str:
        """Equal for equal scales."""
        return sha256(json.dumps([list(self.values.shape), self.values.flatten().tolist()]).encode()).hexdigest()

    def to_json(self) -> bytes:
        """The content of a file that keeps every bit."""
        content = {"fingerprint": self.fingerprint, "scales": self.values.tolist()}
        return (json.dumps(content) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, spec: ModelSpec, where: str) -> KVScales:
        """Raises OutputError for bytes that are not the scales of such a model."""
        try:
            content = json.loads(data)
            found = cls(torch.tensor(content["scales"], dtype=torch.float32))
            if content["fingerprint"] != found.fingerprint:
                raise ValueError("the fingerprint does not fit")
            if tuple(found.values.shape) != (spec.num_paged_layers, 2, _most_heads(spec)):
                raise ValueError(f"scales of shape {list(found.values.shape)}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OutputError(f"{where} is damaged ({error}); restore it or use another output.dir") from error
        return found


def names_of_scales(spec: ModelSpec, stored: Collection[str], where: str) -> list[tuple[str, str]] | None:
    """[L] names of the tensors of K's and V's scales, among those of a checkpoint; None if it has none.

    Raises CheckpointError if some are missing.
    """
    wanted = [
        tuple([f"{layer_prefix(layer)}{own.name}.{name}" for name in names] for names in _NAMES.values())
        for layer, own in keepers_of(spec).items()
    ]
    found = [tuple(next((name for name in names if name in stored), "") for names in pair) for pair in wanted]
    missing = [
        names[0] for pair, own in zip(wanted, found, strict=True) for names, name in zip(pair, own, strict=True) if not name
    ]
    if len(missing) == 2 * len(wanted):
        return None
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of {2 * len(wanted)} K/V scales are missing, {missing[0]} among them; "
            "set cache.scales=calibrate to compute all of them"
        )
    return [(k, v) for k, v in found]


def checkpoint_scales(folder: Path, spec: ModelSpec) -> KVScales | None:
    """The scales that a model's files hold; None if they hold none. Raises CheckpointError if they cannot be used."""
    stored = model_tensors(LocalFiles(folder))
    names = names_of_scales(spec, stored, shown(folder))
    if names is None:
        return None
    values = torch.ones(spec.num_paged_layers, 2, _most_heads(spec))
    for layer, (own, pair) in enumerate(zip(keepers_of(spec).values(), names, strict=True)):
        for part, name in enumerate(pair):
            values[layer, part, : own.num_kv_heads] = _read(folder, name, stored[name], own.num_kv_heads)
    return KVScales(values)


def _most_heads(spec: ModelSpec) -> int:
    return max(own.num_kv_heads for own in keepers_of(spec).values())


def _read(folder: Path, name: str, stored: StoredTensor, num_heads: int) -> Tensor:
    with opened_weights(folder / stored.file) as file:
        values: Tensor = file.get_tensor(stored.name).float().flatten()
    if values.numel() not in (1, num_heads):
        raise CheckpointError(
            f"{shown(folder)}: {name} is {list(stored.shape)}; it must be one number, or one for each of {num_heads} K/V heads; "
            "set cache.scales=calibrate"
        )
    if not bool((values > 0).all() and values.isfinite().all()):
        raise CheckpointError(
            f"{shown(folder)}: {name} holds {values.min():g}; scales must be positive; set cache.scales=calibrate"
        )
    return values.expand(num_heads)


def heads_of_part(spec: ModelSpec) -> list[slice]:
    """[num_paged_layers] the K/V heads of the whole model that a rank holds."""
    return [own.kv_heads_of(spec.shard) for own in keepers_of(spec.whole or spec).values()]


def scales_of_part(values: Tensor, spec: ModelSpec) -> list[Tensor]:
    """[num_paged_layers] of `KVScales.values`, those of the heads [2, KVH] that a rank holds."""
    return [layer[:, own] for layer, own in zip(values, heads_of_part(spec), strict=True)]
