"""The weight formats of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import lcm

import torch

from batchspec.checkpoint.files import listed
from batchspec.checkpoint.wrapped import is_of_text
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.layers.base import BlockSpec, GroupedSpec, projections
from batchspec.model.quant.base import WeightFormat
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.fp8_at_load import FP8_AT_LOAD, Fp8AtLoad
from batchspec.model.quant.module_names import begins_with, is_in
from batchspec.model.quant.nvfp4_format import Nvfp4
from batchspec.model.quant.ordered import ORDERED
from batchspec.model.quant.plain import PLAIN, Plain
from batchspec.tuning.policy import has_fast_experts, has_fast_fp8


@dataclass(frozen=True, slots=True)
class Formats:
    """The weight formats of a model: `of` says which one a projection has. Embedding, output matrix and norms are always plain.

    What says that a module is plain comes first, then `modules`, then `patterns`, then `quantised`.
    """

    quantised: WeightFormat = PLAIN
    """The format of all projections that nothing else here names."""
    plain_modules: tuple[str, ...] = ()
    """Names of modules that are stored plain, with all modules inside them."""
    plain_patterns: tuple[str, ...] = ()
    """Regular expressions: a projection whose name begins with a match is stored plain. Those that name the language model of a
    larger model match its names in the file (`wrapped.py`)."""
    modules: Mapping[str, WeightFormat] = field(default_factory=dict, hash=False)
    """Full name of a module -> the format of its projections. If one named module is inside another, the inner one decides."""
    patterns: tuple[tuple[str, WeightFormat], ...] = ()
    """Regular expressions, as in `plain_patterns`, and the formats of projections that they match; the first one decides."""
    ordered: bool = False
    """Whether plain products sum in one order (decode.deterministic): the job's choice, not the checkpoint's."""

    def of(self, name: str) -> WeightFormat:
        """The format of the projection with this name, as in `model.layers.0.self_attn.q_proj`."""
        plain = is_in(self.plain_modules, name) or begins_with(self.plain_patterns, name)
        found = PLAIN if plain else self._given(name)
        return ORDERED if found is PLAIN and self.ordered else found

    def _given(self, name: str) -> WeightFormat:
        module = name if self.modules else ""
        while module:
            if module in self.modules:
                return self.modules[module]
            module = module.rpartition(".")[0]
        return next((own for pattern, own in self.patterns if begins_with((pattern,), name)), self.quantised)

    def of_product(self, names: Sequence[str]) -> WeightFormat:
        """The format of projections that are multiplied as one matrix, or of all experts of a layer.

        Raises CheckpointError if they have several.
        """
        first, *others = map(self.of, names)
        if any(other != first for other in others):
            raise CheckpointError(f"{listed(names)} must have one weight format; correct quantization_config")
        return first

    @property
    def all(self) -> tuple[WeightFormat, ...]:
        """Every format that a projection may have, once."""
        return tuple(dict.fromkeys((self.quantised, *self.modules.values(), *(own for _, own in self.patterns))))

    def without_modules(self, modules: AbstractSet[str]) -> list[str]:
        """The names and expressions of the first format that none of these modules has; empty if every format has a module.

        Names of modules outside of the language model do not count.
        """
        for own in dict.fromkeys((*self.modules.values(), *(own for _, own in self.patterns))):
            names = [name for name, other in self.modules.items() if other == own and is_of_text(name)]
            patterns = tuple(pattern for pattern, other in self.patterns if other == own)
            matched = any(begins_with(patterns, module) for module in modules)
            if (names or patterns) and not matched and modules.isdisjoint(names):
                return [*names, *patterns]
        return []

    def changed(self, change: Callable[[WeightFormat], WeightFormat]) -> Formats:
        """These formats, each changed in the same way."""
        made = {own: change(own) for own in self.all}
        return replace(
            self, quantised=made[self.quantised], modules={module: made[own] for module, own in self.modules.items()},
            patterns=tuple((pattern, made[own]) for pattern, own in self.patterns),
        )

    def quantised_at_load(self, plain_modules: Iterable[str]) -> Formats:
        """FP8 for all projections but these. Raises ConfigError for weights that are quantised already."""
        if any(own is not PLAIN for own in self.all):  # MXFP4, whose other products are plain, is a kind of Plain
            raise ConfigError(
                "model.quantize=fp8 is for checkpoints whose weights are in bfloat16, float16 or float32, and this one has a "
                "quantization_config; remove the key"
            )
        return replace(self, quantised=FP8_AT_LOAD, plain_modules=(*self.plain_modules, *plain_modules))

    @property
    def of_files(self) -> Formats:
        """The formats of the weights in the files, without those that are quantised when they are read."""
        return self.changed(lambda own: PLAIN if isinstance(own, Fp8AtLoad) else own)

    def with_experts(self, experts: Iterable[GroupedSpec]) -> Formats:
        """These formats for a model with these grouped products: those that a quantised format does not hold are plain."""
        plain = {spec.name for spec in experts if not all(own.holds(spec) for own in self.all)}
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
        fast = has_fast_fp8(device, dtype)
        quantises = activations == "fp8" or (activations == "auto" and fast and any(map(_quantisable, self.all)))
        found = self.with_fp8_activations() if quantises else self
        return found.changed(lambda own: own.for_kernels()) if has_fast_experts(device, dtype) else found

    @property
    def kept(self) -> str:
        """What is kept in memory in formats of its own; empty if all is in the model's dtype."""
        return ", ".join(dict.fromkeys(own.kept for own in self.all if own.kept))

    @property
    def quantises(self) -> bool:
        """Whether products quantise activations."""
        return any(isinstance(own, Fp8) and own.quantises for own in self.all)

    def quantises_input_of(self, name: str) -> bool:
        """Whether the projection with this name quantises activations."""
        own = self.of(name)
        return isinstance(own, Fp8) and own.quantises

    def dequantises(self, name: str) -> bool:
        """Whether products of the projection with this name dequantise NVFP4 weights in plain torch at each call."""
        own = self.of(name)
        return isinstance(own, Nvfp4) and not own.fast

    def multiplies_plain(self, name: str) -> bool:
        """Whether the projection with this name is a product of weights in the model's dtype."""
        own = self.of(name)
        return isinstance(own, Plain) or (isinstance(own, Fp8) and not own.quantises)

    def stores_plain(self, name: str) -> bool:
        """Whether files hold the projection with this name unquantised."""
        return isinstance(self.of(name), Plain | Fp8AtLoad)

    def in_one_order(self) -> Formats:
        """These formats with sums in one order. Raises ConfigError if products that are not plain have no such kernels."""
        return replace(self.changed(lambda own: own.in_one_order()), ordered=True)

    def with_fp8_activations(self) -> Formats:
        """These formats with activations of FP8 weights quantised as the checkpoint says.

        Raises ConfigError if the checkpoint has no FP8 weights, or does not say how activations are quantised.
        """
        fp8 = [own for own in self.all if isinstance(own, Fp8)]
        if not fp8:
            raise ConfigError("model.activations=fp8 needs a checkpoint with FP8 weights; use dtype")
        if not any(map(_quantisable, fp8)):
            raise ConfigError("model.activations=fp8: the checkpoint does not say how to quantise activations; use dtype")
        return self.changed(lambda own: own.with_activations() if isinstance(own, Fp8) and _quantisable(own) else own)


def _quantisable(own: WeightFormat) -> bool:
    """Whether the checkpoint says how to quantise the activations that are multiplied with these weights."""
    return isinstance(own, Fp8) and own.made_for != "plain"


ALL_PLAIN = Formats()
