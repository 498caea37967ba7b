"""quant_method gptq, INT4: weights transposed, K in words; of each group a row of scales and of zero points.

    NAME.qweight  int32 [K / 8, N]   8 codes of a column of W', low bits first
    NAME.qzeros   int32 [G, N / 8]   zero points of 8 outputs, low bits first; checkpoint_format gptq stores z - 1, gptq_v2 z
    NAME.scales   [G, N]
    NAME.g_idx    int32 [K]          the group of each input: with desc_act any, otherwise k // group_size (checked)
    NAME.bias     [N]                some tools write zeros where the model has no bias

With sym z is 8; stored are 7 or 8, in either format. Of format gptq, GPTQModel subtracts and adds the 1 of all 8 zero points as
one number, so a z of 0 borrows from its neighbour; 1 is added back in the same way. The last group may have fewer inputs.
Source: https://github.com/ModelCloud/GPTQModel (nn_modules/qlinear, utils/model.py, quantization/config.py); vLLM,
layers/quantization/auto_gptq.py and utils/gptq_utils.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.name_patterns import checked_pattern
from batchspec.checkpoint.wrapped import plain_name
from batchspec.kernels.common.four_bit import FourBitWeight
from batchspec.kernels.common.int4 import CODES, unpack
from batchspec.model.layers.base import Projection, Share, TensorSpec
from batchspec.model.quant.base import Slices, Weights, bias_of, shard_bias
from batchspec.model.quant.dynamic import excluded, unsupported
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.int4_format import EIGHTS, MEAN_CODE, TYPICAL_SCALE, Int4, in_words

_ONES, _SEVENS = 0x11111111, 0x77777777


@dataclass(frozen=True, slots=True)
class Gptq(Int4):
    """See the module's docstring."""

    minus_one: bool = False
    """Whether the file has z - 1 in place of z."""

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        self.check(part, packs_rows=True, whole_groups=False)
        name, groups = part.name, self.num_groups(part.k)
        often = float(self.group_size or part.k)
        return (
            TensorSpec(f"{name}.qweight", (part.k // CODES, part.rows), "weight", ("I32",)),
            TensorSpec(
                f"{name}.qzeros", (groups, part.rows // CODES), "zero_points", ("I32",),
                words=(EIGHTS, _SEVENS) if self.symmetric else (), typical=MEAN_CODE - self.minus_one,
            ),
            TensorSpec(f"{name}.scales", (groups, part.rows), "scale", typical=TYPICAL_SCALE),
            TensorSpec(f"{name}.g_idx", (part.k,), "index", ("I32",), typical=often, shuffled=self.act_order),
            *bias_of(part),
        )

    def spares(self, part: Projection) -> tuple[TensorSpec, ...]:
        return () if part.bias else (TensorSpec(f"{part.name}.bias", (part.rows,), "bias"),)

    def weight(self, weights: Weights, name: str) -> FourBitWeight:
        words, scales = (weights.stored(f"{name}.{x}").t() for x in ("qweight", "scales"))
        groups, zeros, of_columns = None, None, f"{name}.g_idx"
        if self.act_order:
            groups = self.groups_of(weights.stored(of_columns), scales.shape[1], of_columns)
        if not self.symmetric:
            stored = weights.stored(f"{name}.qzeros")
            zeros = unpack(stored + _ONES if self.minus_one else stored).t()
        return self.arranged(weights, name, words, scales, zeros, groups)

    def shard(self, part: Projection, share: Share) -> Slices:
        name, pieces = part.name, self.cut(part, share, packs_rows=True)
        groups = [self.groups_in(columns, part.k) for _, columns in pieces]
        return {
            f"{name}.qweight": tuple((in_words(columns), rows) for rows, columns in pieces),
            f"{name}.qzeros": tuple((of, in_words(rows)) for (rows, _), of in zip(pieces, groups, strict=True)),
            f"{name}.scales": tuple((of, rows) for (rows, _), of in zip(pieces, groups, strict=True)),
            f"{name}.g_idx": tuple((columns,) for _, columns in pieces) if share.cut == "rows" else (),
        } | shard_bias(part, share)


def read_gptq(config: ConfigReader) -> Formats | str:
    """`quantization_config` -> formats, or a text that names what of it is not supported."""
    config = config.ranged({"bits": (1, 64), "group_size": (-1, 2**20)})
    stored = "checkpoint_format" if config.given("checkpoint_format") else "format"
    if config.text(stored, "gptq") not in ("gptq", "gptq_v2"):
        return f"gptq with {config.shown(stored)}"
    if reason := unsupported(config, "gptq", bits="bits", group_size="group_size"):
        return reason
    values = {key: config.integer(key) for key in ("bits", "group_size")}
    flags = {"sym": config.flag("sym", True), "desc_act": config.flag("desc_act")}
    patterns = excluded(config, {**values, **flags})
    if isinstance(patterns, str):
        return f"gptq with {patterns}"
    group_size = None if values["group_size"] == -1 else values["group_size"]
    act_order = flags["desc_act"] and group_size is not None
    layout = Gptq(group_size, flags["sym"], act_order, minus_one=config.text(stored, "gptq") == "gptq")
    return Formats(layout, plain_patterns=(*patterns, *_not_listed(config)))


def _not_listed(config: ConfigReader) -> tuple[str, ...]:
    """`modules_in_block_to_quantize` names the modules that are quantised; a pattern that matches the others."""
    key = "modules_in_block_to_quantize"
    listed = config.nested_texts(key)
    if not listed:
        return ()
    names = "|".join(re.escape(plain_name(name)) for name in listed)
    return (checked_pattern(config, key, rf"(?!(?:.*\.)?(?:{names})(?:\.|$))", given=listed[0]),)
