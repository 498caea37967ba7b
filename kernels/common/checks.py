"""Checks of shapes, dtypes and strides in every kernel wrapper. They run every round: a valid tensor costs three comparisons."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(
    name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype, rows: bool = False, strided: bool = False
) -> None:
    """Raise ValueError unless `tensor` has this shape, one of these dtypes and the expected strides.

    name     kernel and argument, for the message: "argmax: out_ids"
    rows     False: must be contiguous; True: only the last dimension must be, as in a slice of wider rows
    strided  any strides are allowed, such as those of a column of a matrix
    """
    strides_fit = strided or ((tensor.stride(-1) == 1 or tensor.shape[-1] <= 1) if rows else tensor.is_contiguous())
    if tensor.shape == shape and tensor.dtype in dtypes and strides_fit:
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    found = str(tensor.dtype).removeprefix("torch.")
    layout = "any strides" if strided else "contiguous in its last dimension" if rows else "contiguous"
    raise ValueError(
        f"{name} is {found} {list(tensor.shape)} with strides {list(tensor.stride())}; must be {wanted} {list(shape)}, {layout}"
    )


def check_draw(
    kernel: str, logits: Tensor, row_ids: Tensor, positions: Tensor, keys: Tensor, temperature: Tensor, cutoff: Tensor
) -> None:
    """`check` the inputs of a Gumbel draw for T flat tokens over V logits, with keys and temperatures of R rows."""
    num_tokens, vocab = logits.shape
    wide = logits.dtype == torch.float64
    check(f"{kernel}: logits", logits, (num_tokens, vocab), *FLOATS, rows=True)
    check(f"{kernel}: row_ids", row_ids, (num_tokens,), torch.int32)
    check(f"{kernel}: positions", positions, (num_tokens,), torch.int64)
    check(f"{kernel}: keys", keys, (keys.numel(),), torch.int64)
    check(f"{kernel}: temperature", temperature, (keys.numel(),), torch.float32)
    check(f"{kernel}: cutoff", cutoff, (num_tokens,), torch.float64 if wide else torch.float32)
