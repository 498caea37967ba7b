"""The weight formats of one model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm

import torch

from batchspec.errors import ConfigError
from batchspec.model.blocks.base import BlockSpec, GroupedSpec, projections
from batchspec.model.config_values import ConfigReader
from batchspec.model.quant.base import WeightFormat
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.ordered import ORDERED
from batchspec.model.quant.plain import PLAIN, Plain
from batchspec.model.wrapped import names_in_files
from batchspec.tuning.policy import has_fast_experts, has_fast_fp8


@dataclass(frozen=True, slots=True)
class Formats:
    """The weight formats of a model. Embedding, output matrix and norms are always plain."""

    quantised: WeightFormat = PLAIN
    plain_modules: tuple[str, ...] = ()
    """Names of modules that are stored plain, with all modules inside them."""
    plain_patterns: tuple[str, ...] = ()
    """Regular expressions: a projection whose name begins with a match is stored plain. Those that name the language model of a
    larger model match its names in the file (`wrapped.py`)."""
    ordered: bool = False
    """Whether plain products sum in one order (decode.deterministic): the job's choice, not the checkpoint's."""

    def of(self, name: str) -> WeightFormat:
        """The format of the projection with this name, as in `model.layers.0.self_attn.q_proj`."""
        path = f".{name}."
        plain = any(f".{module}." in path for module in self.plain_modules)
        plain = plain or self.quantised is PLAIN or any(_matches(pattern, name) for pattern in self.plain_patterns)
        return (ORDERED if self.ordered else PLAIN) if plain else self.quantised

    def with_experts(self, experts: Iterable[GroupedSpec]) -> Formats:
        """These formats for a model with these grouped products: those that the quantised format does not hold are plain."""
        plain = {spec.name for spec in experts if not self.quantised.holds(spec)}
        return replace(self, plain_modules=(*self.plain_modules, *sorted(plain)))

    def unit_of(self, block: BlockSpec, prefix: str) -> int:
        """Number of values between the two products of an MLP that one rank holds together, so that no block of weights is
        divided."""
        names = [part.name for part in projections(block)] + [spec.of(0).parts[0].name for spec in block.grouped]
        return lcm(*(self.of(prefix + name).block for name in names))

    def on(self, device: torch.device, dtype: torch.dtype, activations: str) -> Formats:
        """The formats in which a model in `dtype` keeps its weights on this device.

        activations  the value of model.activations. auto quantises activations if the checkpoint says how and kernels for it run
                     here, because weights that are converted instead take twice the memory
        Raises ConfigError for fp8 if the checkpoint has no FP8 weights, or none that are made for quantised activations.
        """
        own, fast = self.quantised, has_fast_fp8(device, dtype)
        if activations == "fp8" or (activations == "auto" and fast and isinstance(own, Fp8) and own.made_for != "plain"):
            return self.with_fp8_activations()
        return replace(self, quantised=own.for_kernels()) if has_fast_experts(device, dtype) else self

    @property
    def kept(self) -> str:
        """What is kept in memory in a format of its own; empty if all is in the model's dtype."""
        return self.quantised.kept

    @property
    def quantises(self) -> bool:
        """Whether products quantise activations."""
        return isinstance(self.quantised, Fp8) and self.quantised.quantises

    def quantises_input_of(self, name: str) -> bool:
        """Whether the projection with this name quantises activations."""
        own = self.of(name)
        return isinstance(own, Fp8) and own.quantises

    def multiplies_plain(self, name: str) -> bool:
        """Whether the projection with this name is a product of weights in the model's dtype."""
        own = self.of(name)
        return isinstance(own, Plain) or (isinstance(own, Fp8) and not own.quantises)

    def in_one_order(self) -> Formats:
        """These formats with sums in one order. Raises ConfigError if products that are not plain have no such kernels."""
        return replace(self, ordered=True, quantised=self.quantised.in_one_order())

    def with_fp8_activations(self) -> Formats:
        """These formats with activations quantised as the checkpoint says.

        Raises ConfigError if the checkpoint has no FP8 weights, or does not say how activations are quantised.
        """
        if not isinstance(self.quantised, Fp8):
            raise ConfigError("model.activations=fp8 needs a checkpoint with FP8 weights; use dtype")
        return replace(self, quantised=self.quantised.with_activations())


ALL_PLAIN = Formats()


def _matches(pattern: str, name: str) -> bool:
    names = names_in_files(name) if "language" in pattern else (name,)  # most patterns do not, and a model has 100,000 names
    return any(re.match(pattern, own) for own in names)


def checked_pattern(config: ConfigReader, key: str, pattern: str) -> str:
    """A regular expression of this key. Raises CheckpointError if it is none."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise config.refusal(f"{config.shown(key)}: {pattern[:60]!r} is not a regular expression; correct it") from None
    return pattern
