"""Jobs in processes of their own, to be killed: forked from a server that has torch loaded, so that one costs half a second."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import torch

from batchspec.config.compose import compose
from batchspec.config.schema import RunConfig
from batchspec.data.runstate import claims, job_state
from batchspec.data.runstate.claims import Claims
from batchspec.data.storage.open_store import open_store
from batchspec.errors import BatchspecError
from batchspec.job import run_job as job
from batchspec.job.load import build
from batchspec.job.runner import conclude, decode_shards, run_shards
from batchspec.job.supervise import poison_rows
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.processes import ended
from tests.helpers.runs import put
from tests.helpers.stand_ins import H200

ROWS, SHARD_ROWS = 12, 2
SHARDS = ROWS // SHARD_ROWS
CALLS = ("link", "replace", "rename", "fsync", "unlink", "rmdir")
"""Functions of module os with which batchspec changes a folder or makes changes durable."""
COOLDOWN_S = 0.5
"""Beside a few milliseconds for a row, what ten seconds are beside a real one's; about as long as a run here lives."""
DIED = "died before "
"""In front of the last line of a log, where the process kills itself."""
Row = tuple[str, int, str, tuple[int, ...] | None]
Step = tuple[str, int]
"""What is done, and which time it is, counted from 1: the order of steps of several threads differs from run to run."""
TIMED = re.compile(r"progress|journal|\bN-N\.json|tmp/N\.json")
"""In kinds of steps whose number differs from run to run: how often progress and the journal are written goes by the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """What is different about a process."""

    journal_s: float | None = 0.0
    """None: as it is."""
    stale_s: float | None = None
    claims: bool = True
    """False: it takes every shard, whoever works on it."""
    method: str | None = None
    """How names are taken: link or rename; None: as the file system allows."""
    kill_at: Step | None = None
    """It kills itself before this one of its CALLS."""
    log: Path | None = None
    """The process writes a line there for each of its CALLS, and one where it kills itself."""
    environ: Mapping[str, str] = field(default_factory=dict)
    wait: bool = False
    """It stops (SIGSTOP) before it begins."""
    publish_at: int | None = None
    """It stops (SIGSTOP) before it publishes its shard for this time (counted from 1), after its last reading of the manifest."""
    hold: tuple[str, str] | None = None
    """It stops (SIGSTOP) when it is about to do this CALL on a path that matches this pattern, once."""


def work(config: RunConfig, said: Path, conduct: Conduct) -> None:
    """The process: what `python -m batchspec.run` does after it has read its command line."""
    os.environ.update(conduct.environ)
    sys.stderr = said.open("a", buffering=1)
    torch.set_num_threads(1)
    put(conclude, "can_draw", lambda: False)  # drawing and measuring this machine take longer than the job
    put(build, "device_rates", lambda *_, **__: H200)
    put(poison_rows, "COOLDOWN_S", COOLDOWN_S)
    if conduct.journal_s is not None:
        put(decode_shards, "JOURNAL_S", conduct.journal_s)
    if conduct.stale_s is not None:
        shorten_claims(conduct.stale_s)
    if not conduct.claims:
        Claims.take = lambda self, shard: True  # type: ignore[method-assign]
    if conduct.method is not None:
        refuse_links(conduct.method)
    watch_calls(conduct)
    if conduct.publish_at is not None:
        stop_before_publishing(conduct.publish_at)
    if conduct.wait:
        os.kill(os.getpid(), signal.SIGSTOP)
    code = 0
    try:
        job.run_job(config)
    except BatchspecError as error:
        print(f"batchspec: {error}", file=sys.stderr)
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def shorten_claims(stale_s: float) -> None:
    begin = Claims.__init__

    def begun(self: Claims, *rest: Any, **named: Any) -> None:
        begin(self, *rest, **{**named, "stale_s": stale_s})

    Claims.__init__ = begun  # type: ignore[method-assign]
    put(claims, "STALE_S", stale_s)
    put(claims, "RENEW_S", stale_s / 5)
    put(run_shards, "RENEW_S", stale_s / 5)


def refuse_links(method: str) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    if method == "rename":
        os.link = refused


def stop_here() -> None:
    """Stop the process in this thread: a signal to the process may reach another thread first, while this one continues."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def stop_before_publishing(number: int) -> None:
    seen: list[str] = []

    def opened(root: Any, scratch: str) -> Any:
        store = open_store(root, scratch)
        publish = store.publish

        def published(path: Path, name: str) -> bool:
            seen.append(name)
            if len(seen) == number:
                stop_here()
            return publish(path, name)

        store.publish = published  # type: ignore[method-assign]
        return store

    put(job_state, "open_store", opened)


