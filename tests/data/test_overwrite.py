"""output.overwrite=true: refused beside a living run, and a run whose job was deleted all the same publishes nothing more."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchspec import run
from batchspec.data.runstate.claims import FOLDER, STALE_S, Claims
from batchspec.data.runstate.generations import Generation
from batchspec.data.runstate.manifest import MANIFEST
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.overwrite import CREW, this_command
from batchspec.data.storage.local_store import LocalStore
from batchspec.errors import OutputError, StorageError
from tests.data.s3_lab import BUCKET, Lab, running_lab
from tests.helpers.io_samples import completion, new_folder, tables
from tests.helpers.processes import until_stopped
from tests.helpers.runs import make_model, make_prompts, start_apart

Make = Callable[..., OutputFolder]


@pytest.fixture(scope="module")
def server() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


@pytest.fixture(params=["disk", "s3"])
def out(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where a job of six rows in three shards goes."""
    if request.param == "disk":
        return tmp_path / "out"
    lab: Lab = request.getfixturevalue("server")
    lab.empty()
    for name, value in lab.environ().items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/out"


def elsewhere(claims: Claims) -> Claims:
    """A run of another machine, whose processes cannot be seen from here."""
    claims._process |= {"host": "node7", "pid": 123, "task": "17/3/0"}
    return claims


def test_overwrite_is_refused_while_a_run_lives_and_names_it_with_advice(out: Any) -> None:
    first = new_folder(out, 6, 2)
    claims = elsewhere(first.claims())
    assert claims.take(1)
    for _ in range(2):  # nothing was deleted the first time
        with pytest.raises(OutputError) as caught:
            new_folder(out, 6, 2, overwrite=True)
        said = str(caught.value)
        assert f"run {first.attempt[:8]} on node7 (process 123, Slurm task 17/3/0) works on it" in said
        assert "claim on shard 1 " in said
        assert "s ago; end it and run this again" in said
        assert "\n" not in said
        assert caught.value.exit_code == 2
    assert first.commit(1, tables()[1])
    new_folder(out, 6, 2, overwrite=True)  # the claim on a finished shard blocks no other run
    assert OutputFolder(out).committed() == set()


def test_a_claim_that_was_given_back_or_is_old_keeps_nobody(tmp_path: Path) -> None:
    claims = elsewhere(new_folder(tmp_path, 6, 2).claims())
    assert claims.take(0)
    path = tmp_path / FOLDER / "00000.json"
    for age, living in ((STALE_S - 20, True), (STALE_S + 20, False)):
        os.utime(path, (time.time() - age,) * 2)
        assert bool(OutputFolder(tmp_path).claims().living({0})) is living
    os.utime(path)
    assert OutputFolder(tmp_path).claims().living({0})
    claims.release()
    new_folder(tmp_path, 6, 2, overwrite=True)


@pytest.mark.second
def test_a_run_whose_job_was_overwritten_publishes_nothing(out: Any) -> None:
    """Its claims expired while it was stopped; now it continues, with the manifest in its memory."""
    first = new_folder(out, 6, 2)
    journal = first.journal()
    journal.add(completion(0))
    second = new_folder(out, 6, 2, overwrite=True)
    assert second.manifest.job != first.manifest.job
    acts: list[Callable[[], Any]] = [
        partial(first.commit, 0, tables()[0]), journal.flush, partial(first.finish, "card"), partial(first.put_report, "page"),
        partial(first.log_run, {}), partial(first.keep_kv_scales, b"old"), partial(first.keep_weight_sums, b"old"),
    ]
    for act in acts:
        with pytest.raises(OutputError, match="was overwritten while this run worked on it; the run ends and publishes nothing"):
            act()
    first.log_timeline("{}")
    assert [second._store.read(f"_batchspec/sums/{name}") for name in second._store.list("_batchspec/sums")] == [b""]
    assert second.committed() == set()
    assert not second._store.list("_batchspec/journal")
    assert not second._store.list("_batchspec/logs")
    assert not second.has_card()
    assert second.keep_kv_scales(b"new") == b"new"
    assert second.commit(0, tables()[0])
    assert list(second.damage()) == []


