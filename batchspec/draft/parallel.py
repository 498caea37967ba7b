"""Parallel drafting: a head that was trained with mask tokens drafts K tokens in one forward pass, whatever K is.

    position p of a row  e = embed(token[p+1]),  h = fc(aux_hidden_states[p])    as in a chain; p = num_tokens - 2 is the last
    position p + j       e = embed(mask token),  h = fc(mask_hidden)             j = 1..K-1, RoPE position p + j, causal
    draft k              argmax lm_head(norm(residual)) at position p + k - 1

Catch-up and prefill write K/V from the target's hidden states only and keep fc of the last position. A round runs its K positions
through the head at once. K/V of mask tokens are in the slots of the positions to verify: the catch-up overwrites them, and no
kv_len reaches them before that. Position p keeps its K/V. In the first round it is the last one of the prompt, perhaps of an
image.
Source: P-EAGLE (2026, arXiv 2602.01469), parallel token decoding (https://github.com/vllm-project/vllm/pull/32628).
Legend: R rows, T flat positions, K draft_len, H hidden, W = len(aux_layer_ids) * target hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.cache.layer_state import RowTensor
from batchspec.cache.pages import KVCache
from batchspec.draft.bound_head import HeadShape, Place
from batchspec.draft.coupled import later_draws
from batchspec.draft.head import Head
from batchspec.draft.head_tensors import feature_width
from batchspec.draft.reader import HeadReader, Reading, zeros_on
from batchspec.kernels.drafting.gather_last_accepted import gather_last_accepted
from batchspec.kernels.drafting.prepare_parallel_draft_inputs import prepare_parallel_draft_inputs
from batchspec.model.target import Target


class ParallelDrafter(HeadReader):
    """Keeps for each slot fc(aux_hidden_states) at its row's last verified position.

    Nothing is read back to the host and no shape depends on data: a round with it can be captured in a CUDA graph.
    """

    name = "parallel"

    def __init__(self, head: Head, target: Target, draft_len: int, *, slots: int, **reading: Unpack[Reading]) -> None:
        """head: one with a mask token; raises ValueError otherwise."""
        super().__init__(head, target, draft_len, **reading)
        spec, device, places = head.spec, target.device, slots * draft_len
        if spec.mask_token_id is None:
            raise ValueError("ParallelDrafter: the head has no mask token; give one that was trained for parallel drafting")
        self._mask_id, self._mask_hidden = spec.mask_token_id, self._feature_of(head)
        zeros = partial(zeros_on, device)
        self._fed = zeros(places, spec.hidden_size, dtype=target.dtype)
        self._ids, self._kv_len = zeros(places), zeros(slots)
        self._positions, self._slots = zeros(places, dtype=torch.int64), zeros(places, dtype=torch.int64)
        self._layout = UniformLayout(slots, range(1, draft_len + 1), device)

    @torch.inference_mode()
    def _feature_of(self, head: Head) -> Tensor:
        """[H] h of a mask token. A checkpoint stores it before fc, [1, W], or after fc, [1, H]; without fc it is h itself."""
        mask_hidden = head.tensors["mask_hidden"]
        if mask_hidden.shape[1] == feature_width(head.spec) and not head.spec.final_hidden:
            mask_hidden = self.head.features(mask_hidden)
        return mask_hidden[0]

    @staticmethod
    def row_tensors(spec: HeadShape, dtype: torch.dtype) -> tuple[RowTensor, ...]:
        return (RowTensor((spec.hidden_size,), dtype),)

    @torch.inference_mode()
    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        assert aux_hidden_states is not None
        features = self.head.features(aux_hidden_states)
        cache.enter(slot_ids, batch.kv_len, (features.index_select(0, batch.cu_seqlens_q[1:] - 1),))
        self._keep(batch, rows.tokens, slot_ids.index_select(0, batch.row_ids), features, cache)

    @torch.inference_mode()
    def catch_up(
        self,
        batch: FlatBatch,
        aux_hidden_states: Tensor | None,
        accepted_len: Tensor,
        rows: DeviceBatch,
        cache: KVCache,
        *,
        prepare_next: bool,
    ) -> None:
        assert aux_hidden_states is not None
        features, num_rows = self.head.features(aux_hidden_states), accepted_len.shape[0]
        if prepare_next:
            gather_last_accepted(
                features, None, batch.cu_seqlens_q, accepted_len, batch.positions, rows.num_tokens, rows.live,
                out_q=cache.draft_rows[0][:num_rows], out_residual=None, out_positions=self._positions[:num_rows],
                out_kv_len=self._kv_len[:num_rows],
            )
        self._keep(batch, rows.tokens, batch.row_ids, features, cache)

    def _keep(self, batch: FlatBatch, tokens: Tensor, line: Tensor, features: Tensor, cache: KVCache) -> None:
        """Write K/V of all T positions. Nothing is drafted here, so the last layer stops after its K/V."""
        if not self._prune:
            self._read(batch, tokens, line, features, cache, self._last + 1)
            return
        normed, _, at = self._read(batch, tokens, line, features, cache, self._last)
        self.head.keep(self._last, normed, at, self._pages(cache, self._last))

    @torch.inference_mode()
    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        """Run K positions a row through the whole head. K/V of the first one exists already and is kept."""
        num_rows, width = draft_ids.shape
        ids, fed, positions, slots = (x[: num_rows * width] for x in (self._ids, self._fed, self._positions, self._slots))
        kv_len, page_table = self._kv_len[:num_rows], cache.draft_table(rows)
        prepare_parallel_draft_inputs(
            rows.tokens, rows.num_tokens, rows.live, page_table, cache.draft_rows[0][:num_rows], self._mask_hidden,
            mask_id=self._mask_id, page_size=cache.page_size, out_ids=ids, out_hidden=fed, out_positions=positions,
            out_slot_mapping=slots, out_kv_len=kv_len, out_draft_len=draft_len,
        )
        batch = self._layout.batch(ids.view(num_rows, width), positions, slots, kv_len, page_table, rows.max_kv)
        normed, residual = self.head.enter(ids, fed)
        at = Place(self._rope(rows.rope_positions_from_prompt(positions, batch.row_ids)), slots)
        plans = self._plans(batch, cache, range(self._last + 1))
        for i, window in enumerate(self._windows):
            normed = self.head.layer(i, normed, residual, at, self._pages(cache, i), plans[window])
        draws = later_draws(self.mode, rows, batch.row_ids, positions, ahead=2, drafts=draft_ids)
        sure = None if self.confidence is None else self.confidence[:num_rows, :width]
        if draws is None:
            flat = None if sure is None else torch.empty_like(ids)
            self.head.output.choose(normed, ids, out_confidence=flat)
            draft_ids.copy_(ids.view(num_rows, width))
            if sure is not None and flat is not None:
                sure.copy_(flat.view(num_rows, width))
        else:
            draws.choose_parallel(self.head.output.logits(normed), draft_ids, self.head.output.map_ids, sure)
