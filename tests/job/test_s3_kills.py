"""Promises 1 and 2 under attack on S3: a job is killed at every PUT, before the store has it and before its answer is read, or
stands still before one while another job takes its folder."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerProcess
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from batchspec.data.runstate.output_folder import OutputFolder
from tests.data.s3_lab import BUCKET, Answer, Faults, Lab, running_lab
from tests.helpers.processes import ended, until_stopped
from tests.job.kill_lab import (
    SHARDS,
    Conduct,
    Killer,
    KillLab,
    Row,
    Step,
    check_part,
    check_rows,
    killed_at_every_step,
    polled,
    rows_of,
)

pytestmark = pytest.mark.second

OUT = f"s3://{BUCKET}/out"
SIDES = ("before", "after")


@pytest.fixture(scope="module")
def server() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> KillLab:
    return KillLab(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def puts(server: Lab, lab: KillLab) -> list[str]:
    """What an undisturbed run PUTs, in order, numbers and attempts left out."""
    server.empty()
    server.faults.requests.clear()
    assert lab.run(OUT, conduct=conduct(server)) == 0
    return [kind_of(request) for request in server.faults.requests if request.startswith("PUT ")]


@pytest.fixture(scope="module")
def expected(puts: list[str], server: Lab) -> list[Row]:
    return written(server)


@pytest.fixture(autouse=True)
def no_faults(server: Lab) -> Iterator[None]:
    yield
    server.faults.before, server.faults.after = Faults().before, Faults().after


def conduct(server: Lab, **changes: Any) -> Conduct:
    return Conduct(environ=server.environ(), **changes)


def kind_of(request: str) -> str:
    return re.sub(r"[0-9a-f]{32}|[0-9]+", "N", request.rpartition("/out/")[2])


def published(server: Lab) -> dict[str, bytes]:
    return {key: server.held(key) for key in server.names() if key.startswith("out/data/")}


def check_visible(server: Lab) -> int:
    """As of the local file system, without a request."""
    parts = published(server)
    for key, data in parts.items():
        number = re.fullmatch(r"out/data/part-(\d{5})\.parquet", key)
        assert number, key
        with pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True) as file:
            check_part(int(number[1]), file)
    return len(parts)


def written(server: Lab) -> list[Row]:
    assert check_visible(server) == SHARDS
    return rows_of(frame_of(server))


def frame_of(server: Lab) -> pl.DataFrame:
    return pl.concat(pl.read_parquet(data) for data in published(server).values())


def killer(process: ForkServerProcess, step: Step, met: list[str]) -> Answer:
    """Kills the process at this PUT, which goes to `met`; the answer then finds nobody."""
    seen: list[str] = []

    def answer(environ: dict[str, Any]) -> tuple[int, str] | None:
        if environ["REQUEST_METHOD"] == "PUT":
            seen.append(kind_of(f"PUT {environ['PATH_INFO']}"))
            if (seen[-1], seen.count(seen[-1])) == step:
                process.kill()
                met.append(seen[-1])
                return 503, "SlowDown"
        return None

    return answer


def killed_and_resumed(server: Lab, lab: KillLab, side: str, expected: list[Row], step: Step) -> str | None:
    """The PUT at which the run was killed; None: it came to its end before that."""
    server.empty()
    met: list[str] = []
    process = lab.start(OUT, conduct=conduct(server, wait=True))
    pid = until_stopped(process)
    setattr(server.faults, side, killer(process, step, met))
    os.kill(pid, signal.SIGCONT)
    assert ended(process) == (-signal.SIGKILL if met else 0), (step, side)
    server.faults.before, server.faults.after = Faults().before, Faults().after
    before = published(server)
    check_visible(server)
    assert lab.run(OUT, conduct=conduct(server)) == 0
    assert {key: server.held(key) for key in before} == before
    assert written(server) == expected
    assert not [key for key in server.names() if "/claims/" in key or "/journal/" in key]
    return met[0] if met else None


@pytest.mark.smoke("an S3 kill at a PUT")
def test_a_kill_at_the_put_of_a_shard_leaves_every_row_once(server: Lab, lab: KillLab, expected: list[Row]) -> None:
    for side in SIDES:
        assert killed_and_resumed(server, lab, side, expected, ("data/part-N.parquet", 3)) == "data/part-N.parquet"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_at_every_kind_of_put_leaves_every_row_once(
    server: Lab, lab: KillLab, puts: list[str], expected: list[Row], every: bool
) -> None:
    """Before the first of a kind is done, and after a later one that is done and not answered; then the other way round.

    Not every one: the kinds that make the job, its claims, its shards and its end, as on a local file system every kind is
    tried (test_kills.py).
    """
    kinds = Counter(puts)
    # How often progress is written goes by the clock: at the beginning and at the end at least.
    counts = {kind: min(count, 2) if "progress" in kind else count for kind, count in kinds.items()}
    steps = [((kind, 1 + turn % count), SIDES[turn % 2]) for turn, (kind, count) in enumerate(counts.items())]
    always = {"data/part-N.parquet", "_batchspec/manifest.json", "_batchspec/claims/N.json", "README.md"}
    assert always <= set(kinds)
    steps = [(step, side) for step, side in steps if every or step[0] in always]
    met = [killed_and_resumed(server, lab, side, expected, step) for step, side in steps]
    assert met == [step[0] for step, _ in steps]


@pytest.mark.soak
def test_a_kill_at_every_put_leaves_every_row_once(server: Lab, lab: KillLab, puts: list[str], expected: list[Row]) -> None:
    for side in SIDES:
        met = killed_at_every_step(puts, partial(killed_and_resumed, server, lab, side, expected))
        assert met["data/part-N.parquet"] == SHARDS
        print(f"killed {side} each of {met.total()} PUTs")


@pytest.mark.soak
def test_kills_at_random_moments_leave_every_row_once(server: Lab, lab: KillLab, expected: list[Row]) -> None:
    """As on a local disk: at most one row is an error for these kills, and says so, and a retry mends it."""
    killer, complete = Killer(200), 0
    unlucky: list[str] = []
    while killer.left > 0 or not complete:
        server.empty()
        with polled(lambda: check_visible(server)):
            while "out/README.md" not in server.names():
                codes = killer.end([lab.start(OUT, conduct=conduct(server)) for _ in range(killer.num_runs)])
                assert set(codes) <= {0, -signal.SIGKILL}, lab.said.read_text()[-2000:]
        assert lab.run(OUT, conduct=conduct(server)) == 0
        assert check_visible(server) == SHARDS
        retry = partial(lab.run, OUT, "resume=error", conduct=conduct(server))
        unlucky += check_rows(partial(frame_of, server), retry, expected)
        complete += 1
    print(f"{killer.died} kills, {complete} jobs completed; taken for rows that kill: {unlucky}")
    assert len(unlucky) <= 1


# --- a run that is suspended after it read the manifest and before its PUT, while another job takes the folder

STALE_S = 1.0
OVERWRITE = ("output.overwrite=true", "decode.temperature=1.5")
"""The other job: in every shard a row of it is not that of the first."""


@pytest.fixture(scope="module")
def taken(server: Lab, lab: KillLab) -> list[Row]:
    server.empty()
    assert lab.run(OUT, *OVERWRITE, conduct=conduct(server)) == 0
    return written(server)


@pytest.fixture
def environ(server: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process reads the store, too."""
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)


