"""Where the states of lazy automata are on the device. Host bookkeeping only.

They fill a part of the tables of their own, from its first word on. No state is removed singly: when the part is full, all states
are forgotten (`LazyConstraints`), and the states that rows need are placed anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchspec.automata.lazy_automaton import NOT_EXPANDED, Expansion, LazyAutomaton, new_epoch
from batchspec.automata.token_automaton import DEAD, NEXT, TokenSymbols
from batchspec.batch.automata import AutomataCapacity, StatesUpload
from batchspec.records import Ids


class KnownStates:
    """What the host knows of one lazy automaton: the places of its states, and what follows on each class of symbols."""

    def __init__(self) -> None:
        self.classes: Ids = np.zeros(0, np.int32)
        self.class_place = 0
        self.places: Ids = np.zeros(64, np.int32)
        """By state; 0: it is not on the device."""
        self.expanded: dict[int, tuple[int, int]] = {}
        """By state the number of its mask, and the token that must come or -1."""
        self._following: dict[int, Ids] = {}

    def learn(self, found: Expansion) -> list[int]:
        """Keep what was computed; returns its states that have no place on the device yet."""
        self.classes = found.classes
        states = found.states.tolist()
        self._following.update(zip(states, found.following, strict=True))
        size = len(self.places)
        while size <= max(int(found.states.max()), int(found.following.max())):
            size *= 2
        self.places = np.concatenate((self.places, np.zeros(size - len(self.places), np.int32)))
        return [state for state in states if not self.places[state]]

    def after(self, state: int, tokens: Sequence[int], of: TokenSymbols) -> tuple[int, int]:
        """The state after the tokens, and how many of them were walked: up to a state that is not expanded. DEAD, and all of
        them, where a token is not allowed."""
        for count, token in enumerate(tokens):
            if state not in self.expanded:
                return state, count
            for symbol in of.symbols[of.starts[token] : of.starts[token + 1]].tolist():
                state = int(self._following[state][self.classes[symbol]])
                if state == DEAD:
                    return DEAD, len(tokens)
        return state, len(tokens)


class LazyPlaces:
    """Assigns places to states and masks, and collects the uploads. States with equal masks share one, in all automata.

    All runs of an engine share it, so that later runs need not compute the states of earlier ones again.
    """

    def __init__(self, capacity: AutomataCapacity) -> None:
        self._capacity = capacity
        self._all_allowed = capacity.num_masks
        """Number of the mask of states that are not expanded: every token, since nothing that follows is kept."""
        self._uploads: list[StatesUpload] = [
            StatesUpload(
                np.zeros(0, np.int32), np.zeros(0, np.int32), np.array([self._all_allowed], np.int32),
                np.full((1, capacity.mask_words), -1, np.int32),
            )
        ]
        self._sent: list[StatesUpload] = []
        """Uploads of the newest step, which the device does not have if the run failed in that step."""
        self.known: dict[LazyAutomaton, KnownStates] = {}
        self.forget()

    def forget(self) -> None:
        """Free all places, and drop the uploads of states that are pending. No row may follow a state."""
        self.known.clear()
        self.epoch = new_epoch()
        """The numbers of states are valid within one epoch only (`Ask`)."""
        self._sent, self._uploads = ([one for one in uploads if not len(one.at)] for uploads in (self._sent, self._uploads))
        self._next_word = max(1, self._capacity.table_words)  # 0 is not a place
        self._masks: dict[bytes, int] = {}

    def take_uploads(self) -> tuple[StatesUpload, ...]:
        """Uploads since the last call, for the next step. Those of the last call are on the device: their step was executed."""
        self._sent, self._uploads = self._uploads, []
        return tuple(self._sent)

    def resend(self) -> None:
        """Upload again what the last step of the previous run uploaded: that step may have failed. Call it when a run begins."""
        self._sent, self._uploads = [], self._sent + self._uploads

    @property
    def has_spare(self) -> bool:
        """Half of the room is free: states that no row needs yet may come."""
        words = self._next_word - self._capacity.table_words
        return 2 * words < self._capacity.lazy_words and 2 * len(self._masks) < self._capacity.num_lazy_masks

    @property
    def is_empty(self) -> bool:
        return not self.known

    def put(self, automaton: LazyAutomaton, found: Expansion) -> bool:
        """Place a state and those that its tokens walk through; False if there is no room for all of them."""
        known, is_new = self.known.get(automaton) or KnownStates(), automaton not in self.known
        width, new_states, key = NEXT + found.following.shape[1], known.learn(found), found.mask.tobytes()
        words = len(new_states) * width + is_new * len(found.classes)
        mask = self._masks.get(key)
        if self._next_word + words > self._capacity.table_words + self._capacity.lazy_words:
            return False
        if mask is None and len(self._masks) + 1 >= self._capacity.num_lazy_masks:
            return False
        parts: list[tuple[Ids, Ids]] = []
        if is_new:
            self.known[automaton] = known
            known.class_place = self._take(len(found.classes))
            parts.append((known.class_place + np.arange(len(found.classes), dtype=np.int32), found.classes))
        for state in new_states:
            known.places[state] = self._take(width)
        mask_ids = np.zeros(0, np.int32)
        if mask is None:
            mask = self._masks[key] = self._all_allowed + 1 + len(self._masks)
            mask_ids = np.array([mask], np.int32)
        known.expanded[found.state] = (mask, found.forced)
        heads = [known.expanded.get(state, (self._all_allowed, NOT_EXPANDED)) for state in found.states.tolist()]
        rows = np.concatenate((np.array(heads, np.int32), known.places[found.following]), 1)
        assert DEAD not in found.states
        at = known.places[found.states][:, None] + np.arange(width, dtype=np.int32)
        parts.append((at.ravel(), rows.ravel().astype(np.int32)))
        self._uploads.append(
            StatesUpload(
                np.concatenate([place for place, _ in parts]), np.concatenate([word for _, word in parts]), mask_ids,
                found.mask.reshape(1, -1)[: len(mask_ids)],
            )
        )
        return True

    def _take(self, num_words: int) -> int:
        place, self._next_word = self._next_word, self._next_word + num_words
        return place
