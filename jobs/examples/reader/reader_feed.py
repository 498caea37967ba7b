"""Processes that draw lines for training, and the thread that brings their batches to the device ahead of it.

Processes are forked, so a feed is made before the device is used. Masks lie in memory shared with them; all else is small and
goes through pipes.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from reader_lines import HEIGHTS, MOST, UNIT, WIDEST, Lines, some_lines
from torch import Tensor

SLOTS = 2
"""Batches of a process that are drawn and not yet taken."""
LEAST = 8
"""Lines of a batch."""
AHEAD = 3
"""Batches on the device that wait for training."""


class Level(NamedTuple):
    """How hard lines are."""

    least: int
    most: int
    """Characters."""
    widest: int
    """Width of canvases at most, in pixels."""
    strength: float
    """See `reader_pictures.pictures`."""


LEVELS = (
    Level(1, 6, 160, 0.2), Level(2, 12, 256, 0.4), Level(3, 20, 416, 0.7), Level(4, 30, 576, 1.0), Level(4, MOST, WIDEST, 1.0),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines on the device. See `Lines`."""

    masks: Tensor
    chars: Tensor
    edges: Tensor
    room: Tensor
    longest: int
    """Characters of the longest line, rounded up to a multiple of 8."""
    level: int

    @staticmethod
    def of(lines: Lines, level: int, device: torch.device) -> Batch:
        longest = -(-int((lines.chars > 0).sum(1).max()) // 8) * 8  # few different shapes
        masks, chars, edges, room = (_moved(own, device) for own in (lines.masks, lines.chars, lines.edges, lines.room))
        return Batch(masks, chars, edges, room, longest, level)


def _moved(array: NDArray[Any], device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    return host.clone() if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _draw(
    pipe: Connection, memory: mmap.mmap, level: mmap.mmap, fonts: Sequence[str], pixels: int, seed: int, parent: int
) -> None:
    """A process: takes a free slot from the pipe, fills it, answers with what lies in it."""
    rng, slots = Random(seed), np.frombuffer(memory, np.uint8).reshape(SLOTS, -1)
    while True:
        while not pipe.poll(5):
            if os.getppid() != parent:
                return
        slot = pipe.recv()
        own = LEVELS[level[0]]
        height = rng.choice(HEIGHTS)
        width = UNIT * max(rng.randint(own.widest // UNIT // 3, own.widest // UNIT) for _ in range(2))  # long lines need it
        count = max(LEAST, min(pixels // (height * width), 1024) // 8 * 8)
        found = some_lines(rng, fonts, count, own.least, own.most, height, width)
        slots[slot, : found.masks.size] = found.masks.reshape(-1)
        pipe.send((slot, found.masks.shape, found.chars, found.edges, found.room, level[0]))


class Feed:
    """Batches of training, as many as are asked for."""

    def __init__(self, fonts: Sequence[str], *, processes: int, pixels: int, seed: int) -> None:
        """pixels: of a batch at most, unless it has the least lines. A process that ends is done without."""
        context = get_context("fork")
        self._level = mmap.mmap(-1, 1)
        self._pipes: dict[Connection, NDArray[np.uint8]] = {}
        self._waited_s = 0.0
        for number in range(processes):
            memory, (ours, theirs) = mmap.mmap(-1, SLOTS * max(pixels, LEAST * HEIGHTS[-1] * WIDEST)), context.Pipe()
            arguments = (theirs, memory, self._level, fonts, pixels, seed * 1000 + number, os.getpid())
            context.Process(target=_draw, args=arguments, daemon=True).start()
            theirs.close()
            self._pipes[ours] = np.frombuffer(memory, np.uint8).reshape(SLOTS, -1)
        for ours in self._pipes:
            for slot in range(SLOTS):
                ours.send(slot)

    @property
    def level(self) -> int:
        return self._level[0]

    @level.setter
    def level(self, value: int) -> None:
        self._level[0] = value

    def waited_s(self) -> float:
        """Seconds that training waited for batches since the last call."""
        found, self._waited_s = self._waited_s, 0.0
        return found

    def _lines(self) -> Iterator[tuple[Lines, int]]:
        while self._pipes:
            for pipe in connection.wait(list(self._pipes)):
                assert isinstance(pipe, Connection)
                try:
                    slot, shape, chars, edges, room, level = pipe.recv()
                    masks = self._pipes[pipe][slot, : int(np.prod(shape))].reshape(shape)
                    yield Lines(masks, chars, edges, room), level
                    pipe.send(slot)
                except (EOFError, OSError):
                    del self._pipes[pipe]
                    print(f"a process that draws lines ended; {len(self._pipes)} go on", flush=True)
        raise RuntimeError("all processes that draw lines ended; the errors are above")

    def _bring(self, device: torch.device, ready: queue.Queue[Batch | BaseException]) -> None:
        try:
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            for lines, level in self._lines():
                with torch.cuda.stream(stream):
                    batch = Batch.of(lines, level, device)
                if stream is not None:
                    stream.synchronize()
                ready.put(batch)
        except BaseException as error:
            ready.put(error)

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """Without an end. Raises RuntimeError if all processes of the feed ended."""
        ready: queue.Queue[Batch | BaseException] = queue.Queue(AHEAD)
        threading.Thread(target=self._bring, args=(device, ready), daemon=True).start()
        while True:
            begin = time.perf_counter()
            found = ready.get()
            self._waited_s += time.perf_counter() - begin
            if isinstance(found, BaseException):
                raise found
            if device.type == "cuda":  # its memory is of the thread's stream, which would use it again too early
                for tensor in (found.masks, found.chars, found.edges, found.room):
                    tensor.record_stream(torch.cuda.current_stream(device))
            yield found
