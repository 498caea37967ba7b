"""Which automata are on the device, and where. Host bookkeeping only."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np

from batchspec.batch.automata import AutomataRoom, AutomatonUpload, ConstraintPlace, place_of
from batchspec.records import Ids, Request
from batchspec.token_automaton import DEAD, TokenAutomaton

FIRST_PLACE = 1
"""Place 0 is never used: it means no constraint."""


@dataclass(slots=True, eq=False)
class _Resident:
    automaton: TokenAutomaton
    place: int
    mask_ids: Ids
    num_rows: int = field(default=0)
    """Rows in slots that follow it."""


class AutomatonPlaces:
    """Rows share an automaton; one that no row follows stays until its place is needed, the one unused longest goes first.

    An automaton keeps its place as long as a row in a slot follows it. The place may then be written at once: rounds that are
    launched already run before the upload, and the host has killed those rows, or read that they ended.
    """

    def __init__(self, room: AutomataRoom) -> None:
        self._room = room
        self._residents: dict[int, _Resident] = {}
        """By the id of the automaton, which the entry keeps alive; the longest unused first."""
        self._spans: list[tuple[int, int]] = []
        """The first word of each resident automaton and the word after its last, in order."""
        self._free_masks = list(range(room.num_masks))
        self._uploads: list[AutomatonUpload] = []

    def hold(self, automaton: TokenAutomaton) -> bool:
        """A row that follows it enters a slot, if there is a place. There always is one where no row in a slot follows any."""
        found = self._residents.get(id(automaton)) or self._bring(automaton)
        if found is not None:
            found.num_rows += 1
        return found is not None

    def release(self, automaton: TokenAutomaton) -> None:
        """A row that follows it has left its slot."""
        found = self._residents.pop(id(automaton))
        found.num_rows -= 1
        self._residents[id(automaton)] = found

    def constraint(self, request: Request, tokens: list[int]) -> ConstraintPlace | None:
        """Of a request that enters a slot with these output tokens; its automaton is held."""
        automaton = request.automaton
        if not isinstance(automaton, TokenAutomaton):
            return None
        place, state = self._residents[id(automaton)].place, automaton.walk(request.automaton_state, tokens)
        assert state != DEAD, f"request {request.request_id!r}: its tokens do not follow its schema"
        return ConstraintPlace(place, place_of(automaton, state, place))

    def take_uploads(self) -> tuple[AutomatonUpload, ...]:
        """What came since the last call."""
        uploads, self._uploads = tuple(self._uploads), []
        return uploads

    def _bring(self, automaton: TokenAutomaton) -> _Resident | None:
        num_words, num_masks = automaton.num_words, len(automaton.masks)
        place = self._gap(num_words)
        unused = (key for key, one in list(self._residents.items()) if not one.num_rows)
        while place is None or len(self._free_masks) < num_masks:
            key = next(unused, None)
            if key is None:
                return None
            begin, end = self._remove(key)
            if place is None and end - begin >= num_words:
                place = begin
        at = len(self._free_masks) - num_masks
        found = _Resident(automaton, place, np.array(self._free_masks[at:], np.int32))
        del self._free_masks[at:]  # not a copy of the others, which are tens of thousands
        self._residents[id(automaton)] = found
        bisect.insort(self._spans, (place, place + num_words))
        self._uploads.append(AutomatonUpload.of(automaton, place, found.mask_ids))
        return found

    def _remove(self, key: int) -> tuple[int, int]:
        """An automaton that no row follows makes room; returns where the gap that it leaves begins and ends."""
        one = self._residents.pop(key)
        self._free_masks += one.mask_ids.tolist()
        at = bisect.bisect_left(self._spans, (one.place, 0))
        del self._spans[at]
        begin = self._spans[at - 1][1] if at else FIRST_PLACE
        return begin, self._spans[at][0] if at < len(self._spans) else self._room.table_words

    def _gap(self, num_words: int) -> int | None:
        """Where the first gap of so many words begins; None: there is none."""
        place = FIRST_PLACE
        for begin, end in self._spans:
            if begin - place >= num_words:
                return place
            place = end
        return place if self._room.table_words - place >= num_words else None
