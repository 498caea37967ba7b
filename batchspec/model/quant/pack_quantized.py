"""INT4 weights of compressed-tensors, format pack-quantized: K in words, codes and zero points as stored values plus 8.

    NAME.weight_packed      int32 [N, K / 8]    8 codes of a row, low bits first
    NAME.weight_scale       [N, G]
    NAME.weight_zero_point  int32 [N / 8, G]    if not symmetric: of 8 rows, low bits first
    NAME.weight_shape       int64 [2]           N and K; not read, and not there if a tensor holds all experts of a layer
    NAME.weight_g_idx       int32 [K]           if actorder is group: the group of each column; all -1: they are in order

G is 1 for strategy channel. Experts are stored one by one (Kimi K2, llm-compressor), or all of a layer in one tensor
(`fused_experts.py`).
Source: https://github.com/vllm-project/compressed-tensors (compressors/pack_quantized; quantized_compressors before 0.13).
"""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.kernels.common.four_bit import FourBitWeight
from batchspec.kernels.common.int4 import CODES, unpack
from batchspec.model.layers.base import Projection, Share, TensorSpec
from batchspec.model.quant.base import Slices, Weights, bias_of, shard_bias
from batchspec.model.quant.int4_format import MEAN_CODE, TYPICAL_SCALE, Int4, in_words

FORMAT = "pack-quantized"
_ACT_ORDERS = {"": False, "weight": False, "static": False, "group": True, "dynamic": True}


@dataclass(frozen=True, slots=True)
class PackQuantized(Int4):
    """See the module's docstring."""

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        self.check(part, packs_rows=not self.symmetric)
        name, rows, groups = part.name, part.rows, self.num_groups(part.k)
        found = [
            TensorSpec(f"{name}.weight_packed", (rows, part.k // CODES), "weight", ("I32",)),
            TensorSpec(f"{name}.weight_scale", (rows, groups), "scale", typical=TYPICAL_SCALE),
        ]
        if not self.symmetric:
            shape = (rows // CODES, groups)
            found.append(TensorSpec(f"{name}.weight_zero_point", shape, "zero_points", ("I32",), typical=MEAN_CODE))
        if self.act_order:
            often = float(self.group_size or part.k)
            found.append(TensorSpec(f"{name}.weight_g_idx", (part.k,), "index", ("I32",), typical=often, shuffled=True))
        return *found, *bias_of(part)

    def spares(self, part: Projection) -> tuple[TensorSpec, ...]:
        return (TensorSpec(f"{part.name}.weight_shape", (2,), "index", ("I64", "I32")),)

    def weight(self, weights: Weights, name: str) -> FourBitWeight:
        words, scales = weights.stored(f"{name}.weight_packed"), weights.stored(f"{name}.weight_scale")
        zeros, groups, of_columns = None, None, f"{name}.weight_g_idx"
        if not self.symmetric:
            zeros = unpack(weights.stored(f"{name}.weight_zero_point").t()).t()
        if self.act_order:
            index = weights.stored(of_columns)
            in_order = bool((index == -1).all())
            groups = None if in_order else self.groups_of(index, scales.shape[1], of_columns)
        return self.arranged(weights, name, words, scales, zeros, groups)

    def shard(self, part: Projection, share: Share) -> Slices:
        name, pieces = part.name, self.cut(part, share, packs_rows=not self.symmetric)
        groups = [self.groups_in(columns, part.k) for _, columns in pieces]
        own: Slices = {
            f"{name}.weight_packed": tuple((rows, in_words(columns)) for rows, columns in pieces),
            f"{name}.weight_scale": tuple((rows, of) for (rows, _), of in zip(pieces, groups, strict=True)),
        }
        if not self.symmetric:
            own[f"{name}.weight_zero_point"] = tuple((in_words(rows), of) for (rows, _), of in zip(pieces, groups, strict=True))
        if self.act_order:
            own[f"{name}.weight_g_idx"] = tuple((columns,) for _, columns in pieces) if share.cut == "rows" else ()
        return own | shard_bias(part, share)


def read_scheme(weights: ConfigReader) -> PackQuantized | str:
    """`config_groups.NAME.weights` -> the layout, or a text that names what of it is not supported."""
    group_size = weights.integer("group_size", -1)
    strategy = weights.text("strategy") or ("channel" if group_size == -1 else "group")
    sized = group_size > 0 and group_size % CODES == 0 if strategy == "group" else strategy == "channel" and group_size == -1
    if weights.integer("num_bits", 8) != 4 or weights.text("type", "int") != "int" or weights.flag("dynamic") or not sized:
        keys = ("num_bits", "type", "strategy", "group_size", "dynamic")
        shown = ", ".join(weights.shown(key, prefix=False) for key in keys)
        return f"compressed-tensors {FORMAT} with weights of {shown}"
    order = weights.text("actorder") if weights.differs("actorder", None, False) else ""
    if order not in _ACT_ORDERS:
        return f"compressed-tensors {FORMAT} with {weights.shown('actorder')}"
    own_size = group_size if strategy == "group" else None
    return PackQuantized(own_size, weights.flag("symmetric", True), _ACT_ORDERS[order] and own_size is not None)