def test_a_new_job_has_neither_scales_nor_sums_of_the_one_before(out: Any) -> None:
    first = new_folder(out, 6, 2)
    for keep in (first.keep_kv_scales, first.keep_weight_sums):
        assert [keep(b"first"), keep(b"second")] == [b"first"] * 2
    second = new_folder(out, 6, 2, overwrite=True)
    assert (second.kv_scales(), second.weight_sums()) == (None, None)
    assert second.keep_weight_sums(b"second") == second.weight_sums() == b"second"


@pytest.mark.parametrize("were_kept", [False, True])
def test_scales_of_a_job_that_is_overwritten_while_they_are_kept_are_none_of_the_new_job_s(
    were_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, put = new_folder(tmp_path, 6, 2), LocalStore.put_if_absent

    def late(self: LocalStore, name: str, data: bytes) -> bool:
        monkeypatch.undo()
        second = new_folder(tmp_path, 6, 2, overwrite=True)
        if were_kept:
            second.keep_kv_scales(data)
        return put(self, name, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", late)
    with pytest.raises(OutputError, match="was overwritten while this run worked on it"):
        first.keep_kv_scales(b"scales")
    assert OutputFolder(tmp_path).kv_scales() == (b"scales" if were_kept else None)


def test_a_run_whose_folder_was_deleted_publishes_nothing(out: Any) -> None:
    first = new_folder(out, 6, 2)
    first._store.delete_tree("_batchspec")
    with pytest.raises(OutputError, match="was deleted while this run worked on it"):
        first.commit(0, tables()[0])
    assert not first._store.list("data")


@pytest.mark.second
def test_a_run_that_is_stopped_right_before_its_shard_gets_its_name_does_not_publish_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_folder(tmp_path, 6, 2)
    publish = LocalStore.publish

    def late(self: LocalStore, path: Path, name: str) -> bool:
        monkeypatch.undo()
        new_folder(tmp_path, 6, 2, overwrite=True)
        return publish(self, path, name)

    monkeypatch.setattr(LocalStore, "publish", late)
    with pytest.raises(OutputError, match="was overwritten while this run worked on it"):
        first.commit(0, tables()[0])
    assert OutputFolder(tmp_path).committed() == set()


def damaged_reads(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes], count: int) -> None:
    """The next readings of a manifest give other bytes."""
    read, left = LocalStore.read, [count]

    def flipped(self: LocalStore, name: str) -> bytes:
        data = read(self, name)
        if name != MANIFEST or not left[0]:
            return data
        left[0] -= 1
        return change(data)

    monkeypatch.setattr(LocalStore, "read", flipped)


FLIPS: dict[str, Callable[[bytes], bytes]] = {
    "not JSON": lambda data: data.replace(b"{", b"[", 1),
    "not UTF-8": lambda data: data.replace(b"job", b"jo\xff", 1),
    "another version": lambda data: data.replace(b'"version": 3', b'"version": 2'),
    "another job": lambda data: re.sub(rb'("job": ".)', rb"\1f", data),
    "another key": lambda data: data.replace(b'"ready"', b'"raedy"'),
    "another fingerprint": lambda data: data.replace(b'"model": "a"', b'"model": "c"'),
    "another number": lambda data: data.replace(b'"num_rows": 6', b'"num_rows": "6"'),
}


@pytest.mark.parametrize("flip", [*FLIPS])
def test_a_manifest_that_reads_wrong_once_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flip: str) -> None:
    first = new_folder(tmp_path, 6, 2)
    damaged_reads(monkeypatch, FLIPS[flip], 1)
    assert first.commit(0, tables()[0])
    monkeypatch.undo()
    damaged_reads(monkeypatch, FLIPS[flip], 1)
    again = new_folder(tmp_path, 6, 2)
    if flip != "another job":  # a run that joins another job's files would refuse them
        assert again.committed() == {0}


