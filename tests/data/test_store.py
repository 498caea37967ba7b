"""The local store: a name is taken once, whole or not at all, and never outside the root."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchspec.data.storage.local_store import LocalStore
from batchspec.data.storage.s3_store import S3Store
from batchspec.data.storage.store import STALE_S, Store, Tail
from batchspec.errors import ConfigError, OutputError, StorageError

METHODS = ["link", "rename"]


def store(root: Path, method: str = "link") -> LocalStore:
    return LocalStore(root, "_batchspec/tmp", method)


def leftovers(root: Path) -> list[str]:
    return os.listdir(root / "_batchspec/tmp")


@pytest.mark.parametrize("method", METHODS)
def test_a_name_is_taken_once(tmp_path: Path, method: str) -> None:
    here = store(tmp_path, method)
    assert not here.exists("a/b")
    assert here.put_if_absent("a/b", b"first")
    assert not here.put_if_absent("a/b", b"second")
    assert here.read("a/b") == b"first"
    assert here.list("a") == ["b"]
    here.put("a/b", b"third")
    assert here.read("a/b") == b"third"
    here.delete_tree("a")
    assert here.list("a") == []
    here.delete_tree("a")
    assert leftovers(tmp_path) == []


def test_reading_makes_nothing(tmp_path: Path) -> None:
    here = store(tmp_path / "out")
    assert (here.list(""), here.list("data"), here.exists("data/x")) == ([], [], False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../../x", ".", "a\0b"])
def test_names_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match=r"links and \.\. are refused"):
        store(tmp_path).put_if_absent(name, b"x")


def test_links_inside_the_root_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "out/data").symlink_to(tmp_path / "other")
    here = store(tmp_path / "out")
    for act in (partial(here.put_if_absent, "data/x", b""), partial(here.delete_tree, "data"), partial(here.list, "data")):
        with pytest.raises(OutputError):
            act()
    assert os.listdir(tmp_path / "other") == []


def places_that_are_no_folder(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """What is wrong -> a root, and what is said of it."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    return {
        "a file": (tmp_path / "file", "file is a file"),
        "below a file": (tmp_path / "file/out", "file is a file"),
        "a link to nothing": (tmp_path / "dangling", "/nowhere: No such file or directory (ENOENT)"),
        "below a link to nothing": (tmp_path / "dangling/out", "No such file or directory (ENOENT)"),
        "a link to itself": (tmp_path / "loop", "Too many levels of symbolic links (ELOOP)"),
        "a name that is too long": (tmp_path / ("x" * 300), "a name in it has 300 bytes, and the file system takes 255"),
        "a folder that takes none": (Path("/proc/out"), "No such file or directory (ENOENT)"),
        "a device": (Path("/dev/null"), "/dev/null is a device"),
        "below a device": (Path("/dev/null/out"), "/dev/null is a device"),
        "a pipe": (tmp_path / "pipe", "pipe is a pipe"),
    }


@pytest.mark.parametrize("place", [
    "a file", "below a file", "a link to nothing", "below a link to nothing", "a link to itself", "a name that is too long",
    "a folder that takes none", "a device", "below a device", "a pipe",
])
def test_what_cannot_become_a_folder_to_write_to_is_a_config_error(tmp_path: Path, place: str) -> None:
    root, said = places_that_are_no_folder(tmp_path)[place]
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError) as caught:
        store(root).check_root()
    message = str(caught.value)
    shown, found, _ = message.removeprefix("output.dir ").partition(" cannot be a folder to write to: ")
    head, _, tail = shown.partition("...")  # where the path is cut
    assert found
    assert str(root).startswith(head)
    assert str(root).endswith(tail)
    assert head == str(root) or len(head) > 15
    assert said in message
    assert "\n" not in message
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_that_cannot_be_written_is_another_choice_or_where_a_job_lies_a_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    (tmp_path / ("_batchspec" if begun else "empty")).mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(StorageError if begun else ConfigError, match=f"{tmp_path} cannot be written; .*mend that"):
        store(tmp_path).check_root()
    monkeypatch.undo()
    store(tmp_path).check_root()
    (tmp_path / "link").symlink_to(tmp_path)
    store(tmp_path / "link/new/deep").check_root()
    assert sorted(os.listdir(tmp_path)) == sorted(["link", "_batchspec" if begun else "empty"])


def test_the_probe_finds_whether_there_are_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = store(tmp_path, "rename")
    here.probe()
    assert here.method == "link"

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    here.probe()
    assert here.method == "rename"
    assert leftovers(tmp_path) == []


