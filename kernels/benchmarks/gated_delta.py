"""The gated delta rule of Qwen3.5: heads of 128 values, 16 of keys, and 32 (35B-A3B) or 48 (27B) of values.

Bytes are those of inputs and outputs once, and of states twice.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from batchspec.kernels.benchmarks.case import Benchmark, Case, copies, noise
from batchspec.kernels.benchmarks.recurrences import recurrence, states_of
from batchspec.kernels.gated_delta.delta_chunks import delta_chunks, delta_chunks_reference
from batchspec.kernels.gated_delta.delta_steps import delta_steps, delta_steps_reference
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState

KEY_HEADS, DIM, RING = 16, 128, 8


def rows_of(rows: int, per_row: int, *, first: int) -> DeltaBatch:
    """`per_row` tokens from position `first` on of each row."""
    ids = torch.arange(rows, dtype=torch.int32)
    return DeltaBatch(
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * per_row, max_tokens=per_row, slots=ids,
        positions=torch.arange(first, first + per_row).repeat(rows), row_ids=ids.repeat_interleave(per_row),
    )


def state_of(rows: int, heads: int, dtype: torch.dtype = torch.float32, *, folded: int) -> DeltaState:
    return DeltaState(
        state=torch.randn(rows, heads, DIM, DIM).to(dtype), gates=torch.rand(rows, RING, heads, 2) * -0.1,
        conv_inputs=noise(rows, RING, (2 * KEY_HEADS + heads) * DIM), keys=F.normalize(noise(rows, RING, KEY_HEADS, DIM), dim=-1),
        values=noise(rows, RING, heads, DIM), folded=torch.full((rows,), folded, dtype=torch.int32),
    )


def inputs_of(tokens: int, heads: int) -> DeltaInputs:
    q, k = F.normalize(torch.randn(2, tokens, KEY_HEADS, DIM), dim=-1).bfloat16()
    beta = torch.rand(tokens, heads)
    return DeltaInputs(q=q, k=k, v=noise(tokens, heads, DIM), gates=torch.stack((-0.1 * beta, beta), 2))


def delta_case(kernel: Any, reference: Any, states: list[DeltaState], batch: DeltaBatch, heads: int, **options: Any) -> Case:
    inputs = inputs_of(len(batch.positions), heads)
    return recurrence(
        lambda state, out: kernel(inputs, state, batch, out, **options),
        lambda state, out: reference(inputs, state, batch, out, **options), states, inputs.v,
        inputs.q.nbytes + inputs.k.nbytes + inputs.v.nbytes,
    )


def steps_case(rows: int, heads: int, drafts: int, replayed: int, dtype: torch.dtype) -> Case:
    """A round that verifies so many drafts, and replays so many tokens accepted before."""
    states = copies(lambda: state_of(rows, heads, dtype, folded=16 - replayed))
    return delta_case(delta_steps, delta_steps_reference, states, rows_of(rows, drafts + 1, first=16), heads, commits=False)


def chunks_case(rows: int, per_row: int, heads: int) -> Case:
    states = states_of(lambda: state_of(rows, heads, folded=0), rows * per_row)
    return delta_case(delta_chunks, delta_chunks_reference, states, rows_of(rows, per_row, first=0), heads)


HEADS = (32, 48)
PROMPTS = ((1, 8192), (8, 1024), (64, 8192))

GATED_DELTA = (
    Benchmark(
        "delta_steps", steps_case, "rows heads drafts replayed dtype",
        tuple(
            (rows, heads, *drafts, dtype)
            for rows, heads, dtype, drafts in product(
                (64, 128, 256), HEADS, (torch.float32, torch.bfloat16), ((0, 1), (1, 2), (3, 2), (3, 4))
            )
        ),
        (1, 16, 1, 2, torch.float32),
    ),
    Benchmark(
        "delta_chunks", chunks_case, "rows per_row heads", tuple((*prompts, heads) for prompts, heads in product(PROMPTS, HEADS)),
        (1, 20, 16),
    ),
)
