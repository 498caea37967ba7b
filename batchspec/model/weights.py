"""Checkpoint weights: reads the tensors that a spec needs, or makes random ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchspec.checkpoint.config_values import shown
from batchspec.checkpoint.files import LocalFiles, ModelFiles, StoredTensor, stored_tensors, weight_names
from batchspec.checkpoint.weight_files import WeightFiles, opened_weights
from batchspec.checkpoint.weight_sums import Summing, WeightSums
from batchspec.errors import CheckpointError
from batchspec.model.checkpoint_part import CheckpointPart, formats_as_stored
from batchspec.model.fused_experts import EntrySlice, tensors_of
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant.base import Pieces, Slices
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.plain import Plain
from batchspec.model.shard import slices_of
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.weight_checks import (
    check_copies,
    check_groups,
    check_products,
    check_spares,
    check_tensors,
    check_unread_tensors,
)
from batchspec.process.load_progress import count_step

Shapes = dict[str, tuple[int, ...]]
_DUMMY_EXPONENTS = (118, 125)
_ONES = 0x11111111
"""A word of eight numbers of four bits."""


def expected_shapes(spec: ModelSpec) -> Shapes:
    """Every tensor of the checkpoint by its name; lm_head.weight only where it is not tied."""
    return shapes_of(spec.tensors())


def shapes_of(tensors: Iterable[TensorSpec]) -> Shapes:
    return {tensor.name: tensor.shape for tensor in tensors}


def judge_model(files: ModelFiles, spec: ModelSpec | None = None) -> ModelSpec:
    """The shape of a model whose weights a run would load: config.json and the headers of the weight files, no weight read.

    spec  what config.json says, perhaps `without_output`; None: it is read
    Its `mtp` is None if the files have no tensor of that layer, as those that transformers saves.
    Raises CheckpointError, in one line, for all that `load_spec`, `stored_tensors` and the checks here refuse.
    """
    spec = spec or load_spec(files.folder)
    items = stored_tensors(files)
    stored = tensors_of(spec, files.where, items)
    check_groups(files.where, spec.formats, items)
    spec = as_stored(spec, stored)
    check_products(files.where, spec)
    check_tensors(files.where, spec, stored)
    return spec if spec.mtp is None or spec.mtp.own(files.where, items) else replace(spec, mtp=None)


def as_stored(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> ModelSpec:
    """The model with the formats in which its files hold its products. stored: its tensors, by their plain names.

    Only for INT4 and NVFP4: their tools leave some modules plain that quantization_config does not name, such as GPTQModel the
    gates of recurrent layers. Tools for FP8 name all of them, so a plain weight that is not named is an error there.
    """
    if all(isinstance(own, Plain | Fp8) for own in spec.formats.all):
        return spec
    return replace(spec, formats=formats_as_stored(spec, stored, named_by=(Fp8,)))


class Checkpoint:
    """A part of a checkpoint in the safetensors files of a folder, opened and checked; a context manager, since it holds them
    open.

    Of what one rank holds, tensors are the rank's parts of them, and nothing else is read.
    Raises CheckpointError as `tensors_of` and `check_tensors`, and for an lm_head that should be tied and is not; ConfigError
    for a model that cannot be cut.
    """

    def __init__(
        self, folder: Path, part: CheckpointPart, *, dtype: torch.dtype, device: torch.device, summed: bool = False
    ) -> None:
        """summed  compute the sums of all tensors while they are read, for `sums`"""
        self._folder, self.dtype, self.device = folder, dtype, device
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._summing: Summing | None = None
        self._slices, whole = slices_of(part), part.complete
        self._specs = {tensor.name: tensor for tensor in whole.tensors()}
        files = LocalFiles(folder)
        self._stored = tensors_of(whole, files.where, stored_tensors(files))
        check_tensors(files.where, whole, self._stored)
        names = weight_names(files)
        self._paths = WeightFiles(tuple(folder / name for name in names))
        self._state = self._paths.state
        with self._stack:
            for name in names:
                self._files[name] = self._stack.enter_context(opened_weights(folder / name))
            check_copies(shown(self._folder), whole, self._stored, self._whole)
            check_spares(shown(self._folder), whole, self._stored, self._whole)
            check_unread_tensors(shown(self._folder), self._specs.values(), self._stored, self._whole)
            if summed:
                self._summing = Summing()
                self._stack.callback(self._summing.close)
            self._stack = self._stack.pop_all()

    def tensor(self, name: str) -> Tensor:
        return as_computed(self._specs[name], self.stored(name), self.dtype)

    def stored(self, name: str) -> Tensor:
        self._sum(name)
        own = () if self._slices is None else self._slices.get(name)
        tensor: Tensor = taken(self._slice(name), own) if own else self._whole(name)
        tensor = tensor.to(self.device)
        count_step()
        return torch.zeros_like(tensor) if own is None else tensor

    def entry(self, name: str, index: int) -> Tensor:
        self._sum(name)
        part: Tensor = self._slice(name)[(slice(index, index + 1), *_of_entry(self._slices, name))]
        count_step()
        return part[0].to(self.device)

    def sums(self) -> WeightSums:
        """Of all tensors of the model, of a rank too; only with `summed`. Waits until they are computed."""
        assert self._summing is not None
        for name in self._stored:
            self._sum(name)
        return self._summing.result()

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a file was written or replaced since the checkpoint was opened: what was read may be of two
        models."""
        if self._paths.state != self._state:
            raise CheckpointError(
                f"{shown(self._folder)}: the weight files were written or replaced while they were loaded; run the same command "
                "again when that is over"
            )

    def _sum(self, name: str) -> None:
        """Begin the sum of a tensor where it is read first, so that its bytes come from the disk once."""
        if self._summing is not None and name not in self._summing:
            self._summing.begin(name, self._whole(name))

    def _whole(self, name: str) -> Tensor:
        own = self._stored[name]
        tensor: Tensor = self._files[own.file].get_tensor(own.name) if own.entry is None else self._slice(name)[:, :]
        return tensor

    def _slice(self, name: str) -> Any:
        """What reads parts of the tensor, by indexing."""
        own = self._stored[name]
        parts = self._files[own.file].get_slice(own.name)
        return parts if own.entry is None else EntrySlice(parts, own.entry)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def as_computed(spec: TensorSpec, tensor: Tensor, model: torch.dtype) -> Tensor:
    """A stored tensor as a model that computes in `model` holds it."""
    dtype = _dtype_of(spec, model)
    return (tensor.to(torch.promote_types(dtype, torch.float32)) + spec.offset if spec.offset else tensor).to(dtype)


