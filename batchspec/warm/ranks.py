"""The engine's side of a model that several ranks compute: it starts a process for each rank, with a pipe to rank 0.

The engine's process admits rows and makes tables, as with one GPU. It holds no GPU memory and joins no process group, so that a
trainer in it may have its own group. When a rank is lost, the ranks end, but this process does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import fields, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL
from typing import TypeVar

from batchspec import errors
from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.cluster.devices import devices_of
from batchspec.config.schema import RunConfig
from batchspec.config.typed import to_json
from batchspec.distributed.rank_ends import ending
from batchspec.distributed.rank_processes import END_S, RankProcesses, RankProgram, environment_of
from batchspec.distributed.seat import new_group
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import BatchspecError, EngineInUse, RankLost
from batchspec.job.supervise.watchdog import limit_s
from batchspec.packed_batch import PackedBatch
from batchspec.process.own_process import OwnProcess, finalize_here
from batchspec.records import Completion, Request
from batchspec.request_stream import RequestStream, take_ready
from batchspec.warm.messages import (
    FROM_LEADER,
    TO_LEADER,
    Ask,
    Ended,
    Failed,
    FromLeader,
    Given,
    GoOn,
    Loaded,
    Progress,
    Rewritten,
    Run,
    Stop,
    Stopped,
    ToLeader,
    Weights,
)

PROGRAM = ("-m", "batchspec.warm.rank_process")
POLL_S = 0.05
"""Seconds between two checks whether the call was cancelled, or a rank has ended."""
REQUESTS = 32
"""Maximum number of requests in one message to the leader."""
NO_VOCABULARY = TokenSymbols.of([])
M = TypeVar("M")


class EngineOfRanks:
    """The methods of `engine.Engine` that `warm` calls, on ranks in processes of their own.

    Raises ConfigError for too few GPUs, RankLost, and what the leader raises while it loads (CheckpointError, CapacityError).
    """

    def __init__(self, config: RunConfig) -> None:
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        self._lost, self._own = "", OwnProcess()
        self._prefetched: deque[Request] = deque()
        """Requests that this run has taken from its stream and the leader has not asked for; REQUESTS at most."""
        self._automata: dict[int, tuple[int, TokenAutomaton]] = {}
        """By id: (number in this run, automaton). The entry keeps the automaton alive, so that no other one gets its id."""
        self._pipe, other = Pipe()
        try:
            self._group = _start(config, other.fileno())
        finally:
            other.close()
        self._end = finalize_here(self, _end, self._group, self._pipe)
        try:
            self.batch: PackedBatch = self._answer(Loaded).batch
        except BaseException:
            self.close()
            raise

    def steps(self, requests: RequestStream) -> Generator[list[Completion]]:
        """As `Engine.steps` of `engine/loop/engine.py`. Raises RankLost if a rank has ended or hangs; the engine has ended
        then."""
        self._send(Run())
        runs, self._automata = True, {}
        self._prefetched.clear()
        try:
            while runs:
                self._send(GoOn())
                ended = self._answer(Ended, requests)
                runs = not ended.over
                yield [*ended.completions]
        finally:
            if runs and not self._lost and self._own.is_this():
                self._give_up()

    def rewrite(self, folder: Path, *, is_checkpoint: bool) -> None:
        """Replace the target's weights on all ranks. Raises RankLost."""
        self._send(Weights(str(folder), is_checkpoint))
        self._answer(Rewritten)

    def close(self) -> None:
        """End all ranks; returns when they have ended, and their memory is free."""
        self._lost = self._lost or "this engine is closed; make another one"
        self._end()

    def _give_up(self) -> None:
        self.on_round = None
        try:
            self._send(Stop())
            while not isinstance(message := self._receive(), Stopped):
                pass
            self._take(message.totals)
        except BaseException:  # Ctrl-C: the state of the leader is unknown
            self.close()
            raise

    def _answer(self, kind: type[M], requests: RequestStream | None = None) -> M:
        """The leader's next message of this type; other messages are answered meanwhile."""
        while True:
            message = self._receive()
            if isinstance(message, kind):
                if isinstance(message, Ended):
                    self._take(message.totals)
                return message
            match message:
                case Progress(totals):
                    self._take(totals)
                case Ask():
                    assert requests is not None
                    self._send(self._given(requests))
                    self._prefetched += take_ready(requests, REQUESTS)  # while the leader decodes
                case Failed(name, text):
                    error: type[BatchspecError] = getattr(errors, name)
                    if error is RankLost:  # because another rank ended
                        self._lose()
                    self._lose(text)
                    raise error(text)
                case _:
                    raise AssertionError(message)

    def _given(self, requests: RequestStream) -> Given:
        """The requests that are ready now, REQUESTS at most; automata that this run has not sent yet come with them."""
        found, follows, new, over = list[Request](), list[int](), list[TokenAutomaton](), False
        while len(found) < REQUESTS:
            request = self._prefetched.popleft() if self._prefetched else requests.next_ready()
            if request is None:
                over = requests.ended
                break
            automaton = request.automaton if isinstance(request.automaton, TokenAutomaton) else None
            if automaton is not None and id(automaton) not in self._automata:
                self._automata[id(automaton)] = len(self._automata), automaton
                new.append(replace(automaton, vocabulary=NO_VOCABULARY))
            follows.append(-1 if automaton is None else self._automata[id(automaton)][0])
            found.append(request if automaton is None else replace(request, automaton=None))
        return Given(found, follows, new, over)

    def _take(self, totals: EngineTotals) -> None:
        for item in fields(totals):
            setattr(self.totals, item.name, getattr(totals, item.name))
        if self.on_round is not None:
            self.on_round(self.totals)

    def _receive(self) -> FromLeader:
        """The next message. Raises RankLost, and what `on_round` raises while there is none."""
        self.check()
        while True:
            self._group.reap()
            gone = len(self._group.live()) < self._group.channel.ranks
            try:
                if self._pipe.poll(0 if gone else POLL_S):
                    return FROM_LEADER.decode(self._pipe.recv_bytes())
            except (EOFError, ConnectionError):
                gone = True
            if gone or self._group.end_hanging():
                self._lose()
            elif self.on_round is not None:
                self.on_round(self.totals)

    def _send(self, message: ToLeader) -> None:
        self.check()
        with suppress(BrokenPipeError):  # `_receive` says which rank is gone
            self._pipe.send_bytes(TO_LEADER.encode(message))

    def check(self) -> None:
        """Raises EngineInUse if it is closed, or has ended because a rank is gone."""
        if self._lost:
            raise EngineInUse(self._lost)

    def _lose(self, why: str = "") -> None:
        """A rank is gone, or hangs: end all ranks.

        why  the error that the leader raised; if unknown, raises RankLost with the name of the rank that made the others end
        """
        self._group.end()
        member = self._group.culprit()
        self._end()
        assert member.code is not None
        said = why or f"{member.name} {ending(member.code) if member.abort_at is None else 'hangs'}"
        self._lost = f"{said}; the engine has ended, make another one"
        if not why:
            raise RankLost(f"{said}; what it said, and its stack if it had time for it, is on stderr; make another engine")


def _start(config: RunConfig, pipe: int) -> RankProcesses:
    """pipe: the leader's end"""
    ranks = config.cluster.tensor_parallel
    devices = devices_of(replace(config, cluster=replace(config.cluster, workers=1)))
    gpu = devices[0] is not None
    sharing = 1 if gpu else ranks
    program = RankProgram(
        program=PROGRAM, line=to_json(config), environment=environment_of(devices, sharing), output={"stdout": DEVNULL}, pipe=pipe
    )
    names = [f"rank {rank} of this engine" for rank in range(ranks)]
    with new_group(ranks, sharing=sharing) as seat:
        return RankProcesses(program, seat, names, watchdog_s=limit_s(config.cluster.watchdog_s, gpu=gpu), leader_end_s=END_S)


def _end(group: RankProcesses, pipe: Connection) -> None:
    group.close()
    pipe.close()
