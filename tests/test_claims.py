"""Claims: one owner a shard as long as it beats; whoever is gone, or silent for long, loses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batchspec.runstate import claims as module
from batchspec.runstate.claims import FOLDER, RENEW_S, STALE_S, Claims, _started, owner_is_gone, this_process
from batchspec.storage.local_store import LocalStore

ROOT = Path(__file__).parents[1]


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
        one.renew()
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
    one.renew()
    assert json.loads((tmp_path / FOLDER / "00000.json").read_text())["owner"] == "b"
    assert not one.take(0)


def test_a_dead_process_of_this_machine_is_known_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.test_claims import open_claims\n"
        "assert open_claims(Path(sys.argv[1]), 'dead').take(5)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
    assert open_claims(tmp_path, "next").take(5)


IN_ANOTHER_SPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*IN_ANOTHER_SPACE, "true"], capture_output=True).returncode != 0,
    reason="needs the right to make a namespace of process numbers",
)
def test_a_process_of_another_container_on_this_machine_counts_as_ended_only_when_it_is_silent(tmp_path: Path) -> None:
    """Its number means another process here, or none; so does ours there."""
    program = (
        "import sys; from pathlib import Path; from tests.test_claims import open_claims\n"
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
        one.renew()
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
