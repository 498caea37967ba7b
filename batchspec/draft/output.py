"""The draft tokens of a head's output: its own output matrix, over the tokens that it can draft, or the target's.

N rows, H hidden, V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.draft.coupled import Draws
from batchspec.kernels.gemm.lm_head import lm_head
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.sampling.argmax import argmax, confidence_of
from batchspec.model.quant.plain import Linear
from batchspec.model.target import Target
from batchspec.model.vocabulary import gather_logits, greedy_of_ranks
from batchspec.tuning.policy import gemm_tile


class DraftOutput:
    """Chooses draft tokens. Logits are in fp32, as the target's are, so that rounding makes no ties (fp64 for an fp64 model)."""

    def __init__(
        self, target: Target, matrix: Tensor | None, map_ids: Tensor | None, *, draft_vocab_size: int, part: slice,
        ranks: Collectives | None, argmax: bool,
    ) -> None:
        """
        matrix   [draft ids of `part`, H]; None: the target's output matrix
        map_ids  int32 [V] target id of each draft id; None: they are equal
        part     the draft ids whose logits this process computes: all, unless ranks divide the matrix
        ranks    those that compute the head together; None: this process alone
        argmax   False: drafts are chosen by softmax and top-k (ablation)
        """
        self.map_ids = map_ids
        self._target, self._matrix, self._ranks, self._argmax = target, matrix, ranks, argmax
        self._vocab_size, self._part = draft_vocab_size, part
        # A GPU multiplies bf16 with fp32 results itself.
        self._fp32_out = matrix is not None and matrix.is_cuda and matrix.dtype is torch.bfloat16
        self.dtype = torch.float64 if target.dtype is torch.float64 else torch.float32
        self._scores = None if matrix is None or self._fp32_out else Linear(matrix.to(self.dtype))

    def choose(
        self, normed: Tensor, out_ids: Tensor, draws: Draws | None = None, out_confidence: Tensor | None = None
    ) -> None:
        """normed [N, H] after the final norm -> the target id of each row's most probable draft token, int32 [N] of any stride.

        draws           noise and rules that are applied before the choice
        out_confidence  int32 [N] of any stride: how sure each choice is, as `argmax` writes it; None: not asked for
        """
        if draws is not None:
            draws.choose(self.logits(normed), out_ids, self.map_ids, out_confidence)
        elif not self._argmax:
            best = torch.softmax(self.logits(normed), -1).topk(1, dim=-1)
            self._store(best.indices.squeeze(1), out_ids)
            if out_confidence is not None:
                out_confidence.copy_(confidence_of(1 / best.values.squeeze(1).nan_to_num(0.0)))
        elif self._matrix is None:
            out_ids.copy_(self._target.greedy_sample(normed, out_confidence=out_confidence))
        elif self._ranks is not None:
            own = self._own_logits(normed, self._matrix)
            self._store(greedy_of_ranks(own, self._part.start, self._ranks, out_confidence=out_confidence), out_ids)
        elif (tile := self._fused_tile(normed)) is not None:
            lm_head(
                normed, self._matrix, out_ids=out_ids, map_ids=self.map_ids, out_confidence=out_confidence, tile=tile
            )
        else:
            argmax(self.logits(normed), out_ids=out_ids, map_ids=self.map_ids, out_confidence=out_confidence)

    def branches(self, normed: Tensor, count: int, draws: Draws | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """normed [N, H] after the final norm -> the most probable draft tokens of each, in descending order.

        Returns their logits [N, count], the log of the sum of all exponentials [N], and their draft ids int64 [N, count].
        """
        logits = self.logits(normed)
        if draws is not None:
            draws.branches(logits, self.map_ids)
        best = logits.topk(count, dim=1)
        return best.values, torch.logsumexp(logits, 1), best.indices

    def logits(self, normed: Tensor) -> Tensor:
        """[N, V]"""
        if self._matrix is None:
            return self._target.all_logits(normed)
        own = self._own_logits(normed, self._matrix)
        return own if self._ranks is None else gather_logits(own, self._vocab_size, self._ranks)

    def rewrite(self, matrix: Tensor, map_ids: Tensor) -> None:
        """Draft other tokens: overwrite matrix and table in place, where captured rounds read them."""
        assert self._matrix is not None
        assert self.map_ids is not None
        self._matrix.copy_(matrix)
        self.map_ids.copy_(map_ids)
        if self._scores is not None:
            self._scores.rewrite(matrix.to(self.dtype))

    def _store(self, draft_ids: Tensor, out_ids: Tensor) -> None:
        out_ids.copy_(draft_ids if self.map_ids is None else self.map_ids.index_select(0, draft_ids))

    def _fused_tile(self, normed: Tensor) -> Tile | None:
        """The tile with which product and argmax are one kernel, if that was measured to be faster than two; else None."""
        if self._matrix is None or not self._fp32_out:
            return None
        vocab, size = self._matrix.shape
        return gemm_tile("lm_head", normed.shape[0], vocab, size, normed.device)

    def _own_logits(self, normed: Tensor, matrix: Tensor) -> Tensor:
        """Logits [N, draft ids of the part]."""
        if self._scores is None:
            return torch.mm(normed, matrix.t(), out_dtype=torch.float32)
        return self._scores(normed.to(self.dtype))
