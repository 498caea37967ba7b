"""The gated delta rule of long prefills by FlashInfer's kernel for Hopper, which takes less time than `delta_chunks`.

It takes chunks of 64 tokens from a row's first on: those of `delta_chunks` for rows that begin at a multiple of 64.
decode.deterministic does not use it, because its sums have another order. It never ends for a row without tokens.
us a layer on one H200, 32 value heads, with a launch that normalises q and k: 1 x 8192 tokens 422 (delta_chunks 591), 8 x 1024
266 (436), 64 x 8192 7,886 (25,783).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.flash import SHORT, delta_rule
from batchspec.kernels.common.dry_run import is_dry
from batchspec.kernels.gated_delta.chunk_products import CHUNK
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState
from batchspec.kernels.gated_delta.normalise import normalise

HEAD_DIM = 128
"""DK and DV."""
TOKENS_PER_ROW = 512
"""A pass has at least as many on average, so that two copies of its rows' states (2 * 4 * 128^2 bytes of a value head) take no
more memory than what `delta_chunks` would allocate and this does not (2 * 2 * 64 + 16 - 8 bytes of a token and value head)."""


@dataclass(frozen=True, slots=True)
class FlashRows:
    """The rows of a pass that FlashInfer may take, for all layers."""

    bounds: Tensor
    """int64 [R+1] the first flat token of each row"""
    slots: Tensor
    """int64 [R]"""
    begin: Tensor | None
    """bool [R] rows that begin at position 0, whose state is zero, whatever the slot holds; None: all do"""


def flash_rows(batch: FlatBatch, rows: DeltaBatch) -> FlashRows | None:
    """The rows of a pass; None if it is left to `delta_chunks`.

    FlashInfer takes passes that are launched kernel by kernel, whose lengths the host knows, with a row of more than SHORT
    positions: its attention is then compiled too. A dry run or a CUDA graph cannot hold its launches.
    """
    host = batch.host
    if host is None or batch.recurrence != "chunks" or is_dry() or max(host.kv_len) <= SHORT:
        return None
    counts, firsts = host.q_len, [end - count for end, count in zip(host.kv_len, host.q_len, strict=True)]
    whole = min(counts) > 0 and sum(counts) == len(batch.token_ids) and not any(first % CHUNK.value for first in firsts)
    if not whole or sum(counts) < TOKENS_PER_ROW * len(counts):
        return None
    begin = rows.positions[rows.cu_seqlens[:-1].long()] == 0 if any(firsts) else None
    return FlashRows(rows.cu_seqlens.long(), rows.slots.long(), begin)


def flash_delta(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, rows: FlashRows, out: Tensor) -> bool:
    """What `delta_chunks` does, at bf16 tolerance; `inputs` are overwritten. False, with nothing done, if FlashInfer has no
    kernel for such a layer on this device. The first call compiles it."""
    fits = (inputs.k.shape[-1], inputs.v.shape[-1]) == (HEAD_DIM, HEAD_DIM)
    if not fits or inputs.q.dtype is not torch.bfloat16 or state.state.dtype is not torch.float32:
        return False
    rule = delta_rule(out.device)
    if rule is None:
        return False
    alpha, beta = normalise(inputs, batch)
    before = None
    if rows.begin is not None:
        before = state.state.index_select(0, rows.slots).masked_fill_(rows.begin[:, None, None, None], 0.0)
    after = state.state.new_empty(len(rows.slots), *state.state.shape[1:])
    rule(
        inputs.q, inputs.k, inputs.v, alpha, beta, initial_state=before, output_final_state=True, cu_seqlens=rows.bounds,
        output=out, output_state=after,
    )
    state.state.index_copy_(0, rows.slots, after)
    return True
