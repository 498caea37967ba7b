"""The interfaces that a block's forward pass uses, so that it is written once: products, the residual stream, K/V, attention.

Inference implements these with packed weights and fused kernels in place (`model/decoder.py`, `model/quant`), training with
operations that gradients flow through (`heads/layer.py`). T tokens, H hidden, NH heads of D numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.units import Routing
from batchspec.model.fused import rms_norm, silu_and_mul
from batchspec.model.layers.base import Gating, GroupedSpec, ProductSpec


class Product(ABC):
    """x [T, k] -> x W' + b [T, rows], for the parts of one ProductSpec.

    lora  which tokens go through which adapter (`model/lora_products.py`); None in a model without. Other products ignore it
    A weight format must implement `__call__`; it overrides the methods for which it has faster kernels.
    """

    @abstractmethod
    def __call__(self, x: Tensor, lora: LoraTokens | None) -> Any:
        """The parts' outputs, concatenated [T, rows]; in training one tensor per part."""

    def rows_from(self, first: int) -> Product:
        """The product of its rows from `first` on. On a GPU without copies of weights."""
        return _RowsFrom(self, first)

    def swiglu(self, x: Tensor, lora: LoraTokens | None) -> Tensor:
        """silu(first half) * second half of self(x)."""
        return silu_and_mul(self(x, lora))

    def norms_input(self, x: Tensor, *, gated: bool) -> bool:
        """Whether `of_norm` (gated: `swiglu_of_norm`) of as many tokens is one kernel that is faster than norm and product."""
        return False

    def of_norm(self, x: Tensor, norm: Tensor, eps: float, lora: LoraTokens | None) -> Any:
        """self(rms_norm(x))."""
        return self(rms_norm(x, norm, eps), lora)

    def swiglu_of_norm(self, x: Tensor, norm: Tensor, eps: float, lora: LoraTokens | None) -> Tensor:
        """self.swiglu(rms_norm(x))."""
        return self.swiglu(rms_norm(x, norm, eps), lora)

    @property
    def fp8_form(self) -> Fp8Form | None:
        """How it quantises its input rows, if the kernel before it may do so for `of_fp8`; None: it reads rows in the model's
        dtype."""
        return None

    def of_fp8(self, x: Fp8Tokens) -> Tensor:
        """self of rows that are quantised as `fp8_form` says. Only if that is not None."""
        raise NotImplementedError

    def add_to(self, residual: Tensor, x: Tensor, lora: LoraTokens | None) -> Tensor | None:
        """If a fast kernel does both, residual += self(x), and returns None; otherwise returns self(x), still to be added."""
        out: Tensor = self(x, lora)
        return out


class _RowsFrom(Product):
    """All rows are computed, and the first ones are dropped."""

    def __init__(self, product: Product, first: int) -> None:
        self._product, self._first = product, first

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        out: Tensor = self._product(x, lora)
        return out[:, self._first :]


class GroupedProduct(Protocol):
    """The product of each expert of a layer with the pairs that go through it (`kernels/moe/units.py`): P pairs, k per token.

    The first of the two products of an expert is called by `up`, the second by `down`.
    """

    @property
    def weight_dtype(self) -> torch.dtype:
        """dtype of the weights in memory; uint8 is MXFP4, int32 INT4 or NVFP4, float4 NVFP4 without kernels. How tokens are tiled
        depends on it (`tuning/policy.py`)."""

    @property
    def reads_rows(self) -> bool:
        """Whether `up` reads `Routing.rows`: the rows of x copied in the order of the list of pairs."""

    @property
    def reads_groups(self) -> bool:
        """Whether `down` quantises its input to e4m3, with a scale for each 128 values, unless it is quantised already."""

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor | Fp8Rows:
        """x [T, H] -> `gating` of the first half and the second half of each pair's product: [P, I].

        Rows are in the order of the list of pairs.

        quantise  the result may be quantised as `reads_groups` says
        """

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        """inner [P, I] from `up`, quantised only if `reads_groups` -> each pair's product [P, H] in pair order."""


