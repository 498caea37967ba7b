"""Random INT4 weights that the tests of their kernels share."""

from __future__ import annotations

import torch

from batchspec.kernels.common.int4 import Int4Weight, arrange, pack
from batchspec.kernels.moe.experts_int4 import StackedInt4

GROUPS = [32, 64, 128, 256, 0]
"""Columns of a group; 0: all of a row."""


def int4_weight(rows: int, k: int, group: int, device: torch.device, *, zeros: bool = False, size: float = 0.05) -> Int4Weight:
    """Scales of about this size, some of them negative."""
    count = -(-k // (group or k))
    codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8, device=device)
    scales = ((torch.rand(rows, count, device=device) + 0.1) * size).bfloat16()
    scales[::5] *= -1
    own = torch.randint(0, 16, (rows, count), dtype=torch.uint8, device=device) if zeros else None
    return arrange(pack(codes), scales, own, group or k)


def stacked_int4(experts: int, rows: int, k: int, group: int, device: torch.device, *, zeros: bool = False) -> StackedInt4:
    own = [int4_weight(rows, k, group, device, zeros=zeros) for _ in range(experts)]
    points = [weight.zeros for weight in own if weight.zeros is not None]
    words, scales = torch.stack([weight.words for weight in own]), torch.stack([weight.scales for weight in own])
    group_size = own[0].kernel_group
    assert group_size is not None
    return StackedInt4(words, scales, torch.stack(points) if points else None, k, group_size)