def test_a_manifest_that_stays_damaged_is_said_to_be_damaged_and_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_folder(tmp_path, 6, 2)
    damaged_reads(monkeypatch, FLIPS["not JSON"], 99)
    with pytest.raises(StorageError, match=r"manifest\.json is damaged \(.*restore it") as caught:
        first.commit(0, tables()[0])
    assert caught.value.exit_code == 74
    assert not first._store.list("data")
    with pytest.raises(OutputError, match=r"manifest\.json is damaged"):
        new_folder(tmp_path, 6, 2)
    monkeypatch.undo()
    assert first.commit(0, tables()[0])


@pytest.mark.second
def test_runs_that_start_a_job_at_once_start_the_same_one_if_a_rename_replaces_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    put, first = LocalStore.put_if_absent, list[OutputFolder]()

    def late(self: LocalStore, name: str, data: bytes) -> bool:
        """It has seen that the name is free; the other run takes it, reads what is there, and is replaced."""
        monkeypatch.setattr(LocalStore, "put_if_absent", put)
        first.append(new_folder(tmp_path, 6, 2))
        self.put(name, data)
        return True

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(LocalStore, "put_if_absent", late)
    second = new_folder(tmp_path, 6, 2)
    assert (first[0].manifest.publish, first[0].manifest.job) == ("rename", second.manifest.job)
    assert first[0].commit(0, tables()[0])
    assert second.commit(1, tables()[1])
    assert second.committed() == {0, 1}
    assert new_folder(tmp_path, 6, 2, overwrite=True).manifest.job != second.manifest.job


def test_segments_of_an_earlier_job_are_not_read(tmp_path: Path) -> None:
    first = new_folder(tmp_path, 6, 2)
    journal = first.journal()
    journal._check_own = lambda: None  # it had checked already
    journal.add(completion(0))
    second = new_folder(tmp_path, 6, 2, overwrite=True)
    assert journal.flush() == 1
    assert first.journal().read(()).completions
    assert not second.journal().read(()).completions


