"""The layout of keys and values in memory, and one layer's pages in it: the `PageFormat` of attention. Everything that depends on
the K/V format is here and in the kernels that this file and the attention plans call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.cache.page_format import LayerPages
from batchspec.kernels.attention.settings import DTYPES, MAX_QUERIES
from batchspec.kernels.common.e4m3 import E4M3, from_e4m3, movable
from batchspec.kernels.kv_cache.kv_gather import kv_gather
from batchspec.kernels.kv_cache.kv_write import kv_write
from batchspec.kernels.norm_rope.rope_write import rope_write

MAX_HEAD_DIM = 512
"""Largest head size for which there are prefill kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The K/V format of one layer: a page holds K and V of `page_size` tokens, num_kv_heads * head_dim numbers each."""

    dtype: torch.dtype
    """The dtype in which the model computes K and V, and in which attention reads them."""
    fp8: bool = False
    """Whether pages hold e4m3, with an fp32 scale for each head; otherwise they hold `dtype`."""
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens."""
    ordered: bool = False
    """Whether attention sums in an order that does not depend on the batch (decode.deterministic; plans of
    `ordered.py`)."""

    @property
    def stored(self) -> torch.dtype:
        """The dtype of pages."""
        return E4M3 if self.fp8 else self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.stored.itemsize

    @property
    def read_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_size * self.token_bytes

    def allocate(self, num_layers: int, num_pages: int, device: torch.device) -> Tensor:
        """Zeroed pages [num_layers, 2 (K, V), P, page_size, KVH, D]. Zeroed, so that unwritten slots, which may be read under a
        mask, are finite."""
        shape = (num_layers, 2, num_pages, self.page_size, self.num_kv_heads, self.head_dim)
        return torch.zeros(shape, dtype=self.stored, device=device)

    def open(self, pages: Tensor, scales: Tensor | None) -> LayerKV:
        return LayerKV(pages, self, scales)

    def unit_scales(self, device: torch.device) -> Tensor | None:
        return torch.ones(2, self.num_kv_heads, device=device) if self.fp8 else None

    @property
    def has_prefill_kernels(self) -> bool:
        """Whether the kernels of `flash.py` support K and V of this layout."""
        return self.dtype in (torch.bfloat16, torch.float16) and self.head_dim <= MAX_HEAD_DIM and self.head_dim % 8 == 0

    def plans_by_bounds(self, max_q: int) -> bool:
        return self.dtype in DTYPES if max_q <= MAX_QUERIES else self.has_prefill_kernels


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One layer's K/V pages. Blocks only pass it on; this file, the plans and the kernels access its fields."""

    pages: Tensor
    """[2 (K, V), P, page_size, KVH, D]"""
    layout: KVLayout
    scales: Tensor | None = None
    """fp32 [2 (K, V), KVH] of an e4m3 layout: the factors of stored numbers"""

    def __post_init__(self) -> None:
        assert (self.scales is not None) == self.layout.fp8, self.layout

    @staticmethod
    def of(pages: LayerPages | None) -> LayerKV:
        """The pages of a layer that keeps K and V."""
        assert isinstance(pages, LayerKV), pages
        return pages

    def write(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write k, v [T, KVH, D] to the slots int64 [T], as the kernel `kv_write` does."""
        kv_write(k, v, self.pages, slot_mapping, scales=self.scales)

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [N, KVH, D] at slots int64 [N], in the layout's dtype."""
        if self.scales is not None:
            return kv_gather(self.pages, self.scales, slots, dtype=self.layout.dtype)
        k, v = (part.flatten(0, 1).index_select(0, slots) for part in self.pages)
        return k, v

    def page_buffer(self, num_pages: int) -> Tensor:
        """Memory for `read_pages`."""
        return movable(self.pages).new_empty(2 * num_pages, self.pages[0, 0].numel())

    def read_pages(self, ids: Tensor, buffer: Tensor) -> Tensor:
        """K and V [2, N * page_size, KVH, D] of N pages, in the layout's dtype.

        ids     int64 [2 * N]  the page ids, then the same ids + P
        buffer  of `page_buffer(N)`; the result may be a view of it
        """
        torch.index_select(movable(self.pages).view(-1, buffer.shape[1]), 0, ids, out=buffer)
        values = buffer.view(2, -1, self.layout.num_kv_heads, self.layout.head_dim)
        if self.scales is None:
            return values
        return from_e4m3(values.view(E4M3), self.scales[:, None, :, None], self.layout.dtype)

    def rope_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        freqs: Tensor,
        slot_mapping: Tensor,
        *,
        axes: Tensor | None = None,
        attention_factor: float,
        interleaved: bool,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: bool = False,
        shared_v: bool = False,
    ) -> Tensor:
        """Returns q [T, NH, D], normed and rotated, and writes K, normed and rotated, and V to the slots. One launch: see the
        kernel `rope_write`."""
        num_heads = qkv.shape[1] // self.layout.head_dim - (1 if shared_v else 2) * self.layout.num_kv_heads
        out_q = qkv.new_empty(qkv.shape[0], num_heads, self.layout.head_dim)
        rope_write(
            qkv, positions, freqs, self.pages, slot_mapping, attention_factor=attention_factor, out_q=out_q,
            axes=axes, interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps, v_norm=v_norm, shared_v=shared_v,
            scales=self.scales,
        )
        return out_q
