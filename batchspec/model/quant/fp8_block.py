"""FP8 weights in blocks of 128 x 128, converted to the model's dtype as they are read: the reference for kernels.

A file holds `NAME.weight` e4m3 [N, K] and `NAME.weight_scale_inv` [ceil(N / 128), ceil(K / 128)], by which, in spite of its name,
each block is multiplied. Activations stay in the model's dtype, whatever activation_scheme says of them.
Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3); transformers, quantizers/quantizer_finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.model.blocks.base import Projection, TensorSpec
from batchspec.model.blocks.forward import Product
from batchspec.model.config_values import ConfigReader
from batchspec.model.quant.base import Cut, Slices, Weights, bias_of, shard_bias, share
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.grouped import SeparateExperts
from batchspec.model.quant.plain import Linear

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Fp8Block(SeparateExperts):
    """See the module's docstring."""

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        blocks = (-(-part.rows // BLOCK), -(-part.k // BLOCK))
        weight = TensorSpec(f"{part.name}.weight", (part.rows, part.k), "weight", ("F8_E4M3",))
        return weight, TensorSpec(f"{part.name}.weight_scale_inv", blocks, "scale"), *bias_of(part)

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        return rows * k * dtype.itemsize

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        parts = [self.matrix(weights, name) for name in names]
        return Linear(torch.cat(parts), torch.cat([weights.tensor(f"{name}.bias") for name in names]) if bias else None)

    def shard(self, part: Projection, cut: Cut, rank: int, ranks: int) -> Slices:
        rows, columns = slice(0, part.rows), slice(0, part.k)
        if cut == "columns":
            rows = share(part, part.rows, rank, ranks, multiple=BLOCK)
        else:
            columns = share(part, part.k, rank, ranks, multiple=BLOCK)
        scale = tuple(slice(own.start // BLOCK, -(-own.stop // BLOCK)) for own in (rows, columns))
        own = {f"{part.name}.weight": (rows, columns), f"{part.name}.weight_scale_inv": scale}
        return own | shard_bias(part, cut, rank, ranks)

    def matrix(self, weights: Weights, name: str) -> Tensor:
        """The weight [N, K] in the model's dtype, each number times the scale of its block in fp32 and rounded once."""
        stored, scale = weights.stored(f"{name}.weight"), weights.stored(f"{name}.weight_scale_inv").float()
        rows, k = stored.shape
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :k]
        return (stored.float() * scale).to(weights.dtype)


def read_fp8(config: ConfigReader) -> Formats | None:
    """quantization_config with quant_method fp8; None unless it is e4m3 in blocks of 128 x 128 with dynamic activations."""
    blocks = config.ranged({"weight_block_size": (1, 2**20)}).integers("weight_block_size")
    plain = config.texts("modules_to_not_convert") or ()
    if blocks != (BLOCK, BLOCK) or config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return None
    return Formats(Fp8Block(), plain) if config.text("activation_scheme", "dynamic") == "dynamic" else None
