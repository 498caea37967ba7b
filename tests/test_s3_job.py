"""Whole jobs with input and output on S3: killed, resumed, read by every command, and no credential left anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from batchspec import cli, run
from batchspec.runstate.output_folder import OutputFolder
from tests.models import make_checkpoint, make_tokenizer
from tests.s3_lab import BUCKET, KEY_ID, SECRET, Faults, Lab, running_lab

ROOT = Path(__file__).parents[1]
ROWS = 12
IN, OUT = f"s3://{BUCKET}/in", f"s3://{BUCKET}/out"


@pytest.fixture(scope="module")
def server() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


@pytest.fixture
def lab(server: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    """The emulator with nothing but a job's input: two files."""
    server.empty()
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    rows = [{"id": f"q{i}", "prompt": f"Say word{i % 5} again", "topic": "ab"[i % 2]} for i in range(ROWS)]
    for i, part in enumerate((rows[:5], rows[5:])):
        pl.DataFrame(part).write_parquet(tmp_path / f"{i}.parquet")
        server.put(f"in/{i}.parquet", (tmp_path / f"{i}.parquet").read_bytes())
    return server


def arguments(model: Path, *, source: str = IN, out: str = OUT) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={source}", f"output.dir={out}", "output.shard_rows=3",
        "decode.max_new_tokens=12", "output.token_ids=true", "packing.max_num_seqs=3", "draft=lookup",
    ]  # fmt: skip


def tokens(out: str) -> list[tuple[str, list[int]]]:
    return OutputFolder(out).scan().select("request_id", "token_ids").collect().rows()


def parts(lab: Lab) -> dict[str, bytes]:
    return {key: lab.body(key) for key in lab.keys("out/data/")}


def killed_after_a_commit(command: list[str], count: int) -> int:
    """Exit code of the job in a process of its own that kills itself when so many shards are committed."""
    program = (
        "import os, signal, sys; from batchspec import run; from batchspec.runstate.output_folder import OutputFolder as O\n"
        "commit = O.commit\n"
        "def then_killed(self, *rest):\n"
        "    commit(self, *rest)\n"
        f"    if len(self.committed()) == {count}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "O.commit = then_killed; sys.exit(run.main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, check=False, capture_output=True).returncode


def test_a_job_is_killed_resumed_and_read_by_every_command(
    lab: Lab, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(model)
    assert killed_after_a_commit(command, 2) == -signal.SIGKILL
    before = parts(lab)
    assert len(before) == 2
    assert run.main(command) == 0
    after = parts(lab)
    assert len(after) == 4
    assert {key: after[key] for key in before} == before
    assert run.main(command) == 0  # the job is done: nothing is computed or changed
    assert "already complete: 12 rows" in capsys.readouterr().err
    assert parts(lab) == after

    local = arguments(model, source=str(tmp_path), out=str(tmp_path / "out"))
    assert run.main(local) == 0
    assert tokens(OUT) == tokens(str(tmp_path / "out"))

    exported = tmp_path / "chat.jsonl"
    for words in (
        ["status", OUT],
        ["stats", OUT, "--by", "topic"],
        ["verify", OUT, "--rows", "2"],
        ["inspect", OUT, "q7"],
        ["export", OUT, str(exported), "--to", "chat", "--status", "ok,truncated"],
    ):
        assert cli.main(words) == 0, words
    assert len(exported.read_text().splitlines()) == ROWS
    said = capsys.readouterr().out
    assert f"{OUT}: complete\n  100.0% done, 4 of 4 shards committed (12 of 12 rows)" in said
    assert "ended: 1 gone, 1 done" in said or "ended: 1 done, 1 gone" in said
    assert "2 completions decoded again one at a time and without speculation: 0 differ" in said
    assert lab.body("out/README.md").startswith(b"---")
    assert lab.keys("out/_batchspec/tmp") == []

    everything = b"".join(lab.body(key) for key in lab.keys("out/")) + said.encode()
    assert KEY_ID.encode() not in everything
    assert SECRET.encode() not in everything


def test_two_runs_of_one_job_leave_every_row_once(lab: Lab, model: Path) -> None:
    code = "import sys; from batchspec import run; sys.exit(run.main(sys.argv[1:]))"
    runs = [
        subprocess.Popen([sys.executable, "-c", code, *arguments(model)], cwd=ROOT, stderr=subprocess.PIPE, env=os.environ)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1].decode() for process in runs]
    assert [process.returncode for process in runs] == [0, 0], said
    assert [name for name, _ in tokens(OUT)] == [f"q{i}" for i in range(ROWS)]
    assert len(parts(lab)) == 4


def test_a_store_that_fails_in_the_middle_ends_the_run_with_74_and_the_same_command_goes_on(lab: Lab, model: Path) -> None:
    def fail(environ: dict[str, Any]) -> tuple[int, str] | None:
        committed = any(key.startswith("out/data/") for key in lab.names())
        return (503, "SlowDown") if committed and environ["REQUEST_METHOD"] == "PUT" else None

    program = (
        "import sys; from batchspec import run; from batchspec.storage import retry; retry.DEADLINE_S = 0.5\n"
        "sys.exit(run.main(sys.argv[1:]))"
    )
    lab.faults.before = fail
    failed = subprocess.run(
        [sys.executable, "-c", program, *arguments(model)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    lab.faults.before = Faults().before
    assert failed.returncode == 74, failed.stderr
    said = failed.stderr.strip().splitlines()[-1]
    assert f"s3://{BUCKET}/out/" in said
    assert "SlowDown" in said
    assert "run the same command again" in said
    assert len(parts(lab)) == 1
    assert run.main(arguments(model)) == 0
    assert [name for name, _ in tokens(OUT)] == [f"q{i}" for i in range(ROWS)]


def test_one_of_two_commits_of_a_shard_wins(lab: Lab, model: Path) -> None:
    assert run.main(arguments(model)) == 0
    key = "out/data/part-00001.parquet"
    table = pl.read_parquet(lab.body(key)).to_arrow(compat_level=pl.CompatLevel.oldest())
    lab.client.delete_object(Bucket=BUCKET, Key=key)
    folders = [OutputFolder(OUT) for _ in range(4)]
    won: dict[str, bool] = {}
    barrier = threading.Barrier(4)

    def commit(folder: OutputFolder) -> None:
        barrier.wait()
        won[folder.attempt] = folder.commit(1, table)

    threads = [threading.Thread(target=commit, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won.values()) == [False, False, False, True]
    (winner,) = [attempt for attempt, first in won.items() if first]
    assert winner.encode() in lab.body(key)


def test_credentials_in_a_url_are_refused_unsaid(lab: Lab, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, out in ((f"s3://{KEY_ID}:{SECRET}@{BUCKET}/in", OUT), (IN, f"s3://{BUCKET}/out?secret_key={SECRET}")):
        assert run.main(arguments(model, source=f"'{source}'", out=f"'{out}'")) == 2
    said = capsys.readouterr().err
    assert said.count("holds credentials in a URL") == 2
    assert SECRET not in said
    assert lab.keys("out") == []
