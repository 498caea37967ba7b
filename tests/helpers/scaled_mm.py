"""A stand-in for the library's FP8 products on a CPU, which refuses what the library refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from batchspec.kernels.common.e4m3 import E4M3


@contextmanager
def library_on_cpu(calls: list[str] | None = None) -> Iterator[None]:
    """`torch.nn.functional.scaled_mm` and `torch._scaled_mm` compute the products of their definition. calls: their names."""
    with pytest.MonkeyPatch.context() as patch:

        def blocks(a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, **options: Any) -> Tensor:
            if calls is not None:
                calls.append("blocks")
            return of_blocks(a, b, scale_a, kind_a, scale_b, kind_b, **options)

        def rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
            if calls is not None:
                calls.append("rows")
            return of_rows(a, b, scale_a, scale_b, **options)

        patch.setattr(torch.nn.functional, "scaled_mm", blocks)
        patch.setattr(torch, "_scaled_mm", rows)
        yield


def check_matrices(a: Tensor, b: Tensor, multiple: int) -> tuple[int, int, int]:
    """M, K, N of a row-major a [M, K] and a column-major b [K, N] in e4m3, whose addresses are multiples of 16."""
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype is E4M3
    assert b.dtype is E4M3
    assert b.shape[0] == k
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    assert m % 4 == 0
    assert k % multiple == n % multiple == 0
    return m, k, n


def of_blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, *, output_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    m, k, n = check_matrices(a, b, 128)
    groups = k // 128
    padded = -(-groups // 4) * 4
    assert (kind_a, kind_b) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    assert not use_fast_accum
    assert scale_a.dtype is scale_b.dtype is torch.float32
    assert scale_a.shape == (m, groups)
    assert scale_a.stride() == (1, m)
    assert scale_b.shape == (padded, n // 128)
    assert scale_b.stride() == (1, padded)
    left = a.double() * scale_a.repeat_interleave(128, 1).double()
    right = b.double() * scale_b[:groups].repeat_interleave(128, 0).repeat_interleave(128, 1).double()
    return (left @ right).to(output_dtype)


def of_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    m, _, n = check_matrices(a, b, 16)
    assert out_dtype is torch.bfloat16
    assert not use_fast_accum
    assert scale_a.dtype is scale_b.dtype is torch.float32
    assert scale_a.shape == (m, 1)
    assert scale_b.shape == (1, n)
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    return (a.double() @ b.double() * scale_a.double() * scale_b.double()).to(out_dtype)
