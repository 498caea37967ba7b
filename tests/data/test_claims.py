"""Claims: one owner a shard as long as it beats; whoever is gone, or silent for long, loses it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.data.runstate import claims as module
from batchspec.data.runstate.claims import FOLDER, RENEW_S, STALE_S, Claims, _started, owner_is_gone, this_process
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage.local_store import LocalStore
from batchspec.errors import StorageError
from tests.helpers.io_samples import new_folder, tables

T = TypeVar("T")

ROOT = Path(__file__).parents[2]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_claims(root: Path, attempt: str, clock: Clock | None = None, **who: Any) -> Claims:
    store = LocalStore(root, "tmp")
    store.probe()
    claims = Claims(store, attempt, clock=clock or Clock())
    claims._process |= who
    return claims


def renewed(claims: Claims) -> None:
    """Renew, and wait until it is done."""
    claims.renew()
    claims.settle()


ELSEWHERE: dict[str, Any] = {"host": "another machine", "task": ""}


def test_a_shard_has_one_owner(tmp_path: Path) -> None:
    one, other = open_claims(tmp_path, "a", **ELSEWHERE), open_claims(tmp_path, "b")
    assert one.take(3)
    assert one.take(3)
    assert not other.take(3)
    assert other.take(4)


def test_an_owner_that_renews_its_lease_keeps_its_shard_and_a_silent_one_loses_it(tmp_path: Path) -> None:
    clock = Clock()
    one, other = open_claims(tmp_path, "a", clock, **ELSEWHERE), open_claims(tmp_path, "b", clock)
    assert one.take(0)
    for _ in range(20):
        clock.now += RENEW_S
        renewed(one)
        assert not other.take(0)
    clock.now += STALE_S - 1
    assert not other.take(0)
    clock.now += 1
    assert other.take(0)


def test_a_stopped_owner_that_continues_finds_that_its_shard_has_another_owner(tmp_path: Path) -> None:
    clock = Clock()
    one, other = open_claims(tmp_path, "a", clock, **ELSEWHERE), open_claims(tmp_path, "b", clock)
    assert one.take(0)
    assert not other.take(0)
    clock.now += STALE_S
    assert other.take(0)
    renewed(one)
    assert json.loads((tmp_path / FOLDER / "00000.json").read_text())["owner"] == "b"
    assert not one.take(0)


@pytest.mark.second
def test_a_dead_process_of_this_machine_is_known_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.data.test_claims import open_claims\n"
        "assert open_claims(Path(sys.argv[1]), 'dead').take(5)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
    assert open_claims(tmp_path, "next").take(5)


IN_ANOTHER_SPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.second
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*IN_ANOTHER_SPACE, "true"], capture_output=True).returncode != 0,
    reason="needs the right to make a namespace of process numbers",
)
def test_a_process_of_another_container_on_this_machine_counts_as_ended_only_when_it_is_silent(tmp_path: Path) -> None:
    """Its number means another process here, or none; so does ours there."""
    program = (
        "import sys; from pathlib import Path; from tests.data.test_claims import open_claims\n"
        "claims = open_claims(Path(sys.argv[1]), 'there')\n"
        "print(claims.take(1), claims.take(2), flush=True)\n"
        "sys.stdin.read()"
    )
    clock = Clock()
    here = open_claims(tmp_path, "here", clock)
    assert here.take(1)
    words = [*IN_ANOTHER_SPACE, sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as there:
        assert there.stdout is not None
        assert there.stdout.readline() == "False True\n"
        assert not here.take(2)
        there.communicate("")
    assert not here.take(2)
    clock.now += STALE_S
    assert here.take(2)


def test_a_process_number_is_checked_only_in_its_own_namespace() -> None:
    here = this_process()
    assert here["space"].count(":") == 2  # boot, kind and number of the namespace
    gone = {**here, "started": "1"}
    assert owner_is_gone(gone, here)
    for other in ({"host": "another"}, {"space": "another boot:pid:[1]"}, {"space": ""}):
        assert not owner_is_gone({**gone, **other}, here)
        assert not owner_is_gone(gone, {**here, **other})
    assert not owner_is_gone({**gone, "space": ""}, {**here, "space": ""})


def test_a_zombie_process_counts_as_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        claim = {**this_process(), "pid": process.pid, "started": _started(process.pid)}
        assert not owner_is_gone(claim, this_process())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owner_is_gone(claim, this_process())


def test_an_earlier_start_of_the_same_task_is_known_to_have_ended() -> None:
    task = {**this_process(), "host": "node1", "pid": 7, "started": "1", "task": "99/3/0", "restart": 0}
    again = {**this_process(), "host": "node2", "pid": 9, "started": "2", "task": "99/3/0", "restart": 1}
    assert owner_is_gone(task, again)
    assert not owner_is_gone(task, {**again, "task": "99/4/0"})
    assert not owner_is_gone(again, {**again, "host": "node3"})


def test_this_process_is_alive_and_the_owner_of_a_reused_process_number_has_ended() -> None:
    assert not owner_is_gone(this_process(), this_process())
    assert owner_is_gone({**this_process(), "started": "1"}, this_process())
    assert this_process()["pid"] == os.getpid()


FOREIGN = ("note.json", "1.json", "00001.json.bak", "\u0661" * 5 + ".json", "9" * 40 + ".json")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"7", b"[" * 100_000, b'{"owner": "x"}', b'{"owner": "../../x"}', b'{"owner": 5}']
    + [b'{"owner": "x", "%s": %s}' % pair for pair in ((b"counter", b"null"), (b"counter", b'"1"'), (b"restart", b"[1]"))]
    + [json.dumps({"owner": "x", **this_process(), "pid": pid}).encode() for pid in (None, "1", [1], 0.5)],
)
def test_a_damaged_claim_goes_stale_like_any_other_and_foreign_files_are_passed_over(tmp_path: Path, data: bytes) -> None:
    clock = Clock()
    claims = open_claims(tmp_path, "a", clock, task="99/3/0", restart=1)
    (tmp_path / FOLDER).mkdir(parents=True)
    for name in ("00001.json", *FOREIGN):
        (tmp_path / FOLDER / name).write_bytes(data)
    assert not claims.take(1)
    assert claims.held({0, 1, 2}) == {1}
    clock.now += STALE_S
    assert claims.held({0, 1, 2}) == set()
    assert claims.take(1)
    assert set(claims.crashed_owners.values()) <= {"x"}
    claims.release()
    assert sorted(os.listdir(tmp_path / FOLDER)) == sorted(("00001.json", *FOREIGN))


def owner_of(root: Path, shard: int) -> str:
    return str(json.loads((root / FOLDER / f"{shard:05d}.json").read_text())["owner"])


def test_of_two_that_take_over_at_once_the_one_whose_claim_remains_has_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, one, other = (open_claims(tmp_path, name) for name in "abc")
    assert dead.take(0)
    dead.release()
    put = LocalStore.put

    def both(self: LocalStore, name: str, data: bytes) -> None:
        put(self, name, data)
        put(self, name, other._claim(0))

    monkeypatch.setattr(LocalStore, "put", both)
    assert not one.take(0)
    assert (one.own, owner_of(tmp_path, 0)) == ([], "c")
    assert (one.crashed_owners, one.inherited) == ({}, False)


def test_who_ends_frees_its_own_shards_and_none_that_another_run_took(tmp_path: Path) -> None:
    clock = Clock()
    one, other = open_claims(tmp_path, "a", clock, **ELSEWHERE), open_claims(tmp_path, "b", clock)
    assert one.take(0)
    assert one.take(1)
    assert not other.take(0)
    clock.now += STALE_S
    assert other.take(0)
    one.release()
    assert (owner_of(tmp_path, 0), owner_of(tmp_path, 1)) == ("b", "")
    assert one.own == []


def test_a_run_renews_its_claims_at_most_once_per_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = Clock(), []
    one = open_claims(tmp_path, "a", clock)
    assert one.take(0)
    put = LocalStore.put

    def noted(self: LocalStore, name: str, data: bytes) -> None:
        written.append(clock.now)
        put(self, name, data)

    monkeypatch.setattr(LocalStore, "put", noted)
    for _ in range(10 * 3):
        clock.now += RENEW_S / 10
        renewed(one)
    assert written == pytest.approx([RENEW_S, 2 * RENEW_S, 3 * RENEW_S])


def test_claims_that_are_deleted_while_another_run_reads_them_belong_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that completes the job deletes them all, even after another one listed the folder and before it reads them."""
    one, other = open_claims(tmp_path, "a", **ELSEWHERE), open_claims(tmp_path, "b")
    assert one.take(0)
    names = LocalStore.list(other._store, FOLDER)  # type: ignore[arg-type]
    monkeypatch.setattr(LocalStore, "list", lambda self, name: names)
    one._store.delete_tree(FOLDER)
    assert other.held({0, 1}) == {0}
    assert other.take(0)


