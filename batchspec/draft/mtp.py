"""draft=mtp: the model drafts with the MTP layer of its own checkpoint, or with one that was tuned on other text (draft.path).

A chain of any length: the layer is applied again to its own output (`chain.py`). With the folder of an assistant in draft.path,
that drafts (`assistant.py`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.cache.layer_state import LayerState
from batchspec.checkpoint.files import ModelFiles
from batchspec.checkpoint.hub import find_model
from batchspec.config.schema import RunConfig
from batchspec.draft.assistant import AssistantDrafterSpec
from batchspec.draft.assistant_spec import is_assistant
from batchspec.draft.base import DrafterUpdate
from batchspec.draft.bound_head import head_states
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.eagle3 import reading
from batchspec.draft.frequent_tokens import FrequentTokens
from batchspec.draft.mtp_head import Mtp, MtpHead, MtpShape, dummy_mtp, load_mtp, open_mtp
from batchspec.draft.spec import DEFAULT_DRAFT_VOCAB, DrafterSpec
from batchspec.errors import ConfigError
from batchspec.model.layers.base import Shard
from batchspec.model.mtp import MtpSpec
from batchspec.model.spec import ModelSpec, load_spec, tokens_of
from batchspec.model.target import Target


class MtpDrafter(ChainDrafter):
    """A chain that the model's own MTP layer drafts."""

    name = "mtp"
    head: MtpHead

    def __init__(self, mtp: Mtp, target: Target, draft_len: int, *, slots: int, **options: Any) -> None:
        super().__init__(mtp, target, draft_len, slots=slots, **options)
        self._vocabulary = mtp.vocabulary

    def learn(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        if self._vocabulary is not None:
            self._vocabulary.learn(prompt_ids, token_ids)

    def next_update(self) -> DrafterUpdate:
        return DrafterUpdate(swap=self._vocabulary is not None and self._vocabulary.is_due)

    def refresh(self, update: DrafterUpdate) -> None:
        if update.swap:
            self.head.choose_vocabulary()


class MtpDrafterSpec(DrafterSpec[Mtp]):
    """A drafter with the MTP layer of the model's checkpoint or of draft.path, or a random one with model.load_format=dummy."""

    checkpoint: MtpShape
    """The part of the layer that this process holds."""
    assumed_accepted = 1.5
    """Of 3 drafts; published figures are first drafts accepted at 75 to 92 %, second ones at 60 to 70 %
    (https://github.com/vllm-project/vllm/pull/48892)."""

    def __init__(self, config: RunConfig, target: ModelSpec, *, draft_vocab: int = DEFAULT_DRAFT_VOCAB) -> None:
        super().__init__(config, target, draft_vocab=draft_vocab)
        self.checkpoint = MtpShape.of(target, self._open(target))

    @classmethod
    def of(cls, config: RunConfig, target: ModelSpec, *, draft_vocab: int) -> DrafterSpec[Any]:
        path = config.draft.path
        if path is not None and is_assistant(find_model(path, key="draft.path").folder):
            return AssistantDrafterSpec(config, target, draft_vocab=draft_vocab)
        return cls(config, target, draft_vocab=draft_vocab)

    def _open(self, target: ModelSpec) -> MtpSpec:
        model, tuned = self.config.model, self.config.draft.path is not None
        found = load_spec(find_model(model.path or "", model.revision).folder).mtp if tuned else target.mtp
        if found is None:
            raise ConfigError(
                f"draft=mtp: {model.path or 'this shape'} has no MTP layer in its files, or none that is supported; choose "
                "draft=lookup, or draft=eagle3 with a head made for the model, or set draft.path to an assistant made for it, as "
                "Gemma 4 has"
            )
        spec = replace(found, formats=target.formats.of_files)
        return spec if self._dummy else open_mtp(self._files, spec)

    @property
    def _files(self) -> ModelFiles:
        """The files that have the layer."""
        model, path = self.config.model, self.config.draft.path
        return find_model(model.path or "", model.revision) if path is None else find_model(path, key="draft.path")

    @property
    def _dummy(self) -> bool:
        return self.config.draft.path is None and self.config.model.load_format == "dummy"

    def of_rank(self, shard: Shard) -> MtpDrafterSpec:
        found = copy(self)
        found.checkpoint = replace(self.checkpoint, mtp=self.checkpoint.mtp.sharded(shard))
        return found

    def layer_states(self, dtype: torch.dtype, page_size: int) -> tuple[LayerState, ...]:
        draft = self.config.draft
        return head_states(
            self.checkpoint.mixer, self.checkpoint.windows, dtype, page_size,
            row=ChainDrafter.row_tensors(self.checkpoint, dtype), fp8=draft.cache_dtype == "fp8", window=draft.window,
            sink=draft.sink_tokens or 0,
        )

    @property
    def _vocab_size(self) -> int | None:
        """Number of tokens that can be drafted, equally many of each rank; None: all."""
        asked, ranks = self.config.draft.vocab_size, self.checkpoint.mtp.shard.ranks
        return None if asked is None or asked >= self.target.vocab_size else max(ranks, asked - asked % ranks)

    def weight_bytes(self, *, dtype: torch.dtype, device: torch.device) -> int:
        copied = (self._vocab_size or 0) // self.checkpoint.mtp.shard.ranks
        return self.checkpoint.mtp.block_bytes(dtype) + copied * self.target.hidden_size * dtype.itemsize

    def draft_bytes(self, draft_len: int, *, dtype: torch.dtype, device: torch.device) -> int:
        """The layer's weights, and rows of an output matrix: its own copies, or all of the target's."""
        shared = 0 if self._vocab_size else self.target.num_logits * self.target.hidden_size * dtype.itemsize
        return draft_len * (self.weight_bytes(dtype=dtype, device=device) + shared)

    def fetch(self) -> None:
        if not self._dummy:
            self._files.fetch()

    def load(self, *, dtype: torch.dtype, device: torch.device) -> Mtp:
        if self._dummy:
            return dummy_mtp(self.checkpoint, dtype=dtype, device=device)
        self._files.fetch()
        return load_mtp(self._files.folder, self.checkpoint, dtype=dtype, device=device)

    def build(self, weights: Mtp, target: Target, *, slots: int) -> MtpDrafter:
        ablation, size, ranks = self.config.ablation, self._vocab_size, self.checkpoint.mtp.shard.ranks
        if size is not None:
            tokens = range(target.spec.vocab_size)
            parts = [tokens[tokens_of(Shard(rank, ranks), len(tokens))] for rank in range(ranks)]
            weights = replace(weights, vocabulary=FrequentTokens(size, parts))
        return MtpDrafter(
            weights, target, self.config.draft.draft_len, slots=slots, argmax=ablation.argmax,
            uniform_slots=ablation.uniform_slots, **reading(self.config),
        )


SPEC = MtpDrafterSpec
