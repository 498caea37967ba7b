"""Executes scheduled steps: owns all device state of the engine and decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.groups import KVGroups
from batchspec.cache.layer_state import windows_of
from batchspec.cache.pages import KVCache
from batchspec.cache.prefix_states import PrefixStates
from batchspec.cache.sharing_cost import NO_LAUNCHES
from batchspec.draft.base import Drafter
from batchspec.draft.shapes import TreeShape
from batchspec.engine.prefill.graphs import PrefillGraphs
from batchspec.engine.rounds.graphs import Graphs
from batchspec.engine.rounds.prefix_tables import PrefixGroupTables
from batchspec.engine.rounds.records import PendingResult, RoundOptions, now_on
from batchspec.engine.rounds.round import Round
from batchspec.engine.rounds.tree_round import TreeRound
from batchspec.engine.slots.row_feature import Features
from batchspec.engine.step import Prefill, Refill, ScheduledRound, ScheduledStep
from batchspec.model.target import Target
from batchspec.packed_batch import PREFIX_STATES, ExpectedRows, PackedBatch


class Executor:
    """The state of the slots on the device, what layers keep of their rows, and the captured rounds.

    All of it depends on the steps alone: two executors that execute the same steps hold the same tokens and page tables. The
    host waits only in `read`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        batch: PackedBatch,
        *,
        device: torch.device,
        options: RoundOptions,
        features: Features | None = None,
        prefill_graphs: bool = False,
    ) -> None:
        """
        features        asked for what they need on the device; None: there are none
        prefill_graphs  run short prefill passes as CUDA graphs if that pays
        """
        assert batch.decodes or drafter.draft_len == 0, "nothing is decoded that could be drafted"
        assert drafter.shape.num_verified <= batch.num_verified, (drafter.shape, batch.num_verified)
        features = features or Features()
        spec = target.spec
        self.target, self.drafter, self.batch = target, drafter, batch
        self.prefill_multiple = spec.prefill_multiple
        """`prefill_of` cuts prompts at multiples of so many tokens; None: anywhere."""
        layers = spec.layer_states(target.dtype, batch.page_size, draft_len=batch.num_verified)
        draft_layers = drafter.layer_states(batch.page_size)
        groups = KVGroups.of(windows_of(layers), windows_of(draft_layers), batch.max_len)
        self.cache = KVCache.allocate(
            layers,
            draft_layers,
            groups=groups,
            page_size=batch.page_size,
            num_pages=batch.group_pages(groups.num_groups),
            num_slots=batch.num_slots,
            num_states=PREFIX_STATES,
            device=device,
            scales=target.kv_scales,
        )
        if target.ranks is not None:
            num_tokens = batch.num_slots * (batch.num_verified + 1)
            target.ranks.reserve(num_tokens * spec.hidden_size * target.dtype.itemsize)
        self.round = round_for(target, drafter, self.cache, batch, options, device)
        self.rows = DeviceBatch.allocate(
            batch,
            vocab_size=spec.vocab_size,
            device=device,
            num_lookahead_slots=self.round.num_lookahead_slots,
            num_groups=groups.num_groups,
        )
        features.allocate(self.rows)
        self.prefix_groups = PrefixGroupTables(batch.num_slots, batch.page_size, device)
        self.graphs = Graphs(self.round, self.rows, self.prefix_groups)
        self.sharing = NO_LAUNCHES
        if self.graphs.captures:
            self.sharing = spec.sharing_cost(target.dtype, page_size=batch.page_size, max_q=batch.num_verified + 1)
        self.prefill_pass = partial(features.prefill_pass, self.round, self.rows)
        """Launches one prefill pass kernel by kernel."""
        self.examples = partial(features.examples, self.rows)
        """As `Features.examples`."""
        self.prefill_graphs: PrefillGraphs | None = None
        if prefill_graphs and (padded_pass := features.padded_pass) is not None:
            self.prefill_graphs = PrefillGraphs(
                self.round, self.rows, self.graphs, self.prefill_pass, padded_pass, batch
            )
        self._launch_pass = self.prefill_pass if self.prefill_graphs is None else self.prefill_graphs.run
        self._pending: deque[PendingResult] = deque()
        self.num_left_at_refill: int | None = None
        """Number of earlier rounds and passes that the device had not finished when the last refill was launched: at 0 the device
        may have waited for the host. None: rounds are no CUDA graphs, so a launch may return after its work is done."""

    def prefix_states(self) -> PrefixStates | None:
        """A new, empty record of the snapshots of prefixes; None if no layer keeps row tensors."""
        if self.prefill_multiple is None:
            return None
        num_slots, page_size = self.batch.num_slots, self.batch.page_size
        entries = range(num_slots, num_slots + PREFIX_STATES)
        return PrefixStates(entries, page_size=page_size, multiple=self.prefill_multiple)

    def execute(self, step: ScheduledStep) -> None:
        """Launch what the step says, in the order of its fields. Results are read later, in launch order."""
        for prompt_ids, token_ids in step.finished:
            self.drafter.learn(prompt_ids, token_ids)
        if step.killed:
            self.rows.kill(step.killed)
        if step.moves:
            self.rows.move(step.moves, self.cache.row_tensors)
        if step.refills:
            self._fill_slots(step.refills)
        step.commands.execute(self.rows)
        if step.resumed:
            self.rows.resume(step.resumed)
        if step.prefill is not None:
            self._launch_prefill(step.prefill)
        if step.grants:
            self.rows.grant([(grant.slot, grant.first_column, grant.pages) for grant in step.grants])
        if step.round is not None:
            self._launch_round(step.round)

    def _fill_slots(self, refills: Sequence[Refill]) -> None:
        """Put requests into their slots: their tokens and their pages."""
        rows = self.rows
        rows.begin([refill.slot for refill in refills], [r.request for r in refills], [r.tokens for r in refills])
        rows.grant([(refill.slot, 0, refill.pages) for refill in refills])

    def _launch_prefill(self, prefill: Prefill) -> None:
        """Launch the passes of requests that are in their slots; their rows decode from the next round on."""
        began, earlier = now_on(self.rows.tokens.device), tuple(self._pending)
        for segments in prefill.passes:
            self.cache.copy_states([(one.restores, one.slot) for one in segments if one.restores is not None])
            prefilled = self._launch_pass(segments, prefill.mode)
            self.cache.copy_states([(one.slot, one.saves) for one in segments if one.saves is not None])
            prefilled.activate(self.rows)
            if prefilled.result is not None:
                self._pending.append(PendingResult.send(prefilled.result, began))
        if self.graphs.captures:
            self.num_left_at_refill = sum(not result.has_arrived for result in earlier)

    def _launch_round(self, scheduled: ScheduledRound) -> None:
        if scheduled.new_prefix_groups is not None:
            self.prefix_groups.write(scheduled.new_prefix_groups, scheduled.shape.num_rows)
        self.drafter.refresh(scheduled.drafter_update)
        result = self.graphs.run(scheduled.shape)  # on a GPU replays a graph, in which `Round.run` was captured
        if scheduled.counts_experts:
            result = replace(result, experts_read=self.target.experts_read())
        if not scheduled.counts_drafts:
            result = replace(result, levels=None)
        self._pending.append(PendingResult.send(result))

    def read(self) -> PendingResult:
        """Wait for the oldest result and return it."""
        result = self._pending.popleft()
        result.wait()
        if self.target.ranks is not None:
            self.target.ranks.check()
        return result

    def clear(self) -> None:
        """Reset all state: an earlier run may have been interrupted."""
        self._pending.clear()
        self.rows.clear()

    def forget_acceptance(self) -> None:
        """Discard what rounds have learnt of their drafts' chances: the target's weights have changed. Every rank calls this."""
        if self.round.chances is not None:
            self.round.chances.forget()

    def prepare_passes(self, expected: ExpectedRows, mode: SamplingMode, *, round_s: float) -> int:
        """As `PrefillGraphs.prepare`; 0 if prefill passes are not CUDA graphs. Only after `rehearse`; no row may be live."""
        return 0 if self.prefill_graphs is None else self.prefill_graphs.prepare(expected, mode, round_s=round_s)

    def dead_tokens_routed(self) -> AbstractContextManager[object]:
        """Within this block tokens of dead rows go through experts as those of live rows do."""
        return self.target.dead_tokens_routed()

    @contextmanager
    def different_tokens(self) -> Iterator[None]:
        """Within this block the newest tokens of the slots differ from each other, as those of live rows do, so that they choose
        different experts. No row may be live.
        """
        tokens, newest = self.rows.tokens, (self.rows.num_tokens - 1).clamp(min=0).long().unsqueeze(1)
        before, noise = tokens.gather(1, newest), torch.Generator(tokens.device).manual_seed(0)
        tokens.scatter_(1, newest, torch.empty_like(before).random_(self.target.spec.vocab_size, generator=noise))
        try:
            yield
        finally:
            tokens.scatter_(1, newest, before)

    def experts_read(self) -> NDArray[np.int32]:
        """int32 [layers with experts]: number of experts that had tokens in the latest forward pass. Synchronises."""
        found = self.target.experts_read()
        assert found is not None
        return found.cpu().numpy()

    def synchronise(self) -> None:
        """Wait until the device has done everything that was launched on it, in any stream."""
        if self.rows.live.is_cuda:
            torch.cuda.synchronize(self.rows.live.device)


def round_for(
    target: Target, drafter: Drafter, cache: KVCache, batch: PackedBatch, options: RoundOptions, device: torch.device
) -> Round:
    """The round that verifies what this drafter proposes: a tree or a chain."""
    if isinstance(drafter.shape, TreeShape):
        return TreeRound(target, drafter, drafter.shape, cache, batch, options, device)
    return Round(target, drafter, cache, batch, options, device)


