"""The network of a draft head of any kind, bound to a target: the target's hidden states in, decoder layers, draft tokens out.

T tokens, R rows, H hidden, NH heads of D numbers. Ranks may compute a head together; NH is then the number of a rank's heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from batchspec.batch.image_inputs import ImageInputs
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.cache.page_format import LayerPages
from batchspec.distributed.collectives import Collectives
from batchspec.draft.output import DraftOutput
from batchspec.model.decoder import ResidualStream
from batchspec.model.fused import rms_norm
from batchspec.model.layers.attention.rope import Rope
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.base import Gemm
from batchspec.model.layers.forward import Selected
from batchspec.model.layers.head_mixer import HeadMixerSpec
from batchspec.model.layers.kind import Computing
from batchspec.model.layers.layer import DecoderLayer, LayerSpec
from batchspec.model.target import Target


class HeadShape(Protocol):
    """What a drafter needs to know of the shape of its head, or of one rank's part of it."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def head_dim(self) -> int:
        """Number of numbers of a query or key for which `rope` has frequencies."""

    @property
    def rope(self) -> RopeSpec: ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """[num_layers] maximum number of keys that a query of the layer attends to, itself included; None: all."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Boundaries 0..L of the target's residual stream that it reads, in the order in which they are concatenated."""

    @property
    def feed_normed(self) -> bool:
        """Whether the next draft step reads the state after the final norm, not before it."""


class DraftWeights(Protocol):
    """The weights of a head."""

    @property
    def spec(self) -> HeadShape: ...

    def bind(self, target: Target, *, argmax: bool = True) -> BoundHead:
        """The network, which may use the target's embedding, norms and output matrix. argmax: see `DraftOutput`."""


def head_windows(windows: tuple[int | None, ...], window: int | None, sink: int) -> tuple[int | None, ...]:
    """[num_layers] newest keys that each layer reads if it is limited to the newest `window` keys and the first `sink` ones.

    windows  those of `HeadShape`
    None: all, or the first ones too.
    """
    if window is None:
        return windows
    return tuple(None if sink else min(window, own or window) for own in windows)


def head_states(
    mixer: HeadMixerSpec, windows: tuple[int | None, ...], dtype: torch.dtype, page_size: int, *, row: tuple[RowTensor, ...],
    fp8: bool = False, window: int | None = None, sink: int = 0,
) -> tuple[LayerState, ...]:
    """What each layer of a head keeps of a row; the last one keeps `row` besides its pages.

    mixer         that of every layer
    windows       those of `HeadShape`
    dtype, fp8    K and V are computed in `dtype`; fp8: and stored as e4m3
    window, sink  layers are limited to the newest `window` keys and the first `sink` ones; window None: not limited
    """
    layout = mixer.layout(
        Computing(dtype=dtype, state_dtype=dtype, fp8_kv=fp8, ordered=False, page_size=page_size, draft_len=0)
    )
    *first, last = head_windows(windows, window, sink)
    return (*(LayerState(layout, own) for own in first), LayerState(layout, last, row))


@dataclass(frozen=True, slots=True)
class Place:
    """Rotations and K/V slots of the tokens of a pass."""

    rope: Rope
    """The RoPE rotations of their positions."""
    slots: Tensor
    """int64 [T] where their K/V are written; 0 for those of dead rows"""


class BoundHead(ABC):
    """A head bound to a target."""

    def __init__(
        self, target: Target, layers: Sequence[DecoderLayer], norm: Tensor, eps: float, output: DraftOutput,
        ranks: Collectives | None,
    ) -> None:
        """
        norm, eps  the final norm, and epsilon of the norms before and after the layers
        ranks      those that compute the head together; None: this process alone
        """
        self.output = output
        self._target, self._layers, self._norm, self._eps, self._ranks = target, layers, norm, eps, ranks
        self._mixers = [layer.of_head for layer in layers]
        self._keepers = [mixer.keeper() for mixer in self._mixers]
        self._has_experts = any(layer.num_experts_read is not None for layer in layers)

    @property
    def mixer(self) -> HeadMixerSpec:
        """The shape of the mixers of its layers, which may differ in their inputs and windows."""
        return self._mixers[0].spec

    @abstractmethod
    def features(self, aux_hidden_states: Tensor) -> Tensor:
        """The target's hidden states [T, W] at the boundaries that it reads -> features [T, H]."""

    @abstractmethod
    def enter(
        self, tokens: Tensor, hidden: Tensor, *, row_ids: Tensor | None = None, positions: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> tuple[Tensor, Tensor]:
        """tokens int32 [T] and hidden [T, H], features or what the last step feeds -> the normed input of layer 0, and the
        residual stream [T, H].

        row_ids, positions  [T]: tokens is [rows, M], and each position reads the token after it in its row
        images  what positions read in place of that token's embedding
        The residual stream may be `hidden` or a view of the input; layers change it in place. Nothing reads the input after
        layer 0.
        """

    def layer(
        self, index: int, normed: Tensor, residual: Tensor, at: Place, pages: LayerPages, plan: Any,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Layer `index` on its normed input; writes K/V of all T tokens, adds to residual [T, H] in place.

        plan       of `plan`
        positions  int64 [T], if they are later than the plan's
        Returns the residual stream after the next layer's norm, for the last layer after the final norm.
        """
        attend = self.mixer.attend(pages, plan, positions)
        return self.finish(index, self.queries(index, normed, at, pages), residual, attend, at.slots)

    def queries(self, index: int, normed: Tensor, at: Place, pages: LayerPages) -> Tensor:
        """The first half of `layer`: queries [T, ...] for `finish`, and K/V of all T tokens in their pages."""
        return self._mixers[index].queries_of(normed, self.mixer.store(pages, at.rope, at.slots))

    def keep(self, index: int, normed: Tensor, at: Place, pages: LayerPages) -> None:
        """Write K/V of all T tokens and nothing else: for tokens whose hidden states after layer `index` are not used."""
        self._keepers[index](normed, self.mixer.store(pages, at.rope, at.slots))

    def finish(
        self, index: int, q: Tensor, residual: Tensor, attend: Selected, slots: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """The second half of `layer`, from the queries; slots int64 [T]: `Place.slots`; out [T, H]: the result is written here
        if it is given."""
        live = self._target.live_tokens(slots) if self._has_experts else None
        stream = ResidualStream(residual, live, self._ranks)
        self._layers[index].finish(q, stream, attend, add_in_product=False)  # the norm that follows is the head's
        return self._normed(index, stream, out)

    def _normed(self, index: int, stream: ResidualStream, out: Tensor | None = None) -> Tensor:
        """The stream after layer `index` and the norm that follows it."""
        following = self._mixers[index + 1].norm if index + 1 < len(self._layers) else self._norm
        return stream.normed(following, self._eps, out=out)


def put_images(images: ImageInputs | None, norm: Tensor, eps: float, out: Tensor) -> None:
    """Write the normed embeddings of images to their places in out [T, H], the normed embeddings of tokens."""
    if images is not None:
        out.index_copy_(0, images.places, rms_norm(images.rows[:, 0].contiguous(), norm, eps))


def layer_gemms(layer: LayerSpec) -> list[Gemm]:
    """The products of a head's layer. The head norms the inputs of its layers itself, so no product
    has a norm before it or adds to the residual stream."""
    *into, out = layer.of_head.head_gemms()
    of_mlp = (replace(gemm, ops=tuple(op for op in gemm.ops if op != "linear_add")) for gemm in layer.mlp.gemms(1))
    return [*into, out, *of_mlp]
