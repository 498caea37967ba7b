"""Whether drawn values have the probabilities that they should have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def chi_square(values: NDArray[np.int64], exact: NDArray[np.float64]) -> tuple[float, float]:
    """The statistic of values 0, 1, ... with these probabilities, and a bound that one seed in about 30,000 exceeds
    (mean + 4 deviations + 8); rare values are one bin."""
    counts, expected = np.bincount(values, minlength=len(exact)), exact * len(values)
    assert not counts[exact == 0].any()
    rare = expected < 5
    seen, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = max(1, len(wanted) - 1)
    return float(((seen - wanted) ** 2 / wanted).sum()), freedom + 4 * (2 * freedom) ** 0.5 + 8
