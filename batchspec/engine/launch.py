"""What the host keeps of a launched round or prefill pass until it reads the result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.step import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A round or a prefill pass, as it was when it was launched."""

    owners: NDArray[np.int64]
    """The owner of each slot at launch, -1 if the slot took no part."""
    is_prefill: bool = False
    num_rows: int = 0
    """Row bucket of a round."""
    live_rows: int = 0
    """Rows of a round that were alive, as far as the host had read."""
    draft_len: int = 0
    prepare_next: bool = True
    context_tokens: int = 0
    """Keys of all rows that one layer reads, on average over the layers; 0 if the round is not used as a measurement."""
    overlaps: bool = False
    """Prefill or other work ran concurrently, so the round's time does not predict that of other rounds."""
    counts_experts: bool = False
    """Whether the result has the number of experts that the round read."""
    num_prefilled: int = 0
    """Tokens of this prefill pass, and of those before it that have no result; 0 if passes overlap rounds."""
    segments: tuple[Segment, ...] = ()
    """Segments of a pass that scores prompts, in the order of its log-probabilities."""
