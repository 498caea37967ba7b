"""Chooses the drafts of a block from its states: most likely tokens, or a walk over the best of each draft.

    Markov matrices (DSpark)   scores of candidates: logit + w2 . w1[the token before]
    a selector (DFlash2)       logit + b . (a[the token before] * P state)

The candidates of sampled rows are the best with the noise of the target's draws, which a walk may then choose.
R rows, K drafts a row, H hidden, V draft vocabulary, C candidates, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.draft.block_head import BlockWeights
from batchspec.draft.block_parts import CONFIDENCE, CONFIDENCE_BIAS, MARKOV, MARKOV_OUT, PREDECESSORS, SELECTOR, SUCCESSORS
from batchspec.draft.coupled import Draws
from batchspec.draft.output import DraftOutput
from batchspec.kernels.drafting.walk_candidates import walk_candidates
from batchspec.kernels.sampling.argmax import CONFIDENCE_BINS
from batchspec.kernels.sampling.top_candidates import top_candidates
from batchspec.model.quant.plain import Linear


class CandidateWalk:
    """See the module. The confidence, if the head has an estimate of it, reads tokens before the draft alone."""

    def __init__(self, head: BlockWeights, output: DraftOutput) -> None:
        tensors, size = head.tensors, head.spec.hidden_size
        self._output, self._most = output, min(head.spec.candidates, head.spec.draft_vocab_size)
        self._matrices = (tensors[MARKOV], tensors[MARKOV_OUT]) if head.spec.markov_rank else None
        self._gate = None
        if head.spec.selector_rank:
            self._matrices, self._gate = (tensors[PREDECESSORS], tensors[SUCCESSORS]), Linear(tensors[f"{SELECTOR}.weight"])
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
        gate = None if self._gate is None else self._gate(states).unflatten(0, draft_ids.shape)
        if draws is None or not draws.in_turns:
            if draws is not None:
                draws.branches(logits, self._output.map_ids)
            self._walk(logits, newest, draft_ids, draws, gate, sure, out_confidence)
            return
        for k in range(width):
            turn, place = draws.turn(k, width), slice(k, k + 1)
            turn.branches(own := logits[k::width], self._output.map_ids)
            parts = (None if x is None else x[:, place] for x in (gate, sure, out_confidence))
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
        self, logits: Tensor, before: Tensor, draft_ids: Tensor, draws: Draws | None, gate: Tensor | None, sure: Tensor | None,
        out_confidence: Tensor | None,
    ) -> None:
        """logits [R * K, V] with noise and rules; before int32 [R] of any stride; gate [R, K, r]."""
        assert self._matrices is not None
        values = logits.new_empty(len(logits), self._most)
        ids = torch.empty_like(values, dtype=torch.int64)
        top_candidates(logits, self._most, out_values=values, out_ids=ids)
        heat = draws.rows.temperature[: len(before)] if draws is not None and draws.mode.random else None
        shape = (*draft_ids.shape, self._most)
        walk_candidates(
            values.view(shape), ids.view(shape), before, *self._matrices, out_ids=draft_ids,
            gate=None if gate is None else gate.contiguous(), map_ids=self._output.map_ids, temperature=heat,
            sure_of_state=None if sure is None else sure.contiguous(), sure_of_token=None if sure is None else self._of_token,
            out_confidence=out_confidence,
        )
