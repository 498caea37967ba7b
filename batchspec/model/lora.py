"""A LoRA adapter that PEFT saved: read, checked, and merged into the weights of its base model while they are loaded.

    W' = W + s B A      W [N, K], B [N, r], A [r, K]; s = alpha / r, or alpha / sqrt(r) with use_rslora

in fp32 (in fp64 for a model of fp64), rounded once to the model's dtype. After loading, the model is like any other of its shape:
it needs no more memory or time, and no other code knows of the adapter. Each rank of a model computes the product of whole
matrices and keeps its part, so that the parts have the bits that one process computes.

Adapters that cannot be merged are kept, and their part is added to the products of the model (`lora_products.py`): adapters of
single rows, and those of weights in FP8, MXFP4, INT4 or NVFP4, because the sum would have to be rounded to that format.
Source: Hu et al. 2021 (arXiv 2106.09685); rank-stabilised scale: Kalajdzievski 2023 (arXiv 2312.03732).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load as tensors_of
from torch import Tensor

from batchspec.checkpoint.config_values import has_folder, readable, shown
from batchspec.checkpoint.files import LocalFiles, StoredTensor, file_tensors, listed
from batchspec.checkpoint.wrapped import of_text
from batchspec.console.text import quoted
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.adapter_config import CONFIG, MERGE, LoraConfig, read_adapter_config
from batchspec.model.layers.base import FLOATS, Projection, projections
from batchspec.model.lora_shape import MAX_RANK
from batchspec.model.quant.base import Weights
from batchspec.model.shard import slices_of
from batchspec.model.spec import OUTPUT, ModelSpec
from batchspec.model.weights import taken
from batchspec.process.local_files import open_regular

FILE = "adapter_model.safetensors"
_HEAD = OUTPUT.removesuffix(".weight")
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to one weight: scale * B A; A [rank, K], B [N, rank]."""

    a: str
    """Name of A in the adapter's file."""
    b: str
    scale: float
    rank: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose names and shapes fit its base model."""

    path: Path
    """The safetensors file."""
    digest: str
    """sha256 of the file."""
    deltas: Mapping[str, Delta]
    """Deltas to merge, by the name of the weight in the base model's checkpoint."""
    kept: Mapping[str, Delta]
    """Deltas that are not merged, by the name of the module."""

    @property
    def fingerprint(self) -> str:
        """Changes with everything that the adapted products depend on."""
        scales = sorted((name, delta.scale) for name, delta in self.deltas.items())
        scales += sorted((name, delta.scale) for name, delta in self.kept.items())
        return sha256(f"{self.digest} {scales}".encode()).hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the file, on the CPU. Raises CheckpointError if it has changed since it was opened."""
        content = _content(self.path)
        if sha256(content).hexdigest() != self.digest:
            raise CheckpointError(f"{shown(self.path)}: changed since this run checked it; run the command again")
        return tensors_of(content)


def open_adapter(path: str, spec: ModelSpec, *, key: str = "model.adapter", per_row: bool = False) -> Adapter:
    """Open the adapter in this folder and check it against its base model's shape; reads headers and a digest, no weights.

    key      names the folder, for messages
    per_row  the adapter belongs to the rows that name it: nothing is merged
    Raises CheckpointError for a folder or file that is missing or broken, for unsupported keys and tensors, and for names and
    shapes that do not fit the model; ConfigError for a path that is not a folder.
    """
    folder = Path(os.path.expanduser(path))
    if not has_folder(folder, key):
        raise ConfigError(
            f"{key}={path}: no such folder; give the folder of a PEFT LoRA adapter, of the hub a downloaded one "
            "(hf download OWNER/NAME --local-dir FOLDER)"
        )
    config = read_adapter_config(folder)
    files = LocalFiles(folder)
    names = files.names()
    if FILE not in names:
        found = "adapter_model.bin is a pickle" if "adapter_model.bin" in names else f"no {FILE}"
        raise CheckpointError(f"{files.where}: {found}; save the adapter again as safetensors (PEFT's save_pretrained)")
    stored = file_tensors(files, FILE)
    whole = spec.whole or spec
    deltas = _deltas(files.where, config, whole, stored)
    kept = {module: delta for module, delta in deltas.items() if per_row or not _merges(module, whole)}
    _check_kept(files.where, kept)
    merged = {f"{module}.weight": delta for module, delta in deltas.items() if module not in kept}
    return Adapter(folder / FILE, sha256(_content(folder / FILE)).hexdigest(), merged, kept)


class AdaptedWeights:
    """The tensors of another source, merged with an adapter where it has deltas. spec: that of the source."""

    def __init__(self, source: Weights, adapter: Adapter, spec: ModelSpec) -> None:
        self._source, self._deltas, self._tensors = source, adapter.deltas, adapter.tensors()
        self._slices = slices_of(spec) or {}
        self.dtype, self.device = source.dtype, source.device

    def tensor(self, name: str) -> Tensor:
        return self._merged(name) if name in self._deltas else self._source.tensor(name)

    def stored(self, name: str) -> Tensor:
        return self._merged(name) if name in self._deltas else self._source.stored(name)

    def entry(self, name: str, index: int) -> Tensor:
        assert name not in self._deltas, name  # entries are those of experts
        return self._source.entry(name, index)

    @torch.no_grad()
    def _merged(self, name: str) -> Tensor:
        """The sum in the model's dtype, rounded once."""
        delta, wide = self._deltas[name], torch.promote_types(self.dtype, torch.float32)
        a, b = (self._tensors[part].to(self.device, wide) for part in (delta.a, delta.b))
        product, own = (b @ a).mul_(delta.scale), self._slices.get(name)
        part = taken(product, own).clone() if own else product  # a view would keep the whole product in memory
        return part.add_(self._source.stored(name)).to(self.dtype)