def test_a_run_without_work_reads_the_claims_on_missing_shards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims on shards that are committed stay where they are: a job of thousands must not read them again and again."""
    one, other = open_claims(tmp_path, "a", **ELSEWHERE), open_claims(tmp_path, "b")
    assert all(one.take(shard) for shard in range(20))
    assert other.take(20)
    reads: list[str] = []
    read = LocalStore.read

    def noted(self: LocalStore, name: str) -> bytes:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(LocalStore, "read", noted)
    assert other.held({18, 19, 20, 21}) == {18, 19}
    assert reads == [f"{FOLDER}/00018.json", f"{FOLDER}/00019.json"]


def _take_all(args: tuple[str, str]) -> list[int]:
    root, attempt = args
    store = LocalStore(Path(root), "tmp")
    store.probe()
    mine = Claims(store, attempt)
    return [shard for shard in range(40) if mine.take(shard)]


@pytest.mark.second
def test_sixteen_processes_share_the_shards_and_take_none_twice(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        taken = list(pool.map(_take_all, [(str(tmp_path), f"run{i}") for i in range(16)]))
    # The pool's processes are alive while the later runs check: no run has ended, so each shard is taken once.
    assert sorted(shard for shards in taken for shard in shards) == list(range(40))


def test_the_folder_goes_when_the_job_is_complete(tmp_path: Path) -> None:
    claims = open_claims(tmp_path, "a")
    claims.take(0)
    claims._store.delete_tree(FOLDER)
    assert not (tmp_path / FOLDER).exists()
    assert module.STALE_S > 2 * 60


def test_rounds_do_not_wait_for_a_slow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread asks after every round; one renewal at a time is under way."""
    clock, answers, asked = Clock(), threading.Event(), list[str]()
    one = open_claims(tmp_path, "a", clock)
    assert one.take(0)
    read = LocalStore.read

    def slow(self: LocalStore, name: str) -> bytes:
        asked.append(name)
        answers.wait(60)
        return read(self, name)

    monkeypatch.setattr(LocalStore, "read", slow)
    for _ in range(10):
        clock.now += RENEW_S
        one.renew()
    assert counter_of(tmp_path, 0) == 0
    answers.set()
    one.settle()
    assert asked == [f"{FOLDER}/00000.json"]
    assert counter_of(tmp_path, 0) == 1
    renewed(one)
    assert counter_of(tmp_path, 0) == 2, "it was overdue"


