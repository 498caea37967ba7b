"""The pixels of the images of rows that will enter their slots soon, made ahead by processes in memory that they share.

A row asks for its images as soon as it is known, and takes copies of their pixels when it enters its slot. Images are made in the
order of the asks, each once for all rows that have it, in a bounded number of blocks; those that were taken stay for later rows
until the blocks are needed. Pixels can always be made again, so nothing is lost with a process, and nothing waits for ever: all
blocks can be taken away in favour of the row that must enter next (`hurry`).

All methods are called by one thread. Others, one a process, only complete futures.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from batchspec.images.decode import Rgb
from batchspec.images.header import BadImage
from batchspec.images.processor import Fit
from batchspec.images.shared_blocks import BLOCK, SharedBlocks, blocks_of
from batchspec.process.limited_process import OUT_OF_MEMORY, CannotStart, Died, Killed, LimitedProcess
from batchspec.process.machine import num_cpus
from batchspec.process.own_process import finalize_here
from batchspec.process.threads import start_thread
from batchspec.records import ImagePiece

MOST_BYTES, MOST_KEPT, MOST_IMAGES_KEPT = 512 << 20, 128 << 20, 256
"""Bytes of pixels that are made ahead, of those that were taken and stay, and number of these images. A single row may exceed the
first."""
MOST_PROCESSES = 30
CPU_S, ANSWER_S = 60, 300.0
"""Limits on the time for an image: CPU time in whole seconds, and time in seconds, after which its process is killed."""
MEMORY_BYTES = 4 << 30
"""Limit on the address space of a process, besides the blocks: three copies of the largest image in RGBA are 1.1 GB."""
AGAIN = "run the same command again with resume=error, or give it more memory"
QUEUED = 3
"""Images at a time that are begun for each process: enough to keep it busy between two steps of the engine, and few enough that
the row that must enter next does not wait for many others."""

log = logging.getLogger(__name__)


def num_processes(workers: int = 1) -> int:
    """This worker's share of the CPUs but two, which launch and admit; at least one, at most MOST_PROCESSES.

    workers: processes of the job on this machine that each make images, one a copy of the model
    """
    return min(MOST_PROCESSES, max(1, num_cpus() // workers - 2))


@dataclass(eq=False, slots=True)
class _Image:
    """An image that rows have asked for."""

    piece: ImagePiece
    """The present one of a row that asks; without the encoded image if none does."""
    num_asks: int = 0
    """Asks of rows that have not taken it; a row may have it several times."""
    blocks: list[int] = field(default_factory=list)
    made: Future[None] | None = None
    """None: it is not begun, and has no blocks."""

    @property
    def is_done(self) -> bool:
        return self.made is not None and self.made.done()

    @property
    def has_failed(self) -> bool:
        return self.made is not None and self.made.done() and self.made.exception() is not None


class PreparedImages:
    """Processes start with the first asks, and end when this object is collected."""

    def __init__(self, *, longest_row: tuple[int, int] = (0, 0), most_bytes: int = MOST_BYTES, num: int | None = None) -> None:
        """
        longest_row  limits on the images of a row and on their bytes of pixels, so that any row has room
        most_bytes   limit on what is made ahead
        num          maximum number of processes; None: `num_processes`
        """
        num_images, row_bytes = longest_row
        self._most_blocks = blocks_of(most_bytes)
        num_blocks = max(self._most_blocks, num_images + blocks_of(row_bytes))
        self._memory = SharedBlocks.create(num_blocks)
        self._free = list(range(num_blocks))[::-1]  # the last one is taken first, so that few blocks are ever written
        self._rows: OrderedDict[Hashable, tuple[ImagePiece, ...]] = OrderedDict()
        """The rows that wait for pixels, in the order in which these are made."""
        self._first: Hashable = None
        """The row that must enter next, if `hurry` has named it."""
        self._images: OrderedDict[bytes, _Image] = OrderedDict()
        """By digest. Those that no row asks for lie in the order of their use."""
        self._running: list[Future[None]] = []
        self._num_missing = 0
        """Images that rows ask for and that are not begun."""
        self._lanes = [_Lane(_DecodeProcess(self._memory)) for _ in range(num or num_processes())]
        self._work = _Work(self._lanes)
        self._num_threads = 0
        finalize_here(self, _end, self._lanes, self._work.tasks, self._memory.fd)

    def ask(self, row: Hashable, pieces: Sequence[ImagePiece]) -> None:
        """The row will take these images. Nothing happens if it has asked already and not taken them."""
        if row in self._rows:
            return
        self._rows[row] = tuple(pieces)
        for piece in pieces:
            image = self._images.get(piece.digest)
            if image is not None and not image.num_asks and image.has_failed:  # after its rows had dropped it
                self._evict(image)
            image = self._images.setdefault(piece.digest, _Image(piece))
            image.piece = piece
            self._num_missing += not image.num_asks and image.made is None
            image.num_asks += 1
        self._begin()

    def hurry(self, row: Hashable) -> None:
        """The images of this row are made before those of others."""
        self._rows.move_to_end(row, last=False)
        self._first = row
        self._begin()

    def take(self, row: Hashable) -> tuple[Rgb, ...] | None:
        """Copies of the pixels of a row that has asked, uint8 [height, width, 3] each; None: they are not all made.

        Afterwards the row has not asked. Raises BadImage for an image that cannot be decoded, and what keeps processes from
        starting.
        """
        pieces = self._rows[row]
        images = [self._images[piece.digest] for piece in pieces]
        for number, image in enumerate(images, 1):
            if image.is_done and (error := image.made.exception()) is not None:  # type: ignore[union-attr]
                self.drop(row)
                if isinstance(error, BadImage):
                    raise BadImage(error.code, f"image {number} of {len(pieces)}: {error}", retryable=error.retryable) from None
                raise error
        self._begin()
        if not all(image.is_done for image in images):
            return None
        found = tuple(
            self._memory.read(image.blocks, piece.num_bytes).reshape(piece.height, piece.width, 3)
            for image, piece in zip(images, pieces, strict=True)
        )
        self.drop(row)
        return found

    def drop(self, row: Hashable) -> None:
        """The row takes no images, if it has asked."""
        if self._first == row:
            self._first = None
        for piece in self._rows.pop(row, ()):
            image = self._images[piece.digest]
            image.num_asks -= 1
            if image.num_asks:
                continue
            self._images.move_to_end(piece.digest)
            image.piece = replace(piece, source=b"")  # it may be larger than the pixels
            if image.made is None:
                self._num_missing -= 1
                del self._images[piece.digest]
            elif image.has_failed:
                self._evict(image)
        self._keep(MOST_KEPT)

    def drop_all(self) -> None:
        """No row takes images."""
        for row in list(self._rows):
            self.drop(row)

    def check(self) -> None:
        """Begin images for which there is room now, and kill processes that do not answer. Call it before every step."""
        if self._num_missing:
            self._begin()
        for lane in self._lanes:
            began_at = lane.began_at  # read once: the lane's thread sets it to None
            if began_at is not None and time.monotonic() - began_at > ANSWER_S:
                lane.began_at = time.monotonic()
                lane.process.kill(f"its process did not answer for {ANSWER_S:g} s")

    def pending(self) -> Iterator[Future[None]]:
        """The images that are being made."""
        return (made for made in self._running if not made.done())

    def _begin(self) -> None:
        """Begin images in the order of their rows, while processes have too few of them and there are blocks."""
        most = QUEUED * len(self._lanes)
        self._running = [made for made in self._running if not made.done()]
        for row, pieces in self._rows.items():
            for piece in pieces:
                if not self._num_missing or len(self._running) >= most:
                    return
                image = self._images[piece.digest]
                if image.made is None:
                    if not self._has_room(blocks_of(image.piece.num_bytes), row):
                        return
                    self._make(image)

    def _make(self, image: _Image) -> None:
        image.blocks = [self._free.pop() for _ in range(blocks_of(image.piece.num_bytes))]
        image.made = Future()
        self._num_missing -= 1
        self._running.append(image.made)
        if self._num_threads < min(len(self._lanes), len(self._running)):
            start_thread(partial(_serve, self._work), "images")
            self._num_threads += 1
        piece = image.piece
        self._work.tasks.put(((piece.source, Fit(piece.height, piece.width), image.blocks), image.made))

    def _has_room(self, count: int, row: Hashable) -> bool:
        """Whether so many blocks are free for an image of this row, after others have been evicted."""
        is_first = row == self._first
        reserved = 0 if is_first else self._memory.num_blocks - self._most_blocks
        while len(self._free) - reserved < count:
            unused = (image for image in self._images.values() if not image.num_asks and image.is_done)
            if (image := next(unused, None)) is None and is_first:
                image = self._last_of_others(row)
            if image is None:
                return False
            self._evict(image)
        return True

    def _last_of_others(self, row: Hashable) -> _Image | None:
        """A made image that this row does not have, of the row that is last in order."""
        own = {piece.digest for piece in self._rows[row]}
        others = (piece.digest for pieces in reversed(self._rows.values()) for piece in pieces if piece.digest not in own)
        return next((image for digest in others if (image := self._images[digest]).is_done), None)

    def _evict(self, image: _Image) -> None:
        """Free the blocks of a made image; if rows ask for it, it is made again."""
        self._free += reversed(image.blocks)
        image.blocks, image.made = [], None
        if image.num_asks:
            self._num_missing += 1
        else:
            del self._images[image.piece.digest]

    def _keep(self, most: int) -> None:
        """Evict images that no row asks for, those that were used longest ago first, while they have more bytes."""
        unused = [image for image in self._images.values() if not image.num_asks and image.is_done]
        count = BLOCK * sum(len(image.blocks) for image in unused)
        for place, image in enumerate(unused):
            if count <= most and len(unused) - place <= MOST_IMAGES_KEPT:
                return
            count -= BLOCK * len(image.blocks)
            self._evict(image)


class _DecodeProcess(LimitedProcess):
    """A process of `decode_process.py`. It holds nothing of earlier images but the PDF that is open."""

    module = "batchspec.images.decode_process"
    does = "decodes images"
    limits: ClassVar = {OUT_OF_MEMORY: "decoding it takes more than {gib:g} GiB of memory"}
    too_long = "decoding it takes more than {cpu_s} s"

    def __init__(self, memory: SharedBlocks) -> None:
        super().__init__(((memory.fd, memory.num_blocks), MEMORY_BYTES, CPU_S))
        self.pass_fds = (memory.fd,)

    def make(self, asked: Any) -> None:
        """Write the pixels. An image with which the process died is given to a new one. Raises BadImage."""
        try:
            answer = self.result(asked)
        except Died:
            try:
                answer = self.result_alone(asked)
            except Died as died:
                advice = AGAIN if isinstance(died, Killed) else "correct the image or drop it"
                raise BadImage("bad_image", f"{died}; {advice}", retryable=isinstance(died, Killed)) from None
        if answer is not None:
            code, said, retryable = answer
            raise BadImage(code, said, retryable=retryable)


@dataclass(eq=False, slots=True)
class _Lane:
    """A process, and the thread that asks it."""

    process: _DecodeProcess
    began_at: float | None = None
    """When the image that it makes was begun, in seconds of the monotonic clock."""


class _Work:
    """The lanes that are not given up, and the tasks of all. It is thread-safe."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._unused, self._num_left, self._lock = deque(lanes), len(lanes), threading.Lock()

    def next_lane(self) -> _Lane | None:
        """One that no thread has; None: each has one."""
        with self._lock:
            return self._unused.popleft() if self._unused else None

    def retire(self, error: Exception) -> bool:
        """Give up a lane whose process does not start or ends by itself. False: it is the last one, and stays."""
        with self._lock:
            if self._num_left == 1:
                return False
            self._num_left -= 1
        log.warning("%s", f"one of the processes that decode images is given up ({error}); {self._num_left} are left")
        return True


def _serve(work: _Work) -> None:
    """Make images until it reads None, by one lane, or by an unused one after that was given up. It does not refer to
    the object that asks, which could not be collected otherwise."""
    lane = work.next_lane()
    while lane is not None and (task := work.tasks.get()) is not None:
        asked, made = task
        lane.began_at = time.monotonic()
        try:
            lane.process.make(asked)
            lane.began_at = None
            made.set_result(None)
        except Exception as error:  # a row would wait for ever for an answer that never comes
            lane.began_at = None
            if isinstance(error, OSError | CannotStart) and work.retire(error):
                work.tasks.put(task)
                lane = work.next_lane()
            else:
                made.set_exception(error)
        del task, asked, made


def _end(lanes: Sequence[_Lane], tasks: queue.SimpleQueue[Any], fd: int) -> None:
    for lane in lanes:
        tasks.put(None)
        lane.process.close()
    os.close(fd)
