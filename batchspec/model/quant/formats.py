"""The weight formats of one model."""

from __future__ import annotations

from dataclasses import dataclass

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