def watch_calls(conduct: Conduct) -> None:
    """Count CALLS, note them, and end or stop the process before one of them."""
    seen: list[str] = []
    held: list[bool] = []
    log = None if conduct.log is None else conduct.log.open("a", buffering=1)

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def before(*args: Any, **named: Any) -> Any:
            kind = kind_of(name, args)
            seen.append(kind)
            if log is not None:
                log.write(kind + "\n")
            if (kind, seen.count(kind)) == conduct.kill_at:
                if log is not None:
                    log.write(f"{DIED}{kind}\n")
                os.kill(os.getpid(), signal.SIGKILL)
            if conduct.hold is not None and not held and conduct.hold[0] == name and re.search(conduct.hold[1], kind):
                held.append(True)
                stop_here()
            return call(*args, **named)

        return before

    for name in CALLS:
        setattr(os, name, watched(name, getattr(os, name)))


def kind_of(name: str, args: Sequence[Any]) -> str:
    """`fsync data/part-N.parquet`: what is done to what, numbers and attempts left out."""
    target = args[1] if name in ("link", "replace", "rename") else args[0]
    return kind_at(name, os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target))


def kind_at(name: str, path: str) -> str:
    path = path.rpartition("/out/")[2] if "/out/" in path else path.rpartition("/")[2]
    return f"{name} {re.sub(r'(?<=^[.]batchspec-).*|[0-9a-f]{32}|[0-9]+', 'N', path)}"


def killed_at_every_step(calls: Sequence[str], kill: Callable[[Step], str | None]) -> Counter[str]:
    """Kill runs before the first, second, ... of each kind of these calls, until a run ends without coming to the next one.

    calls  of an undisturbed run; of each kind that is not TIMED every run must do as many
    kill   gives what the run that it killed was about to do, or None if that run came to its end
    Returns how many runs were killed, by kind.
    """
    met = Counter[str]()
    for kind in dict.fromkeys(calls):
        while (died := kill((kind, met[kind] + 1))) is not None:
            assert died == kind
            met[kind] += 1
    for kind, count in Counter(calls).items():
        assert met[kind] > 0 if TIMED.search(kind) else met[kind] == count, (kind, met[kind], count)
    return met


def death_in(log: Path) -> str:
    """What the process that wrote this log was about to do when it killed itself."""
    (died,) = (line.removeprefix(DIED) for line in log.read_text().splitlines() if line.startswith(DIED))
    return died


class KillLab:
    """A tiny model, 12 rows in 6 shards, one of them bad and one with 3 samples; `expected` is what an undisturbed run writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tokenizer(
            make_checkpoint(folder / "model", "llama", dtype=torch.float64, num_hidden_layers=1, hidden_size=32)
        )
        self.data = folder / "prompts.parquet"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pytest", "pandas", "boto3", __name__])
        prompts().write_parquet(self.data)
        self._number = 0
        self._configs: dict[tuple[str, ...], RunConfig] = {}

    def new(self) -> Path:
        """A folder for a job's output that is not there yet."""
        self._number += 1
        return self.folder / str(self._number) / "out"

    def config(self, out: Path | str, *more: str) -> RunConfig:
        """The folder alone differs between most: Hydra takes half as long as a run."""
        if more not in self._configs:
            overrides = [
                f"model.path={self.model}", "model.dtype=float64", f"input.path={self.data}", f"output.shard_rows={SHARD_ROWS}",
                "decode.max_new_tokens=8", "output.token_ids=true", "packing.max_num_seqs=4", "packing.memory_gb=0.01",
                "draft=lookup", *more,
            ]
            self._configs[more] = compose(overrides)
        config = deepcopy(self._configs[more])
        config.output.dir = str(out)
        return config

    def start(self, out: Path | str, *more: str, conduct: Conduct | None = None) -> ForkServerProcess:
        process = self._context.Process(target=work, args=(self.config(out, *more), self.said, conduct or Conduct()))
        process.start()
        return process

    @property
    def said(self) -> Path:
        return self.folder / "said.txt"

    def run(self, out: Path | str, *more: str, conduct: Conduct | None = None) -> int:
        """Exit code of a run to its end."""
        return ended(self.start(out, *more, conduct=conduct))


