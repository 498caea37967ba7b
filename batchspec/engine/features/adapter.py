"""The LoRA adapter of a row: all its K and V depend on it, so rows with different adapters share no page."""

from __future__ import annotations

from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RowFeature


class Adapter(RowFeature):
    """The rest of it is state of the slot (`DeviceBatch.adapter`), which the model's products read."""

    def arrive(self, state: RequestState) -> bool:
        if state.request.adapter:
            state.prefix_salt += state.request.adapter.to_bytes(4)
        return False
