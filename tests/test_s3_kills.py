"""Promises 1 and 2 under attack on S3: a job is killed at every PUT, before the store has it and before its answer is read."""

from __future__ import annotations

import io
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerProcess
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.kill_lab import (
    SHARDS,
    Conduct,
    Killer,
    KillLab,
    Row,
    Step,
    check_part,
    check_rows,
    ended,
    polled,
    rows_of,
    steps_of,
    until_stopped,
)
from tests.s3_lab import BUCKET, Answer, Faults, Lab, running_lab

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


def check_visible(server: Lab) -> int:
    """As of the local file system, without a request."""
    keys = [key for key in server.names() if key.startswith("out/data/")]
    for key in keys:
        number = re.fullmatch(r"out/data/part-(\d{5})\.parquet", key)
        assert number, key
        with pq.ParquetFile(io.BytesIO(server.held(key)), page_checksum_verification=True) as file:
            check_part(int(number[1]), file)
    return len(keys)


def written(server: Lab) -> list[Row]:
    assert check_visible(server) == SHARDS
    return rows_of(frame_of(server))


def frame_of(server: Lab) -> pl.DataFrame:
    return pl.concat(pl.read_parquet(server.held(key)) for key in server.names() if key.startswith("out/data/"))


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


def killed_and_resumed(server: Lab, lab: KillLab, step: Step, side: str, expected: list[Row]) -> str:
    """The PUT at which the run was killed."""
    server.empty()
    met: list[str] = []
    process = lab.start(OUT, conduct=conduct(server, wait=True))
    pid = until_stopped(process)
    setattr(server.faults, side, killer(process, step, met))
    os.kill(pid, signal.SIGCONT)
    assert ended(process) == -signal.SIGKILL, (step, side)
    server.faults.before, server.faults.after = Faults().before, Faults().after
    before = {key: server.held(key) for key in server.names() if key.startswith("out/data/")}
    check_visible(server)
    assert lab.run(OUT, conduct=conduct(server)) == 0
    assert {key: server.held(key) for key in before} == before
    assert written(server) == expected
    assert not [key for key in server.names() if "/claims/" in key or "/journal/" in key]
    (died,) = met
    return died


def test_a_kill_at_every_kind_of_put_leaves_every_row_once(
    server: Lab, lab: KillLab, puts: list[str], expected: list[Row]
) -> None:
    """Before the first of a kind is done, and behind a later one that is done and not answered; then the other way round."""
    kinds = Counter(puts)
    # How often progress is written goes by the clock: at the beginning and at the end at least.
    counts = {kind: min(count, 2) if "progress" in kind else count for kind, count in kinds.items()}
    steps = [((kind, 1 + turn % count), SIDES[turn % 2]) for turn, (kind, count) in enumerate(counts.items())]
    steps += [(("data/part-N.parquet", 3), side) for side in SIDES]
    met = [killed_and_resumed(server, lab, step, side, expected) for step, side in steps]
    assert met == [*kinds, "data/part-N.parquet", "data/part-N.parquet"]
    assert {"data/part-N.parquet", "_batchspec/manifest.json", "_batchspec/claims/N.json", "README.md"} <= set(met)


@pytest.mark.soak
def test_a_kill_at_every_put_leaves_every_row_once(server: Lab, lab: KillLab, puts: list[str], expected: list[Row]) -> None:
    for side in SIDES:
        met = [killed_and_resumed(server, lab, step, side, expected) for step in steps_of(puts)]
        assert met == puts
        assert met.count("data/part-N.parquet") == SHARDS
    print(f"killed at each of {len(puts)} PUTs, before and behind it")


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
