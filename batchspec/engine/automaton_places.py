"""Which automata are on the device, and where. Host bookkeeping only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchspec.batch.automata import AutomataRoom, AutomatonUpload, ConstraintPlace, place_of
from batchspec.records import Ids, Request
from batchspec.token_automaton import DEAD, TokenAutomaton


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
        place, num_masks = self._gap(automaton.num_words), len(automaton.masks)
        for key in [key for key, one in self._residents.items() if not one.num_rows]:
            if place is not None and len(self._free_masks) >= num_masks:
                break
            self._free_masks += self._residents.pop(key).mask_ids.tolist()
            place = self._gap(automaton.num_words)
        if place is None or len(self._free_masks) < num_masks:
            return None
        at = len(self._free_masks) - num_masks
        found = _Resident(automaton, place, np.array(self._free_masks[at:], np.int32))
        del self._free_masks[at:]  # not a copy of the others, which are tens of thousands
        self._residents[id(automaton)] = found
        self._uploads.append(AutomatonUpload.of(automaton, place, found.mask_ids))
        return found

    def _gap(self, num_words: int) -> int | None:
        """Where the first gap of so many words begins; None: there is none. Place 0 is never used: it means no constraint."""
        place = 1
        for one in sorted(self._residents.values(), key=lambda one: one.place):
            if one.place - place >= num_words:
                return place
            place = one.place + one.automaton.num_words
        return place if self._room.table_words - place >= num_words else None
