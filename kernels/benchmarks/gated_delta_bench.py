"""Times of the gated delta rule's kernels in rounds and prefill passes of Qwen3.5-35B-A3B (32 value heads) and 27B (48)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.gated_delta.convolve import convolve, convolve_reference
from batchspec.kernels.gated_delta.delta_chunks import delta_chunks, delta_chunks_reference
from batchspec.kernels.gated_delta.delta_steps import delta_steps, delta_steps_reference
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState, DeltaWeights, split_columns

KEY_HEADS, DIM, RING = 16, 128, 8
Given = tuple[DeltaInputs, DeltaState, DeltaBatch, Tensor]


def rows_of(rows: int, per_row: int, device: torch.device, *, first: int) -> DeltaBatch:
    """`per_row` tokens from position `first` on of each row."""
    ids = torch.arange(rows, dtype=torch.int32, device=device)
    return DeltaBatch(
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=device) * per_row, max_tokens=per_row, slots=ids,
        positions=torch.arange(first, first + per_row, device=device).repeat(rows), row_ids=ids.repeat_interleave(per_row),
    )


def state_of(rows: int, heads: int, device: torch.device, *, folded: int, dtype: torch.dtype = torch.float32) -> DeltaState:
    narrow: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    return DeltaState(
        state=torch.randn(rows, heads, DIM, DIM, device=device).to(dtype),
        gates=torch.rand(rows, RING, heads, 2, device=device) * -0.1,
        conv_inputs=torch.randn(rows, RING, (2 * KEY_HEADS + heads) * DIM, **narrow),
        keys=F.normalize(torch.randn(rows, RING, KEY_HEADS, DIM, **narrow), dim=-1),
        values=torch.randn(rows, RING, heads, DIM, **narrow),
        folded=torch.full((rows,), folded, dtype=torch.int32, device=device),
    )


def inputs_of(tokens: int, heads: int, device: torch.device) -> DeltaInputs:
    q, k = F.normalize(torch.randn(2, tokens, KEY_HEADS, DIM, device=device), dim=-1).bfloat16()
    v, beta = torch.randn(tokens, heads, DIM, device=device).bfloat16(), torch.rand(tokens, heads, device=device)
    return DeltaInputs(q=q, k=k, v=v, gates=torch.stack((-0.1 * beta, beta), 2))


def recurrence_row(
    bench: Bench, shape: str, given: list[Given], kernel: Callable[..., None], reference: Callable[..., None], **options: Any
) -> None:
    """Counts the bytes of states, inputs and outputs once each, of states twice. On a GPU the reference, which computes one token
    after another by launches of the host, is left out for more than 64 tokens.
    """
    inputs, state, _, out = given[0]
    num_bytes = 2 * state.state.nbytes + inputs.q.nbytes + inputs.k.nbytes + inputs.v.nbytes + out.nbytes
    calls, expected = ([partial(run, *each, **options) for each in given] for run in (kernel, reference))
    long = bench.on_gpu and inputs.q.shape[0] > 64
    bench.row(shape, calls, [] if long else expected, num_bytes=num_bytes)


def convolve_row(bench: Bench, rows: int, per_row: int, heads: int, *, keeps: bool) -> None:
    device, channels, tokens = bench.device, (2 * KEY_HEADS + heads) * DIM, rows * per_row
    layer = DeltaWeights(
        conv=torch.randn(channels, 4, device=device).bfloat16(), a_log=torch.zeros(heads, device=device),
        dt_bias=torch.zeros(heads, device=device),
    )
    ba, columns = torch.randn(tokens, 2 * heads, device=device).bfloat16(), split_columns(KEY_HEADS, heads, DIM, DIM)
    given = (ba, layer, columns, state_of(rows, heads, device, folded=16), rows_of(rows, per_row, device, first=16))
    made = [torch.randn(tokens, channels + heads * DIM, device=device).bfloat16() for _ in range(bench.num_copies)]
    calls, expected = ([partial(run, x, *given, keeps_inputs=keeps) for x in made] for run in (convolve, convolve_reference))
    bench.row(f"convolve {rows} x {per_row} HV={heads}", calls, expected, num_bytes=2 * tokens * channels * 2)


def main() -> None:
    bench = Bench("gated_delta")
    device = bench.device
    for rows, heads in product((64, 128, 256), (32, 48)) if bench.on_gpu else ((2, 32),):
        convolve_row(bench, rows, 4, heads, keeps=True)
        for dtype in (torch.float32, torch.bfloat16):
            for drafts, replayed in ((0, 1), (3, 2), (3, 4)):
                tokens = rows * (drafts + 1)
                inputs, batch = inputs_of(tokens, heads, device), rows_of(rows, drafts + 1, device, first=16)
                states = [state_of(rows, heads, device, folded=16 - replayed, dtype=dtype) for _ in range(bench.num_copies)]
                given = [(inputs, state, batch, torch.empty_like(inputs.v)) for state in states]
                name = f"steps {rows} rows HV={heads} K={drafts} replays {replayed} {str(dtype).removeprefix('torch.')}"
                recurrence_row(bench, name, given, delta_steps, delta_steps_reference, commits=False)
    shapes = product(((1, 8192), (8, 1024), (64, 8192)), (32, 48)) if bench.on_gpu else [((2, 100), 32)]
    for (rows, per_row), heads in shapes:
        bench.num_copies = 1 if rows * per_row > 65536 else bench.num_copies  # gigabytes of inputs
        convolve_row(bench, rows, per_row, heads, keeps=False)
        inputs, batch = inputs_of(rows * per_row, heads, device), rows_of(rows, per_row, device, first=0)
        states = [state_of(rows, heads, device, folded=0) for _ in range(bench.num_copies)]
        given = [(inputs, state, batch, torch.empty_like(inputs.v)) for state in states]
        recurrence_row(bench, f"chunks {rows} x {per_row} HV={heads}", given, delta_chunks, delta_chunks_reference)


if __name__ == "__main__":
    main()