class Killer:
    """Kills at random moments of a run, however long runs take on a machine just now: most die, some get to their end."""

    def __init__(self, kills: int) -> None:
        self.left, self.died = kills, 0
        self._draw, self._run_s = random.Random(kills), 0.5

    @property
    def num_runs(self) -> int:
        """To start next, side by side."""
        return self._draw.choice((1, 1, 2))

    def end(self, runs: Sequence[ForkServerProcess]) -> list[int]:
        """Their exit codes."""
        for process in runs:
            process.join(self._draw.uniform(0.1, 1.0) * self._run_s if self.left > 0 else 60.0)
            process.kill()
        codes = [ended(process) for process in runs]
        for code in codes:
            killed = code == -signal.SIGKILL
            self._run_s *= 1.05 if killed else 0.8
            self.died, self.left = self.died + killed, self.left - killed
        return codes


def prompts() -> pl.DataFrame:
    rows: list[dict[str, Any]] = [
        {
            "id": f"q{i}",
            "messages": [{"role": "user", "content": f"Say word{i % 5} " * (1 + i % 3)}],
            "max_new_tokens": 2 + i % 7,
            "temperature": 0.9 if i % 4 == 1 else None,
            "n": 3 if i == 6 else None,
        }
        for i in range(ROWS)
    ]
    rows[3]["messages"] = []
    return pl.DataFrame(rows, schema_overrides={"n": pl.Int32})


def rows_of(frame: pl.DataFrame) -> list[Row]:
    """Every row with what must not depend on the course of a job, in order."""
    columns = frame.select("request_id", "sample_index", "status", "token_ids").iter_rows()
    return sorted((name, sample, status, None if ids is None else tuple(ids)) for name, sample, status, ids in columns)


def written(out: Path) -> list[Row]:
    return rows_of(pl.read_parquet(out / "data"))


def check_visible(out: Path) -> int:
    """Every part that a reader can see is whole, sound, and holds its shard's rows; how many there are."""
    parts = sorted((out / "data").glob("*"))
    for path in parts:
        number = re.fullmatch(r"part-(\d{5})\.parquet", path.name)
        assert number, path
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_part(int(number[1]), file)
    return len(parts)


def check_part(number: int, file: pq.ParquetFile) -> None:
    table = file.read()
    assert file.metadata.metadata[b"batchspec.shard"] == str(number).encode()
    samples = Counter(table["row_index"].to_pylist())
    first = number * SHARD_ROWS
    found = f"part {number} holds {dict(samples)}, errors {[error for error in table['error'].to_pylist() if error]}"
    assert samples == {row: 3 if row == 6 else 1 for row in range(first, first + SHARD_ROWS)}, found


def check_rows(read: Callable[[], pl.DataFrame], retry: Callable[[], int], expected: Sequence[Row]) -> list[str]:
    """All rows of a complete job are as expected, but for those that are blamed for kills, which are given.

    Each of these says so; after a retry of errors they too are as expected.
    """
    frame = read()
    errors = frame.select("request_id", "error").unnest("error").filter(pl.col("code") == "crash")
    for message, retryable in errors.select("message", "retryable").iter_rows():
        assert "3 isolated retries of this row crashed or hung at the same output position" in message
        assert retryable
    wrong = errors["request_id"].unique(maintain_order=True).to_list()
    assert [row for row in rows_of(frame) if row[0] not in wrong] == [row for row in expected if row[0] not in wrong]
    if wrong:
        assert retry() == 0
        assert rows_of(read()) == expected
    return wrong


@contextmanager
def polled(check: Callable[[], int]) -> Iterator[list[int]]:
    """`check` again and again in a thread while the block runs; what it returned. What it raises is raised after the block."""
    seen: list[int] = []
    wrong: list[BaseException] = []
    over = threading.Event()

    def watch() -> None:
        try:
            while not over.wait(0.005):
                seen.append(check())
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
    if wrong:
        raise AssertionError(f"a reader saw this: {wrong[0]!r}") from wrong[0]
