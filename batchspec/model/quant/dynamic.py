"""Keys of `quantization_config` that GPTQ and AWQ share: what is refused, and the modules that `dynamic` excludes.

`dynamic` has regular expressions for names of modules; the first one that matches a name decides. One that begins with "-:"
excludes the module from quantisation, others ("+:" or nothing) may change its bits, group size and so on.
Source: https://github.com/ModelCloud/GPTQModel (quantization/config.py); vLLM, utils/gptq_utils.py (get_dynamic_override).
"""

from __future__ import annotations

from collections.abc import Mapping

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.name_patterns import checked_pattern
from batchspec.console.text import quoted
from batchspec.kernels.common.int4 import CODES

_NOT, _ALSO = "-:", "+:"
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "lm_head": (None, False), "pack_dtype": (None, "int32"), "is_marlin_format": (None, False), "rotation": (None, "", False),
    "activation": (None, "", {}), "adapter": (None, {}),
}
"""Keys of computations or layouts that are not supported, and the values with which they mean none."""


def unsupported(config: ConfigReader, method: str, *, bits: str, group_size: str) -> str:
    """A text that names a value that is not supported; empty if there is none.

    method            for the text
    bits, group_size  the names of these keys
    """
    if config.integer(bits) != 4:
        return f"{method} with {config.shown(bits)}"
    size = config.integer(group_size)
    if size != -1 and (size <= 0 or size % CODES):
        return f"{method} with {config.shown(group_size)}"
    wrong = [key for key, neutral in _NEUTRAL.items() if config.differs(key, *neutral)]
    return f"{method} with {config.shown(wrong[0])}" if wrong else ""


def excluded(config: ConfigReader, of_all: Mapping[str, object]) -> tuple[str, ...] | str:
    """Regular expressions of the modules that `dynamic` excludes, or a text that names what is not supported.

    of_all  the values of keys that an entry may repeat
    Raises CheckpointError for what is no regular expression.
    """
    dynamic, before, found = config.part("dynamic"), "", []
    for key in dynamic:
        pattern = checked_pattern(config, "dynamic", key.removeprefix(_NOT).removeprefix(_ALSO))
        if key.startswith(_NOT):
            found.append(checked_pattern(config, "dynamic", f"(?!{before})(?:{pattern})", given=key) if before else pattern)
            continue
        own = dynamic.part(key)
        if changed := [name for name in own if own.differs(name, None, of_all.get(name))]:
            return f"dynamic {quoted(key)} with {own.shown(changed[0], prefix=False)}"
        before += f"{'|' if before else ''}(?:{pattern})"
    return tuple(found)
