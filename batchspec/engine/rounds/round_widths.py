"""Widths of rounds that verify a part of their drafts, and are worth a graph."""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.engine.step import RoundWidth

MEAN_LENS = (0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Drafts per row, on average, with which a round may verify fewer than all. Over 900 computed cases (rates of mixed rows, their
number, costs of drafts and of positions), where a part pays, the best of these widths was 0.3 % slower than the best of all K and
means of 1/2 to 12."""
OVERDRAFT = 3
"""Rows draft so many times as many tokens as are verified on average, or draft_len, so that some can have more than others."""


def partial_widths(draft_lens: Sequence[int]) -> list[RoundWidth]:
    """Widths of rounds that verify a part of their drafts, for these K: one for each mean, by ascending means."""
    longest = max(draft_lens)
    return [
        RoundWidth(min(k for k in draft_lens if k >= min(longest, OVERDRAFT * mean_len)), mean_len)
        for mean_len in MEAN_LENS
        if mean_len < longest
    ]
