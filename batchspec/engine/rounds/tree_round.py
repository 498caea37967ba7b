"""A round that verifies a tree of drafts: one forward pass over all nodes, then a chain's round along the accepted path.

Nodes take the K/V slots after the row's last committed token, in the order of their numbers. A node's position is its depth, and
it attends to its own path. The target chooses at every node with the noise of its position; the path from the root along these
choices is accepted. Its K/V are moved to where a chain's would be; commit and catch-up treat it as a chain of `depth` drafts.
Legend: R rows, N nodes besides the root, S = N + 1, D depth, T = R * S flat positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch, TreeTail
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import reads_drafts
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.cache.pages import KVCache
from batchspec.draft.base import Drafter
from batchspec.draft.shapes import TreeShape
from batchspec.engine.rounds.records import Drafts, RoundOptions, RoundResult, Verified
from batchspec.engine.rounds.round import Round
from batchspec.kernels.attention.work_list import SharedPrefixes
from batchspec.kernels.tree.find_accepted_path import find_accepted_path
from batchspec.kernels.tree.prepare_tree_inputs import prepare_tree_inputs
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch


class TreeRound(Round):
    """A round drafts the whole tree or nothing."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        shape: TreeShape,
        cache: KVCache,
        batch: PackedBatch,
        options: RoundOptions,
        device: torch.device,
    ) -> None:
        super().__init__(target, drafter, cache, batch, options, device)
        slots, width = batch.num_slots, shape.nodes + 1
        self.num_nodes = shape.nodes
        self._node_ids = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self._node_layout = UniformLayout(slots, (width,), device)
        self._node_kv_len = torch.zeros(slots, dtype=torch.int32, device=device)
        self._node_positions, self._node_slots, self._ancestors = torch.zeros(3, slots * width, dtype=torch.int64, device=device)
        self._path = torch.zeros(slots, shape.depth + 1, dtype=torch.int32, device=device)
        self._path_flat_ids = torch.zeros(slots, shape.depth + 1, dtype=torch.int64, device=device)

    def row_positions(self, draft_len: int) -> int:
        return 1 if not draft_len else self._node_ids.shape[1]

    def _draft(self, rows: DeviceBatch, mode: SamplingMode, draft_len: int) -> Drafts:
        """draft_len is 0 or the depth."""
        if not draft_len:
            return super()._draft(rows, mode, 0)
        self.set_draft_mode(mode)
        num_rows = rows.live.shape[0]
        path_ids, lengths = self.inputs.ids(num_rows, draft_len)[:, 1:], self.inputs.lengths(num_rows)
        parents = self.drafter.propose(rows, self._node_ids[:num_rows, 1:], lengths, self.cache)
        assert parents is not None
        return Drafts(path_ids, lengths, self.rates(draft_len), parents)

    def _verify(
        self, rows: DeviceBatch, mode: SamplingMode, drafts: Drafts, num_positions: int | None, shared: SharedPrefixes | None
    ) -> Verified | None:
        """Choose the target's tokens after every node, and follow them from the root. num_positions is None."""
        parents, depth = drafts.parents, drafts.ids.shape[1]
        if parents is None:
            return super()._verify(rows, mode, drafts, num_positions, shared)
        num_rows, ids = rows.live.shape[0], self._node_ids[: rows.live.shape[0]]
        chain = self.inputs.uniform(rows, depth).read_rows(rows)
        ids[:, 0] = self.inputs.ids(num_rows, depth)[:, 0]
        nodes = self._nodes(rows, ids, parents)
        nodes.read_rows(rows).shared = shared
        hidden, aux_hidden_states = self.target.forward(nodes, self.cache, self.drafter.aux_layer_ids)
        assert aux_hidden_states is not None
        logit_rows = self._logit_rows(nodes, parents, mode, rows)
        target_ids, raw = self.choose(hidden, logit_rows, rows, mode)
        flat_ids = self._path_flat_ids[:num_rows]
        find_accepted_path(
            ids, parents, target_ids, take_deepest=drafts.rates is not None, draft_len=drafts.length,
            out_path=self._path[:num_rows], out_flat_ids=flat_ids, out_draft_ids=drafts.ids,
        )
        flat_ids = flat_ids.view(-1)
        on_path = None
        if logit_rows is not None:
            on_path = LogitRows(chain.row_ids, chain.positions + 1, num_drafted=self._depth_of(chain, rows))
        return Verified(
            chain, target_ids.index_select(0, flat_ids), aux_hidden_states.index_select(0, flat_ids), on_path,
            None if raw is None else raw.index_select(0, flat_ids), nodes=nodes,
        )

    def _accept(self, rows: DeviceBatch, mode: SamplingMode, drafts: Drafts, verified: Verified) -> RoundResult:
        result = super()._accept(rows, mode, drafts, verified)
        if verified.nodes is not None:
            num_rows = rows.live.shape[0]
            self.cache.move_accepted(
                verified.nodes, self._path[:num_rows], verified.batch, self._accepted_len[:num_rows]
            )
        return result

    def _nodes(self, rows: DeviceBatch, ids: Tensor, parents: Tensor) -> FlatBatch:
        """S flat tokens for every row, dead or not: the newest token and the nodes."""
        (num_rows, width), page_size = ids.shape, self.cache.page_size
        page_table, *more_tables = rows.page_tables
        count = num_rows * width
        positions, slots, ancestors = (x[:count] for x in (self._node_positions, self._node_slots, self._ancestors))
        kv_len = self._node_kv_len[:num_rows]
        prepare_tree_inputs(
            parents, rows.num_tokens, rows.live, page_table, page_size=page_size, max_depth=self.drafter.draft_len,
            out_positions=positions, out_slot_mapping=slots, out_ancestors=ancestors, out_kv_len=kv_len,
        )
        tree = TreeTail(ancestors=ancestors, start=rows.num_tokens - 1, max_depth=self.drafter.draft_len)
        max_kv = page_table.shape[1] * page_size
        batch = self._node_layout.batch(ids, positions, slots, kv_len, page_table, max_kv, tree)
        return batch.add_groups(more_tables, page_size)

    def _logit_rows(self, batch: FlatBatch, parents: Tensor, mode: SamplingMode, rows: DeviceBatch) -> LogitRows | None:
        """Row and position of each node's choice; also the tokens on the path to it if a logit rule reads drafts."""
        if mode.greedy and self.options.reader is None:
            return None
        if not reads_drafts(mode):
            return LogitRows(batch.row_ids, batch.positions + 1)
        return LogitRows(
            batch.row_ids,
            batch.positions + 1,
            drafts=self._above(batch.token_ids.view_as(parents), parents),
            num_drafted=self._depth_of(batch, rows),
            draft_rows=torch.arange(parents.numel(), device=parents.device),
        )

    def _above(self, ids: Tensor, parents: Tensor) -> Tensor:
        """int32 [T, D] tokens of levels 1..D on the path from the root to each node, the node included; arbitrary below its
        depth."""
        (num_rows, width), depth = ids.shape, self.drafter.draft_len
        node = torch.arange(width, device=ids.device).expand(num_rows, -1)
        upwards = []
        for _ in range(depth):
            upwards.append(torch.where(node > 0, ids.gather(1, node), -1))
            node = parents.gather(1, node).clamp_(min=0).long()
        found = torch.stack(upwards[::-1], 2).view(-1, depth)
        # The climb goes on past the root: the entries that it reads there come first and are moved to the end.
        missing = (found < 0).sum(1, keepdim=True)
        order = (torch.arange(depth, device=ids.device) + missing) % depth
        return found.gather(1, order).clamp_(min=0)

    def _depth_of(self, batch: FlatBatch, rows: DeviceBatch) -> Tensor:
        """Depth of each flat token; only before the commit."""
        return batch.positions - (rows.num_tokens - 1)[batch.row_ids]
