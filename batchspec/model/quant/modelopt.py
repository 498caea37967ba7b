"""quant_method modelopt: FP8 weights with calibrated activations, NVFP4 weights, or a map of formats by module (MIXED_PRECISION).

`quantization_config` in config.json describes it; in older checkpoints hf_quant_config.json in the same folder does. The map is
`quantized_layers`: the name of a module, such as a projection or all experts of a layer, and its `quant_algo`. What the map does
not name is plain, and so are modules that `exclude_modules` or `ignore` names or matches (stars).
NVFP4 weights are the same in all formats that have them, whatever the precision of activations is. Here these are not quantised.
`kv_scales.py` reads the scales of an FP8 K/V cache; a checkpoint that has these alone, and no quant_algo, has plain weights.
Source: https://github.com/NVIDIA/Model-Optimizer (modelopt/torch/export/convert_hf_config.py, quant_utils.py); vLLM,
layers/quantization/modelopt.py (ModelOptMixedPrecisionConfig).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

from batchspec.checkpoint.config_values import ConfigReader, Json
from batchspec.checkpoint.files import listed
from batchspec.checkpoint.name_patterns import checked_pattern
from batchspec.checkpoint.wrapped import is_of_text, plain_name
from batchspec.kernels.common.fp4 import GROUP
from batchspec.model.quant.base import WeightFormat
from batchspec.model.quant.formats import ALL_PLAIN, Formats
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.fp8_block import FP8_BLOCK
from batchspec.model.quant.fp8_products import BLOCK
from batchspec.model.quant.nvfp4_format import MODELOPT, Nvfp4
from batchspec.model.quant.plain import PLAIN

CONFIG_FILE = "hf_quant_config.json"
_ALGORITHMS: Mapping[str, WeightFormat] = {
    "FP8": Fp8("tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8("row", "token"),
    "FP8_BLOCK_SCALES": FP8_BLOCK,
    "NVFP4": MODELOPT,
    "W4A16_NVFP4": MODELOPT,
    "W4A8_NVFP4_FP8": MODELOPT,
}
_MIXED = "MIXED_PRECISION"
_PARTS = re.compile(r"\*+|\[!?\]?[^\]]*\]|[^*\[]+|\[")
"""Stars, sets of characters, and what is between them."""


def of_file(values: Json) -> Json | None:
    """The values of hf_quant_config.json as a `quantization_config`; None if it has no values."""
    return {**values, "quant_method": "modelopt"} if values else None


def read_modelopt(config: ConfigReader) -> Formats | str:
    """`quantization_config` -> formats, or a text that names what of it is not supported.

    Raises CheckpointError for malformed values.
    """
    part = config.part("quantization") if config.given("quantization") else config
    if part.text("kv_cache_quant_algo") not in ("", "FP8"):
        return f"modelopt with {part.shown('kv_cache_quant_algo')}"
    described = "kv_cache_scheme" in part.objects()
    if not part.given("quant_algo") and (part.given("kv_cache_quant_algo") or described):
        return ALL_PLAIN
    if part.given("quant_algo") and not described and part.differs("kv_cache_scheme", None, "FP8"):
        return f"modelopt with {part.shown('kv_cache_scheme')}"
    named = [(key, name) for key in ("exclude_modules", "ignore") for name in part.texts(key) or ()]
    excluded = [name for _, name in named]
    patterns = tuple(checked_pattern(part, key, _expression(name), given=name) for key, name in named if "*" in name)
    plain = tuple(plain_name(name) for name in excluded if "*" not in name)
    if part.text("quant_algo").upper() == _MIXED:
        modules = _modules(part)
        return modules if isinstance(modules, str) else Formats(PLAIN, plain, patterns, modules)
    found = _format(part)
    return found if isinstance(found, str) else Formats(found, plain, patterns)


def _expression(name: str) -> str:
    """A name with stars as a regular expression that what it names begins with."""
    beginning = name.removesuffix("*")
    if not set(beginning) & set("*?["):
        return re.escape(beginning)
    parts = _PARTS.findall(name)  # each by itself: of a name with several stars, `translate` makes atomic groups
    found = (".*" if part[0] == "*" else fnmatch.translate(part)[len("(?s:") : -len(r")\Z")] for part in parts)
    return rf"(?s:{''.join(found)})\Z"


def _modules(config: ConfigReader) -> dict[str, WeightFormat] | str:
    """The map of formats by module, or a text that names what of it is not supported.

    Of modules that are not the language model's, such as its MTP layer, formats that are not supported are left out: what reads
    such a module refuses its tensors.
    """
    layers, found = config.part("quantized_layers"), {}
    for name in layers:
        own = _format(layers.part(name))
        if not isinstance(own, str):
            found[plain_name(name)] = own
        elif is_of_text(name):
            return f"{own} of {listed([name])}"
    return found or f"modelopt with {config.shown('quant_algo')} and no quantized_layers"


def _format(config: ConfigReader) -> WeightFormat | str:
    """The format that `quant_algo` and its options describe, or a text that names what is not supported."""
    found = _ALGORITHMS.get(config.text("quant_algo").upper())
    if found is None:
        return f"modelopt with {config.shown('quant_algo')}"
    size = GROUP if isinstance(found, Nvfp4) else BLOCK if found is FP8_BLOCK else 0
    if size and config.ranged({"group_size": (-1, 2**20)}).integer("group_size", size) != size:
        return f"modelopt with {config.shown('quant_algo')}, {config.shown('group_size')}"
    if config.differs("pre_quant_scale", None, False):
        return f"modelopt with {config.shown('pre_quant_scale')}"
    return found
