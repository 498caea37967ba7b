"""What the rest of batchspec may know of a kind of layer. A kind says, in the order of `MixerSpec`:

    what it keeps of a row           kept
    what it costs                    round_work, prompt_work, sharing_cost, row_bytes_of_pass, partial_bytes,
                                     num_rank_sums
    what users read of it            refuses, about
    what else its files may hold     spare
    what its passes read             tables, inputs
    how it computes                  build, which gives a `Mixer`

and as every block which products and vectors it has (`BlockSpec`). A new kind is a package in this folder: its shape, a frozen
dataclass with these methods, and the block that the shape builds. Planner, tuner, cache, engine and `plan` ask the shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from batchspec.cache.kept import Kept
from batchspec.cache.layer_state import LayerState
from batchspec.cache.sharing_cost import SharingCost
from batchspec.console.text import bytes_text, counted
from batchspec.model.layers.base import BlockSpec
from batchspec.model.layers.forward import BlockSource, Selected, Stream
from batchspec.model.layers.passes import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """How a job computes a model: what decides, besides the shapes, what layers keep and what they cost."""

    dtype: torch.dtype
    """Of the computation."""
    state_dtype: torch.dtype
    """Of the states of recurrent layers, in a model that does not compute in fp64."""
    fp8_kv: bool
    """Whether pages hold K and V as e4m3."""
    ordered: bool
    """Whether sums have one order, whatever batch a row is in."""
    page_size: int
    """Tokens."""
    draft_len: int
    """K, the maximum number of drafts that a round verifies; 0 where only what does not depend on it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What mixers cost besides their products."""

    page_bytes: float = 0
    """Bytes of a row's pages, which are read while the mixer computes: the longer of both times counts."""
    state_bytes: int = 0
    """Bytes of a row's states: read before it computes and written after it."""
    token_bytes: int = 0
    """Bytes that take as long to move as the states take with one more token of the row."""
    flop: float = 0
    """Operations of one token."""


Use = Literal["tree", "self_draft", "drafter", "padded_prefill", "gpu", "ordered", "adapters"]
"""What a kind of layer may refuse. tree: rounds verify trees of drafts; self_draft: the model drafts for itself; drafter: it
drafts for another model; padded_prefill: a prefill pass has padding at its end; gpu: it runs on a GPU; ordered: there its
sums have one order; adapters: LoRA adapters are added to its products, each to those of its rows."""


class About(NamedTuple):
    """Lines of `plan`, each of a label and a text."""

    model: tuple[tuple[str, str], ...] = ()
    """Below the line about the model."""
    memory: tuple[tuple[str, str], ...] = ()
    """Below the line about pages."""


class Inputs(NamedTuple):
    """What the two parts of a mixer read in a pass besides the stream."""

    begin: Any
    """Where the first part keeps what the pass's tokens bring; None for a layer without a mixer."""
    finish: Selected
    """The tokens of the second part, and what they read of their rows."""


def row_lines(kept: Sequence[LayerState]) -> str:
    """Text of `About.model` for layers that keep row tensors."""
    what = ", and no K or V" if all(own.pages is None for own in kept) else ", besides K and V"
    return (
        f"{len(kept)} of the layers keep {bytes_text(sum(own.row_bytes for own in kept))} of a row, however long{what}; "
        "rows with a common prefix begin with a copy of what they keep at its end"
    )


def refused_by_recurrence(use: Use) -> str | None:
    """`MixerSpec.refuses` of a layer that keeps one state of a row."""
    only_chains = (
        "has recurrent layers, which keep one state of a row: only chains can be verified, and the model itself cannot draft them"
    )
    reasons: dict[Use, str] = dict.fromkeys(("tree", "self_draft"), only_chains)
    return (reasons | dict.fromkeys(("drafter", "padded_prefill"), "has recurrent layers")).get(use)