def test_a_file_that_is_created_while_its_folder_is_deleted_is_deleted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, rmdir, late = store(tmp_path), os.rmdir, iter(range(3))  # it comes so often
    here.put("journal/a", b"")

    def busy(path: Any, **named: Any) -> None:
        if str(path).endswith("journal") and next(late, None) is not None:
            (tmp_path / "journal/late").touch()
        rmdir(path, **named)

    monkeypatch.setattr(os, "rmdir", busy)
    here.delete_tree("journal")
    assert not (tmp_path / "journal").exists()
    here.put("journal/a", b"")
    late = iter(range(10**6))
    with pytest.raises(StorageError, match="ENOTEMPTY"):
        here.delete_tree("journal")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_folder_deleted_while_a_file_is_created_is_recreated_or_deleted_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, side: str
) -> None:
    here = store(tmp_path, method)

    def deleting(name: str) -> None:
        call, left = getattr(os, name), [1]

        def deleted(*args: Any) -> None:
            if side == "after":
                call(*args)
            if left and left.pop():
                shutil.rmtree(tmp_path / "journal")
            if side == "before":
                call(*args)

        monkeypatch.setattr(os, name, deleted)

    for act, name in ((here.put, "replace"), (here.put_if_absent, "link" if method == "link" else "replace")):
        with monkeypatch.context():
            deleting(name)
            act("journal/a", b"x")
        monkeypatch.undo()
        assert (tmp_path / "journal/a").exists() == (side == "before")
        here.delete_tree("journal")
    assert leftovers(tmp_path) == []


def test_a_link_whose_answer_got_lost_counts_as_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def lossy(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "the second try finds the first")

    monkeypatch.setattr(os, "link", lossy)
    assert store(tmp_path).put_if_absent("a", b"x")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_failing_disk_is_a_storage_error_and_nothing_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match=f"{errno.errorcode[code]}.*run the same command again") as caught:
        store(tmp_path).put_if_absent("data/x", b"y")
    assert caught.value.exit_code == 74
    monkeypatch.undo()
    assert store(tmp_path).list("data") == []
    assert leftovers(tmp_path) == []


METHODS_OF_STORE: dict[str, tuple[Any, ...]] = {
    "check_root": (), "check_bucket": (), "probe": (), "clean": (), "put_if_absent": ("data/x", b"1"), "put": ("data/x", b"1"),
    "publish": (Path("new"), "data/x"), "version": ("data/x",), "versions": ("data",), "tail": ("data/x", 4),
    "delete": ("data/x", ""), "replace": (Path("new"), "data/x", ""), "probe_replace": (), "read": ("data/x",),
    "ages_s": (["data/x"],), "discard": ("part-",), "list": ("data",), "exists": ("data/x",), "delete_tree": ("data",),
    "delete_empty_folders": (), "scratch": (), "arrow_paths": (["data/x"],),
}
"""Every method of the protocol, with arguments."""
CALLS = [
    (os, "stat"), (os, "lstat"), (os, "open"), (os, "listdir"), (os, "scandir"), (os, "mkdir"), (os, "link"), (os, "replace"),
    (os, "unlink"), (os, "rmdir"), (os, "fsync"), (io, "open"), (tempfile, "mkdtemp"),
]
NEVER_FAIL = {"check_bucket", "probe_replace", "delete_empty_folders", "arrow_paths"}


def test_this_table_has_every_method_of_the_protocol_and_each_is_guarded_in_every_store() -> None:
    methods = {name for name, member in vars(Store).items() if callable(member) and not name.startswith("_")}
    assert methods == METHODS_OF_STORE.keys()
    for kind in (LocalStore, S3Store):
        assert all(hasattr(getattr(kind, name), "__wrapped__") for name in methods)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("method", [*METHODS_OF_STORE])
def test_whatever_call_fails_in_whatever_method_it_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, code: int
) -> None:
    failed = 0
    for module, call in CALLS:
        root = tmp_path / call
        here = store(root)
        here.put("data/x", b"there")
        arguments: list[Any] = [here.scratch() / arg if isinstance(arg, Path) else arg for arg in METHODS_OF_STORE[method]]
        for arg in arguments:
            if isinstance(arg, Path):
                arg.write_bytes(b"new")
        if arguments[-1:] == [""]:
            arguments[-1] = here.version("data/x")

        def broken(*_: Any, **__: Any) -> Any:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr(module, call, broken)
            try:
                getattr(here, method)(*arguments)
            except (StorageError, ConfigError) as error:
                failed += 1
                said = str(error)
        if failed:
            assert errno.errorcode[code] in said
            assert "\n" not in said
    assert failed or method in NEVER_FAIL


