"""The engine's side of a model that several ranks compute: it starts a process for each rank, with a pipe to rank 0.

The engine's process admits rows and makes tables, as with one GPU. It holds no GPU memory and joins no process group, so that a
trainer in it may have its own group. When a rank is lost, the ranks end, but this process does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.cluster.devices import devices_of
from batchspec.config.schema import RunConfig
from batchspec.config.typed import to_json
from batchspec.distributed.channel import Channel, make_memory, make_rendezvous, path_of
from batchspec.distributed.seat import Seat, ending
from batchspec.distributed.silent_ranks import SilentRanks
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import EngineInUse, RankLost
from batchspec.packed_batch import PackedBatch
from batchspec.process.child_process import python_command
from batchspec.records import Completion, Request
from batchspec.request_stream import RequestStream, take_ready
from batchspec.supervise.watchdog import limit_s
from batchspec.warm.wire import (
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
END_S, STACKS_S = 3.0, 2.0
"""Seconds that ranks have to end by themselves after one has; then SIGABRT makes them print their stacks, SIGKILL ends them."""
NO_VOCABULARY = TokenSymbols.of([])
M = TypeVar("M")


class EngineOfRanks:
    """The methods of `engine.Engine` that `warm` calls, on ranks in processes of their own.

    Raises ConfigError for too few GPUs, RankLost, and what the leader raises while it loads (CheckpointError, CapacityError).
    """

    def __init__(self, config: RunConfig) -> None:
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        self._lost = ""
        self._prefetched: deque[Request] = deque()
        """Requests that this run has taken from its stream and the leader has not asked for; REQUESTS at most."""
        self._automata: dict[int, tuple[int, TokenAutomaton]] = {}
        """By id: (number in this run, automaton). The entry keeps the automaton alive, so that no other one gets its id."""
        self._processes: list[subprocess.Popen[str]] = []
        self._pipe, other = Pipe()
        ranks, handle, rendezvous = config.cluster.tensor_parallel, make_memory(), make_rendezvous()
        self._channel = Channel(handle, None, ranks)
        self._end = weakref.finalize(self, _end, self._processes, self._pipe)
        try:
            devices = devices_of(replace(config, cluster=replace(config.cluster, workers=1)))
            for rank in range(ranks):
                seat = Seat(rank, ranks, handle, path_of(rendezvous))
                self._processes.append(_start(config, seat, devices, [handle, rendezvous], other if rank == 0 else None))
            watchdog_s = limit_s(config.cluster.watchdog_s, gpu=devices[0] is not None)
            self._silent = SilentRanks(self._channel, watchdog_s, [process.pid for process in self._processes])
        except BaseException:
            self.close()
            raise
        finally:
            os.close(handle)
            os.close(rendezvous)
            other.close()
        try:
            self.batch: PackedBatch = self._answer(Loaded).batch
        except BaseException:
            self.close()
            raise

    def run(self, requests: RequestStream) -> Generator[Completion]:
        """As `Engine.run` of `engine/loop/engine.py`. Raises RankLost if a rank has ended or hangs; the engine has ended then."""
        self._send(Run())
        runs, self._automata = True, {}
        self._prefetched.clear()
        try:
            while runs:
                self._send(GoOn())
                ended = self._answer(Ended, requests)
                runs = not ended.over
                yield from ended.completions
        finally:
            if runs and not self._lost:
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
                case Failed(error, text):
                    if issubclass(error, RankLost):  # because another rank ended
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
            gone = any(process.poll() is not None for process in self._processes)
            try:
                if self._pipe.poll(0 if gone else POLL_S):
                    message: FromLeader = self._pipe.recv()
                    return message
            except (EOFError, ConnectionError):
                gone = True
            if gone:
                self._lose()
            elif silent := self._silent.find():
                self._lose(silent=silent[0])
            elif self.on_round is not None:
                self.on_round(self.totals)

    def _send(self, message: ToLeader) -> None:
        self.check()
        with suppress(BrokenPipeError):  # `_receive` says which rank is gone
            self._pipe.send(message)

    def check(self) -> None:
        """Raises EngineInUse if it is closed, or has ended because a rank is gone."""
        if self._lost:
            raise EngineInUse(self._lost)

    def _lose(self, why: str = "", silent: int | None = None) -> None:
        """A rank is gone: ranks that wait for it end by themselves, the others print their stacks and are killed.

        why     the error that the leader raised; if unknown, raises RankLost with the name of the rank that is gone or hangs
        silent  the rank whose process does not run
        """
        self._channel.lose(0)
        ends = time.monotonic() + END_S
        while any(process.poll() is None for process in self._processes) and time.monotonic() < ends:
            time.sleep(POLL_S)
        codes = [process.poll() for process in self._processes]
        for process in self._processes:
            for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped process handles SIGABRT only after SIGCONT
                process.send_signal(number)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
        self._end()
        said = why or (_culprit(codes) if silent is None else f"rank {silent} of this engine hangs")
        self._lost = f"{said}; the engine has ended, make another one"
        if not why:
            raise RankLost(f"{said}; what it said, and its stack if it had time for it, is on stderr; make another engine")


def _culprit(codes: Sequence[int | None]) -> str:
    """Names the rank that made the others end, and how it ended.

    Ranks that waited for it in vain end with RankLost's exit code, and so does a rank whose watchdog found no progress.

    codes  exit code of each rank, as from Popen; None: it has not ended by itself
    """
    waited = (0, RankLost.exit_code)

    def order(rank: int) -> tuple[bool, bool, bool]:
        code = codes[rank]
        return code is None or code >= 0, code is None or code in waited, code is not None

    rank = min(range(len(codes)), key=order)
    code = codes[rank]
    return f"rank {rank} of this engine {'hangs' if code is None else ending(code)}"


def _start(
    config: RunConfig, seat: Seat, devices: Sequence[str | None], handles: list[int], pipe: Connection | None
) -> subprocess.Popen[str]:
    env = dict(os.environ)
    named = [name for name in devices if name is not None]
    if named:  # ranks must see all GPUs of their group, each once: they read each other's memory
        env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(named))
    else:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // seat.ranks)))
    words = [*python_command(*PROGRAM), *seat.words()]
    if pipe is not None:
        words.append(str(pipe.fileno()))
        handles.append(pipe.fileno())
    process = subprocess.Popen(
        words, env=env, pass_fds=handles, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(to_json(config) + "\n")
        process.stdin.flush()  # left open: when it closes, the rank knows that this process is gone
    return process


def _end(processes: Sequence[subprocess.Popen[str]], pipe: Connection) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
    pipe.close()
