"""The layout of keys and values in memory, and one layer's pages in it. Everything that depends on the K/V format is here and in
the kernels that this file and the attention plans call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.kernels.kv_cache.kv_write import kv_write
from batchspec.kernels.norm_rope.rope_write import rope_write


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The K/V format of one layer: a page holds K and V of `page_size` tokens, num_kv_heads * head_dim numbers of `dtype` each.

    K and V have no scales: they are stored in the dtype in which the model computes.
    """

    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens."""

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_size * self.token_bytes

    def allocate(self, num_layers: int, num_pages: int, device: torch.device) -> Tensor:
        """Zeroed pages [num_layers, 2 (K, V), P, page_size, KVH, D]. Zeroed, so that unwritten slots, which may be read under a
        mask, are finite."""
        shape = (num_layers, 2, num_pages, self.page_size, self.num_kv_heads, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One layer's K/V pages. Model layers only pass it on; this file, the plans in `cache/` and the kernels access its fields."""

    pages: Tensor
    """[2 (K, V), P, page_size, KVH, D]"""
    layout: KVLayout

    def write(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write k, v [T, KVH, D] to the slots int64 [T], as the kernel `kv_write` does."""
        kv_write(k, v, self.pages, slot_mapping)

    def rope_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        freqs: Tensor,
        slot_mapping: Tensor,
        *,
        attention_factor: float,
        interleaved: bool,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Returns q [T, NH, D], normed and rotated, and writes K, normed and rotated, and V to the slots. One launch: see the
        kernel `rope_write`."""
        num_heads = qkv.shape[1] // self.layout.head_dim - 2 * self.layout.num_kv_heads
        out_q = qkv.new_empty(qkv.shape[0], num_heads, self.layout.head_dim)
        rope_write(
            qkv, positions, freqs, self.pages, slot_mapping, attention_factor=attention_factor, out_q=out_q,
            interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        return out_q
