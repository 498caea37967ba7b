"""ablation.dead_rows=false: slots of ended rows are neither refilled nor left out of rounds until every row has ended."""

from __future__ import annotations

from batchspec.engine.allocator import SlotAllocator


class StaticBatching(SlotAllocator):
    """Fills all slots at once and keeps all of them in the rounds until every row has ended."""

    def num_rows_needed(self) -> int:
        return self.batch.num_slots

    def _worth_a_prefill(self, num_free: int, round_s: float, refill_s: float | None = None) -> bool:
        return num_free == self.batch.num_slots
