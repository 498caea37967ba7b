"""Weights that are tensors in memory, by their names in a checkpoint, such as a trainer's state_dict()."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from batchspec.checkpoint.files import StoredTensor
from batchspec.checkpoint.wrapped import of_text
from batchspec.errors import CheckpointError
from batchspec.model.fused_experts import separate_experts
from batchspec.model.spec import ModelSpec
from batchspec.model.weight_checks import check_copies, check_spares, check_tensors, check_unread_tensors
from batchspec.model.weights import as_computed

WHERE = "the tensors given"
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}
"""dtypes as safetensors calls them."""


class GivenWeights:
    """All tensors of a model in memory, on any device: a source like `Checkpoint`.

    Raises CheckpointError for names, shapes and dtypes that do not fit, and for an lm_head that should be tied and is not.
    """

    def __init__(self, tensors: Mapping[str, Tensor], spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        others = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
        if others:
            raise CheckpointError(f"{WHERE}: {others[0]!r} is {type(tensors[others[0]]).__name__}, not a tensor")
        own = of_text(WHERE, {name: tensor.detach() for name, tensor in tensors.items()})
        self._tensors = separate_experts(spec, own, lambda tensor: tuple(tensor.shape), lambda tensor, entry: tensor[entry])
        self._specs = {tensor.name: tensor for tensor in spec.tensors()}
        self.dtype, self.device = dtype, device
        stored = {
            name: StoredTensor(name, _NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), "", 0, 0)
            for name, tensor in self._tensors.items()
        }
        check_tensors(WHERE, spec, stored)
        check_spares(WHERE, spec, self._tensors, self._tensors.__getitem__)
        check_unread_tensors(WHERE, self._specs.values(), self._tensors, self._tensors.__getitem__)
        check_copies(WHERE, spec, self._tensors, self._tensors.__getitem__)

    def tensor(self, name: str) -> Tensor:
        return as_computed(self._specs[name], self.stored(name), self.dtype)

    def stored(self, name: str) -> Tensor:
        return self._tensors[name].to(self.device)

    def entry(self, name: str, index: int) -> Tensor:
        return self._tensors[name][index].to(self.device)
