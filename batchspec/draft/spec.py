"""A job's drafter before there is an engine: what `plan`, the job, training and benchmarks need to know of it.

open_drafter(config, target)   check settings and checkpoint, read no weights; ConfigError, CheckpointError if it cannot draft
    .shape  .layer_states()  .weight_bytes()  .draft_bytes()  .corpus_bytes()  what the planner needs
    .of_rank(shard)            the same if ranks compute the target together
    .fetch()                   download the weights of a hub id
    .load(dtype, device)       read the weights
    .build(weights, target)    make the drafter, for an engine
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from batchspec.cache.layer_state import LayerState
from batchspec.config.schema import RunConfig
from batchspec.draft.base import Drafter
from batchspec.draft.shapes import ChainShape, TreeShape
from batchspec.errors import ConfigError
from batchspec.model.layers.base import Shard
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target

W = TypeVar("W")

DEFAULT_DRAFT_VOCAB = 32000
"""Draft vocabulary of a random head (model.load_format=dummy)."""


class DrafterSpec(ABC, Generic[W]):
    """The drafter that a config asks for. W is the type of its weights. The defaults are those of a drafter without weights."""

    assumed_accepted: ClassVar[float]
    """Accepted draft tokens of a row and round, of 3 or more, that `plan` assumes; subclasses name the source."""
    runs_target: ClassVar[bool] = False
    """Whether the target itself drafts, over other keys than those that it verifies with."""
    checkpoint: Hashable = None
    """The shape of its weights: for one draft.path, equal values load the same weights."""
    note: str = ""
    """What the user should know of its checkpoint, in one line; empty if there is nothing."""

    def __init__(self, config: RunConfig, target: ModelSpec, *, draft_vocab: int = DEFAULT_DRAFT_VOCAB) -> None:
        """Check the checkpoint by its config.json and the headers of its weights.

        target       the complete one, if ranks compute it together
        draft_vocab  draft vocabulary of a random head; a checkpoint has its own
        Raises ConfigError for settings that do not fit it, CheckpointError for one that is broken or of another target.
        """
        self.config, self.target = config, target

    @classmethod
    def of(cls, config: RunConfig, target: ModelSpec, *, draft_vocab: int) -> DrafterSpec[Any]:
        """The drafter that the config asks for by this name. Default: one of this class."""
        return cls(config, target, draft_vocab=draft_vocab)

    def of_rank(self, shard: Shard) -> DrafterSpec[W]:
        """The part of the drafter that one of the ranks that compute the target together holds. Default: every rank has all of
        it.

        Raises ConfigError for a drafter that is to be cut but cannot be.
        """
        return self

    @property
    def shape(self) -> ChainShape | TreeShape:
        """What a round verifies of a row."""
        return ChainShape(self.config.draft.draft_len)

    def layer_states(self, dtype: torch.dtype, page_size: int) -> tuple[LayerState, ...]:
        """What each of its own layers, which follow the target's, keeps of a row."""
        return ()

    def weight_bytes(self, *, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes of the weights that `load` keeps in the device's memory."""
        return 0

    def draft_bytes(self, draft_len: int, *, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes of weights that are read to draft so many tokens of each row. Default: all of its own, once per token."""
        return draft_len * self.weight_bytes(dtype=dtype, device=device)

    def corpus_bytes(self) -> int:
        """Bytes of the device's memory for what it collects while the job runs."""
        return 0

    def fetch(self) -> None:
        """Download what this machine lacks. Raises CheckpointError."""
        return None

    @abstractmethod
    def load(self, *, dtype: torch.dtype, device: torch.device) -> W:
        """Read the weights. Raises CheckpointError."""

    @abstractmethod
    def build(self, weights: W, target: Target, *, slots: int) -> Drafter:
        """The drafter of an engine with `slots` slots; `weights` from `load`, which several drafters may share."""


class Weightless(DrafterSpec[None]):
    """A drafter without a checkpoint."""

    def load(self, *, dtype: torch.dtype, device: torch.device) -> None:
        return None


def open_drafter(config: RunConfig, target: ModelSpec, *, draft_vocab: int = DEFAULT_DRAFT_VOCAB) -> DrafterSpec[Any]:
    """The drafter named draft.name, checked for `target`; see `DrafterSpec`."""
    module = importlib.import_module(f"batchspec.draft.{config.draft.name}")
    kind: type[DrafterSpec[Any]] = module.SPEC
    made = kind.of(config, target, draft_vocab=draft_vocab)
    is_tree = isinstance(made.shape, TreeShape)
    why = target.refuses("tree") if is_tree else target.refuses("self_draft") if made.runs_target else None
    if why is not None:
        raise ConfigError(
            f"draft={'tree' if is_tree else config.draft.name}: {target.family} {why}; choose none, lookup, eagle3, hybrid, "
            "parallel or pard"
        )
    return made
