"""Chooses K of the next round: the one with the most expected tokens a second, by measured round times and acceptance.

    score(K) = (1 + sum_{k<=K} p_1 ... p_k) / (base_s[R, K] + experts_s[R, K] + context_tokens * token_s[R, K])

base_s is the time of a round over dead rows, measured once for each graph. experts_s is the time for the experts that live rows
read in addition, negative if they read fewer (`expert_reads.py`), 0 without experts. token_s is the time that one more context
token adds (attention) with R rows: the minimum of the newest measurements; for a K without measurements that of the nearest K,
for an R without measurements those of the nearest R. p_k is the share of rows that accept draft token k after they accepted those
before it, with a prior and a half-life.

Acceptance beyond the current K and the times of other K are not observed, so some rounds are probes: one round in PROBE_EVERY
takes the next larger K, the next smaller K or K = 0, in turn. While these K are new, one round in PROBE_EVERY_AT_FIRST does. A K
that could not pay even if all its drafts were accepted is not probed. A probe costs the tokens lost relative to the current K;
after the warm-up, probes run only while their cumulative cost is below PROBE_SHARE of all rounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.rounds.expert_reads import ExpertReads

PROBE_EVERY, PROBE_EVERY_AT_FIRST = 64, 8
"""PROBE_EVERY is a multiple of PROBE_EVERY_AT_FIRST."""
PROBE_SHARE = 0.01
NEW = 2
"""A K is no longer new after this many probes."""
PRIOR_RATE, PRIOR_ROWS = 0.7, 32.0
HALF_LIFE_ROWS = 4096.0
"""Row-rounds after which an observation counts half."""
NUM_TIMES = 5
"""Number of measurements kept of each K. Their minimum is used: with the mean, a K penalised by one host stall would rarely be
sampled again."""
LEAST_SHARE = 0.05
"""A round over few live rows is taken to need at least this share of base_s, however few experts it reads."""
MARGIN = 1.005
"""Another K must score higher by this factor, so that a tie does not switch back and forth."""


def candidates(max_len: int) -> tuple[int, ...]:
    """Draft lengths worth a graph: 0 to 4, then each half as large again as the one before, and max_len."""
    steps = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    return (*(k for k in steps if k < max_len), max_len)


class DraftLengths:
    """Measured times and acceptance of rounds by draft length, and the choice that follows from them."""

    def __init__(
        self, max_len: int, choices: tuple[int, ...] | None = None, experts: ExpertReads | None = None,
        num_nodes: int | None = None,
    ) -> None:
        """
        choices    draft lengths that may be chosen, ascending from 0 to max_len, instead of `candidates`
        num_nodes  of a tree: nodes that a round with drafts verifies besides a row's newest token; None: a chain's draft tokens
        """
        self.max_len, self.choices = max_len, choices or candidates(max_len)
        self._lengths = np.array(self.choices)
        self._experts, self._num_nodes = experts, num_nodes
        self._base: dict[tuple[int, int, bool], float] = {}
        self._token_s: dict[int, dict[int, deque[float]]] = {}
        self._rounds, self._lost_rounds = 0, 0.0
        self._current = max_len
        self._next: int | None = None
        self.forget()

    def forget(self) -> None:
        """Discard the measured acceptance; times stay."""
        self._num_probed = np.zeros(self.max_len + 1, np.int64)
        self._tried = [PRIOR_ROWS] * self.max_len
        self._kept = [PRIOR_RATE * PRIOR_ROWS] * self.max_len

    def restart(self) -> None:
        """A run begins: no draft length was chosen for its first round. What was measured stays."""
        self._next = None

    @property
    def ready(self) -> bool:
        """Whether any round was timed."""
        return bool(self._base)

    def set_base(self, num_rows: int, draft_len: int, seconds: float, *, prepare_next: bool = False) -> None:
        """Set the time of a round over `num_rows` dead rows. prepare_next: it also prepares the next draft, as every round that
        drafts does."""
        self._base[num_rows, draft_len, prepare_next or draft_len > 0] = seconds

    def choose(self, num_rows: int, context_tokens: int, *, live_rows: int | None = None) -> tuple[int, bool]:
        """K of the round to launch now, and whether the round after it will draft.

        This is decided one round ahead: a round without drafts prepares the first draft token only if the next round drafts.

        num_rows   row bucket
        live_rows  how many of them hold live rows; None: all
        """
        live_rows = num_rows if live_rows is None else live_rows
        now = self._pick(num_rows, context_tokens, live_rows) if self._next is None else self._next
        self._next = self._pick(num_rows, context_tokens, live_rows)
        return now, self._next > 0

    def observe(self, draft_len: int, accepted: NDArray[np.int32]) -> None:
        """Note the draft tokens that each row of a round of `draft_len` accepted, int32 [rows]."""
        if not len(accepted):
            return
        decay = 0.5 ** (len(accepted) / HALF_LIFE_ROWS)
        prior = PRIOR_RATE * PRIOR_ROWS
        at_least = np.bincount(accepted, minlength=draft_len + 1)[::-1].cumsum()[::-1].tolist()
        for k in range(draft_len):
            self._tried[k] = PRIOR_ROWS + decay * (self._tried[k] - PRIOR_ROWS) + at_least[k]
            self._kept[k] = prior + decay * (self._kept[k] - prior) + at_least[k + 1]

    def timed(
        self, num_rows: int, draft_len: int, context_tokens: int, seconds: float, *, prepare_next: bool = False,
        live_rows: int | None = None,
    ) -> None:
        """Note that a round over live rows took `seconds`.

        prepare_next  it also prepared the next draft, as every round that drafts does
        live_rows     how many of the `num_rows` rows were live; None: all
        """
        if context_tokens:
            live_rows = num_rows if live_rows is None else live_rows
            timed_s = self._base[num_rows, draft_len, prepare_next or draft_len > 0]
            base = float(self._with_experts(num_rows, np.array([draft_len]), np.array([timed_s]), live_rows)[0])
            newest = self._token_s.setdefault(num_rows, {}).setdefault(draft_len, deque(maxlen=NUM_TIMES))
            newest.append(max(0.0, seconds - base) / context_tokens)

    def scores(self, num_rows: int, context_tokens: int, *, live_rows: int | None = None) -> NDArray[np.float64]:
        """float64 [choices] expected tokens a row and second. live_rows: how many rows are live; None: all."""
        seconds = self._seconds(num_rows, context_tokens, num_rows if live_rows is None else live_rows)
        scores: NDArray[np.float64] = np.array(self._tokens()) / seconds
        return scores

    # A few numbers in each round: lists are faster than arrays.

    def _tokens(self) -> list[float]:
        """Expected tokens of a round for each of `choices`."""
        rate, accepted, tokens = 1.0, 0.0, [1.0]
        for kept, tried in zip(self._kept, self._tried, strict=True):
            rate *= kept / tried
            accepted += rate
            tokens.append(1 + accepted)
        return [tokens[k] for k in self.choices]

    def _seconds(self, num_rows: int, context_tokens: int, live_rows: int) -> list[float]:
        """Expected seconds of a round for each of `choices`."""
        base = [self._base[num_rows, k, k > 0] for k in self.choices]
        if self._experts is not None:
            base = self._with_experts(num_rows, self._lengths, np.array(base), live_rows).tolist()
        if not context_tokens or not self._token_s:
            return base
        timed = self._token_s.get(num_rows) or self._token_s[min(self._token_s, key=lambda at: abs(math.log(at / num_rows)))]
        least = {k: min(newest) for k, newest in timed.items()}
        added = [least[k] if k in least else least[min(least, key=lambda at: abs(at - k))] for k in self.choices]
        return [base_s + context_tokens * token_s for base_s, token_s in zip(base, added, strict=True)]

    def _with_experts(
        self, num_rows: int, draft_lens: NDArray[np.int64], base_s: NDArray[np.float64], live_rows: int
    ) -> NDArray[np.float64]:
        """base_s + experts_s: the time of a round without attention."""
        if self._experts is None:
            return base_s
        tokens_per_row = draft_lens + 1 if self._num_nodes is None else np.where(draft_lens > 0, self._num_nodes + 1, 1)
        added = self._experts.added_s(num_rows, draft_lens, live_rows * tokens_per_row)
        seconds: NDArray[np.float64] = np.maximum(base_s + added, LEAST_SHARE * base_s)
        return seconds

    def _pick(self, num_rows: int, context_tokens: int, live_rows: int) -> int:
        tokens, seconds = self._tokens(), self._seconds(num_rows, context_tokens, live_rows)
        scores = [num / took for num, took in zip(tokens, seconds, strict=True)]
        index, best = self.choices.index(self._current), scores.index(max(scores))
        if scores[best] > MARGIN * scores[index]:
            index = best
            self._current = self.choices[best]
        self._rounds += 1
        if self._rounds % PROBE_EVERY_AT_FIRST:
            return self._current
        least_s = self._seconds(num_rows, 0, live_rows)
        hopeful = [1 + k > scores[index] * took for k, took in zip(self.choices, least_s, strict=True)]
        probed = self._probe(index, hopeful)
        if probed is None:
            return self._current
        self._lost_rounds += max(0.0, seconds[probed] * scores[index] - tokens[probed]) / tokens[index]
        return self.choices[probed]

    def _probe(self, index: int, hopeful: Sequence[bool]) -> int | None:
        """Index in `choices` of another K to probe now, or None; `index` is that of the current K."""
        nearest = [i for i in dict.fromkeys((index + 1, index - 1, 0)) if 0 <= i < len(self.choices) and i != index]
        probes = [i for i in nearest if hopeful[i]]
        if self._rounds % PROBE_EVERY == 0 and probes and self._lost_rounds <= PROBE_SHARE * self._rounds:
            return probes[self._rounds // PROBE_EVERY % len(probes)]
        new = [i for i in probes if self._num_probed[self.choices[i]] < NEW]
        if not new:
            return None
        self._num_probed[self.choices[new[0]]] += 1
        return new[0]
