"""What differs between the kinds of drafters that `batchspec train` makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from batchspec.checkpoint.files import ModelFiles
from batchspec.config.train_schema import TrainRun
from batchspec.errors import ConfigError
from batchspec.heads.data import Numbers, Row, unused_id
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.teacher import Teacher
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target


class TrainedDrafter(ABC):
    """A kind of drafter in one training. It is made, and refuses what it cannot train, before weights are loaded."""

    name: ClassVar[str]
    """What `draft=` calls it in jobs."""
    usual_lr: float = 3e-3

    def __init__(self, run: TrainRun, files: ModelFiles, target: ModelSpec) -> None:
        """files  of the target, whose weights may not be fetched yet. Raises ConfigError and CheckpointError."""
        self._run, self._files, self._target = run, files, target

    def check_dtype(self, dtype: torch.dtype, device: torch.device) -> None:
        """dtype  of the target. Raises ConfigError if there is no training with it on this device."""
        return None

    def check(self, rows: list[Row]) -> None:
        """Raises ConfigError for settings that do not fit target and completions."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know before the training begins, a line each."""
        return ()

    @abstractmethod
    def network(self, target: Target, rows: list[Row]) -> DraftNetwork:
        """The network to train on these rows, with its first weights; called once. fp32, or fp64 for a target in fp64."""

    @abstractmethod
    def teacher(self, target: Target) -> Teacher:
        """The source of its training batches; called after `network`."""

    @abstractmethod
    def about(self, network: DraftNetwork, rows: list[Row]) -> str:
        """The network in a few words, with its number of weights."""

    @abstractmethod
    def save(self, folder: Path, network: DraftNetwork, dtype: torch.dtype) -> None:
        """Write it as a checkpoint in `dtype`, which jobs read by draft.path."""

    def _teacher(self, target: Target, aux_layer_ids: tuple[int, ...], draft_vocab_ids: Numbers | None) -> Teacher:
        return Teacher(
            target,
            aux_layer_ids,
            None if draft_vocab_ids is None else torch.from_numpy(draft_vocab_ids),
            dtype_of_inputs(target.dtype, target.device),
            prompts=self._run.train.prompts,
            temperature=self._run.train.temperature,
        )


def mask_token(run: TrainRun, rows: list[Row], vocab_size: int) -> int:
    """The id of a new head's mask token. Raises ConfigError for train.mask_token outside the vocabulary."""
    given = run.train.mask_token
    if given is not None and given >= vocab_size:
        raise ConfigError(f"train.mask_token={given} is outside the target's vocabulary of {vocab_size}; null chooses one")
    return unused_id(rows, vocab_size) if given is None else given


def share_of_draft_vocab(draft_vocab_ids: Numbers, rows: list[Row], vocab_size: int) -> float:
    """Share of the completions' tokens that are in the draft vocabulary."""
    inside = np.zeros(vocab_size, bool)
    inside[draft_vocab_ids] = True
    known = sum(int(inside[row.ids[row.prompt_len :]].sum()) for row in rows)
    return known / sum(len(row.ids) - row.prompt_len for row in rows)


def dtype_of_inputs(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """dtype of what a network reads of a target of `dtype`. On a GPU the network of a bf16 target learns by bf16 products
    (`loop.py`), which read the target's states as they come out; elsewhere by fp32 ones, or fp64."""
    narrow = device.type == "cuda" and dtype is torch.bfloat16
    return dtype if narrow else torch.promote_types(dtype, torch.float32)
