"""Jobs that several processes do, met in the middle: their commands, their processes and what these have written."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import polars as pl

from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.job.runner import commit_shards
from tests.helpers.runs import make_model, put


def make_job(folder: Path, *, rows: int, new_tokens: int, slots: int) -> list[str]:
    """The command of a job without its output folder: shards of four rows, requests q0, q1, ... of `new_tokens` tokens each."""
    data = folder / "in.parquet"
    pl.DataFrame({"id": [f"q{i}" for i in range(rows)], "prompt": [f"{i} and {i * i}" for i in range(rows)]}).write_parquet(data)
    return [
        f"model.path={make_model(folder / 'model')}", f"input.path={data}", f"decode.max_new_tokens={new_tokens}",
        "decode.ignore_eos=true", "draft=none", "output.shard_rows=4", "output.token_ids=true", f"packing.max_num_seqs={slots}",
    ]


def tokens(out: Path, rows: int) -> dict[str, list[int]]:
    """Of each request; there are so many, each with one row."""
    frame = pl.read_parquet(out / "data")
    counts = Counter(frame["request_id"])
    assert len(counts) == rows
    assert set(counts.values()) == {1}
    assert set(frame["status"]) <= {"ok", "truncated"}
    return dict(frame.select("request_id", "token_ids").iter_rows())


def workers_of(parent: ForkServerProcess) -> list[int]:
    """Processes that a run has started, the first started first."""
    return [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]


def commits_wait_for(file: Path, after: int = 0) -> None:
    """A patch: when this many shards are committed, a run commits no more until there is this file. So a test meets it in the
    middle on any machine. Decoding waits for commits as it does with large shards.
    """
    publish = OutputFolder.publish
    put(commit_shards, "MOST_WAITING", commit_shards.WAITING)

    def patched(self: OutputFolder, *rest: Any) -> bool:
        while len(self.committed()) >= after and not file.exists():
            time.sleep(0.01)
        return publish(self, *rest)

    OutputFolder.publish = patched  # type: ignore[method-assign,assignment]


def wait_until(done: Callable[[], bool], parent: ForkServerProcess) -> None:
    while not done():
        assert parent.exitcode is None, "the job ended before"
        time.sleep(0.02)


def owners(out: Path) -> set[str]:
    """Runs that hold claims."""
    found = set()
    for claim in (out / "_batchspec/claims").glob("*.json"):
        with suppress(ValueError):  # being written
            found.add(json.loads(claim.read_text())["owner"])
    return found - {""}


def journals(out: Path) -> int:
    return len(list((out / "_batchspec/journal").iterdir()))
