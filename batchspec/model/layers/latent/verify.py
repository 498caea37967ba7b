"""Rounds of latent attention on a GPU, in the absorbed form: the plan that all layers share. Making it reads nothing back."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.settings import MAX_QUERIES
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.latent.settings import DTYPES
from batchspec.kernels.latent.verify_latents import verify_latents
from batchspec.model.layers.latent.attend import HeadSizes, Matrices
from batchspec.model.layers.latent.pages import LatentPages
from batchspec.tuning.policy import latent_attention_shape


def fits_verify(batch: FlatBatch, pages: LatentPages) -> bool:
    """Whether `LatentVerifyPlan` supports this batch: short rows, and a dtype that the kernel supports."""
    return pages.pages.is_cuda and batch.max_q <= MAX_QUERIES and pages.layout.dtype in DTYPES


class LatentVerifyPlan:
    """The `LatentPlan` of rows of at most 64 queries. Does not synchronise."""

    def __init__(
        self, batch: FlatBatch, pages: LatentPages, num_heads: int, sizes: HeadSizes, *, window: int | None, sink: int
    ) -> None:
        layout = pages.layout
        shape = latent_attention_shape(
            num_rows=batch.kv_len.shape[0], max_q=batch.max_q, max_kv=batch.max_kv, num_heads=num_heads,
            latent_dim=sizes.latent_dim, page_size=layout.page_size, dtype=layout.dtype, fp8=layout.fp8,
            device=pages.pages.device, window=window, sink=sink,
        )
        self._batch = batch
        self._work = split_kv_schedule(batch.cu_seqlens_q, batch.kv_len, batch.positions, shape=shape)
        self._partials = partials_of(self._work, sizes.latent_dim)
        self._listed = False  # as of `VerifyPlan`

    def attend(
        self, q: Tensor, pages: LatentPages, matrices: Matrices, sizes: HeadSizes, scale: float, positions: Tensor | None = None
    ) -> Tensor:
        queries, rotated = q.split((sizes.key_dim, sizes.rope_dim), -1)
        queries = torch.bmm(queries.transpose(0, 1), matrices.keys).transpose(0, 1)
        found = q.new_empty(queries.shape)
        verify_latents(
            queries, rotated, pages.vectors, self._batch.page_table, self._batch.positions if positions is None else positions,
            self._work, self._partials, scale=scale, out=found, early=self._listed,
        )
        self._listed = True
        out = q.new_empty(*q.shape[:2], sizes.value_dim)
        torch.bmm(found.transpose(0, 1), matrices.values.mT, out=out.transpose(0, 1))
        return out
