"""quant_method fp8: blocks of 128 x 128 with scales `NAME.weight_scale_inv`. Values are multiplied by them, despite the name.

Modules that stay plain are listed, by name or as regular expressions, in modules_to_not_convert; older files of MiniMax list them
in ignored_layers.
Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3); transformers, quantizers/quantizer_finegrained_fp8.py, quantizers_utils.py.
"""

from __future__ import annotations

from batchspec.model.config_values import ConfigReader
from batchspec.model.quant.formats import Formats, checked_pattern
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.fp8_products import BLOCK
from batchspec.model.wrapped import plain_name

FP8_BLOCK = Fp8("block", "group", "weight_scale_inv")
_END = r"(?:(?<=\.)|(?=\.|$))"
"""A match ends where a part of a name ends: `layers.1` matches layers.1.mlp, not layers.11.mlp."""


def read_fp8(config: ConfigReader) -> Formats | str:
    """`quantization_config` -> formats, or a text that names what of it is not supported."""
    blocks = config.ranged({"weight_block_size": (1, 2**20)}).integers("weight_block_size")
    if blocks != (BLOCK, BLOCK):
        return f"fp8 with {config.shown('weight_block_size')}"
    if config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"fp8 with {config.shown('fmt')}"
    if config.text("activation_scheme", "dynamic") != "dynamic":
        return f"fp8 in blocks with {config.shown('activation_scheme')}"
    if config.text("scale_fmt", "float") != "float":
        return f"fp8 with {config.shown('scale_fmt')}"
    key = "modules_to_not_convert" if config.given("modules_to_not_convert") else "ignored_layers"
    names = tuple(map(plain_name, config.texts(key) or ()))
    return Formats(FP8_BLOCK, names, tuple(checked_pattern(config, key, f"(?:{name}){_END}") for name in names))
