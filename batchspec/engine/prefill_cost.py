"""What a prefill pass takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds where a pass was timed, else in rounds of all slots."""

    least: float
    """Of a pass of few tokens: its launches, on the host."""
    token: float
    """Of each token of a full pass."""

    def pays_padding(self, num_tokens: int, padded_tokens: int) -> bool:
        """Whether a pass of `num_tokens` takes no longer if it is padded to `padded_tokens` and launched at once, as a graph.

        Launched kernel by kernel it takes as long as its launches, or as its tokens where these take longer.
        """
        return padded_tokens * self.token <= max(self.least, num_tokens * self.token)

    @staticmethod
    def default(prefill_tokens: int) -> PrefillCost:
        """Where nothing was timed: a short pass takes a quarter of a round, and half a full pass is launched at once."""
        return PrefillCost(least=0.25, token=0.5 / max(1, prefill_tokens))
