"""Rows that follow lazy automata: which states they need, which are being computed, which rows are held. Host bookkeeping only.

The device holds a row that reaches a state without a mask (`kernels/sampling/undecided.py`). The host reads that, asks
`Expanding` for the state, uploads it and resumes the row. States stay on the device for rows that come later. When the tables are
full, all rows are held and all states are forgotten; then their states are asked for again. The oldest row gets its state first,
so that there is progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from batchspec.automata.lazy_automaton import Answer, Ask, Expanding, Expansion, LazyAutomaton, MachineError, Recheck
from batchspec.automata.token_automaton import DEAD, ENDS, TokenSymbols
from batchspec.batch.automata import ConstraintOffsets
from batchspec.batch.row_commands import RowCommands
from batchspec.engine.features.constraints import Constraints
from batchspec.engine.features.last_check import ADVICE, CAUSE, LastCheck
from batchspec.engine.features.lazy_places import LazyPlaces
from batchspec.engine.features.tokens_left import no_token_left
from batchspec.engine.slots.request_state import RequestState
from batchspec.records import CONSTRAINT_VIOLATED, Completion, Request, RowError

MAX_WRITTEN = 64
"""Maximum number of a row's tokens that are sent with an ask."""
PATIENCE = 16
"""Rounds that rows with known states may decode, once the tables are full, before all states are forgotten."""
_Key = tuple[LazyAutomaton, int, tuple[int, ...]]
"""An ask without its epoch: automaton, state, and the tokens after it."""


@dataclass(slots=True, eq=False)
class _Row:
    state: RequestState
    automaton: LazyAutomaton
    at: int
    """State of the automaton after `num_walked` output tokens."""
    num_walked: int = 0
    num_learned: int = 0
    """Number of output tokens that were sent with an ask."""
    asked: _Key | None = None
    began_at: int = -1
    """Number of its tokens when it entered its slot or was resumed there last; -1 before."""


