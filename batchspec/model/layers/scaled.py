"""Products whose output is multiplied: by a number, as the last one of a block of Granite, or each part of it by its own, as the
first ones of Falcon-H1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.forward import Product


class ScaledProduct(Product):
    """(x W' + b) * factor, rounded before it is multiplied. One launch more than the product."""

    def __init__(self, product: Product, factor: float) -> None:
        self._product, self._factor = product, factor

    def __call__(self, x: Tensor, lora: LoraTokens | None) -> Any:
        return self._product(x, lora) * self._factor

    @property
    def fp8_form(self) -> Fp8Form | None:
        return self._product.fp8_form

    def of_fp8(self, x: Fp8Tokens) -> Tensor:
        return self._product.of_fp8(x) * self._factor


class ColumnScaledProduct(Product):
    """(x W' + b) * factors, rounded before it is multiplied, in place. One launch more than the product.

    factors  fp32, or fp64 for such a model [rows]
    """

    def __init__(self, product: Product, factors: Tensor) -> None:
        self._product, self._factors = product, factors

    def __call__(self, x: Tensor, lora: LoraTokens | None) -> Any:
        out: Tensor = self._product(x, lora)
        return out.mul_(self._factors)

    @property
    def fp8_form(self) -> Fp8Form | None:
        return self._product.fp8_form

    def of_fp8(self, x: Fp8Tokens) -> Tensor:
        return self._product.of_fp8(x).mul_(self._factors)


def column_scaled_product(product: Product, parts: Sequence[tuple[int, float]], like: Tensor) -> Product:
    """The product, times the factor of each part of its output; the product itself if all are 1.

    parts  number of values and factor of each, one after another
    like   a tensor of the model's dtype on its device
    """
    if all(factor == 1 for _, factor in parts):
        return product
    wide = torch.float64 if like.dtype is torch.float64 else torch.float32
    factors = [torch.full((size,), factor, dtype=wide, device=like.device) for size, factor in parts]
    return ColumnScaledProduct(product, torch.cat(factors))


def scaled_product(product: Product, factor: float | None) -> Product:
    """The product, times the factor if there is one."""
    return product if factor is None else ScaledProduct(product, factor)
