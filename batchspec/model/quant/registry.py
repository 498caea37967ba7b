"""Which weight format each projection of a model has, decided from `quantization_config` of config.json."""

from __future__ import annotations

from collections.abc import Callable

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.quant.awq import read_awq
from batchspec.model.quant.compressed_tensors import read_compressed_tensors
from batchspec.model.quant.formats import ALL_PLAIN, Formats
from batchspec.model.quant.fp8_block import read_fp8
from batchspec.model.quant.gptq import read_gptq
from batchspec.model.quant.modelopt import read_modelopt
from batchspec.model.quant.mxfp4 import read_mxfp4

READERS: dict[str, Callable[[ConfigReader], Formats | str]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), read_modelopt),
    "mxfp4": read_mxfp4,
    "gptq": read_gptq,
    "awq": read_awq,
}
"""quant_method -> the function that reads its `quantization_config`. It returns formats, or a text that names what of the
configuration is not supported."""
_BUILT = "use FP8, INT4 (GPTQ, AWQ, compressed-tensors), NVFP4, MXFP4 or bf16"


def read_formats(config: ConfigReader) -> Formats:
    """The formats that a config.json asks for. Raises CheckpointError, in one line, for unsupported and malformed values."""
    if not config.differs("quantization_config", None, False):
        return ALL_PLAIN
    reason = f"{config.shown('quantization_config')} is not an object"
    if "quantization_config" in config.objects():
        part = config.part("quantization_config")
        reader = READERS.get(part.text("quant_method"))
        found = part.shown("quant_method") if reader is None else reader(part)
        if isinstance(found, Formats):
            return found
        reason = found
    raise config.refusal(f"not supported: quantization_config: {reason}; {_BUILT}")
