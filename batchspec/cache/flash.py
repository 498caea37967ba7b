"""Prefill attention on a GPU: FlashInfer's paged kernels (FA3 on Hopper), planned on the host, which knows every length."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from batchspec.cache.attention import FlatBatch, HostLayout

WORKSPACE_BYTES = 256 << 20
RING = 8
"""Plans in flight: a plan's host buffer is written again only after the copy out of it."""


@cache
def flashinfer() -> Any:
    """The module, or None where it is not installed: prefill then runs on torch's attention, row by row."""
    try:
        import flashinfer as module
    except ImportError:
        return None
    return module


def fits_flash(batch: FlatBatch, dtype: torch.dtype, sink: int) -> bool:
    """Whether FlashInfer serves this batch."""
    fits = batch.host is not None and batch.token_ids.is_cuda and dtype in (torch.bfloat16, torch.float16) and not sink
    return fits and flashinfer() is not None


class FlashPlan:
    """Attention of one prefill pass; the same in every layer with this window."""

    def __init__(self, batch: FlatBatch, kv: Tensor, *, num_heads: int, window: int | None) -> None:
        assert batch.host is not None
        _, _, page_size, kv_heads, head_dim = kv.shape
        self._wrapper = _ring(kv.device).take()
        starts, pages, page_ids, last_page_len = _host_plan(batch.host, page_size)
        self._wrapper.plan(
            starts,
            pages,
            page_ids,
            last_page_len,
            num_heads,
            kv_heads,
            head_dim,
            page_size,
            causal=True,
            window_left=-1 if window is None else window - 1,
            q_data_type=kv.dtype,
            kv_data_type=kv.dtype,
        )

    def attend(self, q: Tensor, kv: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """As `AttentionPlan.attend`, at the batch's own positions only."""
        assert positions is None
        assert math.isclose(scale, q.shape[-1] ** -0.5), scale
        out: Tensor = self._wrapper.run(q, (kv[0], kv[1]), out=torch.empty_like(q))
        return out


def _host_plan(host: HostLayout, page_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int32, on the host: places and pages before each row, page ids end to end, tokens in each row's last page."""
    num_pages = [-(-length // page_size) for length in host.kv_len]
    page_ids = [page for pages, count in zip(host.pages, num_pages, strict=True) for page in pages[:count]]
    last = [length - page_size * (count - 1) for length, count in zip(host.kv_len, num_pages, strict=True)]
    zero = torch.zeros(1, dtype=torch.int32)

    def before(counts: list[int]) -> Tensor:
        return torch.cat((zero, torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)))

    ids, tail = (torch.tensor(values, dtype=torch.int32) for values in (page_ids, last))
    return before(list(host.q_len)), before(num_pages), ids, tail


class _Ring:
    def __init__(self, device: torch.device) -> None:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = [wrapper(workspace, "NHD") for _ in range(RING)]
        self._taken: list[torch.cuda.Event | None] = [None] * RING
        self._next = 0

    def take(self) -> Any:
        """The wrapper that was planned longest ago, once its copy of the plan is on the device."""
        place = self._next
        self._next = (place + 1) % RING
        # The event of the take after it lies behind that wrapper's plan in stream order.
        event = self._taken[self._next]
        if event is not None:
            event.synchronize()
        self._taken[place] = taken = torch.cuda.Event()
        taken.record()
        return self._wrappers[place]


@cache
def _ring(device: torch.device) -> _Ring:
    return _Ring(device)
