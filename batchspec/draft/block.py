"""draft=block: a DFlash, DFlash2 or DSpark head drafts a block of K tokens in one forward pass.

    context      K and V of every position that the target has verified, from its states alone: prefill and catch-up write them
    block        the newest token, then masks, at positions num_tokens - 1 and later; a query attends to the context and to all
                 of the block, or to no later query of it where the head's layer is causal
    draft k      DSpark: of query k.   DFlash, DFlash2: of query k + 1, the mask at the draft's own position
    DSpark, DFlash2   the token before a draft changes its logits: `walk_candidates` walks over the best ones of each
    DFlash2      convolutions around attention and MLP of each layer: a query reads the one before it in the block (`block_conv`)

The block's K and V are in the slots of the positions to verify: the catch-up overwrites them, and nothing reads them before. A
block has as many queries as the round needs, fewer than in training. It needs no embeddings of the prompt. Rounds without drafts
put the context of their positions off (`waiting_states.py`).
Source: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), DFlash2 (https://github.com/z-lab/dflash).
Legend: R rows, T flat positions, K draft_len, S queries of a block, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch, TreeTail
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.cache.pages import KVCache
from batchspec.checkpoint.hub import find_model, resolve_model
from batchspec.config.schema import RunConfig
from batchspec.draft.block_head import (
    BlockHead,
    BlockWeights,
    dummy_block,
    dummy_block_spec,
    load_block,
    open_block,
)
from batchspec.draft.block_spec import BlockSpec
from batchspec.draft.block_tensors import block_bytes, block_layers
from batchspec.draft.bound_head import HeadShape, Place, head_states
from batchspec.draft.coupled import later_draws
from batchspec.draft.eagle3 import reading
from batchspec.draft.markov import CandidateWalk
from batchspec.draft.reader import HeadReader, Reading, zeros_on
from batchspec.draft.spec import DEFAULT_DRAFT_VOCAB, DrafterSpec
from batchspec.draft.waiting_states import PLACES, WaitingStates
from batchspec.errors import ConfigError
from batchspec.kernels.drafting.prepare_block_draft_inputs import prepare_block_draft_inputs
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.plan import AttentionPlan, plan_attention
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target


class BlockDrafter(HeadReader):
    """Keeps of a slot from round to round its K/V, and states of positions for which that is put off. Nothing is read back to the
    host and no shape depends on data: a round with it can be captured in a CUDA graph."""

    name = "block"
    most_unprepared: int | None = PLACES - 1
    head: BlockHead

    def __init__(self, head: BlockWeights, target: Target, draft_len: int, *, slots: int, **reading: Unpack[Reading]) -> None:
        """Raises ValueError for more drafts than the head was trained for."""
        super().__init__(head, target, draft_len, **reading)
        self._block, device = head.spec, target.device
        if draft_len > self._block.most_drafts:
            raise ValueError(f"BlockDrafter: draft_len {draft_len}; the head drafts at most {self._block.most_drafts}")
        widest, widths = self._block.queries(draft_len), [self._block.queries(k) for k in range(1, draft_len + 1)]
        zeros = partial(zeros_on, device)
        self._ids, (self._start, self._kv_len) = zeros(slots * widest), zeros(2, slots)
        self._positions, self._slots, self._seen = zeros(3, slots * widest, dtype=torch.int64)
        self._residual = zeros(slots * widest, self._block.hidden_size, dtype=target.dtype)
        self._layout = UniformLayout(slots, widths, device)
        no_later = torch.tensor([(1 << j + 1) - 1 if j < 63 else -1 for j in range(widest)], device=device)
        self._no_later = {width: no_later[:width].repeat(slots) for width in widths}
        self._walk = CandidateWalk(head, self.head.output)
        self._waiting = WaitingStates(slots, device)

    @property
    def prefill_by_bounds(self) -> bool:
        return True  # it attends to nothing

    @staticmethod
    def row_tensors(spec: HeadShape, dtype: torch.dtype) -> tuple[RowTensor, ...]:
        assert isinstance(spec, BlockSpec)
        features, kv = 2 * spec.hidden_size, 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        return WaitingStates.row_tensors(len(spec.aux_layer_ids) * spec.hidden_size, features + kv, dtype)

    @torch.inference_mode()
    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        assert aux_hidden_states is not None
        self._keep(batch, aux_hidden_states, cache)
        self._waiting.enter(slot_ids, batch.kv_len, cache)

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
        """A round without drafts puts its positions off until the next round drafts, or `most_unprepared` of them have passed."""
        assert aux_hidden_states is not None
        if batch.max_q > 1:
            self._keep(batch, aux_hidden_states, cache)
            return
        self._waiting.put(batch, aux_hidden_states, cache)
        if prepare_next:
            self._keep(*self._waiting.take(rows, cache), cache)

    def _keep(self, batch: FlatBatch, aux_hidden_states: Tensor, cache: KVCache) -> None:
        at = Place(self._rope(batch.rope_positions), batch.slot_mapping)
        kv = [LayerKV.of(self._pages(cache, i)) for i in range(self._last + 1)]
        self.head.keep_all(self.head.features(aux_hidden_states), at, kv)

    @torch.inference_mode()
    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        num_rows, width = draft_ids.shape
        batch = self._batch(rows, width, draft_len, cache)
        states, positions, row_ids, queries = self._states(batch, cache), batch.positions, batch.row_ids, batch.max_q
        if queries > width:  # the newest token's query drafts nothing
            each = (x.unflatten(0, (num_rows, queries))[:, 1:] for x in (states, positions - 1, row_ids))
            states, positions, row_ids = (x.contiguous().flatten(0, 1) for x in each)
        draws = later_draws(self.mode, rows, row_ids, positions, ahead=1, drafts=draft_ids)
        sure = None if self.confidence is None else self.confidence[:num_rows, :width]
        newest = batch.token_ids[::queries]
        self._walk.choose(states, newest, draft_ids, draws, sure)

    def _batch(self, rows: DeviceBatch, draft_len: int, out_draft_len: Tensor, cache: KVCache) -> FlatBatch:
        """The S queries of each row."""
        num_rows, width, page_table = rows.live.shape[0], self._block.queries(draft_len), cache.draft_table(rows)
        ids, positions, slots, seen = (x[: num_rows * width] for x in (self._ids, self._positions, self._slots, self._seen))
        start, kv_len = self._start[:num_rows], self._kv_len[:num_rows]
        prepare_block_draft_inputs(
            rows.tokens, rows.num_tokens, rows.limit, rows.live, page_table, mask_id=self._block.mask_token_id,
            draft_len=draft_len, page_size=cache.page_size, out_ids=ids, out_positions=positions, out_slot_mapping=slots,
            out_start=start, out_kv_len=kv_len, out_seen=seen, out_draft_len=out_draft_len,
        )
        tree = TreeTail(ancestors=seen, start=start, max_depth=width - 1)
        batch = self._layout.batch(ids.view(num_rows, width), positions, slots, kv_len, page_table, rows.max_kv, tree)
        return batch.read_rows(rows)

    def _states(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        """[R * S, H] after the final norm."""
        at = Place(self._rope(batch.rope_positions), batch.slot_mapping)
        plans = dict[tuple[int | None, bool], AttentionPlan]()
        normed, residual = self.head.enter(batch.token_ids, self._residual[: len(batch.token_ids)])
        for i, kind in enumerate(zip(self._windows, self._block.causal, strict=True)):
            if kind not in plans:
                plans[kind] = self._plan(batch, cache, *kind)
            normed = self.head.block_layer(i, normed, residual, at, self._pages(cache, i), plans[kind], batch.max_q)
        return normed

    def _plan(self, batch: FlatBatch, cache: KVCache, window: int | None, causal: bool) -> AttentionPlan:
        tree, positions = batch.tree, batch.positions
        assert tree is not None
        if causal:
            tree = replace(tree, ancestors=tree.ancestors & self._no_later[batch.max_q][: len(positions)])
        if window is not None and self._block.windows_at_anchor:
            positions = tree.start.long().index_select(0, batch.row_ids)
        seen = replace(batch, tree=tree, positions=positions)
        kv = LayerKV.of(self._pages(cache, 0))
        return plan_attention(seen, kv, num_heads=self._block.num_heads, window=window, sink=self._sink)


class BlockDrafterSpec(DrafterSpec[BlockWeights]):
    """A drafter with the head of draft.path, or a random one with model.load_format=dummy and no path."""

    checkpoint: BlockSpec
    assumed_accepted = 1.5
    """An assumption, of 3 drafts: published heads have more of 7 (arXiv 2607.05147, table 1)."""

    def __init__(self, config: RunConfig, target: ModelSpec, *, draft_vocab: int = DEFAULT_DRAFT_VOCAB) -> None:
        super().__init__(config, target, draft_vocab=draft_vocab)
        draft = config.draft
        if draft.path is None:
            size = max(8, draft.draft_len)
            self.checkpoint = dummy_block_spec(target, draft_vocab_size=draft_vocab, block_size=size)
        else:
            self.checkpoint = open_block(find_model(draft.path, key="draft.path"), target, aux_layers=draft.aux_layers)
        if self.checkpoint.assumed:
            self.note = (
                f"{draft.path}: no sample_from_anchor in config.json; {str(self.checkpoint.from_anchor).lower()} is assumed. If "
                "few drafts are accepted, add the other value"
            )
        if draft.draft_len > (most := self.checkpoint.most_drafts):
            raise ConfigError(
                f"draft.num_speculative_tokens={draft.draft_len} exceeds the {most} tokens that {draft.path or 'this head'} "
                f"drafts in a block; use at most {most}"
            )

    def layer_states(self, dtype: torch.dtype, page_size: int) -> tuple[LayerState, ...]:
        draft = self.config.draft
        return head_states(
            block_layers(self.checkpoint)[0].attention, self.checkpoint.windows, dtype, page_size,
            row=BlockDrafter.row_tensors(self.checkpoint, dtype),
            fp8=draft.cache_dtype == "fp8", window=draft.window, sink=draft.sink_tokens or 0,
        )

    def weight_bytes(self, *, dtype: torch.dtype, device: torch.device) -> int:
        return block_bytes(self.checkpoint, dtype)

    def draft_bytes(self, draft_len: int, *, dtype: torch.dtype, device: torch.device) -> int:
        """One pass drafts all of them, with the head's output matrix or the target's."""
        head, target = self.checkpoint, self.target
        shared = 0 if head.own_head else target.num_logits * target.hidden_size * dtype.itemsize
        return self.weight_bytes(dtype=dtype, device=device) + shared if draft_len else 0

    def fetch(self) -> None:
        if self.config.draft.path is not None:
            resolve_model(self.config.draft.path, key="draft.path")

    def load(self, *, dtype: torch.dtype, device: torch.device) -> BlockWeights:
        path = self.config.draft.path
        if path is None:
            return dummy_block(self.checkpoint, dtype=dtype, device=device)
        return load_block(resolve_model(path, key="draft.path"), self.checkpoint, dtype=dtype, device=device)

    def build(self, weights: BlockWeights, target: Target, *, slots: int) -> BlockDrafter:
        options: dict[str, Any] = reading(self.config)
        draft_len, argmax = self.config.draft.draft_len, self.config.ablation.argmax
        return BlockDrafter(weights, target, draft_len, slots=slots, argmax=argmax, **options)


SPEC = BlockDrafterSpec
