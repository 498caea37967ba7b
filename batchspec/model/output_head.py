"""The output matrix of a target: logits, and greedy choices without logits. N rows of hidden states [N, H], V tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from batchspec.kernels.gemm.lm_head import lm_head
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.sampling.argmax import argmax
from batchspec.kernels.sampling.softcap import softcap
from batchspec.model.quant.ordered import OrderedHead
from batchspec.model.quant.plain import Linear
from batchspec.tuning.policy import gemm_tile

Allowed = tuple[Tensor, Tensor]
"""masks and mask_rows of the kernel `lm_head`: the tokens that may be chosen."""


class OutputHead(Protocol):
    """Logits are in fp32 (fp64 for a fp64 model): rounded to bf16 they would tie, and ties are broken differently in batches of
    other shapes.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V], which nothing else holds"""

    def greedy(
        self, hidden: Tensor, *, out_ids: Tensor, vocab: int | None, flag_nonfinite: bool, allowed: Allowed | None = None,
        out_confidence: Tensor | None = None,
    ) -> None:
        """out_ids int32 [N]: the token of each row's largest logit, and out_confidence, as the kernel `argmax`.

        allowed  only where `masks_in_product`
        """

    def rows(self, ids: Tensor) -> Tensor:
        """A copy of the rows of the matrix at ids int64 [n], in any dtype that holds them."""

    def masks_in_product(self, hidden: Tensor) -> bool:
        """Whether `greedy` of these rows writes no logits, so that `allowed` must tell it which tokens may be chosen."""


def output_head(weight: Tensor, *, ordered: bool, scaling: float | None = None, cap: float | None = None) -> OutputHead:
    """weight [V, H]; ordered: sums in the same order for any number of rows (decode.deterministic); scaling: the logits are
    divided by it; cap: then they are cap * tanh(logit / cap)."""
    if scaling is not None or cap is not None:
        return ChangedHead(output_head(weight, ordered=ordered), scaling, cap)
    if ordered:
        return OrderedHead(weight)
    if weight.is_cuda and weight.dtype is torch.bfloat16:
        return NarrowHead(weight)
    return WideHead(weight)


class WrittenLogits(ABC):
    """An output head that writes the logits of a greedy choice, and then chooses."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V]"""

    def greedy(
        self, hidden: Tensor, *, out_ids: Tensor, vocab: int | None, flag_nonfinite: bool, allowed: Allowed | None = None,
        out_confidence: Tensor | None = None,
    ) -> None:
        assert allowed is None
        logits = self.logits(hidden)
        argmax(logits, out_ids=out_ids, vocab=vocab, flag_nonfinite=flag_nonfinite, out_confidence=out_confidence)

    def masks_in_product(self, hidden: Tensor) -> bool:
        return False


class ChangedHead(WrittenLogits):
    """Another head whose logits are divided by a number, and then capped. All choices are made among the results: rounding may
    make two logits one number, and then the lower id is chosen in every way."""

    def __init__(self, head: OutputHead, scaling: float | None, cap: float | None) -> None:
        self._head, self._scaling, self._cap = head, scaling, cap

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._head.logits(hidden)
        if self._scaling is not None:
            logits.div_(self._scaling)
        if self._cap is not None:
            softcap(logits, self._cap)
        return logits

    def rows(self, ids: Tensor) -> Tensor:
        return self._head.rows(ids)


class WideHead(WrittenLogits):
    """The matrix in the dtype of its logits."""

    def __init__(self, weight: Tensor) -> None:
        self._dtype = torch.float64 if weight.dtype is torch.float64 else torch.float32
        self._product = Linear(weight.to(self._dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._product(hidden.to(self._dtype))

    def rows(self, ids: Tensor) -> Tensor:
        return self._product.weight_rows(ids)


class NarrowHead(WrittenLogits):
    """The matrix in bf16 on a GPU, which multiplies bf16 with an fp32 result."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.mm(hidden, self._weight.t(), out_dtype=torch.float32)

    def greedy(
        self, hidden: Tensor, *, out_ids: Tensor, vocab: int | None, flag_nonfinite: bool, allowed: Allowed | None = None,
        out_confidence: Tensor | None = None,
    ) -> None:
        tile = self._tile(hidden)
        if tile is None:
            super().greedy(
                hidden, out_ids=out_ids, vocab=vocab, flag_nonfinite=flag_nonfinite, allowed=allowed,
                out_confidence=out_confidence,
            )
            return
        masks, mask_rows = allowed or (None, None)
        lm_head(
            hidden, self._weight, out_ids=out_ids, tile=tile, vocab=vocab, flag_nonfinite=flag_nonfinite, masks=masks,
            mask_rows=mask_rows, out_confidence=out_confidence,
        )

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight.index_select(0, ids)

    def masks_in_product(self, hidden: Tensor) -> bool:
        return self._tile(hidden) is not None

    def _tile(self, hidden: Tensor) -> Tile | None:
        """The tile of the product that chooses tokens itself; None: logits are written."""
        num_tokens, size = self._weight.shape
        return gemm_tile("lm_head", hidden.shape[0], num_tokens, size, hidden.device)