def _dtype_of(tensor: TensorSpec, model: torch.dtype) -> torch.dtype:
    """The dtype in memory of a tensor of a model that computes in `model`."""
    return torch.promote_types(model, torch.float32) if tensor.wide else model


def taken(tensor: Any, pieces: Pieces) -> Tensor:
    """The pieces of a tensor, or of one in a file; there is at least one."""
    found: list[Tensor] = [tensor[piece] for piece in pieces]
    if len(found) == 1:
        return found[0]
    differ = [dim for dim, own in enumerate(zip(*pieces, strict=True)) if any(other != own[0] for other in own)]
    return torch.cat(found, *differ)


def _of_entry(slices: Slices | None, name: str) -> tuple[slice, ...]:
    """What a rank holds of each entry of a tensor along its first dimension, which is not cut; () for all of it."""
    if slices is None or not slices[name]:
        return ()
    ((_, *own),) = slices[name]
    return tuple(own)


class DummyWeights:
    """Noise of the right shapes from the spec alone: N(0, 0.02^2), norms 1; FP8 weights N(0, 100^2), their scales 0.0002;
    parameters of a decay in the range of real ones, so that states stay small and keep what they were given for long.

    The same in every run on one kind of device. MXFP4 and NVFP4 weights are random bits, those of INT4 but for their mean; the
    scales of MXFP4 are random too, in a range that keeps values small. What is kept wider than the model's dtype holds numbers of
    that dtype, as in most checkpoints.
    The ranks of a model have parts of one noise: each makes all of it, one tensor at a time.
    """

    def __init__(self, part: CheckpointPart, *, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = {tensor.name: tensor for tensor in part.complete.tensors()}
        self._slices = slices_of(part)
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, name: str) -> Tensor:
        whole = self._noise(self._tensors[name], self._tensors[name].shape)
        own = () if self._slices is None else self._slices.get(name)
        if own is None:
            return torch.zeros_like(whole)
        return taken(whole, own).clone() if own else whole

    def stored(self, name: str) -> Tensor:
        return self.tensor(name)

    def entry(self, name: str, index: int) -> Tensor:
        whole = self._noise(self._tensors[name], self._tensors[name].shape[1:])
        own = _of_entry(self._slices, name)
        return whole[own].clone() if own else whole

    def _noise(self, tensor: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        count_step()
        if tensor.dtypes == ("U8",):
            low, high = _DUMMY_EXPONENTS if tensor.role == "scale" else (0, 256)
            return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self._generator)
        if tensor.dtypes == ("F8_E4M3",) and tensor.role == "weight":
            values = torch.empty(shape, device=self.device).normal_(0.0, 100.0, generator=self._generator)
            return values.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
        if tensor.dtypes == ("I32",):
            return self._integers(tensor, shape)
        dtype = torch.float8_e4m3fn if tensor.dtypes == ("F8_E4M3",) else _dtype_of(tensor, self.dtype)
        if tensor.role in ("norm", "scale"):
            return torch.full(shape, tensor.typical, dtype=dtype, device=self.device)
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if tensor.between is not None:
            return made.uniform_(*tensor.between, generator=self._generator).to(dtype)
        return made.normal_(0.0, 0.02, generator=self._generator).to(dtype)

    def _integers(self, tensor: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        """Words of random codes of four bits, or an index. The mean of codes is 8 and that of zero points too, so that of weights
        is 0: weights with another mean make all tokens alike within a few layers, and a GPU multiplies equal numbers faster."""
        if tensor.role == "index":
            index = torch.arange(*shape, dtype=torch.int32, device=self.device) // int(tensor.typical)
            if not tensor.shuffled:
                return index
            return index[torch.rand(shape, device=self.device, generator=self._generator).argsort()]
        words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=self.device, generator=self._generator)
        if tensor.role == "zero_points":
            return (int(tensor.typical) - 1) * _ONES + 2 * (words & _ONES)
        is_positive = (words | words >> 1 | words >> 2 | words >> 3) & _ONES
        return words | (is_positive ^ _ONES) << 3  # 8 in place of 0: the mean of 0 to 15 is 7.5