def about_states(states: Sequence[LayerState], name: str) -> About:
    """`MixerSpec.about` of layers whose first row tensor is a state. name: of one such layer"""
    kept = [own.row[0] for own in states]
    dtype = str(kept[0].dtype).removeprefix("torch.")
    size = bytes_text(sum(own.nbytes for own in kept))
    return About(
        model=(("recurrent", row_lines(states)),), memory=(("states", f"{size} a row in {dtype}, of {counted(len(kept), name)}"),)
    )


class Mixer(Protocol):
    """A block that computes with a row's earlier tokens, from what is kept of them: K and V, latent vectors, a state, or the
    newest inputs. In two parts, because a pass may need the second part for some of its tokens only."""

    def norms_in_product(self, stream: Stream) -> bool:
        """Whether its first product takes the un-normed stream for as many tokens; then the block before it adds in place."""

    def begin(self, stream: Stream, store: Any, out_aux: Tensor | None = None) -> Tensor:
        """The first part, whose result [T, ...] `finish` takes; what the row keeps of its tokens is written.

        store    `Inputs.begin` of this kind
        out_aux  [T, H]: the layer's input stream is written here if it is given
        """

    def finish(self, begun: Tensor, stream: Stream, attend: Any, *, add_in_product: bool) -> None:
        """Continue from the result of `begin`, of the stream's tokens, to the end of the block.

        attend  `Inputs.finish` of this kind
        add_in_product  as for `Block`
        """


class MixerSpec(BlockSpec, Protocol):
    """The shape of a mixer. What a kind does not say of `sharing_cost`, `row_bytes_of_pass`, `partial_bytes`, `num_rank_sums`,
    `spare` and `tables` is that it has none."""

    __slots__ = ()

    @property
    def parts(self) -> tuple[MixerSpec, ...]:
        """The mixers that it runs in parallel; by default itself alone."""
        return (self,)

    def kept(self, run: Computing) -> LayerState:
        """What it keeps of a row."""

    def round_work(self, run: Computing, context: float, tokens: float) -> Work:
        """A round in which a row with `context` tokens verifies `tokens`."""

    def prompt_work(self, run: Computing, prompt: float, *, ends_only: bool) -> Work:
        """A prefill of a prompt, for each of its tokens on average. ends_only: only the last token is computed to the end."""

    def sharing_cost(self, run: Computing, max_q: int) -> SharingCost | None:
        """What it saves and costs in rounds of `max_q` queries a row to read prefixes that rows share once; None: it reads
        none once."""
        return None

    def row_bytes_of_pass(self, run: Computing, num_keys: int) -> int:
        """Bytes that a pass makes of the `num_keys` keys of a row, one row after another, besides `activation_size`."""
        return 0

    def partial_bytes(self, run: Computing, rows: int, num_keys: int, *, shares: bool) -> int:
        """Maximum bytes of partial results of a round over `rows` rows of up to `num_keys` keys, if parts of a row's keys are
        computed apart and then merged. shares: prefixes that rows share are read once."""
        return 0

    @property
    def num_rank_sums(self) -> int:
        """Number of small sums over the ranks in a pass, such as those of a norm over all heads, besides `num_sums`."""
        return 0

    def refuses(self, use: Use) -> str | None:
        """Why a model with such layers cannot be used so, as the end of a sentence about the model; None: it can."""

    @classmethod
    def about(cls, layers: Sequence[Self], run: Computing) -> About:
        """What `plan` says of all layers of this kind in a model."""

    @property
    def spare(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors, relative to the layer, that a file may hold of it and that nothing reads."""
        return ()

    def tables(self) -> Mapping[Hashable, Tensor]:
        """Constants that its passes read, such as the frequencies of a rotation: made when a model is loaded, once for each key,
        and found in `Pass.tables`."""
        return {}

    def inputs(self, pass_: Pass, kept: Kept) -> Inputs:
        """What `Mixer.begin` and `finish` read in a pass; `pass_.once(kept.key, make)` makes what layers share. Called for all
        layers before the first one runs, and for later layers again if the pass goes on with some of its tokens."""

    def build(self, source: BlockSource) -> Mixer:
        """The block that computes, its weights taken from `source`."""