def test_the_claim_on_a_shard_that_is_committed_during_a_renewal_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, answers = Clock(), threading.Event()
    one = open_claims(tmp_path, "a", clock)
    assert one.take(0)
    assert one.take(1)
    read = LocalStore.read
    monkeypatch.setattr(LocalStore, "read", lambda self, name: (answers.wait(60), read(self, name))[1])
    clock.now += RENEW_S
    one.renew()
    one.forget(0)
    assert one.take(2)
    answers.set()
    one.settle()
    assert one.own == [1, 2]
    assert [counter_of(tmp_path, shard) for shard in range(3)] == [0, 1, 0]


def test_a_stopped_renewal_writes_no_other_claim_and_the_next_one_begins_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who stop it do not wait; it ends after the operation of the store that is under way."""
    clock, asked, answers = Clock(), threading.Event(), threading.Event()
    one = open_claims(tmp_path, "a", clock)
    assert all(one.take(shard) for shard in range(3))
    put = LocalStore.put

    def slow(self: LocalStore, name: str, data: bytes) -> None:
        asked.set()
        answers.wait(60)
        put(self, name, data)

    monkeypatch.setattr(LocalStore, "put", slow)
    clock.now += RENEW_S
    one.renew()
    assert asked.wait(60)
    one.stop_renewal()
    answers.set()
    one.settle()
    assert [counter_of(tmp_path, shard) for shard in range(3)] == [1, 0, 0]
    renewed(one)
    assert [counter_of(tmp_path, shard) for shard in range(3)] == [2, 1, 1]
    renewed(one)
    assert [counter_of(tmp_path, shard) for shard in range(3)] == [2, 1, 1], "it was not overdue"


def counter_of(root: Path, shard: int) -> int:
    return int(json.loads((root / FOLDER / f"{shard:05d}.json").read_text())["counter"])


def test_an_error_of_a_renewal_ends_the_run_after_the_next_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    one = open_claims(tmp_path, "a", clock)
    assert one.take(0)

    def full(self: LocalStore, name: str, data: bytes) -> None:
        raise StorageError("no space left")

    clock.now += RENEW_S
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put", full)
        renewed(one)
        with pytest.raises(StorageError, match="no space left"):
            one.renew()
    one.release()
    assert owner_of(tmp_path, 0) == ""


class Turns:
    """Runs threads in a chosen order: each waits for its turn before each operation of a store; `play` gives the turns."""

    def __init__(self) -> None:
        self._changed, self._own, self._turn = threading.Condition(), threading.local(), ""
        self._states: dict[str, str] = {}

    def start(self, name: str, task: Callable[[], None]) -> None:
        def run() -> None:
            self._own.name = name
            try:
                task()
            finally:
                self._become("done")

        self._states[name] = "runs"
        threading.Thread(target=run, daemon=True).start()

    def wait(self) -> None:
        """Wait for this thread's turn; a thread that was not started here does not wait."""
        if not hasattr(self._own, "name") or getattr(self._own, "at_once", False):
            return
        self._become("waits")
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == self._own.name, 60)
            self._turn = ""

    def at_once(self, act: Callable[[], T]) -> T:
        """Call `act`, with all its operations in one turn."""
        self.wait()
        self._own.at_once = True
        try:
            return act()
        finally:
            self._own.at_once = False

    def blocked(self, act: Callable[[], T]) -> T:
        """Call `act`, which waits for another of the threads."""
        self._become("blocked")
        try:
            return act()
        finally:
            self._become("runs")

    def play(self, choices: Sequence[int]) -> None:
        """Give turns until all threads have ended. Each choice picks one of the waiting threads; the choices are repeated."""
        for choice in itertools.cycle(choices):
            with self._changed:
                assert self._changed.wait_for(self._is_still, 60), self._states
                ready = sorted(name for name, state in self._states.items() if state == "waits")
                if not ready:
                    return
                self._turn = ready[choice % len(ready)]
                self._states[self._turn] = "runs"
                self._changed.notify_all()

    def _is_still(self) -> bool:
        states = set(self._states.values())
        return "runs" not in states and ("waits" in states or states == {"done"})

    def _become(self, state: str) -> None:
        with self._changed:
            if hasattr(self._own, "name"):
                self._states[self._own.name] = state
            self._changed.notify_all()


