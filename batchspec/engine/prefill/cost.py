"""The time that a prefill pass takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds if passes were timed, else in units of a round over all slots."""

    least: float
    """Time of a pass of few tokens that is launched kernel by kernel: that of the host's launches."""
    token: float
    """Time of each token of a full pass."""
    replay: float | None = None
    """Time of a pass of few tokens that is replayed from a CUDA graph; None: passes are not graphs, or it was not timed."""
    most_replayed: int = 0
    """Maximum number of tokens of a row in a pass that is replayed."""
    adds_launches: bool = False
    """Whether the host's launches count besides the tokens: where nothing is decoded, the host is busy with the rows of other
    passes while the device computes one."""

    def is_replayed(self, row_tokens: int, *, may_hold: bool = False) -> bool:
        """Whether a pass of few rows of `row_tokens` tokens is replayed.

        may_hold  its rows may be held in their slots (`SamplingMode.may_hold`): such a pass is never a graph
        """
        return self.replay is not None and self.replay < self.least and row_tokens <= self.most_replayed and not may_hold

    def pays_padding(self, num_tokens: int, padded_tokens: int) -> bool:
        """Whether a pass of `num_tokens` takes no longer if it is padded to `padded_tokens` and replayed from a graph.

        Launched kernel by kernel it takes as long as its launches or its tokens, whichever is longer, or as both together.
        """
        plain = num_tokens * self.token
        plain = plain + self.least if self.adds_launches else max(self.least, plain)
        return padded_tokens * self.token <= plain

    @staticmethod
    def default(prefill_tokens: int) -> PrefillCost:
        """The cost if nothing was timed: a short pass takes a quarter of a round, a full pass twice as long."""
        return PrefillCost(least=0.25, token=0.5 / max(1, prefill_tokens))


def padded_rows(num_rows: int, num_slots: int) -> int:
    """Number of rows of a pass that is padded: the smallest power of two that is at least `num_rows`, or all slots."""
    return min(num_slots, 1 << (num_rows - 1).bit_length())
