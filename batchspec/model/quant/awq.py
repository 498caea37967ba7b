"""quant_method awq, version gemm: INT4 weights transposed, N in words; of each group a row of scales and of zero points.

    NAME.qweight  int32 [K, N / 8]   codes of 8 outputs
    NAME.qzeros   int32 [G, N / 8]   zero points of 8 outputs
    NAME.scales   [G, N]

Bits 4 i .. 4 i + 3 of a word are those of output 0, 2, 4, 6, 1, 3, 5, 7 (i = 0 .. 7) of its eight. With zero_point=false all zero
points are 8.
Source: Lin et al. 2023, AWQ (arXiv 2306.00978); https://github.com/casper-hansen/AutoAWQ (modules/linear/gemm.py); vLLM,
layers/quantization/auto_awq.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.wrapped import plain_name
from batchspec.kernels.common.four_bit import FourBitWeight
from batchspec.kernels.common.int4 import CODES, pack, unpack
from batchspec.model.layers.base import Projection, Share, TensorSpec
from batchspec.model.quant.base import Slices, Weights, bias_of, shard_bias
from batchspec.model.quant.dynamic import excluded, unsupported
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.int4_format import EIGHTS, MEAN_CODE, TYPICAL_SCALE, Int4, in_words

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its eight outputs."""
_WORDS = 128
"""Columns of words that are converted at once: temporaries of a weight are larger than itself."""


@dataclass(frozen=True, slots=True)
class Awq(Int4):
    """See the module's docstring."""

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        self.check(part, packs_rows=True)
        name, groups, words = part.name, self.num_groups(part.k), part.rows // CODES
        return (
            TensorSpec(f"{name}.qweight", (part.k, words), "weight", ("I32",)),
            TensorSpec(
                f"{name}.qzeros", (groups, words), "zero_points", ("I32",), words=(EIGHTS,) if self.symmetric else (),
                typical=MEAN_CODE,
            ),
            TensorSpec(f"{name}.scales", (groups, part.rows), "scale", typical=TYPICAL_SCALE),
            *bias_of(part),
        )

    def weight(self, weights: Weights, name: str) -> FourBitWeight:
        stored, scales = weights.stored(f"{name}.qweight"), weights.stored(f"{name}.scales").t()
        words = torch.cat([pack(_in_order(some).t()) for some in stored.split(_WORDS, 1)])
        zeros = None if self.symmetric else _in_order(weights.stored(f"{name}.qzeros")).t()
        return self.arranged(weights, name, words, scales, zeros)

    def shard(self, part: Projection, share: Share) -> Slices:
        name, pieces = part.name, self.cut(part, share, packs_rows=True)
        groups = [self.groups_in(columns, part.k) for _, columns in pieces]
        return {
            f"{name}.qweight": tuple((columns, in_words(rows)) for rows, columns in pieces),
            f"{name}.qzeros": tuple((of, in_words(rows)) for (rows, _), of in zip(pieces, groups, strict=True)),
            f"{name}.scales": tuple((of, rows) for (rows, _), of in zip(pieces, groups, strict=True)),
        } | shard_bias(part, share)


def _in_order(words: Tensor) -> Tensor:
    """words int32 [R, W] of the file -> codes uint8 [R, 8 W] of outputs 0, 1, 2, ..."""
    codes: Tensor = unpack(words).unflatten(1, (-1, CODES))
    return codes[..., list(_PLACES)].flatten(1)


def read_awq(config: ConfigReader) -> Formats | str:
    """`quantization_config` -> formats, or a text that names what of it is not supported."""
    config = config.ranged({"bits": (1, 64), "w_bit": (1, 64), "group_size": (-1, 2**20), "q_group_size": (-1, 2**20)})
    version = "version" if config.given("version") else "format"
    if config.text(version, "gemm").lower() != "gemm":
        return f"awq with {config.shown(version)}"
    for key, neutral in (("backend", (None, "autoawq", "auto")), ("desc_act", (None, False))):
        if config.differs(key, *neutral):
            return f"awq with {config.shown(key)}"
    bits, size = (key if config.given(key) else other for key, other in (("w_bit", "bits"), ("q_group_size", "group_size")))
    if reason := unsupported(config, "awq", bits=bits, group_size=size):
        return reason
    group_size = config.integer(size)
    patterns = excluded(config, {"bits": 4, "group_size": group_size})
    if isinstance(patterns, str):
        return f"awq with {patterns}"
    layout = Awq(None if group_size == -1 else group_size, symmetric=not config.flag("zero_point", True))
    plain = tuple(plain_name(name).strip(".") for name in config.texts("modules_to_not_convert") or ())
    return Formats(layout, plain, patterns)
