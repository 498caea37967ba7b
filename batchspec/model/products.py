"""The matrix products of a model that are worth timing on a GPU (`batchspec doctor --tune`)."""

from __future__ import annotations

from collections.abc import Iterable

from batchspec.kernels.gemm.tiles import NORM_MAX_K
from batchspec.model.blocks.base import Gemm
from batchspec.model.spec import ModelSpec
from batchspec.tuning.table import Product

_FUSED = ("linear_add", "norm_linear", "norm_swiglu")


def products(spec: ModelSpec) -> list[Product]:
    """The products that a model's decode rounds may use, except those of FP8, INT4 and NVFP4, which the table does not cover."""
    plain = spec.formats.multiplies_plain
    gemms = (gemm for prefix, gemm in spec.gemms(tokens=1) if plain(prefix + gemm.product.parts[0].name))
    return [*gemm_products(gemms, spec.hidden_size), ("lm_head", spec.num_logits, spec.hidden_size)]


def gemm_products(gemms: Iterable[Gemm], hidden_size: int) -> list[Product]:
    """Each way to compute each of them, once; those with a fused norm or sum only if H is small."""
    found = [(op, gemm.product.rows, gemm.product.k) for gemm in gemms for op in gemm.ops]
    return list(dict.fromkeys(product for product in found if product[0] not in _FUSED or hidden_size <= NORM_MAX_K))
