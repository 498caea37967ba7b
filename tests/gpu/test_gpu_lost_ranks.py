"""Whole jobs on two GPUs in which one rank is lost, hangs, has too little memory or no weights: exit code, message, resumption.

Two jobs run at a time (in one process: `-n 0`): kernels of ranks wait for each other on the GPUs, so that more jobs that share
them do not end in time (eleven at a time did not in 100 s). Processes on a CPU have the same cases in
tests/cluster/test_group_jobs.py.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl
import pytest
import torch

from tests.gpu.test_gpu_groups import ROWS, SHAPES, assert_same_tokens, words_of
from tests.helpers.models import make_checkpoint, make_tokenizer

pytestmark = [
    pytest.mark.whole_gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

LEFT_BYTES = 1 << 30
"""Bytes of the second GPU that another program leaves free."""
HOLD = f"""import torch
torch.empty(1, device="cuda:1")
held = torch.empty(torch.cuda.mem_get_info(1)[0] - {LEFT_BYTES}, dtype=torch.uint8, device="cuda:1")
print("held", flush=True)
input()
"""
FAULTY = """from batchspec import run
from batchspec.cluster import crew
from batchspec.process.program import end_program
crew.PROGRAM = ("-m", "tests.distributed.rank_faults")
end_program(run.main())
"""
TOGETHER = 2
"""Jobs at a time."""
END_S = 100.0
WATCHDOG_S = 15
"""More seconds than a kernel takes to compile while the other jobs run."""
GONE = r"rank {} of this group is gone|a rank of this group is gone, and this one waits for it"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A job that loses a rank."""

    codes: Sequence[int]
    """Exit codes that it may have."""
    said: Sequence[str]
    """Regular expressions that its output has."""
    sent: signal.Signals | None = None
    """Sent to a rank after the first commit."""
    rank: int = 1
    fault: str = ""
    """As tests/distributed/rank_faults.py has it."""
    held: bool = False
    """Another program holds all but LEFT_BYTES of the second GPU."""
    keys: Sequence[str] = ("packing.memory_gb=1",)


AGAIN = "run the same command again to go on"
OUT = r"rank {}: out of memory \(.*GPU {} has .* GiB of which .* is free.*; free memory or lower packing"
TAKEN, ANY_OUT = r"rank 1 \(GPU 1\) has \d\.\d GB of free memory", "rank 1: out of memory|rank 1 joined its group"
LOSSES = {
    "follower killed": Loss(
        codes=[75], said=[r"rank 1 of worker 0 \(GPU 1\) was killed by SIGKILL; its group ends", GONE.format(1), AGAIN],
        sent=signal.SIGKILL,
    ),
    "leader killed": Loss(
        codes=[75], said=[r"rank 0 of worker 0 \(GPU 0\) was killed by SIGKILL; its group ends", AGAIN],
        sent=signal.SIGKILL, rank=0,
    ),
    "follower stopped": Loss(
        codes=[75], said=[rf"no round ended for {WATCHDOG_S} s|rank 1 of worker 0 .*was stopped"], sent=signal.SIGSTOP
    ),
    "leader stopped": Loss(
        codes=[75], said=[rf"rank 0 of worker 0 \(GPU 0\) has not run for more than {WATCHDOG_S} s .*was stopped", AGAIN],
        sent=signal.SIGSTOP, rank=0,
    ),
    "memory while it loads": Loss(codes=[2], said=[OUT.format(1, 1)], fault="memory 1 2"),
    "memory in a prefill": Loss(codes=[2], said=[OUT.format(1, 1)], fault="prefill 1 100"),
    "memory in a round": Loss(codes=[2], said=[OUT.format(1, 1)], fault="oom 1 100"),
    "memory of the leader": Loss(codes=[2], said=[OUT.format(0, 0)], fault="oom 0 100"),
    "unreadable file": Loss(codes=[74], said=[r"model\.safetensors: .*Input/output error \(EIO\)"], fault=f"disk 1 {errno.EIO}"),
    "NCCL never begins": Loss(codes=[75], said=[f"loading made no progress for {3 * WATCHDOG_S} s"], fault="nccl 1 0"),
    "GPU taken": Loss(codes=[2, 0], said=[rf"{TAKEN}|{ANY_OUT}"], held=True, keys=()),  # 0: what is left was enough
    "GPU taken, pages set": Loss(codes=[2], said=[ANY_OUT], held=True, keys=("packing.pages=200000",)),  # of 32 KB or more
}


