"""The program of each rank of a warm engine's model, leader and followers: `python -m batchspec.warm.rank_process SEAT [PIPE]`.

`ranks.py` starts it. SEAT is the process's place in the group (`distributed/seat.py`). Rank 0 leads: PIPE is the file descriptor
of its end of the pipe to the engine, on which it answers the messages of `messages.py`. The other ranks execute what rank 0 sends
(`job/runner/follower.py`). All ranks end at once when the engine's process ends: nothing is saved.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.cli import guarded
from batchspec.config.compose import reported
from batchspec.config.schema import RunConfig
from batchspec.config.typed import from_json
from batchspec.distributed.group import Group
from batchspec.distributed.seat import Seat
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.ranks.messages import Calibrate, NewWeights
from batchspec.errors import BatchspecError, CapacityError
from batchspec.job.load.build import rewrite_weights, vocabulary_of
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.prepare import open_model
from batchspec.job.runner.rank import run_rank, take_seat
from batchspec.job.supervise.watchdog import Watchdog
from batchspec.model.kv_calibration import give_scales
from batchspec.process.out_of_memory import OutOfMemoryGuard
from batchspec.process.program import end_program
from batchspec.records import Request
from batchspec.warm.loading import load, open_warm
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

ADVICE = "the engine ends: make another one"
TELL_S = 0.05
"""Minimum number of seconds between two messages about the progress of a run."""


class GivenUp(Exception):
    """The engine's process has cancelled the run."""


def main() -> int:
    """Lead or follow until the engine is closed; returns the exit code."""
    config, (seat, words) = from_json(sys.stdin.readline()), Seat.of(sys.argv[1:])
    take_seat(config, seat, lambda: os._exit(0))
    if seat.rank:
        return reported(lambda: run_rank(config, seat, advice=ADVICE))
    pipe = Connection(int(words[0]))
    try:
        run_rank(config, seat, lambda group, watchdog: lead(config, group, pipe, watchdog), advice=ADVICE)
    except (EOFError, BrokenPipeError):
        return 0  # the engine is closed
    except BatchspecError as error:
        with suppress(OSError):
            pipe.send_bytes(FROM_LEADER.encode(Failed(type(error).__name__, str(error))))
        return error.exit_code
    return 0


def lead(config: RunConfig, group: Group, pipe: Connection, watchdog: Watchdog) -> None:
    """Load and serve. Raises as `Leader.serve`, CheckpointError, and CapacityError when memory runs out."""
    with OutOfMemoryGuard() as guard:
        Leader(load(open_warm(open_model(config, group=group))), group, pipe, watchdog).serve()
    if guard.message:
        raise CapacityError(
            f"rank 0: out of memory ({guard.message}); make an engine with a lower packing.max_num_seqs, "
            "packing.memory_gb or packing.max_num_batched_tokens"
        )


class Leader:
    """Rank 0: answers the messages of the engine's process, one run or one change of weights at a time."""

    def __init__(self, loaded: LoadedEngine[Engine], group: Group, pipe: Connection, watchdog: Watchdog) -> None:
        self._loaded, self._group, self._pipe, self._watchdog = loaded, group, pipe, watchdog
        self._progress_sent_at = 0.0

    def serve(self) -> None:
        """Serve until the engine is closed. Raises EOFError or BrokenPipeError then, and RankLost and DivergedError."""
        self._send(Loaded(self._loaded.batch))
        while True:
            match self._receive():
                case Run():
                    self._run()
                case Weights(folder, is_checkpoint):
                    self._watchdog.begin_loading()
                    self._rewrite(Path(folder), is_checkpoint=is_checkpoint)
                    self._send(Rewritten())
                case Stop():  # it was sent before the run's end had arrived
                    self._send(Stopped(self._totals))
                case message:
                    raise AssertionError(message)

    def _run(self) -> None:
        requests = _GivenRequests(self._ask, vocabulary_of(self._loaded.job))
        try:
            # without the job, whose rows the engine's process has admitted
            with closing(LoadedEngine(self._loaded.engine).steps(requests, self._look)) as steps:
                while True:
                    message = self._receive()
                    if isinstance(message, Stop):
                        raise GivenUp
                    assert isinstance(message, GoOn), message
                    done = next((done for done in steps if done or not self._loaded.engine.slots.num_live), None)
                    self._send(Ended(done or (), self._totals, over=done is None))
                    if done is None:
                        return
        except GivenUp:
            self._send(Stopped(self._totals))

    def _ask(self) -> Given:
        """The requests that are ready. Raises GivenUp if the engine's process asks to stop."""
        self._send(Ask())
        message = self._receive()
        if isinstance(message, Stop):
            raise GivenUp
        assert isinstance(message, Given), message
        return message

    def _look(self, totals: EngineTotals) -> None:
        """Called after each result that was read. Raises GivenUp if the engine's process asks to stop."""
        self._watchdog.beat()
        if self._pipe.poll():
            message = self._receive()
            assert isinstance(message, Stop), message
            raise GivenUp
        if time.monotonic() - self._progress_sent_at >= TELL_S:
            self._progress_sent_at = time.monotonic()
            self._send(Progress(self._totals))

    def _rewrite(self, folder: Path, *, is_checkpoint: bool) -> None:
        engine, job, lead = self._loaded.engine, self._loaded.job, self._loaded.engine.lead
        assert lead is not None
        lead.send(NewWeights(str(folder)))
        with engine.changing_target():
            rewrite_weights(job, engine.target, folder)
            self._group.least(0)  # all have read the folder, which may be deleted now
            if job.spec.has_kv_scales:
                give_scales(
                    engine.target, None, job.config.cache.scales, folder if is_checkpoint else None, job.tokenizer,
                    tell=lambda prompts: lead.send(Calibrate(prompts)),
                )
                assert engine.target.all_kv_scales is not None
                engine.use_kv_scales(engine.target.all_kv_scales)

    @property
    def _totals(self) -> EngineTotals:
        """The engine's totals, without CUDA events, which another process cannot read."""
        return replace(self._loaded.totals, _group=None)

    def _send(self, message: FromLeader) -> None:
        self._pipe.send_bytes(FROM_LEADER.encode(message))

    def _receive(self) -> ToLeader:
        """The next message; the ranks have nothing to do until it comes."""
        self._watchdog.pause()
        message = TO_LEADER.decode(self._pipe.recv_bytes())
        self._watchdog.beat()
        return message


class _GivenRequests:
    """The `RequestStream` of requests that come from the engine's process.

    ask         returns those that are ready now
    vocabulary  of their automata
    """

    def __init__(self, ask: Callable[[], Given], vocabulary: TokenSymbols | None) -> None:
        self._ask, self._vocabulary, self._over = ask, vocabulary, False
        self._given: deque[Request] = deque()
        """Requests that have come, and that the engine has not taken."""
        self._automata: list[TokenAutomaton] = []

    @property
    def num_ready(self) -> int:
        return len(self._given)

    @property
    def ended(self) -> bool:
        return self._over and not self._given

    def next_ready(self) -> Request | None:
        if not self._given and not self._over:
            self._add(self._ask())
        return self._given.popleft() if self._given else None

    def _add(self, given: Given) -> None:
        self._over = given.over
        for automaton in given.automata:
            assert self._vocabulary is not None
            self._automata.append(replace(automaton, vocabulary=self._vocabulary))
        for request, number in zip(given.requests, given.follows, strict=True):
            self._given.append(request if number < 0 else replace(request, automaton=self._automata[number]))


if __name__ == "__main__":
    end_program(guarded(main))
