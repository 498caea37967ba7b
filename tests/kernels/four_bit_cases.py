"""Random INT4 and NVFP4 weights that the tests of their kernels share."""

from __future__ import annotations

import torch

from batchspec.kernels.common.four_bit import FourBitWeight
from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.common.int4 import arrange, pack
from batchspec.kernels.common.nvfp4 import Nvfp4Weight, arranged
from batchspec.kernels.moe.experts_four_bit import StackedFourBit

GROUPS = [GROUP, 32, 64, 128, 256, 0]
"""Columns of a group; 0: all of a row; 16: NVFP4, which has no zero points."""


def four_bit_weight(
    rows: int, k: int, group: int, device: torch.device, *, zeros: bool = False, size: float = 0.05
) -> FourBitWeight:
    """Scales of about this size, some of them negative; of NVFP4 row scales, which are other numbers in each row."""
    if group == GROUP:
        return arranged(nvfp4_weight(rows, k, device, size=size))
    count = -(-k // (group or k))
    codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8, device=device)
    scales = ((torch.rand(rows, count, device=device) + 0.1) * size).bfloat16()
    scales[::5] *= -1
    own = torch.randint(0, 16, (rows, count), dtype=torch.uint8, device=device) if zeros else None
    return arrange(pack(codes), scales, own, group or k)


def nvfp4_weight(rows: int, k: int, device: torch.device, *, size: float = 0.05) -> Nvfp4Weight:
    """Any codes, and scales up to about 2."""
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(0, 0x42, (rows, k // GROUP), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return Nvfp4Weight(codes, scales, (torch.rand(rows, device=device) + 0.1) * size, divides=False)


def stacked_four_bit(experts: int, rows: int, k: int, group: int, device: torch.device, *, zeros: bool = False) -> StackedFourBit:
    own = [four_bit_weight(rows, k, group, device, zeros=zeros) for _ in range(experts)]
    points = [weight.shifts for weight in own if weight.shifts is not None]
    words, scales = torch.stack([weight.words for weight in own]), torch.stack([weight.scales for weight in own])
    group_size = own[0].kernel_group
    assert group_size is not None
    rows_of = [weight.row_scales for weight in own if weight.row_scales is not None]
    return StackedFourBit(
        words, scales, torch.stack(points) if points else None, k, group_size, torch.stack(rows_of) if rows_of else None
    )
