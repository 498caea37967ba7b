"""A job's drafter before there is an engine: what `plan`, the job, training, adaptation and benchmarks ask of it.

open_drafter(config, target)   settings and checkpoint judged, no weight read; ConfigError, CheckpointError for what cannot draft
    .shape  .kv_layers()   .weight_bytes()  .state_bytes()     what the planner needs
    .of_rank(shard)            the same where ranks compute the target together
    .fetch()                   weights of a hub id downloaded
    .load(dtype, device)       weights read
    .build(weights, target)    the drafter, for an engine
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from batchspec.cache.layout import KVLayout
from batchspec.config.schema import RunConfig
from batchspec.draft.base import Drafter
from batchspec.draft.formats import HeadSpec
from batchspec.draft.shapes import ChainShape, TreeShape
from batchspec.draft.weights import Head
from batchspec.model.blocks.base import Shard
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target

W = TypeVar("W")

USUAL_DRAFT_VOCAB = 32000
"""Draft tokens of a head of noise (model.load_format=dummy)."""


class DrafterSpec(ABC, Generic[W]):
    """The drafter that a config asks for. W is the type of its weights. The defaults here are those of one without any."""

    assumed_accepted: ClassVar[float]
    """Draft tokens accepted a row and round, the bonus token not counted: what `plan` assumes, with a source."""
    checkpoint: Hashable = None
    """The shape of its weights: for one draft.path those that compare equal `load` the same."""
    head: HeadSpec | None = None
    """The EAGLE-3 head that it drafts with, which may go on learning during the job; None: it has none."""

    def __init__(self, config: RunConfig, target: ModelSpec, *, draft_vocab: int = USUAL_DRAFT_VOCAB) -> None:
        """Judge the checkpoint by its config.json and the headers of its weights.

        target       the complete one, where ranks compute it together
        draft_vocab  draft tokens of a head of noise; real ones say themselves
        Raises ConfigError for settings that do not fit it, CheckpointError for one that is broken or another target's.
        """
        self.config, self.target = config, target

    def of_rank(self, shard: Shard) -> DrafterSpec[W]:
        """What one of the ranks that compute the target together holds of the drafter. Every rank has a whole one by default.

        Raises ConfigError for one that is to be cut and cannot be.
        """
        return self

    @property
    def shape(self) -> ChainShape | TreeShape:
        """What a round verifies of a row."""
        return ChainShape(self.config.draft.num_speculative_tokens)

    def kv_layers(self, dtype: torch.dtype, page_size: int) -> tuple[tuple[KVLayout, int | None], ...]:
        """K/V format of each layer of its own, which follow the target's layers, and how many newest keys it reads; None: all."""
        return ()

    def weight_bytes(self, *, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes of the weights that `load` keeps in the device's memory."""
        return 0

    def state_bytes(self) -> int:
        """Bytes of the device's memory for what it collects while the job runs."""
        return 0

    def fetch(self) -> None:
        """Download what is on the hub still. Raises CheckpointError."""
        return None

    @abstractmethod
    def load(self, *, dtype: torch.dtype, device: torch.device) -> W:
        """Read the weights. Raises CheckpointError."""

    @abstractmethod
    def build(self, weights: W, target: Target, *, slots: int) -> Drafter:
        """The drafter of an engine with so many slots; `weights` from `load`, and several drafters may share them."""

    def trainable(self, weights: W) -> Head | None:
        """The weights of `head`; None where there is none."""
        return None


class Weightless(DrafterSpec[None]):
    """A drafter without a checkpoint."""

    def load(self, *, dtype: torch.dtype, device: torch.device) -> None:
        return None


def open_drafter(config: RunConfig, target: ModelSpec, *, draft_vocab: int = USUAL_DRAFT_VOCAB) -> DrafterSpec[Any]:
    """The drafter at draft.name, checked for `target`; see `DrafterSpec`."""
    module = importlib.import_module(f"batchspec.draft.{config.draft.name}")
    spec: type[DrafterSpec[Any]] = module.SPEC
    return spec(config, target, draft_vocab=draft_vocab)
