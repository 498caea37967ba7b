"""quant_method fp8: blocks of 128 x 128 with scales `NAME.weight_scale_inv`. Values are multiplied by them, despite the name.

Or, where weight_block_size is null and activation_scheme static (Ministral 3, Devstral 2), one scale a weight and one for its
input, `NAME.activation_scale`.

Modules that stay plain are listed, by name or as regular expressions, in modules_to_not_convert; older files of MiniMax list them
in ignored_layers.
Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3); transformers, quantizers/quantizer_finegrained_fp8.py, quantizers_utils.py.
"""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.name_patterns import checked_pattern
from batchspec.checkpoint.wrapped import plain_name
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.fp8_products import BLOCK

FP8_BLOCK = Fp8("block", "group", "weight_scale_inv")
FP8_STATIC = Fp8("tensor", "static", "weight_scale_inv", "activation_scale")
_END = r"(?:(?<=\.)|(?=\.|$))"
"""A match ends where a part of a name ends: `layers.1` matches layers.1.mlp, not layers.11.mlp."""


def read_fp8(config: ConfigReader) -> Formats | str:
    """`quantization_config` -> formats, or a text that names what of it is not supported."""
    blocks = config.ranged({"weight_block_size": (1, 2**20)}).integers("weight_block_size")
    scheme = config.text("activation_scheme", "dynamic")
    static = blocks is None and scheme == "static"
    if blocks != (BLOCK, BLOCK) and not static:
        return f"fp8 with {config.shown('weight_block_size')}"
    if config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"fp8 with {config.shown('fmt')}"
    if scheme != "dynamic" and not static:
        return f"fp8 in blocks with {config.shown('activation_scheme')}"
    if config.text("scale_fmt", "float") != "float":
        return f"fp8 with {config.shown('scale_fmt')}"
    key = "modules_to_not_convert" if config.given("modules_to_not_convert") else "ignored_layers"
    names = tuple(map(plain_name, config.texts(key) or ()))
    own = FP8_STATIC if static else FP8_BLOCK
    return Formats(own, names, tuple(checked_pattern(config, key, f"(?:{name}){_END}", given=name) for name in names))
