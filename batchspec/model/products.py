"""The matrix products of a model that are worth timing on a GPU (`batchspec doctor --tune`)."""

from __future__ import annotations

from collections.abc import Iterable

from batchspec.kernels.gemm.four_bit_tiles import op_of
from batchspec.kernels.gemm.tiles import NORM_MAX_K
from batchspec.model.layers.base import Gemm
from batchspec.model.quant.int4_format import Int4
from batchspec.model.quant.nvfp4_format import Nvfp4
from batchspec.model.spec import ModelSpec
from batchspec.tuning.table import Product

_FUSED = ("linear_add", "norm_linear", "norm_swiglu")


def products(spec: ModelSpec) -> list[Product]:
    """The products that a model's decode rounds may use, except those of FP8, which the table does not cover."""
    plain = spec.formats.multiplies_plain
    gemms = [(prefix + gemm.product.parts[0].name, gemm) for prefix, gemm in spec.gemms(tokens=1)]
    packed = [(layout, gemm) for name, gemm in gemms if isinstance(layout := spec.formats.of(name), (Int4, Nvfp4))]
    found = [*gemm_products((gemm for name, gemm in gemms if plain(name)), spec.hidden_size)]
    output = [("lm_head", spec.num_logits, spec.hidden_size)] if spec.has_output else []
    return [*found, *_four_bit_products(packed), *output]


def _four_bit_products(gemms: Iterable[tuple[Int4 | Nvfp4, Gemm]]) -> list[Product]:
    """Each dense product with weights of four bits that kernels read, once."""
    found = [
        (op_of(group, gated=op == "swiglu"), gemm.product.rows, gemm.product.k)
        for layout, gemm in gemms
        for op in gemm.ops
        if op in ("linear", "swiglu") and (group := layout.kernel_group(gemm.product.k)) is not None
    ]
    return list(dict.fromkeys(found))


def gemm_products(gemms: Iterable[Gemm], hidden_size: int) -> list[Product]:
    """Each way to compute each of them, once; those with a fused norm or sum only if H is small."""
    found = [(op, gemm.product.rows, gemm.product.k) for gemm in gemms for op in gemm.ops]
    return list(dict.fromkeys(product for product in found if product[0] not in _FUSED or hidden_size <= NORM_MAX_K))
