"""quant_method compressed-tensors: FP8 (one scale per row, per tensor or per block of 128 x 128), INT4 and NVFP4 weights.

Each of `config_groups` has a scheme and targets: module names, regular expressions after "re:", or all Linear layers. A name
comes before an expression, an expression before Linear; of several expressions that match a module, that of the first group
decides. What `ignore` matches is plain, and so is what no group names.
There may be no scheme at all if the checkpoint has plain weights and only scales of an FP8 K/V cache (`kv_cache_scheme`), which
`kv_scales.py` reads.
Source: https://github.com/vllm-project/compressed-tensors (quantization/quant_args.py, quant_config.py, utils/match.py); for the
order of expressions vLLM, layers/quantization/compressed_tensors/utils.py (find_matched_target).
"""

from __future__ import annotations

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.name_patterns import checked_pattern
from batchspec.checkpoint.wrapped import plain_name
from batchspec.model.quant import nvfp4_format, pack_quantized
from batchspec.model.quant.base import WeightFormat
from batchspec.model.quant.formats import ALL_PLAIN, Formats
from batchspec.model.quant.fp8 import Fp8, Scales
from batchspec.model.quant.fp8_products import BLOCK, Activations
from batchspec.model.quant.plain import PLAIN

_OF_GROUP = ("weights", "input_activations", "output_activations")
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_SCALES: dict[str, Scales] = {"channel": "row", "tensor": "tensor", "block": "block"}
_PATTERN, _ALL = "re:", "Linear"
_HEAD = "lm_head"
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
    if not names:
        return "compressed-tensors with 0 config_groups"
    found: dict[str, WeightFormat] = {}
    for name in names:
        group = groups.part(name)
        targets = group.texts("targets") or ()
        if not targets or any(target in found or not _is_supported(target) for target in targets):
            return f"compressed-tensors with {group.shown('targets')}"
        scheme = _scheme(group, config)
        if isinstance(scheme, str):
            return scheme
        found |= dict.fromkeys(targets, scheme)
    return _formats(config, found)


def _is_supported(target: str) -> bool:
    """Whether a target names modules, or all Linear layers; other classes have no dot in their names."""
    return target.startswith(_PATTERN) or "." in target or target in (_ALL, _HEAD)


def _formats(config: ConfigReader, targets: dict[str, WeightFormat]) -> Formats:
    """targets: their formats, in the order in which expressions are tried."""
    ignored = config.texts("ignore") or ()
    modules = {plain_name(name): own for name, own in targets.items() if name != _ALL and not name.startswith(_PATTERN)}
    return Formats(
        targets.get(_ALL, PLAIN),
        tuple(plain_name(name) for name in ignored if not name.startswith(_PATTERN)),
        tuple(_expression(config, "ignore", name) for name in ignored if name.startswith(_PATTERN)),
        modules,
        tuple((_expression(config, "config_groups", name), own) for name, own in targets.items() if name.startswith(_PATTERN)),
    )


def _expression(config: ConfigReader, key: str, name: str) -> str:
    return checked_pattern(config, key, name.removeprefix(_PATTERN))


def _scheme(group: ConfigReader, config: ConfigReader) -> WeightFormat | str:
    """The weight format of a group, or a text that names what of it is not supported."""
    of_weights = group if group.given("format") else config
    form = of_weights.text("format")
    if form not in (*_FP8_FORMATS, pack_quantized.FORMAT, nvfp4_format.FORMAT):
        return f"compressed-tensors {of_weights.shown('format')}"
    if group.given("output_activations"):
        return f"compressed-tensors with {group.shown('output_activations')}"
    weights, inputs = group.part("weights").ranged(_INTEGERS), group.part("input_activations").ranged(_INTEGERS)
    if form == pack_quantized.FORMAT:
        if group.given("input_activations"):
            return f"compressed-tensors {form} with {group.shown('input_activations')}"
        return pack_quantized.read_scheme(weights)
    own_inputs = inputs if group.given("input_activations") else None
    return nvfp4_format.read_scheme(weights, own_inputs) if form == nvfp4_format.FORMAT else _fp8_scheme(weights, own_inputs)


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
