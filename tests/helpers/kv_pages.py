"""K/V pages made by hand, as layers hand them on."""

from __future__ import annotations

from torch import Tensor

from batchspec.model.layers.attention.kv_layout import KVLayout, LayerKV


def layer_kv(pages: Tensor) -> LayerKV:
    """The layer whose pages [2, P, page_size, KVH, D] these are."""
    page_size, num_kv_heads, head_dim = pages.shape[2:]
    return LayerKV(pages, KVLayout(dtype=pages.dtype, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size))
