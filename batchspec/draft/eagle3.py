"""draft=eagle3: an EAGLE-3 or P-EAGLE head drafts a chain (`chain.py`), a tree (`tree.py`), or K tokens at once (`parallel.py`).

The drafter is a tree if draft.tree.topk is above 1; otherwise it drafts in parallel if the head has a mask token, unless
draft.parallel says otherwise.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from batchspec.cache.layer_state import LayerState
from batchspec.checkpoint.hub import find_model, resolve_model
from batchspec.config.schema import RunConfig
from batchspec.draft.base import Drafter
from batchspec.draft.bound_head import head_states
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.formats import HeadSpec
from batchspec.draft.head import Head
from batchspec.draft.head_tensors import head_bytes, head_layers
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.reader import HeadReader
from batchspec.draft.shapes import ChainShape, TreeShape, default_nodes
from batchspec.draft.shard import cut, part_of_head
from batchspec.draft.spec import DEFAULT_DRAFT_VOCAB, DrafterSpec
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec, load_head, open_head
from batchspec.errors import ConfigError
from batchspec.model.layers.base import Shard
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target


class Eagle3DrafterSpec(DrafterSpec[Head]):
    """A drafter with a head: that of draft.path, or a random one with model.load_format=dummy and no path."""

    head: HeadSpec
    checkpoint: HeadSpec
    """The part of `head` that this process holds: all of it, or that of one rank."""
    assumed_accepted = 1.0
    """A mean acceptance length of 2, which published heads have on mixed prompts."""

    def __init__(self, config: RunConfig, target: ModelSpec, *, draft_vocab: int = DEFAULT_DRAFT_VOCAB) -> None:
        super().__init__(config, target, draft_vocab=draft_vocab)
        self.head = self.checkpoint = _open(config, target, draft_vocab)
        if target.vision is not None and self.head.hidden_size != target.hidden_size:
            raise ConfigError(
                f"draft.path={config.draft.path}: a head of hidden_size {self.head.hidden_size} reads no embeddings of images, "
                f"which have the model's {target.hidden_size} numbers; choose another head, or leave the images out "
                "(input.columns.images, model.vision)"
            )

    def of_rank(self, shard: Shard) -> Eagle3DrafterSpec:
        config, found = self.config, copy(self)
        found.checkpoint = part_of_head(self.head, shard, config.ablation.sharded_draft)
        return found

    @property
    def shape(self) -> ChainShape | TreeShape:
        draft, tree = self.config.draft, self.config.draft.tree
        if tree.topk == 1:
            return ChainShape(draft.draft_len)
        depth = tree.depth or draft.draft_len
        return TreeShape(topk=tree.topk, depth=depth, nodes=tree.nodes or default_nodes(tree.topk, depth))

    def layer_states(self, dtype: torch.dtype, page_size: int) -> tuple[LayerState, ...]:
        draft = self.config.draft
        return head_states(
            head_layers(self.checkpoint)[0].attention, self.checkpoint.windows, dtype, page_size,
            row=self._kind.row_tensors(self.checkpoint, dtype), fp8=draft.cache_dtype == "fp8", window=draft.window,
            sink=draft.sink_tokens or 0,
        )

    @property
    def _kind(self) -> type[HeadReader]:
        return TreeDrafter if isinstance(self.shape, TreeShape) else chain_kind(self.config, self.head)

    def weight_bytes(self, *, dtype: torch.dtype, device: torch.device) -> int:
        return head_bytes(self.checkpoint, dtype)

    def fetch(self) -> None:
        if self.config.draft.path is not None:
            resolve_model(self.config.draft.path, key="draft.path")

    def load(self, *, dtype: torch.dtype, device: torch.device) -> Head:
        head = self._load(dtype=dtype, device=device)
        return head if self.checkpoint.whole is None else cut(head, self.checkpoint)

    def _load(self, *, dtype: torch.dtype, device: torch.device) -> Head:
        draft = self.config.draft
        if draft.path is None:
            return dummy_head(self.head, dtype=dtype, device=device)
        folder = resolve_model(draft.path, key="draft.path")
        return load_head(folder, self.target, dtype=dtype, device=device, aux_layers=draft.aux_layers)

    def build(self, weights: Head, target: Target, *, slots: int) -> Drafter:
        shape = self.shape
        if isinstance(shape, TreeShape):
            return TreeDrafter(weights, target, shape, slots=slots, **reading(self.config))
        return build_chain(self.config, weights, target, shape.draft_len, slots=slots)


def build_chain(config: RunConfig, head: Head, target: Target, draft_len: int, *, slots: int) -> ChainDrafter | ParallelDrafter:
    """A drafter of up to `draft_len` tokens: all at once if head and config allow it, else one after another."""
    argmax, uniform_slots = config.ablation.argmax, config.ablation.uniform_slots
    if chain_kind(config, head.spec) is ParallelDrafter:
        return ParallelDrafter(head, target, draft_len, slots=slots, argmax=argmax, **reading(config))
    return ChainDrafter(head, target, draft_len, slots=slots, argmax=argmax, uniform_slots=uniform_slots, **reading(config))


def chain_kind(config: RunConfig, head: HeadSpec) -> type[ChainDrafter] | type[ParallelDrafter]:
    """The drafter of chains that this head is for."""
    return ParallelDrafter if config.draft.parallel is not False and head.mask_token_id is not None else ChainDrafter


def reading(config: RunConfig) -> dict[str, Any]:
    """What a head reads of a row, as arguments of its drafter."""
    draft = config.draft
    dead_positions = config.ablation.dead_positions is not False
    return {
        "window": draft.window, "sink": draft.sink_tokens or 0, "fp8_kv": draft.cache_dtype == "fp8",
        "dead_positions": dead_positions,
    }


def _open(config: RunConfig, target: ModelSpec, draft_vocab: int) -> HeadSpec:
    draft = config.draft
    if draft.path is None:
        return dummy_spec(target, draft_vocab_size=draft_vocab, parallel=draft.parallel is True)
    head = open_head(find_model(draft.path, key="draft.path"), target, aux_layers=draft.aux_layers)
    if draft.tree.topk > head.draft_vocab_size:
        raise ConfigError(
            f"draft.tree.topk={draft.tree.topk} exceeds the {head.draft_vocab_size} draft tokens of the head "
            f"{draft.path}; lower it"
        )
    if draft.parallel is True and head.mask_token_id is None:
        raise ConfigError(
            f"draft.parallel=true, but the head {draft.path} has no mask token: it drafts a chain; use draft=eagle3"
        )
    return head


SPEC = Eagle3DrafterSpec
