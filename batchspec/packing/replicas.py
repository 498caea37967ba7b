"""How the GPUs of a machine are divided: copies of the model, each on one GPU, or cut over several (tensor parallelism).

A copy on one GPU exchanges nothing. A copy over R GPUs reads its weights once for R times the rows, and its K/V pages have the
memory that R - 1 copies of the weights would take. The cost model decides; what does not fit is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchspec.errors import CapacityError, ConfigError
from batchspec.packing.planner import Forecast
from batchspec.records import PackedBatch

TIE = 0.02
"""A way with more ranks must be faster by this share: it has more that can fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to divide the GPUs."""

    ranks: int
    """GPUs for each copy of the model."""
    replicas: int
    """Copies."""
    seconds: float | None = None
    """Of the whole job, predicted; None: it cannot run so."""
    batch: PackedBatch | None = None
    """Of each copy."""
    reason: str = ""
    """Why it cannot run so."""


def ways(
    counts: Sequence[int], num_gpus: int, predict: Callable[[int, int], tuple[PackedBatch, Forecast]], copies: int | None = None
) -> list[Way]:
    """Each number of ranks among `counts` that the GPUs suffice for.

    copies   of the model that the job asks for; None: as many as the GPUs suffice for
    predict  ranks, replicas -> the batch of a copy, and the forecast of its share of the job. Raises CapacityError or ConfigError
             where it cannot run so
    """
    found = []
    for ranks in counts:
        if ranks * (copies or 1) > num_gpus:
            continue
        replicas = copies or num_gpus // ranks
        try:
            batch, ahead = predict(ranks, replicas)
        except (CapacityError, ConfigError) as error:
            found.append(Way(ranks=ranks, replicas=replicas, reason=str(error)))
        else:
            found.append(Way(ranks=ranks, replicas=replicas, seconds=ahead.prefill_s + ahead.decode_s, batch=batch))
    return found


def best(found: Sequence[Way]) -> Way:
    """The fastest way, fewer ranks in a tie. Raises CapacityError, with the reason of the fewest ranks, if none can run."""
    possible = [(way.seconds, way) for way in found if way.seconds is not None]
    if not possible:
        raise CapacityError(found[0].reason)
    least = min(seconds for seconds, _ in possible)
    return next(way for seconds, way in possible if seconds <= least * (1 + TIE))