def test_a_folder_in_the_place_of_a_file_or_the_reverse_is_to_be_moved_away(tmp_path: Path) -> None:
    here = store(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for act in (
        lambda: here.read("folder"),
        lambda: here.list("file"),
        lambda: here.put("file/x", b""),
        lambda: here.delete_tree("file"),
    ):
        with pytest.raises(StorageError, match=rf"{tmp_path}/f.*; nothing committed is lost: move away what is in its place"):
            act()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("act", ["put_if_absent", "put", "replace"])
def test_what_gets_a_name_is_on_the_disk_before_and_its_name_and_its_folder_are_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, method: str
) -> None:
    here, steps = store(tmp_path, method), list[tuple[str, str]]()
    here.put("_batchspec/there", b"")
    syncing, naming = os.fsync, {name: getattr(os, name) for name in ("link", "replace")}

    def fsync(descriptor: int) -> None:
        steps.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        syncing(descriptor)

    def named(name: str, source: Path, target: Path) -> None:
        steps.append((str(source), str(target)))
        naming[name](source, target)

    if act == "replace":
        here.put("data/x", b"old")
    monkeypatch.setattr(os, "fsync", fsync)
    for name in naming:
        monkeypatch.setattr(os, name, partial(named, name))
    if act == "replace":
        path = here.scratch() / "new"
        path.write_bytes(b"y")
        assert here.replace(path, "data/x", here.version("data/x"))
    else:
        getattr(here, act)("data/x", b"y")
    (at,) = (i for i, step in enumerate(steps) if step[0] != "sync")
    source, target = steps[at]
    assert target == str(tmp_path / "data/x")
    assert act == "replace" or ("sync", source) in steps[:at]  # who calls `replace` has synced the file
    assert act == "replace" or ("sync", str(tmp_path)) in steps[:at], "the new folder data"
    assert ("sync", str(tmp_path / "data")) in steps[at:]
    assert (tmp_path / "data/x").read_bytes() == b"y"


def test_a_file_is_replaced_only_if_it_has_not_changed_since_it_was_read(tmp_path: Path) -> None:
    here = store(tmp_path)
    here.put("data/x", b"old")
    seen = here.version("data/x")
    for data, won in ((b"first", True), (b"second", False)):
        path = here.scratch() / "new"
        path.write_bytes(data)
        assert here.replace(path, "data/x", seen) == won
    assert here.read("data/x") == b"first"
    assert leftovers(tmp_path) == []


def test_versions_tell_files_apart_and_a_tail_comes_with_its_own(tmp_path: Path) -> None:
    here = store(tmp_path)
    assert (here.versions("data"), here.tail("data/x", 4)) == ({}, None)
    here.put("data/x", b"0123456789")
    here.put("data/y", b"")
    before = here.versions("data")
    assert before == {name: here.version(f"data/{name}") for name in here.list("data")}
    for count, data in ((4, b"6789"), (10, b"0123456789"), (99, b"0123456789")):
        assert here.tail("data/x", count) == Tail(data, before["x"])
    assert here.tail("data/y", 4) == Tail(b"", before["y"])
    here.put("data/x", b"0123456789")
    assert here.versions("data")["x"] != before["x"]
    here.delete("data/x", before["x"])
    assert here.list("data") == ["x", "y"]
    here.delete("data/x", here.version("data/x"))
    here.delete("data/x", before["x"])
    assert here.list("data") == ["y"]


def test_only_old_temporary_files_are_cleaned(tmp_path: Path) -> None:
    here = store(tmp_path)
    for name, age in (("old", STALE_S + 60), ("young", 60)):
        path = here.scratch() / name
        path.touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    here.clean()
    assert leftovers(tmp_path) == ["young"]


def _race(root: Path, data: bytes, start: Any, won: Any) -> None:
    start.wait()
    won.put(store(root).put_if_absent("data/x", data))


def test_one_of_many_processes_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.test_store"])
    start, won = context.Barrier(8), context.Queue()
    workers = [context.Process(target=_race, args=(tmp_path, bytes([i]) * 1000, start, won)) for i in range(8)]
    for worker in workers:
        worker.start()
    results = [won.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(results) == [False] * 7 + [True]
    assert len(set(store(tmp_path).read("data/x"))) == 1
