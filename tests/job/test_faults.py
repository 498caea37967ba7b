"""Disks and stores that fail in the middle of a job: exit 74, nothing committed is lost, the same command resumes."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchspec import run
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage import retry
from tests.data.s3_lab import BUCKET, SECRET, running_lab, running_proxy
from tests.helpers.runs import make_model, make_prompts, run_apart

pytestmark = pytest.mark.second

ROWS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prompts(tmp_path_factory.mktemp("data") / "prompts.parquet", ROWS)


def arguments(model: Path, data: Path, out: Path | str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={out}", "output.shard_rows=3",
        "decode.max_new_tokens=8", "output.token_ids=true", "packing.max_num_seqs=3", "draft=lookup",
    ]


def tokens(out: Path | str) -> list[tuple[str, list[int]]]:
    return OutputFolder(out).scan().select("request_id", "token_ids").collect().rows()


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[int]]]:
    out = tmp_path_factory.mktemp("plain") / "out"
    assert run.main(arguments(model, data, out)) == 0
    return tokens(out)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def after_commit(number: int, act: Any) -> None:
    commit, seen = OutputFolder.publish, [0]

    def then(self: OutputFolder, *rest: Any) -> bool:
        won = commit(self, *rest)
        seen[0] += 1
        if seen[0] == number:
            act()
        return won

    OutputFolder.publish = then  # type: ignore[method-assign, assignment]


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 512):
            pass


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


@pytest.mark.parametrize(("fault", "said"), [("full", "No space left on device (ENOSPC)"), ("read-only", "(EROFS)")])
def test_a_disk_that_fills_up_or_turns_read_only_costs_the_run_and_no_shard(
    model: Path, data: Path, finished: list[tuple[str, list[int]]], disk: Path, tmp_path: Path, fault: str, said: str
) -> None:
    command = arguments(model, data, disk / "out")
    breaking = partial(fill, disk) if fault == "full" else partial(remount, disk, "ro")
    code, text = run_apart(command, tmp_path / "log", partial(after_commit, 2, breaking))
    assert code == 74, text
    last = text.splitlines()[-1]
    assert said in last
    assert "nothing committed is lost" in last
    before = {path.name: path.read_bytes() for path in (disk / "out/data").iterdir()}
    assert len(before) == 2
    assert run.main(command) == 74  # not before it is repaired
    if fault == "full":
        (disk / "filler").unlink()
    else:
        remount(disk, "rw")
    assert run.main(command) == 0
    assert {name: (disk / "out/data" / name).read_bytes() for name in before} == before
    assert tokens(disk / "out") == finished
    assert list(OutputFolder(disk / "out").damage()) == []


def fail_call(name: str, number: int, code: int) -> None:
    """The number-th call of os.<name> fails, and every later one: a disk that is broken stays broken. /dev is on no disk."""
    call, seen = getattr(os, name), [0]

    def broken(*rest: Any, **named: Any) -> Any:
        if str(rest[0]).startswith("/dev/"):
            return call(*rest, **named)
        seen[0] += 1
        if seen[0] >= number:
            raise OSError(code, os.strerror(code))
        return call(*rest, **named)

    setattr(os, name, broken)


def sweep(command: list[str], out: Path, log: Path, name: str, numbers: Iterator[int]) -> int:
    """Break each of these calls in turn, each time in the middle of the same job, until one is never reached; how many broke."""
    broken = 0
    for number in numbers:
        code, said = run_apart(command, log, partial(fail_call, name, number, errno.EIO))
        if code == 0:
            break
        assert code == 74, f"{name} {number}: {said}"
        assert said.splitlines()[-1].startswith("batchspec: ")
        assert "EIO" in said.splitlines()[-1]
        assert list(OutputFolder(out).damage()) == [] if (out / "_batchspec/manifest.json").exists() else True
        broken += 1
    return broken


@pytest.mark.parametrize("name", ["fsync", "link"])
def test_an_io_error_ends_the_run_with_74_and_the_next_run_resumes(
    model: Path, data: Path, finished: list[tuple[str, list[int]]], tmp_path: Path, name: str
) -> None:
    command = arguments(model, data, tmp_path / "out")
    assert sweep(command, tmp_path / "out", tmp_path / "log", name, iter([6, 4])) == 2
    assert run.main(command) == 0
    assert tokens(tmp_path / "out") == finished


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fsync", "link", "replace", "open", "unlink"])
def test_every_io_error_ends_the_run_with_74(
    model: Path, data: Path, finished: list[tuple[str, list[int]]], tmp_path: Path, name: str
) -> None:
    for number in range(1, 80):
        out = tmp_path / f"out{number}"
        command = arguments(model, data, out)
        if not sweep(command, out, tmp_path / "log", name, iter([number])):
            break
        assert run.main(command) == 0
        assert tokens(out) == finished
    assert number > 3


def short_patience() -> None:
    retry.CONNECT_S = retry.REQUEST_S = 0.5
    retry.DEADLINE_S = 1.5


@pytest.mark.parametrize("kind", ["truncation", "black hole"])
def test_a_network_that_breaks_in_the_middle_ends_the_run_with_74_and_no_partial_shard(
    model: Path, data: Path, finished: list[tuple[str, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with running_lab() as lab, running_proxy(lab.port) as proxy:
        lab.empty()
        for name, value in lab.environ(proxy.port).items():
            monkeypatch.setenv(name, value)

        def then_breaks(environ: dict[str, Any]) -> None:
            if environ["REQUEST_METHOD"] == "PUT" and "/out/data/" in environ["PATH_INFO"]:
                proxy.kind, proxy.faulty, proxy.good_bytes = kind, float("inf"), 20  # within the headers

        lab.faults.after = then_breaks
        out = f"s3://{BUCKET}/out"
        command = arguments(model, data, out)
        code, said = run_apart(command, tmp_path / "log", short_patience)
        assert code == 74, said
        last = said.splitlines()[-1]
        assert f"s3://{BUCKET}/out/" in last
        assert "run the same command again" in last
        assert SECRET not in said
        # The answer to the first commit was lost, its object is whole.
        (key,) = lab.keys("out/data/")
        (tmp_path / "part.parquet").write_bytes(lab.body(key))
        assert pl.read_parquet(tmp_path / "part.parquet").height == 3
        proxy.faulty, lab.faults.after = 0, lambda environ: None
        code, said = run_apart(command, tmp_path / "log")
        assert code == 0, said
        assert tokens(out) == finished
