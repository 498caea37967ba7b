"""draft=mtp with an assistant (`batchspec.draft.assistant_spec`) in draft.path, such as those of Gemma 4.

    draft k  the assistant's token after the newest one and k - 1 drafts, over the K and V of the target for all tokens before the
             newest one

All steps have the position of the newest token, and the assistant keeps nothing of a row: between rounds each row has the
target's state at its last verified position. A layer with a window reads as many keys as the target's layer would. (The mask of
transformers lets one key more through, and the K and V of the first rejected draft.)
Source: transformers, generation/candidate_generator.py (SinglePositionMultiTokenCandidateGenerator).
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.cache.pages import KVCache
from batchspec.checkpoint.files import ModelFiles
from batchspec.checkpoint.hub import find_model
from batchspec.config.schema import RunConfig
from batchspec.draft.assistant_head import Assistant, BoundAssistant, check_assistant, load_assistant
from batchspec.draft.assistant_spec import AssistantSpec, read_assistant
from batchspec.draft.base import DrafterBase
from batchspec.draft.coupled import later_draws
from batchspec.draft.spec import DEFAULT_DRAFT_VOCAB, DrafterSpec
from batchspec.errors import ConfigError
from batchspec.kernels.sampling.argmax import PROBABILITIES
from batchspec.model.fused import rms_norm
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.plan import AttentionPlan, plan_attention
from batchspec.model.layers.base import Shard
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target

_OF_LAYERS = ("vocab_size", "window", "sink_tokens", "cache_dtype")
"""Keys of `draft` that are for an MTP layer."""


class AssistantDrafter(DrafterBase):
    """Keeps for each slot the target's state at the row's last verified position."""

    name = "mtp"
    fixed_len = True
    prior_chances = PROBABILITIES

    def __init__(self, assistant: Assistant, target: Target, draft_len: int, *, slots: int, argmax: bool = True) -> None:
        self.draft_len = draft_len
        self.aux_layer_ids: tuple[int, ...] = (target.spec.num_layers,)
        self._target, self._net = target, BoundAssistant(assistant, target, argmax=argmax)
        self._attentions = [layer.attention for layer in assistant.spec.layers]
        self._sources = [own.kv_of for own in self._attentions if own.kv_of is not None]
        self._layout = UniformLayout(slots, (1,), target.device)
        self._row_ids = torch.arange(slots, dtype=torch.int32, device=target.device)

    @property
    def prefill_by_bounds(self) -> bool:
        return True

    def layer_states(self, page_size: int) -> tuple[LayerState, ...]:
        return states_of(self._target.spec, self._target.dtype)

    @torch.inference_mode()
    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        assert aux_hidden_states is not None
        ends = aux_hidden_states.index_select(0, batch.cu_seqlens_q[1:] - 1)
        cache.enter(slot_ids, batch.kv_len, (self._features(ends),))

    @torch.inference_mode()
    def catch_up(
        self,
        batch: FlatBatch,
        aux_hidden_states: Tensor | None,
        accepted_len: Tensor,
        rows: DeviceBatch,
        cache: KVCache,
        *,
        prepare_next: bool,
    ) -> None:
        assert aux_hidden_states is not None
        if prepare_next:
            places = (batch.cu_seqlens_q[:-1] + accepted_len).clamp_(max=len(batch.token_ids) - 1)
            cache.draft_rows[0][: len(places)].copy_(self._features(aux_hidden_states.index_select(0, places)))

    def _features(self, states: Tensor) -> Tensor:
        return rms_norm(states, self._target.final_norm, self._target.spec.rms_eps)

    @torch.inference_mode()
    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        width, net = draft_ids.shape[1], self._net
        kept = (rows.num_tokens - 1).clamp_(min=0).mul_(rows.live)  # the newest token has no K and V yet
        newest, last = kept.long(), (kept.long() - 1).clamp_(min=0)
        tokens = rows.tokens.gather(1, newest.unsqueeze(1)).squeeze(1)
        plans, ropes = self._plans(rows, tokens, last, kept, cache), net.ropes(newest)
        kv = [LayerKV.of(cache.kept[source].pages) for source in self._sources]
        hidden, row_ids = cache.draft_rows[0][: len(kept)], self._row_ids[: len(kept)]
        for k in range(width):
            normed = net.step(tokens, hidden, ropes, kv, plans, last)
            draws = later_draws(self.mode, rows, row_ids, newest, ahead=k + 1, drafts=draft_ids)
            sure = None if self.confidence is None else self.confidence[: len(kept), k]
            net.output.choose(normed, draft_ids[:, k], draws, sure)
            if k + 1 < width:
                tokens, hidden = draft_ids[:, k], net.next_hidden(normed)
        torch.mul(rows.live, width, out=draft_len)

    def _plans(
        self, rows: DeviceBatch, tokens: Tensor, last: Tensor, kept: Tensor, cache: KVCache
    ) -> list[AttentionPlan]:
        """Of each layer: attention of one query a row over the `kept` keys up to position `last`."""
        tables, made = cache.page_tables(rows), dict[object, AttentionPlan]()
        found = []
        for own, source in zip(self._attentions, self._sources, strict=True):
            group, kv = cache.kept[source].group, LayerKV.of(cache.kept[source].pages)
            kind = (group, own.window, own.num_heads, kv.layout)
            if kind not in made:
                batch = self._layout.batch(tokens.unsqueeze(1), last, last, kept, tables[group], rows.max_kv)
                made[kind] = plan_attention(batch, kv, num_heads=own.num_heads, window=own.window)
            found.append(made[kind])
        return found


def states_of(target: ModelSpec, dtype: torch.dtype) -> tuple[LayerState, ...]:
    """What the drafter keeps of a row: no K and V."""
    return (LayerState(None, None, (RowTensor((target.hidden_size,), dtype),)),)


class AssistantDrafterSpec(DrafterSpec[Assistant]):
    """A drafter with the assistant in draft.path."""

    checkpoint: AssistantSpec
    """The part of it that this process holds."""
    assumed_accepted = 1.5
    """An assumption, that of an MTP layer: it was not measured."""

    def __init__(self, config: RunConfig, target: ModelSpec, *, draft_vocab: int = DEFAULT_DRAFT_VOCAB) -> None:
        super().__init__(config, target, draft_vocab=draft_vocab)
        usual = RunConfig().draft
        for key in _OF_LAYERS:
            if (value := getattr(config.draft, key)) != getattr(usual, key):
                raise ConfigError(
                    f"draft.{key}={value} is not used by the assistant {config.draft.path}, which reads K and V of the model and "
                    "drafts any token; remove the key"
                )
        if config.ablation.dead_positions is False:
            raise ConfigError("ablation.dead_positions=false has no effect on an assistant, which keeps no K and V; remove it")
        self.checkpoint = read_assistant(self._files.folder, target)
        check_assistant(self._files, self.checkpoint)

    @property
    def _files(self) -> ModelFiles:
        return find_model(self.config.draft.path or "", key="draft.path")

    def of_rank(self, shard: Shard) -> AssistantDrafterSpec:
        found = copy(self)
        found.checkpoint = self.checkpoint.sharded(shard)
        return found

    def layer_states(self, dtype: torch.dtype, page_size: int) -> tuple[LayerState, ...]:
        return states_of(self.target, dtype)

    def weight_bytes(self, *, dtype: torch.dtype, device: torch.device) -> int:
        spec = self.checkpoint
        return spec.block_bytes(dtype) + spec.num_logits * spec.ends.hidden_size * dtype.itemsize

    def fetch(self) -> None:
        self._files.fetch()

    def load(self, *, dtype: torch.dtype, device: torch.device) -> Assistant:
        self._files.fetch()
        return load_assistant(self._files.folder, self.checkpoint, dtype=dtype, device=device)

    def build(self, weights: Assistant, target: Target, *, slots: int) -> AssistantDrafter:
        return AssistantDrafter(weights, target, self.config.draft.draft_len, slots=slots, argmax=self.config.ablation.argmax)
