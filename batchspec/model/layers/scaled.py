"""A product whose output is multiplied by a number, such as the last one of a block of Granite."""

from __future__ import annotations

from typing import Any

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


def scaled_product(product: Product, factor: float | None) -> Product:
    """The product, times the factor if there is one."""
    return product if factor is None else ScaledProduct(product, factor)