def words(folder: Path, out: Path, *more: str) -> list[str]:
    given = words_of(folder / "model", folder / "in.parquet", out, "draft=none", "output.logprobs=2", "decode.max_new_tokens=100")
    given = [word for word in given if not word.startswith(("packing.", "output.shard_rows"))]
    return [*given, "output.shard_rows=4", "packing.max_num_seqs=4", "cluster.tensor_parallel=2", "cluster.workers=1", *more]


def start(given: Sequence[str], log: Path, fault: str = "") -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": os.pathsep.join(paths), "FAULT": fault}
    program = ["-c", FAULTY] if fault else ["-m", "batchspec.run"]
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *program, *given], env=env, stdout=file, stderr=file)


def lose(name: str, folder: Path) -> tuple[int, str, list[int]]:
    """Exit code and output of the job, and which of its processes are left."""
    loss, log, out = LOSSES[name], folder / f"{name}.log", folder / name
    process = start(words(folder, out, f"cluster.watchdog_s={WATCHDOG_S}", *loss.keys), log, loss.fault)
    ranks, began = list[int](), time.time()
    try:
        sent = loss.sent
        while process.poll() is None and time.time() - began < END_S:
            ranks = children(process.pid) or ranks
            if sent is not None and list(out.glob("data/*.parquet")):
                os.kill(ranks[loss.rank], sent)
                sent = None
            time.sleep(0.01)
        code = process.poll()
        left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    finally:
        process.kill()
    return -1 if code is None else code, log.read_text(errors="replace"), left


def finish(folder: Path, name: str) -> int:
    """The exit code of the job NAME, which nothing happens to; what it says is in NAME.again."""
    process = start(words(folder, folder / name, "packing.memory_gb=1"), folder / f"{name}.again")
    try:
        return process.wait(END_S)
    finally:
        process.kill()


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextmanager
def other_program() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"held\n"
            yield
        finally:
            process.kill()


def rows_of(out: Path) -> pl.DataFrame:
    frame = pl.read_parquet(out / "data").sort("request_id")
    assert frame["request_id"].n_unique() == len(frame) == ROWS
    return frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jobs")
    make_tokenizer(make_checkpoint(made / "model", "llama", **SHAPES["llama"]))
    texts = [f"{i} and {i * i}, " * (1 + i % 7) for i in range(ROWS)]
    pl.DataFrame({"id": [f"q{i}" for i in range(ROWS)], "prompt": texts}).write_parquet(made / "in.parquet")
    return made


@pytest.fixture(scope="module")
def lost(folder: Path) -> dict[str, tuple[int, str, list[int]]]:
    """What became of all jobs. All that end have been resumed since, and there is one that nothing happened to: "whole". It runs
    first, so that the others find its compiled kernels."""
    assert finish(folder, "whole") == 0, (folder / "whole.again").read_text()
    with ThreadPoolExecutor(TOGETHER) as pool:
        found = {name: pool.submit(lose, name, folder) for name, loss in LOSSES.items() if not loss.held}
        ended = {name: each.result() for name, each in found.items()}
        with other_program():
            found = {name: pool.submit(lose, name, folder) for name, loss in LOSSES.items() if loss.held}
            ended |= {name: each.result() for name, each in found.items()}
        list(pool.map(partial(finish, folder), LOSSES))
    return ended


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_rank_is_named_and_the_job_is_resumed(
    name: str, folder: Path, lost: dict[str, tuple[int, str, list[int]]]
) -> None:
    code, said, left = lost[name]
    assert code in LOSSES[name].codes, said[-4000:]
    for each in LOSSES[name].said:
        assert re.search(each, said), said[-4000:]
    assert "an exchange with the other ranks" not in said
    assert not left
    temporary = folder / name / "_batchspec/tmp"
    assert not temporary.exists() or not list(temporary.iterdir())
    again = (folder / f"{name}.again").read_text()
    assert (folder / name / "data").exists(), again[-4000:]
    assert_same_tokens(rows_of(folder / "whole"), rows_of(folder / name))