class Stream(Protocol):
    """The residual stream of a pass. The next norm adds what a block leaves to be added, in the same kernel."""

    @property
    def live(self) -> Tensor | None:
        """bool [T] False for dead tokens. Their results are not used, so they go through no expert. None: no token is dead."""

    @property
    def layer_input(self) -> Tensor:
        """[T, P] what the layer reads besides the stream: see `layers/layer_inputs.py`."""

    def norms_in_product(self, product: Product, *, gated: bool) -> bool:
        """Whether `project` would give this product the un-normed stream, if nothing were left to be added."""

    def project(
        self, norm: Tensor | None, eps: float, product: Product, lora: LoraTokens | None, *, gated: bool = False,
        out_aux: Tensor | None = None,
    ) -> Any:
        """product(rms_norm(stream)); gated: product.swiglu of it; norm None: product(stream).

        out_aux  [T, H]: the stream is written here if it is given
        """

    def normed(self, norm: Tensor, eps: float, *, out_aux: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """rms_norm(stream) [T, H], written to `out` if given. out_aux [T, H]: the stream is written here if it is given."""

    def settle(self, out_aux: Tensor) -> None:
        """Add what is left to be added, without a norm, and write the stream to out_aux [T, H]."""

    def reduced(self, values: Tensor) -> Tensor:
        """The outputs [T, H] of a product that is cut by rows, summed over all ranks; without ranks the values themselves."""

    def add(self, values: Tensor, factor: Tensor | None = None) -> None:
        """stream += values [T, H], the same on all ranks; then stream *= factor [1], if it is given."""

    def add_output(self, values: Tensor) -> None:
        """stream += values [T, H] of a product that is cut by rows, summed over all ranks."""

    def add_pairs(self, values: Tensor, weights: Tensor, shared: Tensor | None = None) -> None:
        """stream += shared [T, H], if it is given, and the sum over each token's slots of weights [T, k] * values [T * k, H], in
        slot order; both summed over all ranks."""

    def combined(self, values: Tensor, weights: Tensor) -> Tensor:
        """[T, N] the sum over each token's slots of weights [T, k] * values [T * k, N], in slot order; of this rank alone."""

    def add_product(self, product: Product, x: Tensor, lora: LoraTokens | None, *, in_product: bool) -> None:
        """stream += product(x), summed over all ranks. in_product: in the product's own kernel if it has one."""


class StoreKV(Protocol):
    """The part of attention before the scores, in one layer: positions, and the slots of K and V."""

    @property
    def lora(self) -> LoraTokens | None:
        """Which tokens go through which adapter; None in a model without."""

    def rotate_and_store(
        self, qkv: Any, *, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, v_norm: bool = False, shared_v: bool = False
    ) -> Tensor:
        """The output of the product of q, k and v -> q [T, NH, D], normed and rotated; stores K, treated the same, and V.

        q_norm, k_norm  weights of the norm of each head [D], or of all heads at once [NH * D] and [KVH * D]; or None
        v_norm          each head of V is normed, without a weight
        shared_v        the product has no rows of V: it is what K is before its norm and rotation
        """


    def rotate(self, q: Tensor, *, q_norm: Tensor | None, eps: float) -> Tensor:
        """The output of the product of q [T, NH * D] -> q [T, NH, D], normed and rotated, of a layer that keeps no K and V.
        q_norm [D], the weight of the norm of each head, or None."""


class Selected(Protocol):
    """The tokens of the second part of a layer, possibly fewer than those of the first."""

    @property
    def lora(self) -> LoraTokens | None:
        """Which of these tokens go through which adapter; None in a model without."""


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """The same as data."""

    lora: LoraTokens | None


class Attend(Selected, Protocol):
    """The rest of attention: which query attends to which keys."""

    def __call__(self, q: Tensor, scale: float, sink_logits: Tensor | None = None) -> Tensor:
        """q [T, NH, D] -> attended values [T, NH * D] over the stored K and V.

        sink_logits  fp32 [NH], in the softmax as one more key of each head, whose value is 0; or None
        """


class BlockSource(Protocol):
    """The source of a block's weights; names are relative to its layer."""

    def product(self, spec: ProductSpec) -> Product:
        """Called once for each product, in the order of the block's `products`."""

    def matrix(self, spec: ProductSpec) -> Tensor:
        """In place of `product`, the weight [N, K] of a product of one projection, in any floating-point dtype: for what is
        multiplied otherwise, with inputs that are not quantised."""

    def vector(self, name: str) -> Tensor:
        """A norm or another small tensor, by its full relative name."""

    def grouped(self, spec: GroupedSpec) -> GroupedProduct:
        """Called once for each grouped product, in order."""


class Block(Protocol):
    """A block that computes: it reads a norm of the stream and adds to the stream."""

    @property
    def num_experts_read(self) -> Tensor | None:
        """int32 [1]: number of experts that had tokens in the latest forward pass, for statistics. None without experts."""

    def pass_sizes(self, most: int) -> Sequence[int]:
        """Numbers of tokens, up to `most`, from which on it takes other kernels, if these are no powers of two."""

    def norms_in_product(self, stream: Stream) -> bool:
        """Whether its first product takes the un-normed stream for as many tokens; then the block before it adds in place."""

    def __call__(self, stream: Stream, lora: LoraTokens | None, *, add_in_product: bool) -> None:
        """
        lora            which tokens go through which adapter; None in a model without
        add_in_product  the next norm is fused into a product, so the last product of this block adds to the stream itself
        """
