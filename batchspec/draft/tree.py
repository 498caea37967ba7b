"""An EAGLE-3 head drafts a tree: at each level the best nodes so far branch, and the best of all nodes are verified.

    root           the newest token; its children are the `topk` most likely tokens after the row's last verified position
    level l+1      the topk best nodes of level l, by path score, go through the head; each gets its topk most likely children
    path score     sum of log-probabilities from the root on
    verified       the `nodes` best of all children of all levels. A parent's score is never below its child's, so every verified
                   node's parent is verified too

Among equal scores the node drafted first wins, so parents come before children. The head's K/V of the nodes it reads takes topk
slots a level after the row's last verified position; each node attends to its own path only. The catch-up overwrites them.
Source: Li et al. 2024, EAGLE-2 (arXiv 2406.16858); sums of log-probabilities: SGLang, "Optimize EAGLE select_top_k_tokens: use
logprobs" (2025).
Legend: R rows, B topk, D depth, N nodes, C candidates B + (D - 1) B^2, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch, TreeTail
from batchspec.batch.logits import drafters_read_drafts
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.cache.layer_state import RowTensor
from batchspec.cache.pages import KVCache
from batchspec.draft.bound_head import HeadShape, Place
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.coupled import Draws, later_draws
from batchspec.draft.head import Head
from batchspec.draft.shapes import TreeShape, num_grown
from batchspec.kernels.tree.expand_tree import Frontier, expand_tree
from batchspec.kernels.tree.prepare_tree_inputs import prepare_tree_inputs
from batchspec.kernels.tree.rerank_tree import rerank_tree
from batchspec.model.target import Target


class TreeDrafter(ChainDrafter):
    """Keeps for each slot the head's output at its last verified position, from which the root's children are drafted.

    draft_len is the depth. Nothing is read back to the host and no shape depends on data: a round with it can be captured.
    """

    name = "tree"

    def __init__(
        self, head: Head, target: Target, shape: TreeShape, *, slots: int, window: int | None = None, sink: int = 0,
        fp8_kv: bool = False, dead_positions: bool = True,
    ) -> None:
        """The other arguments are those of HeadReader. Raises ValueError if topk exceeds the draft vocabulary."""
        if shape.topk > head.spec.draft_vocab_size:
            raise ValueError(f"TreeDrafter: topk={shape.topk} exceeds the head's {head.spec.draft_vocab_size} draft tokens")
        super().__init__(
            head, target, shape.depth, slots=slots, window=window, sink=sink, fp8_kv=fp8_kv, dead_positions=dead_positions
        )
        device, branches, places = target.device, shape.topk, shape.num_drafted
        self._shape = shape
        self._parents = torch.full((slots, shape.nodes + 1), -1, dtype=torch.int32, device=device)
        place = torch.arange(places, dtype=torch.int32, device=device)
        self._depths = (place // branches).long()
        self._places_above = torch.where(place < branches, -1, place - branches).unsqueeze(0)
        self._keys = torch.arange(1, shape.depth, dtype=torch.int32, device=device).mul_(branches).unsqueeze(1)
        self._node_ids = torch.arange(slots * branches, dtype=torch.int32, device=device).view(slots, branches)
        self._layout = UniformLayout(slots, (branches,), device)
        self._grown_positions, self._grown_slots, self._grown_masks = torch.zeros(
            3, slots * places, dtype=torch.int64, device=device
        )
        self._scores = torch.zeros(slots, shape.num_candidates, dtype=self.head.output.dtype, device=device)
        self._ids, self._numbers_above = torch.zeros(2, slots, shape.num_candidates, dtype=torch.int32, device=device)
        line = torch.arange(slots, device=device)
        start = torch.zeros((slots, 1), dtype=self._scores.dtype, device=device)
        no_number, no_place = torch.full_like(start, -1, dtype=torch.int32), torch.zeros_like(start, dtype=torch.int64)
        self._root = Frontier(start, no_number, no_place, no_number.flatten(), line)

    @staticmethod
    def row_tensors(spec: HeadShape, dtype: torch.dtype) -> tuple[RowTensor, ...]:
        return *(RowTensor((spec.hidden_size,), dtype),) * 2, RowTensor((), torch.int32)

    @property
    def shape(self) -> TreeShape:
        return self._shape

    def _prepare_next(self, normed: Tensor, out: Tensor, out_sure: Tensor, draws: Draws | None) -> None:
        out.copy_(normed)

    @torch.inference_mode()
    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> Tensor:
        """Nodes 1..N of each row's tree; siblings are adjacent, the most likely first. draft_len is the depth."""
        num_rows, branches, depth = draft_ids.shape[0], self._shape.topk, self.draft_len
        torch.mul(rows.live, depth, out=draft_len)
        root, levels = self._root, self._levels(rows, cache)
        frontier = Frontier(
            *(x[:num_rows] for x in (root.scores, root.node_ids, root.ancestors, root.token_ids, root.parent_index))
        )
        normed, hidden, _ = (x[:num_rows] for x in cache.draft_rows)
        scores, ids, above = (x[:num_rows] for x in (self._scores, self._ids, self._numbers_above))
        draws, paths = self._draws_at_end(rows), frontier.token_ids.new_empty(num_rows, 0)
        reads_paths = self.mode is not None and drafters_read_drafts(self.mode)
        for level in range(depth):
            if level:
                batch = levels[level - 1]
                if reads_paths:
                    paths = torch.cat((paths.index_select(0, frontier.parent_index), frontier.token_ids.unsqueeze(1)), 1)
                draws = later_draws(
                    self.mode, rows, batch.row_ids, batch.positions, ahead=2, drafts=paths,
                    draft_rows=self._node_ids[:num_rows].view(-1),
                )
                hidden = hidden.index_select(0, frontier.parent_index)
                normed, hidden = self._through(batch, frontier, hidden, cache)
            following = expand_tree(
                *self.head.output.branches(normed, branches, draws), self.head.output.map_ids, frontier,
                first_node_id=num_grown(branches, level), first_bit=level * branches if level + 1 < depth else None,
                all_scores=scores, all_ids=ids, all_parents=above,
            )
            frontier = following or frontier
        parents = self._parents[:num_rows]
        rerank_tree(scores, ids, above, out_ids=draft_ids, out_parents=parents)
        return parents

    def _levels(self, rows: DeviceBatch, cache: KVCache) -> list[FlatBatch]:
        """The batch of each level that goes through the head, topk nodes a row; tokens and masks are filled in later."""
        num_rows, branches, steps = rows.live.shape[0], self._shape.topk, self.draft_len - 1
        if not steps:
            return []
        count = num_rows * self._shape.num_drafted
        positions, slots, masks = (x[:count] for x in (self._grown_positions, self._grown_slots, self._grown_masks))
        start, page_table = rows.num_tokens - 1, cache.draft_table(rows)
        prepare_tree_inputs(
            self._places_above.expand(num_rows, -1), rows.num_tokens, rows.live, page_table, page_size=cache.page_size,
            max_depth=steps - 1, out_positions=positions, out_slot_mapping=slots, out_ancestors=masks,
            out_kv_len=self._kv_len[:num_rows],
        )
        by_level = [x.view(num_rows, steps, branches).transpose(0, 1).flatten(1).contiguous() for x in (positions, slots)]
        kv_len = torch.minimum(start + self._keys, self._kv_len[:num_rows]) * rows.live
        tree = TreeTail(ancestors=masks, start=start, max_depth=steps - 1, depths=self._depths)
        # Their tokens are not known yet: attention only needs their number.
        tokens, max_kv = self._node_ids[:num_rows], page_table.shape[1] * cache.page_size
        levels = [
            self._layout.batch(tokens, by_level[0][level], by_level[1][level], kv_len[level], page_table, max_kv, tree)
            for level in range(steps)
        ]
        return [level.read_rows(rows) for level in levels]

    def _through(self, batch: FlatBatch, nodes: Frontier, hidden: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Run every node of a level through the head: its output [R*B, H], and the hidden state that drafts its children."""
        assert batch.tree is not None
        batch.tree = replace(batch.tree, ancestors=nodes.ancestors.flatten())
        normed, residual = self.head.enter(nodes.token_ids, hidden)
        at = Place(self._rope(batch.rope_positions), batch.slot_mapping)
        plans = self._plans(batch, cache, range(self._last + 1))
        for i, window in enumerate(self._windows):
            normed = self.head.layer(i, normed, residual, at, self._pages(cache, i), plans[window])
        return normed, normed if self._spec.feed_normed else residual
