"""quant_method modelopt, FP8: each weight has one scale, and its activations have one calibrated scale.

`quantization_config` in config.json describes it; in older checkpoints hf_quant_config.json in the same folder does.
`kv_scales.py` reads the scales of an FP8 K/V cache; a checkpoint that has these alone, and no quant_algo, has plain weights.
Source: https://github.com/NVIDIA/Model-Optimizer (modelopt/torch/export/convert_hf_config.py).
"""

from __future__ import annotations

import fnmatch

from batchspec.model.config_values import ConfigReader, Json
from batchspec.model.quant.formats import ALL_PLAIN, Formats
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.wrapped import plain_name

CONFIG_FILE = "hf_quant_config.json"


def of_file(values: Json) -> Json | None:
    """The values of hf_quant_config.json as a `quantization_config`; None if it has no values."""
    return {**values, "quant_method": "modelopt"} if values else None


def read_modelopt(config: ConfigReader) -> Formats | str:
    """`quantization_config` -> formats, or a text that names what of it is not supported."""
    part = config.part("quantization") if config.given("quantization") else config
    if part.text("kv_cache_quant_algo") not in ("", "FP8"):
        return f"modelopt with {part.shown('kv_cache_quant_algo')}"
    if not part.given("quant_algo") and (part.given("kv_cache_quant_algo") or "kv_cache_scheme" in part.objects()):
        return ALL_PLAIN
    if part.text("quant_algo") != "FP8":
        return f"modelopt with {part.shown('quant_algo')}"
    excluded = (part.texts("exclude_modules") or ()) + (part.texts("ignore") or ())
    patterns = tuple(fnmatch.translate(name) for name in excluded if "*" in name)
    return Formats(Fp8("tensor", "static"), tuple(plain_name(name) for name in excluded if "*" not in name), patterns)
