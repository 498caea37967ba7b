"""Ranks in lockstep: the leader decides and sends, all execute, and no completion leaves that they do not agree on.

Every choice that depends on a clock, on memory or on the host is in what the leader sends; what follows from it on the device is
the same on all ranks, because exchanges give all of them the same bits. The digest of a rank covers the log of every result that
it has read, and with it every emitted token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.distributed.channel import Channel
from batchspec.engine.executor import Executor
from batchspec.engine.messages import (
    Begin,
    Calibrate,
    End,
    Message,
    NewWeights,
    Prepare,
    Scales,
    Step,
    decode,
    encode,
)
from batchspec.engine.results import PendingResult
from batchspec.engine.step import ScheduledStep
from batchspec.engine.vocabulary_of_ranks import DIVERGED
from batchspec.errors import DivergedError
from batchspec.model.kv_calibration import calibrate
from batchspec.model.target import Target

RUN = 1 << 32
"""Results are counted from a multiple of it in each run of the engine: what an earlier run left unread is not mistaken for it."""


class Digest:
    """A checksum of all results that a rank has read in a run of the engine, in order, and their number."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, number: int) -> None:
        self.number, self.value = number, 0

    def add(self, result: PendingResult) -> None:
        """A result that has arrived. Lines of rows that took no part may hold anything."""
        log = result.result.log.numpy()
        live = np.flatnonzero(log[:, 0] >= 0)
        self.value = zlib.crc32(log[live].tobytes(), zlib.crc32(live.tobytes(), self.value))
        self.number += 1


class Lead:
    """The leader's side: an engine sends what it is about to do, and asks before a completion leaves it."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._digest = channel, Digest()
        self._scheduled = 0
        """Number of results that the followers read in the steps that were sent."""
        self._num_steps = 0

    def send(self, message: Message) -> None:
        """Send it. The leader will ask about no result of an earlier step that it has not read by now. Raises RankLost."""
        self._channel.pass_by(self._scheduled)
        self._channel.send(encode(message))

    def send_step(self, step: ScheduledStep) -> None:
        """Send the step with the next number. Raises RankLost."""
        self._num_steps += 1
        self.send(Step(step, self._num_steps))
        self._scheduled += step.num_reads

    def begin(self) -> None:
        """A run of the engine begins."""
        self._digest.begin((self._digest.number // RUN + 1) * RUN)
        self._scheduled, self._num_steps = self._digest.number, 0
        self.send(Begin(self._digest.number))

    def read(self, result: PendingResult) -> None:
        """The leader has read a result; the followers read it without a message.

        Raises DivergedError if the ranks had different hidden states where a token would have been emitted.
        """
        self._digest.add(result)
        self._channel.pass_by(self._digest.number)
        log = result.result.log.numpy()
        if (log[log[:, 0] >= 0, 4:] == DIVERGED).any():
            raise self._diverged("hidden states")

    def confirm(self) -> None:
        """Wait until every rank has read what the leader has. Raises DivergedError if one has read something else, RankLost."""
        number, value = self._digest.number, self._digest.value
        if number % RUN == 0:
            return
        for rank in range(1, self._channel.ranks):
            if self._channel.digest_of(rank, number) != value:
                raise self._diverged("tokens")

    def _diverged(self, what: str) -> DivergedError:
        return DivergedError(
            f"the ranks of this group came to different {what} within {self._digest.number % RUN} rounds and prefill passes; "
            "rows that ended since are not saved. Run the same command again; if it happens again, test the machine's memory and "
            "GPUs or set cluster.tensor_parallel=1"
        )


class Following(Protocol):
    """What a follower needs of an engine."""

    executor: Executor
    target: Target

    def prepare(self, mode: SamplingMode, *, shared: bool = False) -> None:
        """See `Engine`."""


class Beats(Protocol):
    """A watchdog."""

    def beat(self) -> None:
        """Work begins."""

    def pause(self) -> None:
        """It is done, and the rank waits for more."""

    def begin_loading(self) -> None:
        """The rank compiles kernels, captures graphs or reads weights."""


@torch.inference_mode()
def follow(
    channel: Channel,
    engine: Following,
    watchdog: Beats | None = None,
    *,
    new_weights: Callable[[NewWeights], object] | None = None,
) -> None:
    """Execute what the leader sends until it ends the run.

    Raises RankLost; DivergedError if a step does not have the next number, because this rank has missed a step or got one twice.

    new_weights  executes these messages; None: the leader never sends them
    """
    digest, num_steps = Digest(), 0
    while True:
        if watchdog is not None:
            watchdog.pause()
        message = decode(channel.receive())
        if watchdog is not None:
            (watchdog.beat if isinstance(message, Step) else watchdog.begin_loading)()
        match message:
            case Step(step, number):
                num_steps += 1
                if number != num_steps:
                    raise DivergedError(
                        f"rank {channel.rank} received step {number} instead of step {num_steps}; run the same command again"
                    )
                engine.executor.execute(step)
                for _ in range(step.num_reads):
                    digest.add(engine.executor.read())
                    channel.send_digest(digest.number, digest.value)
                    if watchdog is not None:  # the passes of one step may take longer than the limit
                        watchdog.beat()
            case NewWeights():
                assert new_weights is not None
                engine.executor.synchronise()
                new_weights(message)
                engine.executor.synchronise()
            case Calibrate(prompts):
                calibrate(engine.target, prompts)
            case Begin(number):
                digest.begin(number)
                num_steps = 0
                engine.executor.clear()
            case Scales(values):
                engine.target.use_kv_scales(torch.tensor(values, dtype=torch.float32))
            case Prepare(mode, shared):
                engine.prepare(mode, shared=shared)
            case End():
                return
            case _:
                raise AssertionError(message)
