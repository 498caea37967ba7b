"""ablation.dead_rows=false: slots of ended rows are neither refilled nor left out of rounds until every row has ended."""

from __future__ import annotations

from batchspec.engine.slots.allocator import SlotAllocator


class StaticBatching(SlotAllocator):
    """Fills all slots at once and keeps all of them in the rounds until every row has ended."""

    def num_rows_needed(self) -> int:
        return self.batch.num_slots

    def _is_worth_a_refill(self, round_s: float, refill_s: float | None) -> bool:
        return self.slots.num_free == self.batch.num_slots
