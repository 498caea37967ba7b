"""Decides which automata are on the device, and where. Host bookkeeping only."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from batchspec.automata.token_automaton import DEAD, TokenAutomaton
from batchspec.batch.automata import AutomataCapacity, AutomatonUpload, ConstraintOffsets, place_of
from batchspec.records import Ids

FIRST_PLACE = 1
"""Offset 0 is never used: it means no constraint."""


@dataclass(slots=True, eq=False)
class _Resident:
    automaton: TokenAutomaton
    place: int
    mask_ids: Ids
    num_rows: int = field(default=0)
    """Rows in slots that follow this automaton."""


class AutomatonPlaces:
    """Assigns memory on the device to automata. Rows share an automaton. One that no row follows stays until its memory is
    needed; the least recently used is evicted first.

    Evicted memory may be written at once: rounds that are already launched run before the upload, and rows that followed the
    evicted automaton have ended or were stopped.
    """

    def __init__(self, capacity: AutomataCapacity) -> None:
        self._capacity = capacity
        self._residents: dict[int, _Resident] = {}
        """By the id of the automaton, which the entry keeps alive; the least recently used first."""
        self._spans: list[tuple[int, int]] = []
        """The first word of each resident automaton and the word after its last, in order."""
        self._free_masks = list(range(capacity.num_masks))
        self._uploads: list[AutomatonUpload] = []

    def has(self, automaton: TokenAutomaton) -> bool:
        """Whether it is on the device, or will be with the next uploads."""
        return id(automaton) in self._residents

    def bring(self, automaton: TokenAutomaton) -> bool:
        """Make it so, for a row that is about to enter a slot; False if it has no space. There is space if no row follows any."""
        return self.has(automaton) or self._bring(automaton)

    def hold(self, automaton: TokenAutomaton) -> None:
        """A row that follows it enters a slot. Call `bring` first."""
        self._residents[id(automaton)].num_rows += 1

    def release(self, automaton: TokenAutomaton) -> None:
        """A row that followed the automaton has left its slot."""
        found = self._residents.pop(id(automaton))
        found.num_rows -= 1
        self._residents[id(automaton)] = found

    def offsets(self, automaton: TokenAutomaton, state: int, tokens: Sequence[int]) -> ConstraintOffsets:
        """The places of a row that enters a slot with these output tokens after the state.

        Where the automaton does not allow the tokens, the state is one that allows no token: the row fails at once.
        """
        place, state = self._residents[id(automaton)].place, automaton.walk(state, tokens)
        return self._capacity.none_allowed if state == DEAD else ConstraintOffsets(place, place_of(automaton, state, place))

    def take_uploads(self) -> tuple[AutomatonUpload, ...]:
        """Automata that came since the last call."""
        uploads, self._uploads = tuple(self._uploads), []
        return uploads

    def _bring(self, automaton: TokenAutomaton) -> bool:
        num_words, num_masks = automaton.num_words, len(automaton.masks)
        place = self._gap(num_words)
        unused = (key for key, one in list(self._residents.items()) if not one.num_rows)
        while place is None or len(self._free_masks) < num_masks:
            key = next(unused, None)
            if key is None:
                return False
            begin, end = self._remove(key)
            if place is None and end - begin >= num_words:
                place = begin
        at = len(self._free_masks) - num_masks
        found = _Resident(automaton, place, np.array(self._free_masks[at:], np.int32))
        del self._free_masks[at:]  # slicing would copy the others, tens of thousands
        self._residents[id(automaton)] = found
        bisect.insort(self._spans, (place, place + num_words))
        self._uploads.append(AutomatonUpload.of(automaton, place, found.mask_ids))
        return True

    def _remove(self, key: int) -> tuple[int, int]:
        """Evict an automaton that no row follows; returns the begin and end of the gap that it leaves."""
        one = self._residents.pop(key)
        self._free_masks += one.mask_ids.tolist()
        at = bisect.bisect_left(self._spans, (one.place, 0))
        del self._spans[at]
        begin = self._spans[at - 1][1] if at else FIRST_PLACE
        return begin, self._spans[at][0] if at < len(self._spans) else self._capacity.table_words

    def _gap(self, num_words: int) -> int | None:
        """Where the first gap of at least `num_words` begins; None if there is none."""
        place = FIRST_PLACE
        for begin, end in self._spans:
            if begin - place >= num_words:
                return place
            place = end
        return place if self._capacity.table_words - place >= num_words else None
