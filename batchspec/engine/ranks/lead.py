"""Ranks in lockstep: the leader decides and sends, all execute (`loop/follower.py`), and no completion leaves that they do not
agree on.

Every choice that depends on a clock, on memory or on the host is in what the leader sends; what follows from it on the device is
the same on all ranks, because exchanges give all of them the same bits. The digest of a rank covers the log of every result that
it has read, and with it every emitted token.
"""

from __future__ import annotations

import zlib

import numpy as np

from batchspec.distributed.channel import Channel
from batchspec.engine.ranks.messages import Begin, Message, Step, encode
from batchspec.engine.rounds.records import PendingResult
from batchspec.engine.rounds.vocabulary import DIVERGED
from batchspec.engine.step import ScheduledStep
from batchspec.errors import DivergedError

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
