"""Constraints of answers (schema, regex, choice, grammar): a row follows an automaton over tokens, finite or lazy.

The device masks tokens by the automaton (`batch/logits.py`), each finished row is checked once more on the host
(`last_check.py`), and no row is in a slot without its automaton: `DeviceBatch.begin` puts it into a state that allows no token,
until a row command sets its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from batchspec.automata.token_automaton import ENDS, FORCED, MASK, TokenAutomaton
from batchspec.batch.automata import AutomataCapacity, ConstraintOffsets
from batchspec.batch.row_commands import RowCommands
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.features.automaton_places import AutomatonPlaces
from batchspec.engine.features.last_check import LastCheck
from batchspec.engine.features.tokens_left import no_token_left
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.records import Completion


class Constraints(RowFeature):
    """What finite and lazy constraints have in common."""

    may_hold = False
    """Whether rows may have to wait in their slots."""

    def __init__(self, check: LastCheck) -> None:
        self._check = check
        self._constrain: list[tuple[int, ConstraintOffsets]] = []

    def arrive(self, state: RequestState) -> bool:
        request = state.request
        assert request.constraint is None or request.automaton is not None, f"{request.request_id!r}: nothing was compiled"
        if not self.follows(state):
            return False
        state.mode = SamplingMode.of(request.sampling, request.min_new_tokens, constrained=True, may_hold=self.may_hold)
        return True

    def follows(self, state: RequestState) -> bool:
        """Whether the row has an automaton of this kind."""
        raise NotImplementedError

    def may_go_on(self, state: RequestState) -> bool:
        """Whether the row may enter a slot, or go on in one."""
        raise NotImplementedError

    def explained(self, state: RequestState) -> bool:
        """Whether it is known if a row that failed in the rounds had any token left; fails it for good if it had none."""
        raise NotImplementedError

    def ready(self, state: RequestState) -> bool:
        if state.finish_reason is None:
            return self.may_go_on(state)
        if not self._check.done(state):
            return False
        return state.finish_reason != "error" or state.error is not None or self.explained(state)

    def constrain(self, state: RequestState, at: ConstraintOffsets) -> None:
        """Let a row that enters its slot, or goes on, follow its automaton from there on."""
        self._constrain.append((state.slot, at))

    def take_commands(self) -> RowCommands:
        constrain, self._constrain = tuple(self._constrain), []
        return RowCommands(constrain=constrain)

    def pending(self) -> Iterable[Future[Any]]:
        return self._check.pending()

    def finish(self, state: RequestState, done: Completion) -> Completion:
        assert self._check.done(state), f"{state.request.request_id!r}: its constraint was not checked"
        if done.token_ids is None:
            return done
        request = state.request
        unchecked = request.constraint if request.automaton is not None and request.automaton.is_weaker else None
        return done.replace(constraint=request.constraint_kind, unchecked=unchecked)


class FiniteConstraints(Constraints):
    """Rows whose automata are wholly on the device. A row waits for a slot until its automaton fits; meanwhile no other row may
    take the memory that it needs."""

    def __init__(self, check: LastCheck, capacity: AutomataCapacity) -> None:
        super().__init__(check)
        self._places = AutomatonPlaces(capacity)
        self._first: RequestState | None = None
        """The row that waits for memory."""

    def follows(self, state: RequestState) -> bool:
        return isinstance(state.request.automaton, TokenAutomaton)

    def keep(self, state: RequestState, tokens: Sequence[int]) -> Sequence[int] | None:
        """None: another version compiled it, and its automaton allowed these tokens."""
        automaton = _finite(state)
        return tokens if automaton.num_allowed(state.request.automaton_state, tokens) == len(tokens) else None

    def may_go_on(self, state: RequestState) -> bool:
        if self._first not in (None, state) and not self._places.has(_finite(state)):
            return False
        if not self._places.bring(_finite(state)):
            self._first = state
            return False
        if self._first is state:
            self._first = None
        return True

    def enter(self, state: RequestState) -> None:
        self._places.hold(_finite(state))
        self.constrain(state, self._places.offsets(_finite(state), state.request.automaton_state, state.tokens))

    def leave(self, state: RequestState) -> None:
        self._places.release(_finite(state))

    def explained(self, state: RequestState) -> bool:
        automaton = _finite(state)
        at = automaton.walk(state.request.automaton_state, state.tokens)
        mask, forced = automaton.table[at, [MASK, FORCED]]
        state.fail(no_token_left(state.request, state.tokens, automaton.masks[mask], only_ends=bool(forced == ENDS)))
        return True

    def take_commands(self) -> RowCommands:
        return replace(super().take_commands(), automata=self._places.take_uploads())


def _finite(state: RequestState) -> TokenAutomaton:
    assert isinstance(state.request.automaton, TokenAutomaton)
    return state.request.automaton
