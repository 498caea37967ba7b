"""Which weight format each projection of a model has, decided from `quantization_config` of config.json."""

from __future__ import annotations

from collections.abc import Callable

from batchspec.model.config_values import ConfigReader
from batchspec.model.quant.formats import ALL_PLAIN, Formats
from batchspec.model.quant.fp8_block import read_fp8
from batchspec.model.quant.mxfp4 import read_mxfp4

READERS: dict[str, Callable[[ConfigReader], Formats | None]] = {
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
}
"""quant_method -> what reads its `quantization_config`; None for a variant that is not built"""


def read_formats(config: ConfigReader) -> Formats | None:
    """The formats that a config.json asks for; None where they are not built. Raises CheckpointError for malformed values."""
    if not config.differs("quantization_config", None, False):
        return ALL_PLAIN
    if "quantization_config" not in config.objects():
        return None
    part = config.part("quantization_config")
    reader = READERS.get(part.text("quant_method"))
    return None if reader is None else reader(part)
