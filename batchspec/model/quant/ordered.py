"""Batch-invariant products of plain weights (decode.deterministic): sums in one order for any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchspec.kernels.gemm.lm_head import lm_head
from batchspec.kernels.gemm.ordered import ordered_linear, ordered_swiglu
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.forward import Product
from batchspec.model.quant.base import Weights, joined_bias
from batchspec.model.quant.plain import Plain
from batchspec.tuning.policy import ordered_head_tile, ordered_segments, ordered_tile


class OrderedPlain(Plain):
    """`Plain` for models in bf16; the files are the same. Experts are computed as in `Plain`, whose choices change no bits."""

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        weight = torch.cat([weights.tensor(f"{name}.weight") for name in names])
        return OrderedLinear(weight, joined_bias(weights, names) if bias else None)


ORDERED = OrderedPlain()


class OrderedLinear(Product):
    """x [T, in] -> x @ weight.T + bias [T, out], in bf16. Norms and residual sums are not fused: that would round differently.

    The library's product is never used: its order of sums depends on the number of tokens.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._rows, self._k = weight.shape
        self._segments = ordered_segments(self._rows, self._k)

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        tile = ordered_tile(x.shape[0], self._rows, self._k, self._segments, x.device)
        return ordered_linear(
            x, self._weight, self._bias, segments=self._segments, tile=tile, interpret=not x.is_cuda
        )

    def swiglu(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        tile = ordered_tile(x.shape[0], self._rows, self._k, self._segments, x.device, gated=True)
        return ordered_swiglu(
            x, self._weight, self._bias, segments=self._segments, tile=tile, interpret=not x.is_cuda
        )


class OrderedHead:
    """The output matrix: logits and greedy choices of a token depend on its hidden state alone. The sum over H is one segment."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._rows, self._k = weight.shape

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden bf16 [N, H] -> fp32 [N, V]."""
        out = torch.empty(hidden.shape[0], self._rows, dtype=torch.float32, device=hidden.device)
        tile = ordered_tile(hidden.shape[0], self._rows, self._k, 1, hidden.device)
        return ordered_linear(hidden, self.weight, segments=1, tile=tile, out=out, interpret=not hidden.is_cuda)

    def greedy(
        self, hidden: Tensor, *, out_ids: Tensor, vocab: int | None, flag_nonfinite: bool,
        allowed: tuple[Tensor, Tensor] | None = None, out_confidence: Tensor | None = None,
    ) -> None:
        """The tokens int32 [N] of the largest of these logits, as the kernel `lm_head` finds them. Masks are not supported.
        Of out_confidence the last bit may depend on the batch: no token does."""
        assert allowed is None
        tile = ordered_head_tile(hidden.shape[0], self._rows, self._k, hidden.device)
        lm_head(
            hidden, self.weight, out_ids=out_ids, tile=tile, vocab=vocab, flag_nonfinite=flag_nonfinite,
            out_confidence=out_confidence, interpret=not hidden.is_cuda,
        )

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)

    def masks_in_product(self, hidden: Tensor) -> bool:
        return False