class LazyConstraints(Constraints):
    """All rows of a run that follow lazy automata."""

    may_hold = True

    def __init__(self, check: LastCheck, expanding: Expanding, symbols: TokenSymbols, places: LazyPlaces) -> None:
        """places: has the states that earlier runs of the engine found; those of this run are added."""
        super().__init__(check)
        self._expanding, self._symbols, self._places = expanding, symbols, places
        self._rows: dict[RequestState, _Row] = {}
        self._asked: dict[_Key, Future[Answer]] = {}
        self._explaining: dict[RequestState, Future[Answer]] = {}
        """Rows that failed in the rounds, and the states that they failed in."""
        self._failed: list[RequestState] = []
        self._held: set[RequestState] = set()
        """Rows that are held and have not asked for their states since: they come before rows that enter."""
        self.full = False
        """The tables have no room for the next state."""
        self._patience = PATIENCE
        places.resend()

    def follows(self, state: RequestState) -> bool:
        return isinstance(state.request.automaton, LazyAutomaton)

    def keep(self, state: RequestState, tokens: Sequence[int]) -> Sequence[int] | None:
        """None: another version compiled it, and its automaton allowed these tokens. Waits for the answer. All if the process
        cannot find out: `LastCheck` asks again."""
        request = state.request
        assert isinstance(request.automaton, LazyAutomaton)
        found = self._expanding.recheck(Recheck(request.automaton, request.automaton_state, tuple(tokens))).result()
        return tokens if isinstance(found, str) or found == len(tokens) else None

    def after(self, request: Request, tokens: Sequence[int]) -> Answer:
        """The state after these output tokens of a request with a lazy automaton. Waits for the answer. Call it while no row
        is in a slot."""
        assert isinstance(request.automaton, LazyAutomaton)
        ask = Ask(request.automaton, request.automaton_state, tuple(tokens), self._places.epoch, from_beginning=True)
        found = self._expanding.submit(ask).result()
        if found is None:
            self.forget()
            found = self._expanding.submit(replace(ask, epoch=self._places.epoch)).result()
        return found

    def may_go_on(self, state: RequestState) -> bool:
        """Whether the state after the row's tokens is on the device. If it is not, it is asked for.

        While the tables are full, rows whose states are there already enter too: after all states are forgotten those of rows in
        slots come first, so that rows go on. With no row in a slot all requests would ask for their first states again, and none
        would begin.
        """
        row = self._row(state)
        self._held.discard(state)
        if state.slot < 0 and self._held:
            return False
        if state.slot >= 0 and row.began_at == len(state.tokens):
            said = f"the device has lost the state of its automaton, {CAUSE}"
            self._fail_row(row, _error(state, row.automaton, CONSTRAINT_VIOLATED, said, ADVICE, retryable=True))
            return False
        if self.full and state.slot < 0:
            return row.asked is None and self._has_mask(row)
        return self._is_ready(row)

    def explained(self, state: RequestState) -> bool:
        request = state.request
        assert isinstance(request.automaton, LazyAutomaton)
        if state not in self._explaining:
            ask = Ask(request.automaton, request.automaton_state, tuple(state.tokens), self._places.epoch, from_beginning=True)
            self._explaining[state] = self._expanding.submit(replace(ask, reads_ahead=False))
        answer = self._explaining[state]
        if not answer.done():
            return False
        found = answer.result()
        if found is None:  # asked again once all states are forgotten, in the next epoch
            self.full = True
            del self._explaining[state]
            return False
        if isinstance(found, str):
            state.fail(_unanswered(state, request.automaton, found))
        elif found.state != DEAD:
            state.fail(no_token_left(request, state.tokens, found.mask, only_ends=found.forced == ENDS))
        return True

    def finish(self, state: RequestState, done: Completion) -> Completion:
        self._explaining.pop(state, None)
        return super().finish(state, done)

    def enter(self, state: RequestState) -> None:
        row = self._rows[state]
        known = self._places.known[row.automaton]
        row.began_at = len(state.tokens)
        self.constrain(state, ConstraintOffsets(known.class_place, int(known.places[row.at])))

    def leave(self, state: RequestState) -> None:
        self._rows.pop(state, None)
        self._held.discard(state)

    def take_commands(self) -> RowCommands:
        return replace(super().take_commands(), states=self._places.take_uploads())

    def pending(self) -> Iterable[Future[Any]]:
        return [*super().pending(), *self._asked.values(), *self._explaining.values()]

    def poll(self) -> Iterable[RequestState]:
        # Before new answers are taken: requests whose states were placed when the tables became full have entered by now.
        held = self.forget() if self._must_forget() else []
        self._collect()
        failed, self._failed = self._failed, []
        return [*failed, *(state for state in held if state not in failed)]

    def _must_forget(self) -> bool:
        """Whether all states must be forgotten now. Rows that can go on do so for a while first."""
        if not self.full:
            return False
        self._patience -= 1
        in_slots = [row for row in self._rows.values() if row.state.slot >= 0]
        return self._patience < 0 or not any(row.asked is None and self._has_mask(row) for row in in_slots)

    def _collect(self) -> None:
        """Take the answers that have come, and place their states. Sets `full` where one has no room."""
        late = set[LazyAutomaton]()
        """Automata that an answer is missing for: their later answers wait for it, because each tells more than those before."""
        for key, answer in list(self._asked.items()):
            if self.full:
                break
            if key[0] in late or not answer.done():
                late.add(key[0])
                continue
            found = answer.result()
            if found is None:
                self.full = True
            elif isinstance(found, str):
                self._fail(key, found)
            elif found.state == DEAD:
                self._fail(key, None)
            elif self._places.put(key[0], found):
                for row in self._of(key):
                    row.at, row.num_walked, row.asked = found.state, len(row.state.tokens), None
                self._take_ahead(key[0], found.ahead)
            elif self._places.is_empty:
                self._fail(key, "one of its states takes more than the memory for them on the device")
            else:
                self.full = True
            if not self.full:
                del self._asked[key]

    def _take_ahead(self, automaton: LazyAutomaton, ahead: Sequence[Expansion]) -> None:
        """Place states that were not asked for, as long as there is ample room; rows that asked for them wait no longer."""
        known = self._places.known[automaton]
        for found in ahead:
            if found.state not in known.expanded and not (self._places.has_spare and self._places.put(automaton, found)):
                return
            for row in self._of((automaton, found.state, ())):
                row.asked = None

    def forget(self) -> list[RequestState]:
        """Forget all states. Returns the rows in slots, which must be held: their states are asked for when all their tokens
        are known, the oldest row's first."""
        self._places.forget()
        self._asked.clear()
        self.full, self._patience = False, PATIENCE
        for row in self._rows.values():
            assert row.state.request.automaton is not None
            row.at, row.num_walked, row.asked, row.began_at = row.state.request.automaton_state, 0, None, -1
        self._held = {row.state for row in self._rows.values() if row.state.slot >= 0}
        return list(self._held)

    def _row(self, state: RequestState) -> _Row:
        row = self._rows.get(state)
        if row is None:
            automaton = state.request.automaton
            assert isinstance(automaton, LazyAutomaton)
            row = self._rows[state] = _Row(state, automaton, state.request.automaton_state)
        return row

    def _is_ready(self, row: _Row) -> bool:
        """Whether the device has the mask of the state after the row's tokens; if not, that state is asked for."""
        if row.asked is not None:
            return False
        if self._has_mask(row):
            return True
        row.asked = (row.automaton, row.at, tuple(row.state.tokens[row.num_walked :]))
        if row.asked not in self._asked:
            written = tuple(row.state.tokens[row.num_learned :][-MAX_WRITTEN:])
            ask = Ask(*row.asked, self._places.epoch, from_beginning=row.num_walked == 0, written=written)
            self._asked[row.asked] = self._expanding.submit(ask)
            row.num_learned = len(row.state.tokens)
        return False

    def _has_mask(self, row: _Row) -> bool:
        """The same, without asking."""
        known = self._places.known.get(row.automaton)
        if known is None:
            return False
        row.at, count = known.after(row.at, row.state.tokens[row.num_walked :], self._symbols)
        row.num_walked += count
        return row.num_walked == len(row.state.tokens) and row.at in known.expanded

    def _of(self, key: _Key) -> Iterable[_Row]:
        return [row for row in self._rows.values() if row.asked == key]

    def _fail(self, key: _Key, why: str | None) -> None:
        """End the rows that asked. why: None where their tokens are not allowed, about which `LastCheck` says more."""
        for row in self._of(key):
            self._fail_row(row, None if why is None else _unanswered(row.state, row.automaton, why))

    def _fail_row(self, row: _Row, error: RowError | None) -> None:
        row.state.fail(error)
        self._failed.append(row.state)
        self._rows.pop(row.state, None)


def _unanswered(state: RequestState, automaton: LazyAutomaton, why: str) -> RowError:
    """The error of a row whose state could not be computed."""
    retryable = isinstance(why, MachineError) or automaton.retryable
    advice = "decode the row again (resume=error)" if retryable else f"shorten the {automaton.kind} or drop the row"
    return _error(state, automaton, "large_schema", why, advice, retryable=retryable)


def _error(
    state: RequestState, automaton: LazyAutomaton, code: str, why: str, advice: str, *, retryable: bool = False
) -> RowError:
    said = f"{automaton.kind}: {why} (after output token {len(state.tokens)}); {advice}"
    return RowError(code=code, stage="decode", message=said, retryable=retryable)
