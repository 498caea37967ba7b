"""Self-speculation with a window: the target drafts for itself, attending only to its newest keys and the first few.

    draft k = argmax of the target at position num_tokens - 1 + k, over keys 0 .. sink-1 and the newest `window` ones

It needs no checkpoint and no copy of K/V: a window is a read range of the same pages. Drafting writes K/V from windowed attention
at the positions that the round then verifies; the verification overwrites all of it before anything reads it. A draft costs a
whole pass over the weights, so it pays only if attention over the full context takes most of a round.
Source: Zhang et al. 2024, "Draft & Verify" (arXiv 2309.08168), where a model drafts with a part of itself; Xiao et al. 2024,
"StreamingLLM" (arXiv 2309.17453), for the window and the sink.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.cache.pages import KVCache
from batchspec.draft.base import NoFeatures
from batchspec.draft.coupled import later_draws
from batchspec.draft.spec import Weightless
from batchspec.kernels.drafting.prepare_chain_draft_inputs import prepare_chain_draft_inputs
from batchspec.kernels.sampling.argmax import PROBABILITIES
from batchspec.model.target import Target


class WindowDrafter(NoFeatures):
    """Drafts K tokens a row by K forward passes over one position a row; keeps nothing from round to round."""

    name = "window"
    fixed_len = True
    prior_chances = PROBABILITIES

    def __init__(
        self, target: Target, draft_len: int, *, slots: int, window: int | None, sink: int = 0, vocab: int | None = None,
        sees_images: bool = True,
    ) -> None:
        """
        window  number of newest keys that a draft reads, its own included; None: all
        sink    number of first keys that it also reads
        vocab   number of token ids to draft from, the lowest; None: all
        sees_images  whether prefill gave the model the images of rows; otherwise positions count their placeholders
        """
        device = target.device
        self.draft_len = draft_len
        self._target, self._window, self._sink, self._vocab, self._sees_images = target, window, sink, vocab, sees_images
        self._ids = torch.zeros(slots, draft_len + 1, dtype=torch.int32, device=device)
        self._lens, self._kv_len = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self._positions, self._slots = torch.zeros(2, draft_len * slots, dtype=torch.int64, device=device)
        self._layout = UniformLayout(slots, (1,), device)

    @torch.inference_mode()
    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        num_rows, width = draft_ids.shape
        by_step = (width, num_rows)
        positions, slots = (x[: width * num_rows].view(by_step) for x in (self._positions, self._slots))
        ids, kv_len = self._ids[:num_rows, : width + 1], self._kv_len[:num_rows]
        page_table, *more_tables = cache.page_tables(rows)
        newest = rows.tokens.gather(1, (rows.num_tokens.long() - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
        # A chain of K + 1 whose first token is known: the newest one, which has no K/V yet.
        prepare_chain_draft_inputs(
            newest, rows.num_tokens, rows.live, page_table, page_size=cache.page_size, max_tokens=rows.tokens.shape[1],
            out_ids=ids, out_draft_len=self._lens[:num_rows], out_positions=positions, out_slot_mapping=slots, out_kv_len=kv_len,
        )
        for k in range(width):
            newest_ids = ids[:, k : k + 1].contiguous()
            step = self._layout.batch(newest_ids, positions[k], slots[k], kv_len, page_table, rows.max_kv)
            step.add_groups(more_tables, cache.page_size)
            step.read_rows(rows)  # as when it verifies
            if not self._sees_images:
                step.rope = None
            hidden, _ = self._target.forward(step, cache, window=self._window, sink=self._sink)
            draws = later_draws(self.mode, rows, step.row_ids, positions[k], ahead=1, drafts=ids[:, 1:])
            sure = None if self.confidence is None else self.confidence[:num_rows, k]
            if draws is None:
                ids[:, k + 1] = self._target.greedy_sample(hidden, vocab=self._vocab, out_confidence=sure)
            else:
                draws.choose(self._target.all_logits(hidden)[:, : self._vocab], ids[:, k + 1], out_confidence=sure)
        draft_ids.copy_(ids[:, 1:])
        torch.mul(rows.live, width, out=draft_len)


class WindowDrafterSpec(Weightless):
    """draft=window."""

    runs_target = True
    assumed_accepted = 1.5
    """A cautious assumption: of three drafts, 2.7 and 2.1 were accepted (jobs/pages/NOTEBOOK.md, "Drafters")."""

    def draft_bytes(self, draft_len: int, *, dtype: torch.dtype, device: torch.device) -> int:
        """The target's weights, once per token."""
        return draft_len * self.target.weight_bytes(dtype)

    def build(self, weights: None, target: Target, *, slots: int) -> WindowDrafter:
        draft = self.config.draft
        assert draft.window is not None
        return WindowDrafter(target, draft.draft_len, slots=slots, window=draft.window, sink=draft.sink_tokens or 0)


SPEC = WindowDrafterSpec
