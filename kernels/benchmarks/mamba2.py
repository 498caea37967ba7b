"""Mamba2 layers: the recurrence as Nemotron 3 Nano has it, 64 heads of 64 values in 8 groups, states of 128 a value; and the
convolution before it.

Bytes are those of inputs and outputs once, and of states twice; of the rings of a convolution what is read and written.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from batchspec.kernels.benchmarks.case import Benchmark, Case, copies, noise
from batchspec.kernels.benchmarks.recurrences import recurrence, states_of
from batchspec.kernels.mamba2.layout import SsmState, SsmWeights
from batchspec.kernels.mamba2.scan_chunks import scan_chunks, scan_chunks_reference
from batchspec.kernels.mamba2.scan_steps import scan_steps, scan_steps_reference
from batchspec.kernels.short_conv.short_conv import ConvRows, short_conv, short_conv_reference

HEADS, DIM, GROUPS, SIZE, RING = 64, 64, 8, 128, 8
INNER = HEADS * DIM


def rows_of(rows: int, per_row: int, *, first: int) -> ConvRows:
    """`per_row` tokens from position `first` on of each row."""
    ids = torch.arange(rows, dtype=torch.int32)
    return ConvRows(
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * per_row, max_tokens=per_row, slots=ids,
        positions=torch.arange(first, first + per_row).repeat(rows), live=torch.ones_like(ids),
    )


def state_of(rows: int, dtype: torch.dtype = torch.float32, *, folded: int) -> SsmState:
    return SsmState(
        state=torch.randn(rows, HEADS, DIM, SIZE).to(dtype), inputs=noise(rows, RING, INNER + GROUPS * SIZE),
        steps=noise(rows, RING, HEADS), folded=torch.full((rows,), folded, dtype=torch.int32),
    )


def scan_case(kernel: Any, reference: Any, states: list[SsmState], rows: ConvRows, **options: Any) -> Case:
    tokens = len(rows.positions)
    xbc, dt = noise(tokens, INNER + 2 * GROUPS * SIZE), noise(tokens, HEADS)
    weights = SsmWeights(a_log=torch.rand(HEADS), dt_bias=torch.rand(HEADS) - 4.0, d=torch.ones(HEADS))
    return recurrence(
        lambda state, out: kernel(xbc, dt, weights, state, rows, out, **options),
        lambda state, out: reference(xbc, dt, weights, state, rows, out, **options), states, xbc[:, :INNER].contiguous(),
        xbc.nbytes + dt.nbytes,
    )


def steps_case(rows: int, drafts: int, replayed: int, dtype: torch.dtype) -> Case:
    """A round that verifies so many drafts, and replays so many tokens accepted before."""
    states = copies(lambda: state_of(rows, dtype, folded=16 - replayed))
    return scan_case(scan_steps, scan_steps_reference, states, rows_of(rows, drafts + 1, first=16), commits=False)


def chunks_case(rows: int, per_row: int) -> Case:
    states = states_of(lambda: state_of(rows, folded=0), rows * per_row)
    return scan_case(scan_chunks, scan_chunks_reference, states, rows_of(rows, per_row, first=0))


def conv_case(rows: int, per_row: int, channels: int) -> Case:
    """A round or a pass of `per_row` tokens a row, 4 taps and SiLU, whose inputs are columns of a wider product."""
    tokens, taps, drafted = rows * per_row, 4, min(per_row, 8)
    x = noise(tokens, 2 * channels)[:, channels:]
    weight, bias, own = noise(taps, channels), noise(channels), rows_of(rows, per_row, first=16)
    places = max(2 * drafted, drafted + taps - 1)
    rings = copies(lambda: noise(rows, places, channels))
    before = rings[0].clone()
    return Case(
        calls=[lambda ring=ring: short_conv(x, weight, bias, ring, own, gated=False) for ring in rings],  # type: ignore[misc]
        reference=lambda: short_conv_reference(x, weight, bias, before, own, gated=False),
        num_bytes=(2 * tokens + (taps - 1 + min(per_row, places)) * rows) * channels * x.element_size(),
    )


MAMBA2 = (
    Benchmark(
        "scan_steps", steps_case, "rows drafts replayed dtype",
        tuple(
            (rows, *drafts, dtype)
            for rows, dtype, drafts in product((64, 256), (torch.float32, torch.bfloat16), ((0, 1), (1, 2), (3, 2), (3, 4)))
        ),
        (1, 1, 2, torch.float32),
    ),
    Benchmark(
        "short_conv", conv_case, "rows per_row channels",
        tuple((*sizes, channels) for channels in (10240, 6144, 8192) for sizes in ((256, 1), (256, 4), (64, 1), (8, 1024))),
        (2, 2, 70),
    ),
    Benchmark("scan_chunks", chunks_case, "rows per_row", ((1, 8192), (8, 1024), (64, 1024)), (1, 20)),
)
