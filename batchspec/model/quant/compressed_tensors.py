"""quant_method compressed-tensors: FP8 weights with one scale per row, per tensor or per block of 128 x 128, or INT4 weights.

`config_groups` must hold one group: one scheme for all Linear layers except those in `ignore`. It may hold no scheme at all if
the checkpoint has plain weights and only scales of an FP8 K/V cache (`kv_cache_scheme`), which `kv_scales.py` reads.
Source: https://github.com/vllm-project/compressed-tensors (quantization/quant_args.py, quant_config.py, utils/match.py).
"""

from __future__ import annotations

from batchspec.model.config_values import ConfigReader
from batchspec.model.quant import pack_quantized
from batchspec.model.quant.base import WeightFormat
from batchspec.model.quant.formats import ALL_PLAIN, Formats, checked_pattern
from batchspec.model.quant.fp8 import Fp8, Scales
from batchspec.model.quant.fp8_products import BLOCK, Activations
from batchspec.model.wrapped import plain_name

_OF_GROUP = ("weights", "input_activations", "output_activations")
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_SCALES: dict[str, Scales] = {"channel": "row", "tensor": "tensor", "block": "block"}
_PATTERN = "re:"
_INTEGERS = {"num_bits": (1, 64), "group_size": (-1, 2**20), "block_structure": (1, 2**20)}


def read_compressed_tensors(config: ConfigReader) -> Formats | str:
    """`quantization_config` -> formats, or a text that names what of it is not supported.

    Raises CheckpointError for malformed values.
    """
    groups = config.part("config_groups")
    names = groups.objects()
    if config.part("sparsity_config").text("format", "dense") != "dense":
        return f"compressed-tensors with {config.shown('sparsity_config')}"
    if config.differs("transform_config", None, {}):
        return f"compressed-tensors with {config.shown('transform_config')}"
    quantises = any(groups.part(name).given(key) for name in names for key in _OF_GROUP)
    if config.given("kv_cache_scheme") and len(names) == len(list(groups)) and not quantises:
        return ALL_PLAIN
    if len(names) != 1:
        return f"compressed-tensors with {len(names)} config_groups"
    group = groups.part(names[0])
    if group.texts("targets") != ("Linear",):
        return f"compressed-tensors with {group.shown('targets')}"
    of_weights = group if group.given("format") else config
    form = of_weights.text("format")
    if form not in (*_FP8_FORMATS, pack_quantized.FORMAT):
        return f"compressed-tensors {of_weights.shown('format')}"
    if group.given("output_activations"):
        return f"compressed-tensors with {group.shown('output_activations')}"
    weights, inputs = group.part("weights").ranged(_INTEGERS), group.part("input_activations").ranged(_INTEGERS)
    scheme: WeightFormat | str
    if form == pack_quantized.FORMAT:
        if group.given("input_activations"):
            return f"compressed-tensors {form} with {group.shown('input_activations')}"
        scheme = pack_quantized.read_scheme(weights)
    else:
        scheme = _fp8_scheme(weights, inputs if group.given("input_activations") else None)
    if isinstance(scheme, str):
        return scheme
    ignored = config.texts("ignore") or ()
    patterns = tuple(
        checked_pattern(config, "ignore", name.removeprefix(_PATTERN)) for name in ignored if name.startswith(_PATTERN)
    )
    return Formats(scheme, tuple(plain_name(name) for name in ignored if not name.startswith(_PATTERN)), patterns)


def _fp8_scheme(weights: ConfigReader, inputs: ConfigReader | None) -> Fp8 | str:
    strategy = weights.text("strategy")
    if not _is_fp8(weights) or weights.flag("dynamic") or strategy not in _SCALES:
        return f"compressed-tensors with weights of {_shown(weights)}"
    if strategy == "block" and weights.integers("block_structure") != (BLOCK, BLOCK):
        return f"compressed-tensors with {weights.shown('block_structure')}"
    activations = "plain" if inputs is None else _activations(inputs)
    if activations is None or activations not in (("group", "plain") if strategy == "block" else ("token", "static", "plain")):
        return f"compressed-tensors with weights of strategy {strategy} and activations of {_shown(inputs)}"
    return Fp8(_SCALES[strategy], activations)


def _is_fp8(part: ConfigReader) -> bool:
    return part.integer("num_bits", 8) == 8 and part.text("type", "int") == "float" and part.flag("symmetric", True)


def _activations(inputs: ConfigReader) -> Activations | None:
    """How the checkpoint says that activations are quantised; None: in a way that is not supported."""
    strategy, dynamic = inputs.text("strategy", "tensor"), inputs.differs("dynamic", None, False)
    if not _is_fp8(inputs):
        return None
    if dynamic and inputs.flag("dynamic"):
        if strategy == "token":
            return "token"
        return "group" if strategy == "group" and inputs.integer("group_size", 0) == BLOCK else None
    return "static" if strategy == "tensor" else None


def _shown(part: ConfigReader | None) -> str:
    assert part is not None
    return ", ".join(part.shown(key, prefix=False) for key in ("num_bits", "type", "strategy", "dynamic", "symmetric"))
