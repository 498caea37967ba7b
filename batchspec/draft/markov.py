"""Chooses the drafts of a block from its states: most likely tokens, or with Markov matrices a walk over the best of each draft.

R rows, K drafts a row, H hidden, V draft vocabulary, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.draft.block_head import BlockWeights
from batchspec.draft.block_spec import CONFIDENCE, CONFIDENCE_BIAS, MARKOV, MARKOV_OUT
from batchspec.draft.coupled import Draws
from batchspec.draft.output import DraftOutput
from batchspec.kernels.drafting.walk_candidates import walk_candidates
from batchspec.kernels.sampling.argmax import CONFIDENCE_BINS
from batchspec.kernels.sampling.top_candidates import top_candidates

CANDIDATES = 16
"""Best tokens of each draft, before the bias of the token before it: as many as in vLLM."""


class MarkovWalk:
    """See the module. The confidence, if the head has an estimate of it, reads tokens before the draft alone."""

    def __init__(self, head: BlockWeights, output: DraftOutput) -> None:
        tensors, size = head.tensors, head.spec.hidden_size
        self._output, self._most = output, min(CANDIDATES, head.spec.draft_vocab_size)
        self._matrices = (tensors[MARKOV], tensors[MARKOV_OUT]) if head.spec.markov_rank else None
        self._of_state = self._of_token = self._bias = None
        if head.spec.confidence != "none":
            weight, self._bias = tensors[CONFIDENCE][0], tensors[CONFIDENCE_BIAS]
            self._of_state = weight[:size].contiguous()
            self._of_token = weight[size:].contiguous() if head.spec.confidence == "markov" else None

    def choose(
        self, states: Tensor, newest: Tensor, draft_ids: Tensor, draws: Draws | None, out_confidence: Tensor | None
    ) -> None:
        """states [R * K, H] after the final norm -> draft_ids int32 [R, K].

        newest          int32 [R] of any stride: each row's newest token
        draws           noise and rules for the drafts, made with `draft_ids`
        out_confidence  int32 [R, K] or None
        """
        sure = None if out_confidence is None or self._of_state is None else self._sure(states, draft_ids)
        if self._matrices is None:
            measured = out_confidence if sure is None else None
            self._choose_alone(states, draft_ids, draws, measured)
            if out_confidence is not None and sure is not None:
                out_confidence.copy_((4 * (sure.nan_to_num(-9.0) + 3)).floor().clamp(0, CONFIDENCE_BINS - 1))
            return
        logits, width = self._output.logits(states), draft_ids.shape[1]
        if draws is None or not draws.in_turns:
            if draws is not None:
                draws.branches(logits, self._output.map_ids)
            self._walk(logits, newest, draft_ids, draws, sure, out_confidence)
            return
        for k in range(width):
            turn, place = draws.turn(k, width), slice(k, k + 1)
            turn.branches(own := logits[k::width], self._output.map_ids)
            parts = (None if x is None else x[:, place] for x in (sure, out_confidence))
            self._walk(own, newest if k == 0 else draft_ids[:, k - 1], draft_ids[:, place], turn, *parts)

    def _sure(self, states: Tensor, draft_ids: Tensor) -> Tensor:
        """[R, K] the part of the log odds that the states give."""
        assert self._of_state is not None
        assert self._bias is not None
        return (states.to(self._of_state.dtype) @ self._of_state + self._bias).view(draft_ids.shape)

    def _choose_alone(self, states: Tensor, draft_ids: Tensor, draws: Draws | None, out_confidence: Tensor | None) -> None:
        if draws is not None:
            draws.choose_parallel(self._output.logits(states), draft_ids, self._output.map_ids, out_confidence)
            return
        ids = torch.empty(len(states), dtype=torch.int32, device=states.device)
        sure = None if out_confidence is None else torch.empty_like(ids)
        self._output.choose(states, ids, out_confidence=sure)
        draft_ids.copy_(ids.view_as(draft_ids))
        if out_confidence is not None and sure is not None:
            out_confidence.copy_(sure.view_as(out_confidence))

    def _walk(
        self, logits: Tensor, before: Tensor, draft_ids: Tensor, draws: Draws | None, sure: Tensor | None,
        out_confidence: Tensor | None,
    ) -> None:
        """logits [R * K, V] with noise and rules; before int32 [R] of any stride."""
        assert self._matrices is not None
        values = logits.new_empty(len(logits), self._most)
        ids = torch.empty_like(values, dtype=torch.int64)
        top_candidates(logits, self._most, out_values=values, out_ids=ids)
        heat = draws.rows.temperature[: len(before)] if draws is not None and draws.mode.random else None
        shape = (*draft_ids.shape, self._most)
        walk_candidates(
            values.view(shape), ids.view(shape), before, *self._matrices, out_ids=draft_ids,
            map_ids=self._output.map_ids, temperature=heat,
            sure_of_state=None if sure is None else sure.contiguous(), sure_of_token=None if sure is None else self._of_token,
            out_confidence=out_confidence,
        )
