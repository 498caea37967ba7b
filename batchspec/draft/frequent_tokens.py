"""A smaller vocabulary for drafts: the tokens that are most frequent in the rows that have ended.

A draft step reads the whole output matrix, one row a token of the vocabulary; most tokens are never drafted. Which tokens can be
drafted changes no output: the others are still chosen by the target.
Source: Zhao et al. 2025, FR-Spec (arXiv 2502.14856), which counts the tokens of a fixed corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_UPDATE = 8192
"""Number of tokens that are counted before the vocabulary is chosen again; later each time that there are twice as many."""


class FrequentTokens:
    """Counts tokens on the host. Until rows have ended it names the lowest ids: tokenizers number frequent tokens first."""

    def __init__(self, count: int, parts: Sequence[range]) -> None:
        """
        count  size of the vocabulary for drafts, a multiple of the number of parts
        parts  the ids of the target's vocabulary that each rank computes logits of; equally many are chosen from each
        """
        assert count % len(parts) == 0, (count, parts)
        assert all(count // len(parts) <= len(part) for part in parts), (count, parts)
        self._each, self._parts = count // len(parts), parts
        self._counts = np.zeros(parts[-1].stop, np.int64)
        self._counted, self._next_update = 0, FIRST_UPDATE

    def learn(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        for ids in (prompt_ids, token_ids):
            np.add.at(self._counts, ids[(ids >= 0) & (ids < len(self._counts))], 1)
            self._counted += len(ids)

    @property
    def is_due(self) -> bool:
        """Whether so many tokens were counted since the last choice that another one is worth it."""
        return self._counted >= self._next_update

    def choose(self) -> NDArray[np.int32]:
        """[count] the most frequent tokens, ascending; the lower ids among equals."""
        self._next_update = max(FIRST_UPDATE, 2 * self._counted)
        return np.concatenate([self._chosen_of(part) for part in self._parts])

    def _chosen_of(self, part: range) -> NDArray[np.int32]:
        return (part.start + most_frequent(self._counts[part.start : part.stop], self._each)).astype(np.int32)


def most_frequent(counts: NDArray[Any], count: int) -> NDArray[np.int64]:
    """[min(count, len(counts))] the places of the largest counts, ascending; the lower places among equals."""
    return np.sort(np.argsort(-counts, kind="stable")[:count])
