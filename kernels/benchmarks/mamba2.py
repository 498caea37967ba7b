"""The recurrence of Mamba2 as Nemotron 3 Nano has it: 64 heads of 64 values in 8 groups, states of 128 a value.

Bytes are those of inputs and outputs once, and of states twice. The references compute one token after another, each by launches
of the host, and are left out for more than 64 tokens.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

from batchspec.kernels.benchmarks.case import Benchmark, Case, copies, into, noise, unwritten
from batchspec.kernels.mamba2.layout import SsmState, SsmWeights
from batchspec.kernels.mamba2.scan_chunks import scan_chunks, scan_chunks_reference
from batchspec.kernels.mamba2.scan_steps import scan_steps, scan_steps_reference
from batchspec.kernels.short_conv.short_conv import ConvRows

HEADS, DIM, GROUPS, SIZE, RING = 64, 64, 8, 128, 8
INNER = HEADS * DIM
MOST_TOKENS = 64
"""Of a reference."""
MOST_COPIED = 65536
"""Tokens of which there is one copy: they are gigabytes."""


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


def recurrence(kernel: Any, reference: Any, states: list[SsmState], rows: ConvRows, **options: Any) -> Case:
    tokens = len(rows.positions)
    xbc, dt = noise(tokens, INNER + 2 * GROUPS * SIZE), noise(tokens, HEADS)
    weights = SsmWeights(a_log=torch.rand(HEADS), dt_bias=torch.rand(HEADS) - 4.0, d=torch.ones(HEADS))
    out = unwritten(xbc[:, :INNER]).contiguous()
    expected = out.clone()
    before = SsmState(**{name: getattr(states[0], name).clone() for name in SsmState.__dataclass_fields__})
    right = into(expected, partial(reference, xbc, dt, weights, before, rows, expected, **options))
    return Case(
        calls=[into(out, partial(kernel, xbc, dt, weights, state, rows, out, **options)) for state in states],
        reference=right if tokens <= MOST_TOKENS else None,
        num_bytes=2 * before.state.nbytes + xbc.nbytes + dt.nbytes + out.nbytes,
    )


def steps_case(rows: int, drafts: int, replayed: int, dtype: torch.dtype) -> Case:
    """A round with so many drafts, after one of which `replayed` tokens were accepted."""
    states = copies(lambda: state_of(rows, dtype, folded=16 - replayed))
    return recurrence(scan_steps, scan_steps_reference, states, rows_of(rows, drafts + 1, first=16), commits=False)


def chunks_case(rows: int, per_row: int) -> Case:
    states = copies(lambda: state_of(rows, folded=0))
    kept = states if rows * per_row <= MOST_COPIED else states[:1]
    return recurrence(scan_chunks, scan_chunks_reference, kept, rows_of(rows, per_row, first=0))


MAMBA2 = (
    Benchmark(
        "scan_steps", steps_case, "rows drafts replayed dtype",
        tuple(
            (rows, *drafts, dtype)
            for rows, dtype, drafts in product((64, 256), (torch.float32, torch.bfloat16), ((0, 1), (1, 2), (3, 2), (3, 4)))
        ),
        (1, 1, 2, torch.float32),
    ),
    Benchmark("scan_chunks", chunks_case, "rows per_row", ((1, 8192), (8, 1024), (64, 1024)), (1, 20)),
)
