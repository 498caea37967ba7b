"""The memory through which the leader of a group sends: every byte arrives once and in order; loss is noticed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.distributed import channel as module
from batchspec.distributed.channel import FRAME, KEPT, RING, Channel, Progress, make_memory
from batchspec.errors import RankLost
from tests.helpers.runs import fork_context


@pytest.fixture
def handle() -> Iterator[int]:
    made = make_memory()
    yield made
    os.close(made)


def ends(handle: int, ranks: int) -> list[Channel]:
    return [Channel(handle, rank, ranks) for rank in range(ranks)]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3 * FRAME), min_size=1, max_size=8), st.integers(2, 4))
def test_every_message_arrives_in_order(sizes: list[int], ranks: int) -> None:
    handle = make_memory()
    leader, *followers = ends(handle, ranks)
    messages = [np.random.default_rng(size).bytes(size) for size in sizes]
    found: list[list[bytes]] = [[] for _ in followers]

    def take(end: Channel, into: list[bytes]) -> None:
        for _ in messages:
            into.append(end.receive())

    threads = [threading.Thread(target=take, args=pair) for pair in zip(followers, found, strict=True)]
    for thread in threads:
        thread.start()
    for message in messages:
        leader.send(message)
    for thread in threads:
        thread.join(30)
    os.close(handle)
    assert all(own == messages for own in found)
    assert leader.progress(1) == Progress(messages=len(messages), results=0)


def test_a_full_ring_waits_for_the_slowest_follower(handle: int) -> None:
    leader, fast, slow = ends(handle, 3)
    count = RING // FRAME + 2
    sent = threading.Event()

    def send_all() -> None:
        for number in range(count):
            leader.send(bytes([number]) * FRAME)
        sent.set()

    threading.Thread(target=send_all, daemon=True).start()
    for number in range(RING // FRAME - 1):
        assert fast.receive() == bytes([number]) * FRAME
    assert not sent.wait(0.05)
    for number in range(count):
        assert slow.receive()[0] == number
        if number >= RING // FRAME - 1:
            fast.receive()
    assert sent.wait(10)


def test_bytes_that_have_not_arrived_are_not_read(handle: int) -> None:
    """As where a processor shows the new position before the bytes."""
    leader, follower = ends(handle, 2)
    leader.send(b"whole")
    at = module._HEADER.size
    leader._ring[at : at + 1] = b"W"
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(follower.receive()))
    thread.start()
    thread.join(0.05)
    assert not found
    leader._ring[at : at + 1] = b"w"
    thread.join(10)
    assert found == [b"whole"]


def test_the_digest_of_a_result_is_waited_for(handle: int) -> None:
    leader, follower = ends(handle, 2)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(leader.digest_of(1, 3)))
    thread.start()
    for number in (1, 2):
        follower.send_digest(number, 100 + number)
    thread.join(0.05)
    assert not found
    for number in (3, 4):
        follower.send_digest(number, 100 + number)
    thread.join(10)
    assert found == [103]
    assert leader.progress(1).results == 4


def test_a_follower_overwrites_no_digest_that_the_leader_may_ask_for(handle: int) -> None:
    leader, follower = ends(handle, 2)
    first = 5 * KEPT
    leader.pass_by(first)

    def tell_all() -> None:
        for number in range(first + 1, first + 3 * KEPT):
            follower.send_digest(number, -number)

    thread = threading.Thread(target=tell_all)
    thread.start()
    for number in range(first + 1, first + 3 * KEPT, 700):
        thread.join(0.02)
        leader.pass_by(number)
        leader.pass_by(first)  # it goes back to none
        assert leader.digest_of(1, number) == -number
    leader.pass_by(first + 3 * KEPT)
    thread.join(10)
    assert leader.progress(1).results == first + 3 * KEPT - 1


@pytest.mark.parametrize("waiting", ["receive", "digest_of", "send", "send_digest"])
def test_whoever_waits_for_a_group_hears_that_a_rank_is_lost(handle: int, waiting: str) -> None:
    leader, follower = ends(handle, 2)
    parent = Channel(handle, None, 2)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            if waiting == "receive":
                follower.receive()
            elif waiting == "digest_of":
                leader.digest_of(1, 1)
            elif waiting == "send_digest":
                follower.send_digest(KEPT, 0)
            else:
                while True:
                    leader.send(bytes(FRAME))
        except RankLost as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    parent.lose(1)
    parent.lose(0)  # the first one counts
    thread.join(10)
    assert str(errors[0]) == "rank 1 of this group is gone; run the same command again to go on"


def test_ranks_wait_for_each_other_unless_one_is_lost(handle: int) -> None:
    first, second = ends(handle, 2)
    Channel(handle, None, 2).lose(1)
    with pytest.raises(RankLost, match="rank 1 of this group is gone"):
        first.meet()
    second.meet()  # the other one has come: it does not wait, so it learns of the loss later


def test_a_rank_that_is_found_to_be_lost_soon_is_named(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections end before its parent finds it."""
    end, parent = ends(handle, 2)[0], Channel(handle, None, 2)
    monkeypatch.setattr(module, "NOTICED_S", 0.05)
    end.check_soon()
    monkeypatch.setattr(module, "NOTICED_S", 60.0)
    threading.Timer(0.05, lambda: parent.lose(1)).start()
    with pytest.raises(RankLost, match="rank 1 of this group is gone"):
        end.check_soon()


def _echo(handle: Any, ready: Any) -> None:
    end = Channel(handle.detach(), 1, 2)
    ready.set()
    for number in range(1, 1001):
        end.send_digest(number, len(end.receive()))


def test_another_process_reads_and_answers(handle: int) -> None:
    leader, context = Channel(handle, 0, 2), fork_context()
    ready = context.Event()
    process = context.Process(target=_echo, args=(_Passed(handle), ready))
    process.start()
    ready.wait(120)
    began = time.monotonic()
    for number in range(1, 1001):
        leader.send(b"x" * (number % 700))
        assert leader.digest_of(1, number) == number % 700
    assert time.monotonic() - began < 60
    process.join(60)
    assert process.exitcode == 0


class _Passed:
    """A file descriptor that is handed to a process when it starts."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __reduce__(self) -> Any:
        return _same, (DupFd(self._handle),)


def _same(value: Any) -> Any:
    return value


def test_the_memory_has_no_name_to_be_removed(handle: int) -> None:
    assert os.readlink(f"/proc/self/fd/{handle}") == "/memfd:batchspec (deleted)"
