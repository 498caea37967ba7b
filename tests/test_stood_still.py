"""A run on S3 that stands still between its look at the manifest and its PUT, while another job takes the folder."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Iterator

import polars as pl
import pyarrow.parquet as pq
import pytest

from batchspec.runstate.output_folder import OutputFolder
from tests.kill_lab import SHARDS, Conduct, KillLab, Row, ended, rows_of, until_stopped
from tests.s3_lab import BUCKET, Lab, running_lab

OUT = f"s3://{BUCKET}/out"
STALE_S = 1.0
OVERWRITE = ("output.overwrite=true", "decode.temperature=1.5")
"""The other job: in every shard a row of it is not that of the first."""


@pytest.fixture(scope="module")
def server() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> KillLab:
    return KillLab(tmp_path_factory.mktemp("stood_still"))


@pytest.fixture(scope="module")
def expected(server: Lab, lab: KillLab) -> list[Row]:
    server.empty()
    assert lab.run(OUT, *OVERWRITE, conduct=Conduct(environ=server.environ())) == 0
    return written(server)


@pytest.fixture(autouse=True)
def environ(server: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)


def parts(server: Lab) -> dict[str, bytes]:
    return {key: server.held(key) for key in server.names() if key.startswith("out/data/")}


def written(server: Lab) -> list[Row]:
    return rows_of(pl.concat(pl.read_parquet(data) for data in parts(server).values()))


def stood_still(server: Lab, lab: KillLab, number: int, moment: str) -> None:
    """The first job stops before its PUT of this number, for longer than its claims are good for, and goes on at a moment of the
    second: before the second has published its own first shard, or when it is done.
    """
    server.empty()
    conduct = Conduct(environ=server.environ(), stale_s=STALE_S, publish_at=number)
    first = lab.start(OUT, conduct=conduct)
    late = until_stopped(first)
    time.sleep(2 * STALE_S + 1)  # the store tells ages in whole seconds
    second = lab.start(
        OUT, *OVERWRITE, conduct=Conduct(environ=server.environ(), stale_s=STALE_S, publish_at=1 if moment == "within" else None)
    )
    if moment == "within":
        pid = until_stopped(second)
        assert not parts(server)
        os.kill(late, signal.SIGCONT)
        assert ended(first) == 2
        assert len(parts(server)) == 1, "the first job's shard is in the second one's folder"
        os.kill(pid, signal.SIGCONT)
        assert ended(second) == 0
    else:
        assert ended(second) == 0
        os.kill(late, signal.SIGCONT)
        assert ended(first) == 2


def check(server: Lab, expected: list[Row]) -> None:
    """Every row is the second job's, and every file says so."""
    assert written(server) == expected
    folder = OutputFolder(OUT)
    assert not folder.missing()
    assert list(folder.damage()) == []
    jobs = {pq.read_schema(io.BytesIO(data)).metadata[b"batchspec.job"].decode() for data in parts(server).values()}
    assert jobs == {folder.manifest.job}


def test_a_run_that_stood_still_leaves_no_row_in_the_job_that_took_its_folder(
    server: Lab, lab: KillLab, expected: list[Row]
) -> None:
    stood_still(server, lab, 2, "within")
    check(server, expected)


@pytest.mark.soak
def test_twenty_runs_that_stood_still_leave_no_row_in_the_jobs_that_took_their_folders(
    server: Lab, lab: KillLab, expected: list[Row]
) -> None:
    for turn in range(20):
        number, moment = 1 + turn // 2 % SHARDS, ("within", "after")[turn % 2]
        stood_still(server, lab, number, moment)
        check(server, expected)
        print(f"turn {turn}: stopped before PUT {number}, went on {moment} the second job", flush=True)
