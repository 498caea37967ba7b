"""Prefill attention on a GPU: FlashInfer (FA3 on Hopper) for long rows, planned on the host, which knows all lengths; torch's own
FlashAttention 2 for short rows, for passes of which the host knows only bounds, and if FlashInfer is not installed; a kernel of
batchspec's for heads that neither supports, and for passes with images whose tokens attend to each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.attention.apply_sinks import apply_sinks
from batchspec.kernels.attention.ragged_prefill import ragged_prefill
from batchspec.kernels.common.dry_run import is_dry
from batchspec.kernels.kv_cache.slot_mapping import compute_slot_mapping
from batchspec.model.layers.attention.kv_layout import KVLayout

if TYPE_CHECKING:
    from batchspec.batch.flat_batch import FlatBatch

WORKSPACE_BYTES = 256 << 20
RING = 8
"""Number of plans in flight. A plan's host buffer is reused only after it was copied to the device."""
SHORT = 2048
"""A pass whose longest row has at most this many keys uses torch's attention. It takes 1.5 to 1.9 times as long as FlashInfer's
(8 rows of 2,048, 32 heads of 128, H200: 0.97 ms a layer instead of 0.53, of about 12 ms in total), but FlashInfer compiles for a
minute and a half when it is first used with a head size on a machine."""
_FLASH_HEAD_DIM = 256
"""Largest head size of torch's attention."""
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""Those for which FlashInfer has kernels on every card: `prefill_sm90.cuh` of 0.6.13 to 0.7.4 allows no other."""
log = logging.getLogger(__name__)


@cache
def flashinfer() -> Any:
    """The module; None if it is not installed, or if its import fails: then a warning is logged."""
    try:
        import flashinfer as module
    except ModuleNotFoundError as error:
        if error.name != "flashinfer":
            _warn("be imported", error)
        return None
    except Exception as error:  # it imports compilers of kernels, which may not fit this torch or driver
        _warn("be imported", error)
        return None
    return module


def _warn(cannot: str, error: Exception) -> None:
    cause = str(error).strip().partition("\n")[0]
    log.warning("FlashInfer cannot %s (%s): torch's attention is used, slower above %d keys", cannot, cause, SHORT)


class KeysAndValues(Protocol):
    """What a prefill reads: `LayerKV`, or K and V that are made when they are read."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def pages(self) -> Tensor:
        """On the device."""

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As of `LayerKV`."""


def fits_flash(batch: FlatBatch, kv: KeysAndValues, sink: int) -> bool:
    """Whether `plan_flash` supports this batch and these pages."""
    bounded = batch.host is not None or batch.max_keys is not None
    return bounded and kv.pages.is_cuda and not sink and kv.layout.has_prefill_kernels


def plan_flash(batch: FlatBatch, kv: KeysAndValues, *, num_heads: int, window: int | None) -> FlashPlan | VarlenPlan:
    """The plan of one prefill pass for all layers with this window. `fits_flash` must be true for the batch."""
    # FlashInfer comes last: its import takes a second or two. A dry run can skip torch's attention, but not FlashInfer's.
    layout, short = kv.layout, batch.host is None or max(batch.host.kv_len) <= SHORT
    short = short or batch.last_keys is not None
    if short or is_dry() or not _flashinfer_compiles(kv.pages.device, layout.dtype, layout.head_dim, window is not None):
        return VarlenPlan(batch, kv, window=window)
    return FlashPlan(batch, kv, num_heads=num_heads, window=window)


@cache
def _flashinfer_compiles(device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool) -> bool:
    """Whether FlashInfer is installed and has a kernel for such rows. The first call compiles it, which needs nvcc and ninja; if
    that fails, a warning says so, and the job goes on with torch's attention."""
    if head_dim not in _FLASHINFER_HEAD_DIMS or flashinfer() is None:
        return False
    try:
        one = _cu_seqlens([1])
        _ring(device).take().plan(
            one, one, 1, 1, head_dim, causal=True, window_left=0 if windowed else -1, q_data_type=dtype, kv_data_type=dtype
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may fail in many ways
        _warn("compile its prefill kernel", error)
        return False
    return True


class VarlenPlan:
    """torch's FlashAttention 2, or `ragged_prefill` for larger heads and for images whose tokens attend to each other, over
    concatenated rows of any length. Before torch 2.12 the public function of the former does not support grouped K/V heads, so
    the internal operator is called.

    It reads lengths on the device and bounds on the host: with `max_keys` a CUDA graph can hold it. Its output for padding after
    the last row is undefined.
    """

    def __init__(self, batch: FlatBatch, kv: KeysAndValues, *, window: int | None) -> None:
        num_keys = batch.max_keys if batch.host is None else sum(batch.host.kv_len)
        assert num_keys is not None
        self._key_slots = _key_slots(batch, num_keys, kv.layout.page_size)
        self._cu_seqlens_q, self._cu_seqlens_k = batch.cu_seqlens_q, F.pad(batch.kv_len.cumsum(0, dtype=torch.int32), (1, 0))
        self._longest, self._last_keys = (batch.max_q, batch.max_kv), batch.last_keys
        self._window = -1 if window is None else window - 1

    def attend(
        self, q: Tensor, kv: KeysAndValues, scale: float, positions: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        """As `AttentionPlan.attend`; only for the positions of the batch."""
        assert positions is None
        k, v = kv.read_slots(self._key_slots)
        if kv.layout.head_dim > _FLASH_HEAD_DIM or self._last_keys is not None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            ragged_prefill(
                q, k, v, self._cu_seqlens_q, self._cu_seqlens_k, scale=scale, max_q=self._longest[0], out=out,
                window=self._window + 1, sink_logits=sink_logits, last_keys=self._last_keys,
            )
            return out
        attended: Tensor
        attended, lse = torch.ops.aten._flash_attention_forward(
            q, k, v, self._cu_seqlens_q, self._cu_seqlens_k, *self._longest, 0.0, True, False,
            scale=scale, window_size_left=self._window, window_size_right=0,
        )[:2]
        if sink_logits is not None:
            apply_sinks(attended, lse.t(), sink_logits)
        return attended


class FlashPlan:
    """FlashInfer's ragged prefill.

    K/V are gathered from their pages first: two copies of about 30 us a layer at 16,384 tokens. FlashInfer's paged prefill is a
    quarter slower (2.4 ms instead of 1.9, 2 x 8192 tokens, H200). K/V in e4m3 pages are converted by the same copy: a pass
    attends to its own keys as later passes and rounds do, so that it does not matter where passes are cut.
    """

    def __init__(self, batch: FlatBatch, kv: KeysAndValues, *, num_heads: int, window: int | None) -> None:
        assert batch.host is not None
        self._host, self._num_heads, self._window = batch.host, num_heads, window
        self._key_slots = _key_slots(batch, sum(batch.host.kv_len), kv.layout.page_size)
        self._scale: float | None = None

    def attend(
        self, q: Tensor, kv: KeysAndValues, scale: float, positions: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        """As `AttentionPlan.attend`; only for the positions of the batch. The scores of all layers have one scale."""
        assert positions is None
        if self._scale is None:
            self._plan(kv, scale)
        assert scale == self._scale, (scale, self._scale)
        out = torch.empty_like(q)
        if sink_logits is None:
            self._wrapper.run(q, *kv.read_slots(self._key_slots), out=out)
            return out
        _, lse = self._wrapper.run(q, *kv.read_slots(self._key_slots), out=out, return_lse=True)
        apply_sinks(out, lse, sink_logits, base_2=True)
        return out

    def _plan(self, kv: KeysAndValues, scale: float) -> None:
        layout, self._scale = kv.layout, scale
        self._wrapper = _ring(kv.pages.device).take()
        self._wrapper.plan(
            _cu_seqlens(self._host.q_len),
            _cu_seqlens(self._host.kv_len),
            self._num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            causal=True,
            window_left=-1 if self._window is None else self._window - 1,
            sm_scale=scale,
            q_data_type=layout.dtype,
            kv_data_type=layout.dtype,
        )


def _key_slots(batch: FlatBatch, num_keys: int, page_size: int) -> Tensor:
    """int64 [num_keys] cache slot of each key of all rows, concatenated; 0 after the last row's keys."""
    device = batch.kv_len.device
    row_ids = torch.empty(num_keys, dtype=torch.int32, device=device)
    positions, slots = (torch.empty(num_keys, dtype=torch.int64, device=device) for _ in range(2))
    compute_slot_mapping(
        torch.zeros_like(batch.kv_len),
        batch.kv_len,
        batch.page_table,
        page_size=page_size,
        out_cu_seqlens_q=torch.empty_like(batch.cu_seqlens_q),
        out_row_ids=row_ids,
        out_positions=positions,
        out_slot_mapping=slots,
    )
    return slots


def _cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """int32 [rows + 1] on the host: cumulative lengths, from 0."""
    starts: Tensor = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return starts


class _Ring:
    """FlashInfer wrappers, used in turn."""

    def __init__(self, device: torch.device) -> None:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = flashinfer().BatchPrefillWithRaggedKVCacheWrapper
        self._wrappers = [wrapper(workspace, "NHD") for _ in range(RING)]
        self._taken: list[torch.cuda.Event | None] = [None] * RING
        self._next = 0

    def take(self) -> Any:
        """The least recently used wrapper, after its last plan was copied to the device."""
        index = self._next
        self._next = (index + 1) % RING
        # An event is recorded before its wrapper is planned, so the event of the next wrapper is the one that follows this
        # wrapper's last plan in stream order.
        event = self._taken[self._next]
        if event is not None:
            event.synchronize()
        self._taken[index] = taken = torch.cuda.Event()
        taken.record()
        return self._wrappers[index]


@cache
def _ring(device: torch.device) -> _Ring:
    return _Ring(device)
