"""Rows that follow lazy automata: which states they need, which are being computed, which rows wait. Host bookkeeping only.

A row that reaches a state without a mask on the device stops there by itself (`kernels/sampling/waiting.py`). The host reads
that, asks `Expanding` for the state, uploads it and wakes the row. States stay on the device for rows that come later. When the
tables are full, the engine reads all results, so that every row's tokens are known, and all states are forgotten: the rows wait,
and their states are asked for again. The oldest row gets its state first, so that there is progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from batchspec.batch.automata import ConstraintOffsets, StatesUpload
from batchspec.engine.last_check import ADVICE, CAUSE
from batchspec.engine.lazy_places import LazyPlaces
from batchspec.engine.request_state import RequestState
from batchspec.lazy_automaton import Answer, Ask, Expanding, Expansion, LazyAutomaton, MachineError, Recheck
from batchspec.records import CONSTRAINT_VIOLATED, Request, RowError
from batchspec.token_automaton import DEAD, TokenSymbols

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
    waits: bool = False
    """It is in a slot, and not live on the device until it is woken."""
    woken_at: int = -1
    """Number of its tokens when it was woken last."""


class LazyStates:
    """All rows of a run that follow lazy automata. Arguments as for `Engine`."""

    def __init__(self, expanding: Expanding, vocabulary: TokenSymbols, places: LazyPlaces) -> None:
        """places: has the states that earlier runs of the engine found; those of this run are added."""
        self._expanding, self._vocabulary, self._places = expanding, vocabulary, places
        self._rows: dict[int, _Row] = {}
        """By the id of the request's state, which the entry keeps alive."""
        self._asked: dict[_Key, Future[Answer]] = {}
        self._failed: list[RequestState] = []
        self.full = False
        """The tables have no room for the next state."""
        self._patience = PATIENCE
        places.resend()

    def follows(self, request: Request) -> bool:
        """Whether the request's automaton allows the tokens that an earlier run left. Waits for the answer.

        True if the process cannot find out: `LastCheck` asks again.
        """
        if request.resumed is None or not isinstance(request.automaton, LazyAutomaton):
            return True
        tokens = request.resumed.tokens
        found = self._expanding.recheck(Recheck(request.automaton, request.automaton_state, tokens)).result()
        return isinstance(found, str) or found == len(tokens)

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

    def may_enter(self, state: RequestState) -> bool:
        """Whether a request may enter a slot: the state after its tokens is on the device. If it is not, it is asked for.

        Requests that are ready enter while the tables are full, too: after all states are forgotten those of rows in slots come
        first, so that rows go on. With no row in a slot all requests would ask for their first states again, and none would
        begin. Call `collect` before the first of several.
        """
        if state.finish_reason is not None:
            return False
        row = self._row(state)
        return row.asked is None and self._has_mask(row) if self.full else self._is_ready(row)

    def constraint(self, state: RequestState) -> ConstraintOffsets:
        """Where the class map and the state of a row that `may_enter` a slot are in the tables."""
        row = self._rows[id(state)]
        known = self._places.known[row.automaton]
        return ConstraintOffsets(known.class_place, int(known.places[row.at]))

    def wait(self, state: RequestState) -> None:
        """The row stopped at the end of its tokens, which are all read."""
        row = self._row(state)
        if row.woken_at == len(state.tokens):
            said = f"the device has lost the state of its automaton, {CAUSE}"
            self._end(row, _error(row, CONSTRAINT_VIOLATED, said, ADVICE, retryable=True))
            return
        row.waits = True
        self._is_ready(row)

    def drop(self, state: RequestState) -> None:
        """The request leaves its slot, or is given up."""
        self._rows.pop(id(state), None)

    @property
    def num_waiting(self) -> int:
        return sum(row.waits for row in self._rows.values())

    def must_forget(self) -> bool:
        """Asked before each round: whether all states must be forgotten now. Rows that can go on do so for a while first."""
        if not self.full:
            return False
        self._patience -= 1
        in_slots = (row for row in self._rows.values() if row.state.slot >= 0)
        return self._patience < 0 or all(row.waits and not self._is_ready(row) for row in in_slots)

    @property
    def is_asking(self) -> bool:
        """Whether answers are outstanding."""
        return bool(self._asked)

    def rest(self, seconds: float) -> None:
        """Sleep until an answer comes, for at most so long."""
        wait(self._asked.values(), seconds, FIRST_COMPLETED)

    def collect(self) -> None:
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

    def forget(self) -> tuple[int, ...]:
        """Forget all states, after every result was read. Returns the slots of the rows that now wait: they must be stopped."""
        self._places.forget()
        self._asked.clear()
        self.full, self._patience = False, PATIENCE
        rows = sorted(self._rows.values(), key=lambda row: (row.state.slot < 0, row.state.order))
        for row in rows:
            assert row.state.request.automaton is not None
            row.at, row.num_walked, row.asked, row.woken_at = row.state.request.automaton_state, 0, None, -1
            row.waits = row.state.slot >= 0
            self._is_ready(row)
        return tuple(row.state.slot for row in rows if row.waits)

    def take_uploads(self) -> tuple[StatesUpload, ...]:
        """Uploads since the last call. They come before the wakes and refills of the same step."""
        return self._places.take_uploads()

    def take_wakes(self) -> tuple[tuple[int, ConstraintOffsets], ...]:
        """Rows that wait no longer: the slot, and where class map and state are in the tables."""
        woken = [row for row in self._rows.values() if row.waits and self._is_ready(row)]
        for row in woken:
            row.waits, row.woken_at = False, len(row.state.tokens)
        return tuple((row.state.slot, self.constraint(row.state)) for row in woken)

    def take_failed(self) -> list[RequestState]:
        """Requests whose next state cannot be computed; their error says why."""
        failed, self._failed = self._failed, []
        return failed

    def _row(self, state: RequestState) -> _Row:
        row = self._rows.get(id(state))
        if row is None:
            automaton = state.request.automaton
            assert isinstance(automaton, LazyAutomaton)
            row = self._rows[id(state)] = _Row(state, automaton, state.request.automaton_state)
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
        row.at, count = known.after(row.at, row.state.tokens[row.num_walked :], self._vocabulary)
        row.num_walked += count
        return row.num_walked == len(row.state.tokens) and row.at in known.expanded

    def _of(self, key: _Key) -> Iterable[_Row]:
        return [row for row in self._rows.values() if row.asked == key]

    def _fail(self, key: _Key, why: str | None) -> None:
        """End the rows that asked. why: None where their tokens are not allowed, about which `LastCheck` says more."""
        for row in self._of(key):
            retryable = isinstance(why, MachineError) or row.automaton.retryable
            advice = "decode the row again (resume=error)" if retryable else f"shorten the {row.automaton.kind} or drop the row"
            self._end(row, None if why is None else _error(row, "large_schema", why, advice, retryable=retryable))

    def _end(self, row: _Row, error: RowError | None) -> None:
        row.state.finish_reason, row.state.error = "error", error
        self._failed.append(row.state)
        row.waits = False
        self.drop(row.state)


def _error(row: _Row, code: str, why: str, advice: str, *, retryable: bool = False) -> RowError:
    said = f"{row.automaton.kind}: {why} (after output token {len(row.state.tokens)}); {advice}"
    return RowError(code=code, stage="decode", message=said, retryable=retryable)