def suspended_run(server: Lab, lab: KillLab, number: int, moment: str) -> None:
    """The first job stops before its PUT of this number, for longer than its claims are valid, and continues at a moment of the
    second: before the second has published its own first shard, or when it is done.
    """
    server.empty()
    stops = conduct(server, stale_s=STALE_S, publish_at=number)
    first = lab.start(OUT, conduct=stops)
    late = until_stopped(first)
    time.sleep(2 * STALE_S + 1)  # the store tells ages in whole seconds
    stops = conduct(server, stale_s=STALE_S, publish_at=1 if moment == "within" else None)
    second = lab.start(OUT, *OVERWRITE, conduct=stops)
    if moment == "within":
        pid = until_stopped(second)
        assert not published(server)
        os.kill(late, signal.SIGCONT)
        assert ended(first) == 2
        assert len(published(server)) == 1, "the first job's shard is in the second one's folder"
        os.kill(pid, signal.SIGCONT)
        assert ended(second) == 0
    else:
        assert ended(second) == 0
        os.kill(late, signal.SIGCONT)
        assert ended(first) == 2


def check_taken(server: Lab, taken: list[Row]) -> None:
    """Every row is the second job's, and every file says so."""
    assert written(server) == taken
    folder = OutputFolder(OUT)
    assert not folder.missing()
    assert list(folder.damage()) == []
    jobs = {pq.read_schema(io.BytesIO(data)).metadata[b"batchspec.job"].decode() for data in published(server).values()}
    assert jobs == {folder.manifest.job}


def test_a_run_that_was_suspended_leaves_no_row_in_the_job_that_took_its_folder(
    server: Lab, lab: KillLab, taken: list[Row], environ: None
) -> None:
    suspended_run(server, lab, 2, "within")
    check_taken(server, taken)


@pytest.mark.soak
def test_twenty_runs_that_were_suspended_leave_no_row_in_the_jobs_that_took_their_folders(
    server: Lab, lab: KillLab, taken: list[Row], environ: None
) -> None:
    for turn in range(20):
        number, moment = 1 + turn // 2 % SHARDS, ("within", "after")[turn % 2]
        suspended_run(server, lab, number, moment)
        check_taken(server, taken)
        print(f"turn {turn}: stopped before PUT {number}, went on {moment} the second job", flush=True)
