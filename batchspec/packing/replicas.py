"""How the GPUs of a machine are divided: copies of the model, each on one GPU, or cut over several (tensor parallelism).

A copy on one GPU exchanges nothing. A copy over R GPUs reads the weights once for R times as many rows, and has more memory for
K/V pages: R copies on one GPU each would store the weights R times. The cost model decides among the layouts that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchspec.errors import CapacityError, ConfigError
from batchspec.packed_batch import PackedBatch
from batchspec.packing.planner import Forecast

TIE = 0.02
"""A layout with more ranks must be faster by this share, because more processes can fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """One way to divide the GPUs among copies of the model."""

    ranks: int
    """GPUs of each copy of the model."""
    replicas: int
    """Copies."""
    seconds: float | None = None
    """Predicted seconds of the whole job; None: it cannot run with this layout."""
    batch: PackedBatch | None = None
    """The batch of each copy."""
    reason: str = ""
    """Why the job cannot run with this layout."""


def gpu_layouts(
    counts: Sequence[int], num_gpus: int, predict: Callable[[int, int], tuple[PackedBatch, Forecast]], copies: int | None = None
) -> list[GpuLayout]:
    """One layout for each number of ranks among `counts` for which there are enough GPUs.

    copies   number of copies of the model that the job asks for; None: as many as the GPUs allow
    predict  (ranks, replicas) -> the batch of a copy and the forecast of its share of the job. Raises CapacityError or
             ConfigError if the job cannot run with them
    """
    found = []
    for ranks in counts:
        if ranks * (copies or 1) > num_gpus:
            continue
        replicas = copies or num_gpus // ranks
        try:
            batch, ahead = predict(ranks, replicas)
        except (CapacityError, ConfigError) as error:
            found.append(GpuLayout(ranks=ranks, replicas=replicas, reason=str(error)))
        else:
            found.append(GpuLayout(ranks=ranks, replicas=replicas, seconds=ahead.prefill_s + ahead.decode_s, batch=batch))
    return found


def best(found: Sequence[GpuLayout]) -> GpuLayout:
    """The fastest layout, with fewer ranks in a tie. If none can run, raises CapacityError with the reason of the fewest
    ranks."""
    possible = [(layout.seconds, layout) for layout in found if layout.seconds is not None]
    if not possible:
        raise CapacityError(found[0].reason)
    least = min(seconds for seconds, _ in possible)
    return next(layout for seconds, layout in possible if seconds <= least * (1 + TIE))
