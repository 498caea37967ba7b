"""Chooses the width of the next round: the one with the most expected tokens a second, by measured times and acceptance.

    score = tokens / seconds        tokens = 1 + sum_{k<=K} p_1 ... p_k,  of a round that verifies all K drafts of every row
                                    tokens = 0.95 (1 + expected survivors of the verified drafts (`survival.py`)), of other rounds

seconds are those of `round_times.py`. p_k is the share of rows that accept draft token k after they accepted those before it, a
prior for the first rounds; where survival is known, p_1 ... p_k is the mean survival of draft k. Observations fade with every
round, also with those without drafts: after many of these, one probe outweighs what was known.

In the shares a row counts by the weight of its tokens (`SlotTable.token_weights`): slow rows count more, because they stay
longest and decide when the job ends. The width with the most tokens a second for the rows in slots now favours rows that accept
much, which end soon in any case.

Acceptance beyond the current K and the times of other K are not observed, so some rounds are probes, which verify all their
drafts. One round in PROBE_EVERY takes, in turn,

    the K next above, or next below, what a row verifies now on average
    the K next above what is drafted now
    K = 0
    the least K of a round that verifies a part of its drafts, while drafts of this K were never counted

While these K are new, one round in PROBE_EVERY_AT_FIRST does: the one that promises most comes first. A K that could not pay even
if all its drafts were accepted is not probed. A probe costs the tokens lost relative to the current width; after the warm-up,
probes run only while their cumulative cost is below PROBE_SHARE of all rounds.

Whether rounds that verify a part are chosen at all is tried in the job (`part_trial.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from batchspec.draft.shapes import candidates
from batchspec.engine.rounds.expert_reads import ExpertReads
from batchspec.engine.rounds.part_trial import PartTrial, Turn
from batchspec.engine.rounds.round_times import RoundTimes
from batchspec.engine.rounds.round_widths import partial_widths
from batchspec.engine.rounds.survival import Survival
from batchspec.engine.step import RoundWidth

PROBE_EVERY, PROBE_EVERY_AT_FIRST = 64, 8
"""PROBE_EVERY is a multiple of PROBE_EVERY_AT_FIRST."""
PROBE_SHARE = 0.01
NEW = 2
"""A K is no longer new after this many probes in rounds of about as many rows: from a power of 4 up to the next one."""
PRIOR_RATE, PRIOR_ROWS = 0.7, 32.0
HALF_LIFE_ROWS = 4096.0
"""Row-rounds, with or without drafts, after which an observation counts half."""
LEAST_WEIGHT = 32.0
"""Rows that all earlier observations together count as at least."""
MARGIN = 1.005
"""Another width must score higher by this factor, so that a tie does not switch back and forth."""
PART_WORTH = 0.95
"""What a token of a round that verifies a part of its drafts counts. It helps the rows that accept most, which end first in any
case, and slower ones remain. In simulated jobs (8B, 256 slots; rows of two kinds, or as those of Spec-Bench) 0.95 was 0 to 1.5 %
faster than 1, with which such rounds lost up to 1 % against one K for all."""
LEAST_ROWS = 12
"""Rounds of fewer rows verify all drafts: there are too few rows for one to need what another does not."""
PARTS = (1, 2, 4)
"""Row buckets with graphs of rounds that verify a part: of all slots, and the largest ones of at most these parts of them."""
NO_TRIAL = Turn(may_verify_part=True, counts_drafts=True, phase=None)
"""All rounds have this turn where none may verify a part, and elsewhere those before the first of LEAST_ROWS rows."""


def choices_of(choices: tuple[int, ...], *, all_slots: bool) -> tuple[int, ...]:
    """The draft lengths of rounds that verify all drafts, of those that rounds over all slots may choose. Rounds over fewer rows
    come at a job's end: the least, the middle and the largest do for them, and a short job can then afford their graphs."""
    return choices if all_slots else tuple(dict.fromkeys((choices[0], choices[len(choices) // 2], choices[-1])))


def partial_buckets(row_buckets: Sequence[int]) -> list[int]:
    """Row buckets for which such rounds may be captured, the largest first. Most rounds of a job are over all slots."""
    large = [bucket for bucket in row_buckets if bucket >= LEAST_ROWS]
    found = (max((bucket for bucket in large if part * bucket <= row_buckets[-1]), default=0) for part in PARTS)
    return [bucket for bucket in dict.fromkeys(found) if bucket]


class DraftLengths:
    """Measured times and acceptance of rounds by their width, and the choice that follows from them."""

    def __init__(
        self, draft_len: int, choices: tuple[int, ...] | None = None, experts: ExpertReads | None = None,
        num_nodes: int | None = None, *, row_lengths: bool = False,
    ) -> None:
        """
        choices    draft lengths that may be chosen, ascending from 0 to draft_len, instead of `candidates`
        num_nodes  of a tree: nodes that a round with drafts verifies besides a row's newest token; None: a chain's draft tokens
        row_lengths  rounds may verify a part of their drafts, and report the survival of all
        """
        self.draft_len, self.choices = draft_len, choices or candidates(draft_len)
        self.times = RoundTimes(experts, num_nodes)
        self._survival, self._trial = Survival(draft_len), PartTrial()
        self._whole = [RoundWidth(draft_len) for draft_len in self.choices]
        self.partial = partial_widths(self.choices) if row_lengths else []
        """Widths of rounds that verify a part of their drafts, by ascending means. Without any nothing is tried, and no survival
        is reported."""
        self._rounds, self._lost_rounds = 0, 0.0
        self._current = RoundWidth(draft_len)
        self._next: RoundWidth | None = None
        self._next_rows = 0
        self.turn = self._next_turn = NO_TRIAL
        """Of the round that was chosen last."""
        self.forget()

    def forget(self) -> None:
        """Discard the measured acceptance; times stay."""
        self._num_probed = Counter[tuple[int, int]]()
        self._tried = [PRIOR_ROWS] * self.draft_len
        self._kept = [PRIOR_RATE * PRIOR_ROWS] * self.draft_len
        self._survival.forget()
        self._trial.restart()

    def verify_all(self) -> None:
        """From now on rounds verify all drafts of every row, and report no survival. Only before the first round."""
        self.partial = []

    def restart(self) -> None:
        """A run begins: no width was chosen for its first round. What was measured stays, but for phases that have not ended."""
        self._next = None
        self._trial.drop_unfinished()

    @property
    def ready(self) -> bool:
        """Whether any round was timed."""
        return bool(self.times)

    def widths(self, num_rows: int) -> list[RoundWidth]:
        """Widths of rounds over so many rows that may be chosen once they were timed."""
        return [*self._whole, *(self.partial if num_rows >= LEAST_ROWS else ())]

    def set_base(self, num_rows: int, draft_len: int, seconds: float, *, prepare_next: bool = False) -> None:
        """Set the time of a round over `num_rows` dead rows that verifies all drafts. prepare_next: it also prepares the next
        draft, as every round that drafts does."""
        self.times.set_base(num_rows, RoundWidth(draft_len), seconds, prepare_next=prepare_next)

    def choose(self, num_rows: int, context_tokens: int, *, live_rows: int | None = None) -> tuple[RoundWidth, bool]:
        """Width of the round to launch now, and whether the round after it will draft.

        This is decided one round ahead: a round without drafts prepares the first draft token only if the next round drafts.

        num_rows   row bucket
        live_rows  how many of them hold live rows; None: all
        """
        live_rows = num_rows if live_rows is None else live_rows
        self._fade(live_rows)
        if self._next is None:
            self._next = self._pick(num_rows, context_tokens, live_rows)
        now, self.turn = self._next, self._next_turn
        if num_rows != self._next_rows:  # the row bucket is another one since it was chosen
            self.turn = self.turn._replace(phase=None)
            now = now if self.times.knows(num_rows, now) else self._nearest(num_rows, now)
        self._next = self._pick(num_rows, context_tokens, live_rows)
        return now, self._next.draft_len > 0

    def made(self, phase: int, num_rows: int, tokens: float, seconds: float) -> None:
        """Note the tokens that a live row got from a round of this phase (`turn`) in so many measured seconds, on average over
        the rows by their weights."""
        self._trial.add(phase, num_rows, tokens, seconds)

    def observe(
        self, draft_len: int, accepted: NDArray[np.int32], after_draft: NDArray[np.bool_] | None = None,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        """Note the draft tokens that each row accepted, int32 [rows], in a round that verified all drafts of all rows.

        after_draft  of `RoundLog`: one more draft of the row was right, and of those after it nothing is known. None: of no row
        weights      float64 [rows], 1 on average: how much each row counts; None: 1
        """
        if not len(accepted):
            return
        right = accepted if after_draft is None else accepted + after_draft
        at_least = np.bincount(right, weights, draft_len + 1)[::-1].cumsum()[::-1]
        tried = at_least
        if after_draft is not None and after_draft.any():
            tried = at_least - np.bincount(right[after_draft], None if weights is None else weights[after_draft], draft_len + 1)
        for k, (num_tried, num_kept) in enumerate(zip(tried[:-1].tolist(), at_least[1:].tolist(), strict=True)):
            self._tried[k] += num_tried
            self._kept[k] += num_kept

    def observe_levels(self, levels: NDArray[np.int32], num_rows: int) -> None:
        """Note the survival of all drafts of a round over so many live rows, int32 [K, LEVELS]."""
        self._survival.observe(levels, num_rows)

    def timed(
        self, num_rows: int, width: RoundWidth | int, context_tokens: int, seconds: float, *, prepare_next: bool = False,
        live_rows: int | None = None,
    ) -> None:
        """Note that a round over live rows took `seconds`.

        width         or K of a round that verifies all drafts
        prepare_next  it also prepared the next draft, as every round that drafts does
        live_rows     how many of the `num_rows` rows were live; None: all
        """
        width = RoundWidth(width) if isinstance(width, int) else width
        live_rows = num_rows if live_rows is None else live_rows
        self.times.add(num_rows, width, context_tokens, seconds, prepare_next=prepare_next, live_rows=live_rows)

    def scores(self, num_rows: int, context_tokens: int, *, live_rows: int | None = None) -> NDArray[np.float64]:
        """float64 [choices] expected tokens a row and second, if all were timed. live_rows: how many rows are live; None: all."""
        live_rows = num_rows if live_rows is None else live_rows
        seconds = self.times.seconds(num_rows, self._whole, context_tokens, live_rows)
        scores: NDArray[np.float64] = np.array(self._tokens()) / seconds
        return scores

    def _fade(self, live_rows: int) -> None:
        """A round over so many live rows is launched: what was observed before weighs less, whatever the round verifies."""
        decay = 0.5 ** (live_rows / HALF_LIFE_ROWS)
        for k, tried in enumerate(self._tried):
            self._tried[k] = max(LEAST_WEIGHT, decay * tried)
            self._kept[k] *= self._tried[k] / tried
        self._survival.fade(decay)

    def _tokens(self) -> list[float]:
        """Expected tokens of a round for each of `choices`."""
        survival = self._survival
        known = survival.known_len if self._next_turn.counts_drafts else 0
        rate, accepted, tokens = 1.0, 0.0, [1.0]
        for k, (kept, tried) in enumerate(zip(self._kept, self._tried, strict=True), 1):
            if k <= known:
                rate, accepted = survival.accepted(k, k) - accepted, survival.accepted(k, k)
            else:
                rate *= kept / tried
                accepted += rate
            tokens.append(1 + accepted)
        return [tokens[k] for k in self.choices]

    def _partial_tokens(self, num_rows: int, live_rows: int) -> dict[RoundWidth, float]:
        """What rounds that verify a part of their drafts count as tokens a row: those that were timed, and whose drafts were
        counted."""
        survival = self._survival
        if num_rows < LEAST_ROWS or not live_rows or not self._next_turn.may_verify_part:
            return {}
        tokens = {}
        for width in self.partial:
            if width.draft_len <= survival.known_len and self.times.knows(num_rows, width):
                places = ((width.num_positions(num_rows) or 0) - live_rows) / live_rows
                tokens[width] = PART_WORTH * (1 + survival.accepted(width.draft_len, places))
        return tokens

    def _pick(self, num_rows: int, context_tokens: int, live_rows: int) -> RoundWidth:
        """The width of a round, whose turn is `_next_turn` from now on."""
        self._next_rows, self._next_turn = num_rows, self._next_turn._replace(phase=None)
        if self.partial and num_rows >= LEAST_ROWS:
            counted, self._next_turn = self._next_turn.counts_drafts, self._trial.next_turn()
            if not counted and self._next_turn.counts_drafts:
                self._survival.forget()  # it is old
        expected, whole = dict(zip(self._whole, self._tokens(), strict=True)), self._timed(num_rows)
        tokens = {one: expected[one] for one in whole} | self._partial_tokens(num_rows, live_rows)
        widths = list(tokens)
        seconds = dict(zip(widths, self.times.seconds(num_rows, widths, context_tokens, live_rows), strict=True))
        margin = MARGIN
        if self._current not in tokens:
            self._current, margin = self._nearest(num_rows, self._current), 1.0
        best = max(widths, key=lambda one: tokens[one] / seconds[one])
        score = tokens[self._current] / seconds[self._current]
        if tokens[best] / seconds[best] > margin * score:
            self._current, score = best, tokens[best] / seconds[best]
        self._rounds += 1
        if self._rounds % PROBE_EVERY_AT_FIRST:
            return self._current
        least_s = self.times.seconds(num_rows, whole, 0, live_rows)
        hopeful = [one for one, took in zip(whole, least_s, strict=True) if 1 + one.draft_len > score * took]
        one = self._probe(num_rows, whole, hopeful, {one: tokens[one] / seconds[one] for one in whole})
        if one is None:
            return self._current
        self._lost_rounds += max(0.0, seconds[one] * score - tokens[one]) / tokens[self._current]
        return one

    def _timed(self, num_rows: int) -> list[RoundWidth]:
        """Widths of rounds over so many rows that verify all drafts and were timed, by ascending K."""
        return [one for one in self._whole if self.times.knows(num_rows, one)]

    def _nearest(self, num_rows: int, width: RoundWidth) -> RoundWidth:
        """The one of `_timed` whose K is nearest to that of `width`."""
        return min(self._timed(num_rows), key=lambda one: abs(one.draft_len - width.draft_len))

    def _uncounted(self, num_rows: int) -> list[int]:
        """The least K that a round which verifies a part drafts, and whose drafts were never counted."""
        if num_rows < LEAST_ROWS or not self._next_turn.counts_drafts:
            return []
        return [one.draft_len for one in self.partial if one.draft_len > self._survival.known_len][:1]

    def _probe(
        self, num_rows: int, whole: Sequence[RoundWidth], hopeful: Sequence[RoundWidth], scores: Mapping[RoundWidth, float]
    ) -> RoundWidth | None:
        """The width to probe now, or None.

        whole    widths of rounds over so many rows that verify all drafts
        hopeful  those of them that could pay
        scores   of each of `whole`, by what is known
        """
        width, lengths = self._current, [one.draft_len for one in whole]
        above, below = bisect_right(lengths, width.verified), bisect_left(lengths, width.verified) - 1
        deeper = bisect_right(lengths, width.draft_len)
        near = [whole[i] for i in (above, below, deeper, 0) if 0 <= i < len(whole)]
        uncounted = self._uncounted(num_rows)
        near += [one for one in whole if one.draft_len in uncounted]
        probes = [one for one in dict.fromkeys(near) if one != width and one in hopeful]
        if self._rounds % PROBE_EVERY == 0 and probes and self._lost_rounds <= PROBE_SHARE * self._rounds:
            return probes[self._rounds // PROBE_EVERY % len(probes)]
        scale = num_rows.bit_length() // 2
        new = (one for one in probes if self._num_probed[scale, one.draft_len] < NEW)
        likeliest = max(new, key=scores.__getitem__, default=None)
        if likeliest is not None:
            self._num_probed[scale, likeliest.draft_len] += 1
        return likeliest