@pytest.mark.second
@given(choices=st.lists(st.integers(0, 5), min_size=1, max_size=30))
@settings(deadline=None, max_examples=60)
def test_in_any_order_of_renewal_and_takeover_each_row_is_written_once_and_no_claim_looks_crashed(
    choices: list[int],
) -> None:
    """One run renews in a thread while it commits shard 0 and ends; another one finds its claims stale and takes shard 0 over.

    A claim that was not renewed in time does not keep its run from computing: the commit that comes second is refused.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        first = new_folder(Path(folder) / "out", 6, 2)
        second, clock, turns = OutputFolder(first.path), Clock(), Turns()
        one, other = first.claims(), second.claims()
        one._process |= ELSEWHERE
        one._clock = other._clock = clock
        one._renewed_at = clock.now
        assert one.take(0)
        assert one.take(1)
        assert not other.take(0)
        clock.now += STALE_S
        settle, won = Claims.settle, list[bool]()

        def in_turns(task: Callable[[], None], name: str) -> Future[None]:
            ended: Future[None] = Future()

            def run() -> None:
                task()
                ended.set_result(None)

            turns.start("renewal", run)
            return ended

        for name in ("list", "read", "put", "put_if_absent"):
            patch.setattr(LocalStore, name, gated(getattr(LocalStore, name), turns))
        patch.setattr(module, "in_thread", in_turns)
        patch.setattr(Claims, "settle", lambda self: turns.blocked(lambda: settle(self)))

        def run_first() -> None:
            one.renew()
            won.append(turns.at_once(lambda: first.commit(0, tables()[0])))
            one.forget(0)
            one.release()

        def run_second() -> None:
            if other.take(0):
                won.append(turns.at_once(lambda: second.commit(0, tables()[0])))
                other.forget(0)
            other.release()

        turns.start("first", run_first)
        turns.start("second", run_second)
        turns.play(choices)
        assert won.count(True) == 1
        assert second.written(0)[0]["row_index"].to_pylist() == tables()[0]["row_index"].to_pylist()
        assert (one.own, other.own) == ([], [])
        assert owner_of(Path(first.path), 1) == "", "the shard that it released looks as if it had crashed"


def gated(operation: Callable[..., Any], turns: Turns) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        turns.wait()
        return operation(*arguments)

    return call