def test_who_dies_while_it_deletes_a_job_leaves_a_folder_that_only_overwrite_takes(
    out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_folder(out, 6, 2)
    first.commit(0, tables()[0])
    with monkeypatch.context() as patched:
        patched.setattr(type(first._store), "delete_tree", lambda *_: (_ for _ in ()).throw(StorageError("killed")))
        with pytest.raises(StorageError, match="killed"):
            new_folder(out, 9, 3, overwrite=True)
    with pytest.raises(OutputError, match=r"is deleting the old job, or died while it did; .*output\.overwrite=true"):
        new_folder(out, 9, 3)
    assert new_folder(out, 9, 3, overwrite=True).committed() == set()
    assert new_folder(out, 9, 3).manifest.num_rows == 9


# --- one command, several processes


@pytest.mark.second
def test_processes_of_one_command_delete_a_job_once(out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have seen the old job; the others continue the job that the first has started, however late they start."""
    new_folder(out, 6, 2).commit(0, tables()[0])
    monkeypatch.setenv(CREW, "crew-1")
    begins_anew, delete_work = OutputFolder.begins_anew, OutputFolder._delete_work
    barrier, deleted = threading.Barrier(3), []
    begun: list[tuple[str, bool]] = []

    def at_once(self: OutputFolder, overwrite: bool) -> bool:
        anew = begins_anew(self, overwrite)
        if anew:
            barrier.wait(60)
        return anew

    def noted(self: OutputFolder, *rest: Any) -> None:
        deleted.append(self.attempt)
        delete_work(self, *rest)

    def work(index: int) -> None:
        folder = new_folder(out, 6, 2, overwrite=True)
        claims = elsewhere(folder.claims())
        begun.append((folder.manifest.job, claims.take(2) if index == 2 else folder.commit(index, tables()[index])))

    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "begins_anew", at_once)
        patched.setattr(OutputFolder, "_delete_work", noted)
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(deleted) == 1
    assert len({job for job, _ in begun}) == 1
    assert [done for _, done in begun] == [True] * 3
    assert new_folder(out, 6, 2, overwrite=True).committed() == {0, 1}
    monkeypatch.setenv(CREW, "crew-2")
    with pytest.raises(OutputError, match="works on it"):
        new_folder(out, 6, 2, overwrite=True)


SINGLE = {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "c"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_CLUSTER_NAME": "c"}


@pytest.mark.parametrize(
    ("began", "comes", "same"),
    [
        ({}, {}, False),
        (SINGLE, SINGLE, False),  # two commands in one allocation
        (SINGLE, {**SINGLE, "SLURM_RESTART_COUNT": "1"}, True),
        ({**SINGLE, CREW: "a"}, {**SINGLE, CREW: "b"}, False),
        ({**SINGLE, CREW: "a"}, {**SINGLE, CREW: "a"}, True),
        ({**SINGLE, CREW: "a"}, {**SINGLE, CREW: "b", "SLURM_RESTART_COUNT": "1"}, True),
        ({**ARRAY, "SLURM_JOB_ID": "18"}, {**ARRAY, "SLURM_JOB_ID": "19", CREW: "b"}, True),
        (ARRAY, {**ARRAY, "SLURM_ARRAY_JOB_ID": "20"}, False),
        ({**SINGLE, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
         {**SINGLE, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, True),
        ({**SINGLE, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
         {**SINGLE, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4"}, False),
    ],
)
def test_what_is_one_command(tmp_path: Path, began: dict[str, str], comes: dict[str, str], same: bool) -> None:
    manifest = new_folder(tmp_path, 6, 2).manifest
    made = type(manifest)(
        **{**{name: getattr(manifest, name) for name in manifest.__slots__}, "began": this_command(began).names}
    )
    assert this_command(comes).began(made) is same


# --- whole runs


def stop_at_second_commit() -> None:
    commit, seen = OutputFolder.publish, [0]

    def then_stops(self: OutputFolder, *rest: Any) -> bool:
        seen[0] += 1
        if seen[0] == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return commit(self, *rest)

    OutputFolder.publish = then_stops  # type: ignore[method-assign, assignment]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    model, data = make_model(tmp_path / "model"), make_prompts(tmp_path / "in.parquet", 12)
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={tmp_path / 'out'}",
        "output.shard_rows=2", "packing.max_num_seqs=2", "input.chat=true", "decode.ignore_eos=true",
    ]


@pytest.fixture
def stopped(command: list[str], tmp_path: Path) -> Iterator[ForkServerProcess]:
    """A run that has stopped itself at its second commit."""
    process = start_apart([*command, "decode.max_new_tokens=9"], tmp_path / "log", stop_at_second_commit)
    try:
        until_stopped(process)
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.second
def test_a_run_that_was_stopped_and_continues_adds_no_row_to_the_job_that_took_its_folder(
    command: list[str], stopped: ForkServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, anew = tmp_path / "out", [*command, "decode.max_new_tokens=2", "output.overwrite=true"]
    capsys.readouterr()
    assert run.main(anew) == 2  # it is there, and its claims are young
    (said,) = capsys.readouterr().err.splitlines()  # before anything is loaded
    assert f"(process {stopped.pid}) works on it" in said
    assert len(list((out / "data").iterdir())) == 1
    for claim in (out / FOLDER).iterdir():
        os.utime(claim, (time.time() - STALE_S - 1,) * 2)
    assert run.main(anew) == 0
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.join(60)
    assert stopped.exitcode == 2
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith(f"batchspec: the job in {out} was overwritten while this run worked on it; the run ends and publishes")
    usage = pl.read_parquet(out / "data")["usage"].struct.field("completion_tokens")
    assert usage.to_list() == [2] * 12
    assert list(OutputFolder(out).damage()) == []
    assert run.main([*command, "decode.max_new_tokens=2"]) == 0
    assert "already complete" in capsys.readouterr().err


def test_a_card_from_before_a_retry_is_not_the_retry_s(out: Any) -> None:
    """A run that dies between the last new shard and the card leaves the old card: the next run writes it anew."""
    first = new_folder(out, 6, 2)
    first.finish("card")
    assert OutputFolder(first.path).has_card()
    wanted = {**first.manifest.fingerprint, "decode.max_new_tokens": "9"}
    retry = Generation(number=1, retry="error", fingerprint=wanted, config={}, shards=(0,), job=first.manifest.job)
    OutputFolder(first.path).retry(retry)
    second = OutputFolder(first.path)
    assert not second.has_card()
    second.finish("card of the retry")
    assert OutputFolder(first.path).has_card()
