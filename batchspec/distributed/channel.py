"""Shared memory of a group's processes: the leader's messages to the other ranks, and what each rank reports about itself.

The leader (rank 0) writes a stream of frames into a ring buffer; every follower reads all of them. Each rank has a line of words
that only it writes: how far it has read, a liveness counter (its process runs), a counter of its progress in loading, whether it
waits for another rank, and digests of its newest results. A worker that computes the model alone is a group of one: its parent
reads the liveness counter. This module does not import torch: the parent of the ranks creates the memory, and marks it when a
rank has died.

A frame is a length, a checksum and at most FRAME bytes; a message is as many frames as it needs. The checksum is compared because
a processor may show the new position of the ring before the bytes (x86 does not).
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.errors import RankLost
from batchspec.process.threads import start_thread

RING = 1 << 23
FRAME = 1 << 20
MAX_RANKS = 16
KEPT = 1024
"""Number of digests of a rank that are kept. A follower that would be so many results ahead of the leader waits for it."""
_HEADER = struct.Struct("<IIQ")
"""Header of a frame: checksum of the rest, bytes in the frame, bytes of the message that follow in later frames."""
_LINE = 2 * KEPT + 8
_WRITTEN, _LOST = 0, 1
_READ, _RESULTS, _MESSAGES, _LIVENESS, _LOAD_PROGRESS, _WAITS, _HERE = 0, 1, 2, 3, 4, 5, 6
_WORDS = 8 + MAX_RANKS * _LINE
SPINS = 200
LONGEST_SLEEP_S = 1e-3
NOTICED_S = 5.0
"""Seconds in which the parent of the ranks finds that one has ended. A process may take long to end after its connections."""
LIVENESS_S = 0.5
"""Seconds between two increments of a rank's liveness counter."""


