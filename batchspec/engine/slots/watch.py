"""When the features of a row examine its tokens next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NEVER = 1 << 62
"""More tokens than a row can have."""
NO_TOKEN = -2
"""Matches no token of a log, which holds ids, and -1 for no token."""


@dataclass(frozen=True, slots=True)
class Watch:
    """A feature examines a row next once it has `num_tokens` output tokens, as soon as `token` is among its new ones, and when it
    ends."""

    num_tokens: int = NEVER
    token: int = NO_TOKEN

    @classmethod
    def first(cls, watches: Iterable[Watch]) -> Watch | None:
        """The watch that is due as soon as one of these is; None if there are none."""
        watches = list(watches)
        if len(watches) < 2:
            return watches[0] if watches else None
        tokens = {watch.token for watch in watches} - {NO_TOKEN}
        if len(tokens) > 1:  # a slot has room for one: examine the row after every result
            return cls(num_tokens=0)
        return cls(min(watch.num_tokens for watch in watches), tokens.pop() if tokens else NO_TOKEN)
