"""Which weight format each projection of a model has, decided from `quantization_config` of config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchspec.model.config_values import ConfigReader
from batchspec.model.quant.base import WeightFormat
from batchspec.model.quant.plain import PLAIN


@dataclass(frozen=True, slots=True)
class Formats:
    """The weight formats of a model. Embedding, output matrix and norms are always plain."""

    quantised: WeightFormat = PLAIN
    plain_modules: tuple[str, ...] = ()
    """Names of modules that are stored plain; what lies inside them is plain too."""

    def of(self, name: str) -> WeightFormat:
        """The format of the projection with this name, as in `model.layers.0.self_attn.q_proj`."""
        path = f".{name}."
        return PLAIN if any(f".{module}." in path for module in self.plain_modules) else self.quantised


ALL_PLAIN = Formats()
READERS: dict[str, Callable[[ConfigReader], Formats | None]] = {}
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
