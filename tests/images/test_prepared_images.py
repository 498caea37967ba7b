"""Pixels that processes make ahead are right and complete, whatever is killed, hangs or lacks room, in bounded memory."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from batchspec.images import prepared_images
from batchspec.images.decode import Rgb, decode
from batchspec.images.header import BadImage
from batchspec.images.prepared_images import PreparedImages, num_processes
from batchspec.images.processor import Fit
from batchspec.images.shared_blocks import BLOCK, SharedBlocks, blocks_of
from batchspec.process.limited_process import CannotStart
from batchspec.records import ImagePiece
from tests.helpers.image_models import encoded, picture
from tests.helpers.processes import wait_for_end

PATIENCE_S = 60.0


def piece(seed: int, height: int = 40, width: int = 56, *, data: bytes | None = None) -> ImagePiece:
    source = picture(32, 50, seed) if data is None else data
    return ImagePiece(
        begin=0, length=1, rows=1, cols=1, advance=1, height=height, width=width, encoded_pixels=1,
        digest=f"{seed} {height} {width}".encode(), source=source,
    )


def right(one: ImagePiece) -> Rgb:
    return decode(one.source, Fit(one.height, one.width))


def taken(prepared: PreparedImages, row: object, *, after_each: Callable[[], object] = lambda: None) -> tuple[Rgb, ...]:
    """The pixels of a row that has asked, as the engine's steps wait for them."""
    end = time.monotonic() + PATIENCE_S
    while (found := prepared.take(row)) is None:
        assert time.monotonic() < end, "the pixels never came"
        wait(prepared.pending(), 0.05, "FIRST_COMPLETED")
        prepared.check()
        after_each()
    return found


def pids(prepared: PreparedImages) -> list[int]:
    return [pid for lane in prepared._lanes if (pid := lane.process.pid) is not None]


def slow_piece(seed: int) -> ImagePiece:
    """An image that takes a tenth of a second."""
    return piece(seed, 64, 64, data=picture(1000, 1000, seed, format="WEBP"))


@contextmanager
def killing(prepared: PreparedImages, *, most: int) -> Iterator[list[int]]:
    """Kills processes while they make an image, `most` of them in all; gives those that were killed."""
    killed, over = list[int](), threading.Event()

    def kill() -> None:
        while not over.is_set():
            for lane in prepared._lanes:
                pid, began = lane.process.pid, lane.began_at
                if pid is None or began is None or len(killed) == most or pid in killed:
                    continue
                if time.monotonic() - began > 0.05:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
            time.sleep(0.005)

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed
    over.set()
    thread.join()


def test_pixels_are_those_that_this_process_would_make() -> None:
    prepared = PreparedImages(num=2)
    rows = [(piece(1), piece(2, 8, 8)), (piece(3, 200, 300),), (piece(1), piece(1), piece(4, 64, 256))]
    for number, row in enumerate(rows):
        prepared.ask(number, row)
    for number, row in reversed([*enumerate(rows)]):
        found = taken(prepared, number)
        assert len(found) == len(row)
        for pixels, one in zip(found, row, strict=True):
            assert pixels.shape == (one.height, one.width, 3)
            assert (pixels == right(one)).all()
    assert not [*prepared.pending()]


def test_blocks_keep_what_was_written_whatever_their_order() -> None:
    memory = SharedBlocks.create(6)
    other = SharedBlocks(memory.fd, 6)
    for count in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
        values = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
        blocks = random.Random(count).sample(range(6), blocks_of(count))
        memory.write(blocks, values)
        assert (other.read(blocks, count) == values).all()
    os.close(memory.fd)


def test_an_image_is_made_once_for_all_rows_that_have_it_and_stays_for_later_ones() -> None:
    prepared, one = PreparedImages(num=1), piece(1)
    for row in range(3):
        prepared.ask(row, (one,))
    (made,) = prepared._running
    for row in range(3):
        taken(prepared, row)
    prepared.ask(3, (one,))
    assert prepared._images[one.digest].made is made
    assert prepared.take(3) is not None


