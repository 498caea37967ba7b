"""What a kind of layer has besides `kind.py` if the layers of draft heads may be of it.

A head norms the inputs of its layers itself (`draft/bound_head.py`). Its drafter makes rotations once for all layers of a pass. A
plan it makes once for these, or for all steps of a chain, whose later ones have other places in pages and later positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.page_format import LayerPages, PageFormat
from batchspec.model.layers.attention.rope import Rope
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.base import Gemm
from batchspec.model.layers.forward import Selected
from batchspec.model.layers.kind import Computing, Mixer, MixerSpec


class HeadMixerSpec(MixerSpec, Protocol):
    """The shape of such a mixer."""

    __slots__ = ()

    @property
    def window(self) -> int | None:
        """Number of keys that a query attends to at most, itself included; None: all."""

    @property
    def rotation(self) -> RopeSpec:
        """How queries and keys are rotated by their positions."""

    @property
    def rotated_size(self) -> int:
        """Number of numbers of a query or key for which `rotation` has frequencies."""

    def head_gemms(self) -> tuple[Gemm, ...]:
        """Its products in a head, none of which has a norm before it."""

    def layout(self, run: Computing) -> PageFormat:
        """The format of what it keeps in pages."""

    def plan(self, batch: FlatBatch, pages: LayerPages, *, window: int | None, sink: int) -> Any:
        """What all layers of this shape share to attend in a pass to the newest `window` keys and the first `sink` ones."""

    def store(self, pages: LayerPages, rope: Rope, slots: Tensor) -> Any:
        """`Inputs.begin`: rotations and places int64 [T] of the pass's tokens."""

    def attend(self, pages: LayerPages, plan: Any, positions: Tensor | None = None) -> Selected:
        """`Inputs.finish`. positions: int64 [T] in place of the plan's: not earlier, and below the row's number of keys"""


class HeadMixer(Mixer, Protocol):
    """Such a mixer as it computes."""

    @property
    def spec(self) -> HeadMixerSpec: ...

    @property
    def norm(self) -> Tensor:
        """The weight of the norm of its input."""

    def queries_of(self, normed: Tensor, store: Any) -> Tensor:
        """`Mixer.begin` for an input [T, ...] that the caller has normed."""

    def keeper(self) -> Callable[[Tensor, Any], object]:
        """The part of `queries_of` that writes to pages, with the same arguments. Made once: it may copy weights on a CPU."""
