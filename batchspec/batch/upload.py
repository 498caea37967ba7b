"""Copies of host numbers to the device, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN_BYTES = 16
"""Each array in a joint transfer begins at a multiple of this many bytes, as kernels and views of other types require."""
_TORCH_DTYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}
NUMPY_DTYPES = {theirs: ours for ours, theirs in _TORCH_DTYPES.items()}


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the device with the numbers of nested lists or an array, of their shape. A GPU gets them from pinned memory in
    stream order: the host does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)  # a copy: the array may be read-only, or change later
    array = np.asarray(values)
    host = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    host.numpy()[...] = array  # as in `automata.sent`: torch copies a large one with all its threads
    return host.to(device, non_blocking=True)


def upload_all(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy several arrays in one transfer, as `upload` does with one: for small arrays the host's calls take most of the time."""
    ends = list(accumulate(-(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES for array in arrays))
    begins = [0, *ends[:-1]]
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    data = host.numpy()
    for begin, array in zip(begins, arrays, strict=True):
        data[begin : begin + array.nbytes].view(array.dtype)[:] = array.ravel()
    sent = host.to(device, non_blocking=True)
    sent_as = {dtype: sent.view(_TORCH_DTYPES[dtype]) for dtype in {array.dtype.type for array in arrays}}
    return [
        sent_as[array.dtype.type][begin // array.itemsize : begin // array.itemsize + array.size].view(array.shape)
        for begin, array in zip(begins, arrays, strict=True)
    ]