def test_a_bad_image_is_the_error_of_its_rows_alone() -> None:
    prepared, good = PreparedImages(num=1), piece(1)
    bad = piece(2, data=encoded(good)[: len(encoded(good)) // 2])
    prepared.ask("bad", (good, bad))
    prepared.ask("too", (bad,))
    prepared.ask("good", (good,))
    for row, place in (("bad", "2 of 2"), ("too", "1 of 1")):
        with pytest.raises(BadImage, match=f"^image {place}: Pillow cannot read it") as caught:
            taken(prepared, row)
        assert (caught.value.code, caught.value.retryable) == ("bad_image", False)
    assert (taken(prepared, "good")[0] == right(good)).all()
    prepared.drop_all()
    assert bad.digest not in prepared._images
    assert blocks_in_use(prepared) == blocks_of(40 * 56 * 3)


def blocks_in_use(prepared: PreparedImages) -> int:
    """Checks that each block is free or belongs to one image."""
    used = [block for image in prepared._images.values() for block in image.blocks]
    assert sorted([*used, *prepared._free]) == [*range(prepared._memory.num_blocks)]
    assert prepared._num_missing == sum(image.made is None for image in prepared._images.values())
    return len(used)


@pytest.mark.second
def test_a_killed_process_loses_nothing() -> None:
    """SIGKILL while it makes an image, and while it makes none."""
    prepared = PreparedImages(num=2)
    rows = [slow_piece(seed) for seed in range(4)]
    for number, one in enumerate(rows):
        prepared.ask(number, (one,))
    with killing(prepared, most=3) as killed:
        for number, one in enumerate(rows):
            assert (taken(prepared, number)[0] == right(one)).all()
    assert len(killed) == 3
    for pid in pids(prepared):
        os.kill(pid, signal.SIGKILL)
    prepared.ask("later", (piece(9),))
    assert (taken(prepared, "later")[0] == right(piece(9))).all()


@pytest.mark.second
def test_an_image_whose_processes_are_killed_again_and_again_is_an_error_that_may_be_retried() -> None:
    prepared = PreparedImages(num=1)
    prepared.ask("bad", (slow_piece(1),))
    said = r"^image 1 of 1: its process was killed, .*; run the same command again with resume=error, or give it more memory"
    with killing(prepared, most=99) as killed, pytest.raises(BadImage, match=said) as caught:
        taken(prepared, "bad")
    assert (caught.value.code, caught.value.retryable) == ("bad_image", True)
    assert len(killed) == 4  # in the first process, and in three new ones
    prepared.ask("good", (piece(2),))
    assert (taken(prepared, "good")[0] == right(piece(2))).all()


@pytest.mark.second
def test_a_process_that_does_not_answer_is_killed_and_its_image_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedImages(num=1)
    prepared.ask("first", (piece(1),))
    taken(prepared, "first")
    (pid,) = pids(prepared)
    os.kill(pid, signal.SIGSTOP)
    prepared.ask("next", (piece(2),))
    with monkeypatch.context() as patch:
        patch.setattr(prepared_images, "ANSWER_S", 0.2)
        while pids(prepared) == [pid]:
            assert prepared.take("next") is None
            prepared.check()
            time.sleep(0.01)
    assert (taken(prepared, "next")[0] == right(piece(2))).all()


@pytest.mark.second
def test_an_image_whose_processes_never_answer_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_images, "ANSWER_S", 0.05)  # a process takes longer to start
    prepared = PreparedImages(num=1)
    prepared.ask("bad", (piece(1),))
    said = r"^image 1 of 1: its process did not answer for 0\.05 s; run the same command again with resume=error, or"
    with pytest.raises(BadImage, match=said) as caught:
        taken(prepared, "bad", after_each=lambda: time.sleep(0.01))
    assert caught.value.retryable


def test_an_image_may_be_finished_while_its_time_is_checked() -> None:
    class Lane:
        """Whose image is finished after its time was read once."""

        reads = 0

        @property
        def began_at(self) -> float | None:
            self.reads += 1
            return time.monotonic() if self.reads == 1 else None

    prepared, lane = PreparedImages(num=1), Lane()
    prepared._lanes[:] = [lane]  # type: ignore[list-item]
    try:
        prepared.check()
    finally:
        prepared._lanes.clear()
    assert lane.reads == 1


def failing_lanes(prepared: PreparedImages, monkeypatch: pytest.MonkeyPatch, *lanes: int) -> None:
    """The processes of these lanes cannot be started, which takes a moment."""

    def fail() -> None:
        time.sleep(0.05)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    for lane in lanes:
        monkeypatch.setattr(prepared._lanes[lane].process, "_start", fail)


@pytest.mark.parametrize("lanes", [(0,), (0, 1), (0, 2), (1, 2)])
def test_a_lane_whose_process_does_not_start_leaves_its_images_to_others(
    lanes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = PreparedImages(num=3)
    failing_lanes(prepared, monkeypatch, *lanes)
    rows = [piece(seed) for seed in range(9)]
    prepared.ask("first", (rows[0],))
    assert (taken(prepared, "first")[0] == right(rows[0])).all(), "with a single image there is a single thread"
    for row, one in enumerate(rows):
        prepared.ask(row, (one,))
    for row, one in enumerate(rows):
        assert (taken(prepared, row)[0] == right(one)).all()
    assert 0 in lanes or len(pids(prepared)) == 1
    assert len(caplog.messages) <= len(lanes)
    assert all("decode images is given up ([Errno 11]" in said for said in caplog.messages)


def test_the_job_ends_if_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedImages(num=3)
    failing_lanes(prepared, monkeypatch, 0, 1, 2)
    for row in range(6):
        prepared.ask(row, (piece(row),))
    with pytest.raises(BlockingIOError):
        taken(prepared, 0)


def test_a_process_that_ends_by_itself_says_whether_it_had_worked() -> None:
    prepared = PreparedImages(num=1)
    process = prepared._lanes[0].process
    process.result((piece(1).source, Fit(8, 8), [0]))
    with pytest.raises(CannotStart, match=r"^the process that decodes images ended with 1 while it worked; look for"):
        process.result("no image")
    process._first_message = ("no memory", 1, 1)
    with pytest.raises(CannotStart, match=r"^the process that decodes images ended with 1 at its start; look for"):
        process.result("no image")


def test_a_failure_that_nobody_waited_for_is_not_given_to_a_later_row() -> None:
    prepared, one = PreparedImages(num=1), piece(1)
    lost = BadImage("bad_image", "its process was killed", retryable=True)
    prepared.ask("dropped", (one,))
    prepared.drop("dropped")
    image = prepared._images[one.digest]
    wait(prepared.pending(), PATIENCE_S)
    image.made = Future()
    image.made.set_exception(lost)
    prepared.ask("later", (one,))
    assert (taken(prepared, "later")[0] == right(one)).all()
    blocks_in_use(prepared)


@pytest.mark.parametrize(("cpus", "workers", "processes"), [(96, 1, 30), (96, 8, 10), (16, 2, 6), (8, 8, 1), (1, 1, 1)])
def test_workers_of_a_machine_share_its_cpus(cpus: int, workers: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_images, "num_cpus", lambda: cpus)
    assert num_processes(workers) == processes


@pytest.mark.second
def test_an_image_that_takes_too_much_memory_is_an_error_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import BytesIO

    from PIL import Image

    monkeypatch.setattr(prepared_images, "MEMORY_BYTES", 400 << 20)
    prepared, out = PreparedImages(num=1), BytesIO()
    Image.new("RGB", (9400, 9400)).save(out, "PNG")
    prepared.ask("large", (piece(1, data=out.getvalue()),))
    with pytest.raises(BadImage, match=r"decoding it takes more than 0.39\d* GiB of memory; correct the image or drop it"):
        taken(prepared, "large")
    prepared.ask("small", (piece(2),))
    assert (taken(prepared, "small")[0] == right(piece(2))).all()


@pytest.mark.parametrize("most", [3, 10])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_asks_ends_with_the_right_pixels_and_leaves_no_block_taken(seed: int, most: int) -> None:
    """In memory for so many blocks, or for the longest row, which is all that there is or more: most rows have to wait, and those
    that come back after a preemption take the blocks of others."""
    rng = random.Random(seed)
    pieces = [piece(number, 8 * rng.randint(1, 8), 8 * rng.randint(1, 20)) for number in range(40)]
    rows = [tuple(rng.choices(pieces, k=rng.randint(1, 5))) for _ in range(25)]
    longest_row = (5, 5 * 64 * 160 * 3) if most == 3 else (0, 0)
    prepared = PreparedImages(longest_row=longest_row, most_bytes=most * BLOCK, num=1)
    waiting = list(range(len(rows)))
    for row in waiting:
        prepared.ask(row, rows[row])
    end = time.monotonic() + PATIENCE_S
    while waiting:
        assert time.monotonic() < end
        prepared.check()
        for place, row in enumerate(list(waiting[:4])):
            prepared.ask(row, rows[row])
            if (found := prepared.take(row)) is None:
                if not place:
                    prepared.hurry(row)
                continue
            assert all((pixels == right(one)).all() for pixels, one in zip(found, rows[row], strict=True))
            waiting.remove(row)
            if rng.random() < 0.3:
                waiting.insert(0, row)
        if waiting and rng.random() < 0.1:
            prepared.drop(waiting.pop())
        blocks_in_use(prepared)
        wait(prepared.pending(), 0.05, "FIRST_COMPLETED")
    assert not prepared._rows
    wait(prepared.pending(), PATIENCE_S)
    assert os.fstat(prepared._memory.fd).st_blocks * 512 <= prepared._memory.num_blocks * BLOCK
    prepared._keep(0)
    assert blocks_in_use(prepared) == 0


def test_the_row_that_must_enter_next_takes_the_blocks_of_others_once_their_images_are_made() -> None:
    """Otherwise a preempted row would never get memory: later rows that wait for a slot would hold all of it."""
    prepared, rows = PreparedImages(most_bytes=2 * BLOCK, num=1), [piece(seed, 64, 64) for seed in range(3)]
    for row in range(3):
        prepared.ask(row, (rows[row],))
    prepared.hurry(2)
    assert prepared._images[rows[2].digest].made is None, "an image that is being made keeps its block"
    assert (taken(prepared, 2)[0] == right(rows[2])).all()
    assert blocks_in_use(prepared) == 2
    for row in (1, 0):
        assert (taken(prepared, row)[0] == right(rows[row])).all()


@pytest.mark.parametrize("limit", ["MOST_KEPT", "MOST_IMAGES_KEPT", "most_bytes"])
def test_memory_does_not_grow_with_the_rows(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of 2 blocks: 20 rows wait, and 2 images stay; or 4 are made ahead, though a row might need more."""
    if limit != "most_bytes":
        monkeypatch.setattr(prepared_images, limit, 4 * BLOCK if limit == "MOST_KEPT" else 2)
    few = limit == "most_bytes"
    prepared = PreparedImages(longest_row=(0, 400 * BLOCK), most_bytes=8 * BLOCK if few else 300 * BLOCK, num=1)
    source = picture(30, 50)
    rows = [piece(seed, 100, 100, data=source) for seed in range(80)]
    for row, one in enumerate(rows[:20]):
        prepared.ask(row, (one,))
    for row in range(len(rows)):
        taken(prepared, row)
        if row + 20 < len(rows):
            prepared.ask(row + 20, (rows[row + 20],))
        assert len(prepared._images) <= 20 + 2 + 4 * few
        assert sum(bool(image.piece.source) for image in prepared._images.values()) <= 20
    assert os.fstat(prepared._memory.fd).st_blocks * 512 <= (8 if few else 2 * 24) * BLOCK


def test_processes_end_with_what_has_started_them() -> None:
    prepared = PreparedImages(num=2)
    prepared.ask("row", (piece(1), piece(2)))
    taken(prepared, "row")
    running = pids(prepared)
    assert running
    del prepared
    gc.collect()
    wait_for_end(running, PATIENCE_S)


def test_a_process_imports_no_torch_and_little_else() -> None:
    script = (
        "import sys, batchspec.images.decode_process, PIL.Image\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'triton', 'pyarrow', 'polars', 'transformers', "
        "'hydra', 'tokenizers', 'msgspec'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