def make_memory() -> int:
    """File descriptor of the zeroed memory of a new channel: it is passed to the ranks, and is freed with the last of them."""
    handle = os.memfd_create("batchspec", 0)
    os.ftruncate(handle, 8 * _WORDS + RING)
    return handle


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come."""

    messages: int
    """messages that it has received"""
    results: int
    """results of rounds and prefill passes that it has read"""


class Channel:
    """The channel as one rank uses it, or with rank None as the parent does."""

    def __init__(self, handle: int, rank: int | None, ranks: int) -> None:
        assert ranks <= MAX_RANKS
        self.rank, self.ranks = rank, ranks
        self._memory = mmap.mmap(handle, 8 * _WORDS + RING)
        self._words: NDArray[np.int64] = np.frombuffer(self._memory, np.int64, _WORDS)
        self._ring = memoryview(self._memory)[8 * _WORDS :]
        self._position = 0

    def send(self, message: bytes) -> None:
        """Send to all followers. Waits while the ring buffer is full. Raises RankLost."""
        for begin in range(0, max(1, len(message)), FRAME):
            part = message[begin : begin + FRAME]
            rest = _HEADER.pack(0, len(part), len(message) - begin - len(part))[4:] + part
            frame = zlib.crc32(rest).to_bytes(4, "little") + rest
            end = self._position + len(frame)
            self.wait(lambda end=end: end - self._slowest() <= RING)  # type: ignore[misc]
            self._put(frame)
            self._position = end
            self._words[_WRITTEN] = end
        self._line(self.rank)[_MESSAGES] += 1

    def receive(self) -> bytes:
        """The next message. Waits for it. Raises RankLost."""
        parts: list[bytes] = []
        while True:
            self.wait(lambda: int(self._words[_WRITTEN]) > self._position)
            part, left = self._frame()
            parts.append(part)
            self._line(self.rank)[_READ] = self._position
            if not left:
                self._line(self.rank)[_MESSAGES] += 1
                return b"".join(parts)

    def pass_by(self, number: int) -> None:
        """Report that the leader will ask for no digest of fewer than `number` results."""
        line = self._line(0)
        line[_RESULTS] = max(int(line[_RESULTS]), number)

    def send_digest(self, number: int, digest: int) -> None:
        """Report that this follower has read `number` results, with the digest of all of them.

        Waits if that would overwrite a digest that the leader may ask for. Raises RankLost.
        """
        line, leader = self._line(self.rank), self._line(0)
        self.wait(lambda: number - int(leader[_RESULTS]) < KEPT)
        line[8 + 2 * (number % KEPT)] = digest
        line[9 + 2 * (number % KEPT)] = number
        line[_RESULTS] = number

    def digest_of(self, rank: int, number: int) -> int:
        """The digest of another rank after `number` results. Waits for it. Raises RankLost."""
        line = self._line(rank)
        self.wait(lambda: int(line[_RESULTS]) >= number and int(line[9 + 2 * (number % KEPT)]) >= number)
        assert int(line[9 + 2 * (number % KEPT)]) == number, "the digest is no longer kept"
        return int(line[8 + 2 * (number % KEPT)])

    def lose(self, rank: int) -> None:
        """Mark that a rank is gone: all that wait for the group raise RankLost."""
        if not self._words[_LOST]:
            self._words[_LOST] = 1 + rank

    def is_lost(self) -> bool:
        """Whether a rank is gone."""
        return bool(self._words[_LOST])

    def check(self) -> None:
        """Raises RankLost if a rank is gone."""
        if self.is_lost():
            raise RankLost(f"rank {int(self._words[_LOST]) - 1} of this group is gone; run the same command again to go on")

    def meet(self) -> None:
        """Wait until all ranks are here. Raises RankLost, as the rendezvous of a library does not."""
        self._line(self.rank)[_HERE] = 1
        self.wait(lambda: all(self._line(rank)[_HERE] for rank in range(self.ranks)))

    def check_soon(self) -> None:
        """Raises RankLost if a rank is gone, or is found to be gone within NOTICED_S: an exchange fails before that."""
        ends = time.monotonic() + NOTICED_S
        while not self.is_lost() and time.monotonic() < ends:
            time.sleep(LONGEST_SLEEP_S)
        self.check()

    def progress(self, rank: int) -> Progress:
        line = self._line(rank)
        return Progress(int(line[_MESSAGES]), int(line[_RESULTS]))

    def start_liveness_thread(self) -> None:
        """Start a thread that increments this rank's liveness counter until the process ends. `SilentRanks` reads it."""
        start_thread(self._count_liveness, "liveness")

    def _count_liveness(self) -> None:
        line = self._line(self.rank)
        while True:
            line[_LIVENESS] += 1
            time.sleep(LIVENESS_S)

    def liveness_count(self, rank: int) -> int:
        """The rank's liveness counter; 0 while its process starts."""
        return int(self._line(rank)[_LIVENESS])

    def tell_load_progress(self, number: int) -> None:
        """Tell how many times this rank has found progress of its loading (`job/supervise/watchdog.py`)."""
        self._line(self.rank)[_LOAD_PROGRESS] = number

    def load_progress(self) -> list[int]:
        """That number of each rank."""
        return [int(self._line(rank)[_LOAD_PROGRESS]) for rank in range(self.ranks)]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this block this rank waits for another one. If that does not come, and the block raises or the process ends in
        it, the parent finds by `waits` that the others did not wait for this rank.
        """
        self.tell_waiting(True)
        yield
        self.tell_waiting(False)

    def tell_waiting(self, now: bool) -> None:
        if self.rank is not None:
            self._line(self.rank)[_WAITS] = now

    def waits(self, rank: int) -> bool:
        """Whether this rank waits for another one, or did when it ended."""
        return bool(self._line(rank)[_WAITS])

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`: at first without sleeping, then in sleeps of at most a millisecond. Raises RankLost."""
        for _ in range(SPINS):
            if ready():
                return
            self.check()
            os.sched_yield()
        tries = 0
        with self.waiting():
            while not ready():
                self.check()
                tries += 1
                time.sleep(min(LONGEST_SLEEP_S, 1e-5 * tries))

    def _line(self, rank: int | None) -> NDArray[np.int64]:
        assert rank is not None
        return self._words[8 + rank * _LINE : 8 + (rank + 1) * _LINE]

    def _slowest(self) -> int:
        return min(int(self._line(rank)[_READ]) for rank in range(1, self.ranks))

    def _put(self, frame: bytes) -> None:
        at = self._position % RING
        first = min(len(frame), RING - at)
        self._ring[at : at + first] = frame[:first]
        self._ring[: len(frame) - first] = frame[first:]

    def _get(self, position: int, count: int) -> bytes:
        at = position % RING
        first = min(count, RING - at)
        return bytes(self._ring[at : at + first]) + bytes(self._ring[: count - first])

    def _frame(self) -> tuple[bytes, int]:
        """The payload of the frame at the position, and the number of bytes of its message that follow."""
        while True:
            head = self._get(self._position, _HEADER.size)
            checksum, count, left = _HEADER.unpack(head)
            if count <= FRAME:
                part = self._get(self._position + _HEADER.size, count)
                if zlib.crc32(part, zlib.crc32(head[4:])) == checksum:
                    self._position += _HEADER.size + count
                    return part, left
            self.check()
