"""One row through the target in one pass, with its own cache: for calibration and comparisons, not for jobs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.cache.groups import KVGroups
from batchspec.cache.pages import KVCache
from batchspec.model.target import Target


def forward_row(target: Target, ids: list[int], *, fp8: bool, kv_only: bool = False, adapter: int = 0) -> tuple[Tensor, KVCache]:
    """Hidden states [T, H] after the final norm, and the cache, whose layers hold K and V in page 1.

    fp8      K and V are stored in e4m3, with target.kv_scales; otherwise in the target's dtype
    kv_only  stop after the last layer's K and V; the returned hidden states are undefined
    adapter  number of the row's LoRA adapter
    """
    spec, device, count = target.spec, target.device, len(ids)
    page_size = max(16, 1 << (count - 1).bit_length())  # a power of two: each page size compiles kernels anew
    layers = replace(spec, fp8_kv=fp8).layer_states(target.dtype, page_size, draft_len=0)
    scales = target.kv_scales if fp8 else None
    groups = KVGroups.single(spec.num_paged_layers)
    cache = KVCache.allocate(layers, groups=groups, page_size=page_size, num_pages=(2,), device=device, scales=scales)

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = torch.arange(count, device=device)
    batch = FlatBatch(
        token_ids=ints(ids), row_ids=ints([0] * count), positions=positions, slot_mapping=positions + page_size,
        cu_seqlens_q=ints([0, count]), kv_len=ints([count]), page_table=ints([[1]]), max_q=count, max_kv=count,
        host=HostLayout([count], [count]), row_adapters=ints([adapter]),
    )
    hidden, _ = target.forward(batch, cache, kv_only=kv_only)
    return hidden, cache