def adapted(source: Weights, adapter: Adapter | None, spec: ModelSpec) -> Weights:
    """The source with the adapter merged in; the source itself without one."""
    return source if adapter is None else AdaptedWeights(source, adapter, spec)


def _merges(module: str, spec: ModelSpec) -> bool:
    """Whether the adapter of this module can be merged: the file's weight is not quantised. With model.quantize it is quantised
    after the adapter was merged."""
    return module == _HEAD or spec.formats.stores_plain(module)


def _check_kept(where: str, kept: Mapping[str, Delta]) -> None:
    """Raises CheckpointError for adapters that the products of `lora_products.py` do not support."""
    if _HEAD in kept:
        raise CheckpointError(
            f"{where}: {_HEAD} has an adapter; adapters of single rows are supported in attention and dense MLPs; train one "
            "without it, or give it as model.adapter of a job of its own"
        )
    if large := {module: delta.rank for module, delta in kept.items() if delta.rank > MAX_RANK}:
        module, rank = next(iter(large.items()))
        raise CheckpointError(
            f"{where}: {module} has rank {rank}, above {MAX_RANK}, the limit of adapters that cannot be merged into the weights "
            "(model.adapters, and any adapter of quantised weights); for one adapter of bf16 weights use model.adapter, "
            "or merge it with PEFT"
        )


def _content(path: Path) -> bytes:
    with readable(path), open_regular(path) as file:
        return file.read()


def _deltas(where: str, config: LoraConfig, spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> dict[str, Delta]:
    """Deltas by module. Raises CheckpointError for tensors that are not pairs A, B of the model's projections in the shapes that
    config gives."""
    others = [name for name in stored if not _NAME.fullmatch(name)]
    if not stored:
        raise CheckpointError(f"{where}/{FILE}: no tensors; save or download the adapter again")
    if others:
        raise CheckpointError(
            f"{where}/{FILE}: {len(others)} tensors are not lora_A or lora_B of a projection: {listed(others)}; "
            f"embeddings, DoRA, biases and modules saved whole are not supported: {MERGE}"
        )
    own_names = dict.fromkeys(name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in stored)
    if spec.vision is not None and (of_vision := spec.vision.own(where, own_names)):
        raise CheckpointError(f"{where}: {listed(of_vision)}: adapters of what encodes images are not supported: {MERGE}")
    modules = of_text(f"{where}/{FILE}", {name: name for name in own_names})  # the text goes through no other module
    known = {prefix + part.name: part for prefix, block in spec.blocks() for part in projections(block)}
    known[_HEAD] = Projection(_HEAD, spec.vocab_size, spec.hidden_size)
    _check_modules(where, config, spec, modules, known)
    found = {}
    for module, own in modules.items():
        part, rank = known[module], config.rank_of(own)
        a, b = (f"base_model.model.{own}.lora_{letter}.weight" for letter in "AB")
        for name, shape in ((a, (rank, part.k)), (b, (part.rows, rank))):
            _check_tensor(f"{where}/{FILE}", name, stored.get(name), shape, rank)
        found[module] = Delta(a, b, config.scale_of(own), rank)
    return found


def _check_modules(
    where: str, config: LoraConfig, spec: ModelSpec, modules: Mapping[str, str], known: Mapping[str, Projection]
) -> None:
    """Raises CheckpointError for modules that cannot have adapters here, and if they differ from those of adapter_config.json.

    modules: their names in the adapter, by those in the model
    """
    if not modules:
        raise CheckpointError(f"{where}: no module is one of the language model's; rows of text need no such adapter")
    experts = tuple(f"{prefix}{grouped.name}." for prefix, block in spec.blocks() for grouped in block.grouped)
    if of_experts := [module for module in modules if f"{module}.".startswith(experts)]:
        raise CheckpointError(f"{where}: {listed(of_experts)}: adapters of MoE experts are not supported; {MERGE}")
    if unknown := [module for module in modules if module not in known]:
        raise CheckpointError(
            f"{where}: {len(unknown)} modules are not projections of the model: {listed(unknown)}; give the adapter's own base "
            f"model ({CONFIG} says {quoted(config.base)}) as model.path"
        )
    if spec.tie and _HEAD in modules:
        raise CheckpointError(
            f"{where}: {_HEAD} has an adapter, and it is the embedding too (tie_word_embeddings=true), which would "
            "change with it; train one without it"
        )
    unnamed = [own for own in modules.values() if not config.targets(own)]
    missing = [module for module in known if config.targets_all and config.targets(module) and module not in modules]
    for wrong, what in (
        (unnamed, f"that target_modules of {CONFIG} does not name"),
        (missing, f"of target_modules lack in {FILE}"),
    ):
        if wrong:
            raise CheckpointError(f"{where}: {len(wrong)} modules {what}: {listed(wrong)}; save or download the adapter again")


def _check_tensor(where: str, name: str, stored: StoredTensor | None, shape: tuple[int, ...], rank: int) -> None:
    if stored is None:
        raise CheckpointError(f"{where}: {name[:200]} is missing; save or download the adapter again")
    if stored.shape != shape:
        raise CheckpointError(
            f"{where}: {name} is {list(stored.shape)}, and rank {rank} by {CONFIG} and the model need {list(shape)}; give the "
            "adapter's own base model as model.path"
        )
    if stored.dtype not in FLOATS:
        raise CheckpointError(f"{where}: {name} is {stored.dtype}; {', '.join(FLOATS)} are supported")
