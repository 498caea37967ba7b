"""Whole jobs with input and output on S3, Google Cloud Storage and Azure, by command line: shared, killed, resumed, read by every
command, and no credential left anywhere."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from batchspec import cli, run
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage import retry
from tests.data import cloud_lab, s3_lab
from tests.data.cloud_lab import CloudLab, running_azure, running_gcs
from tests.data.hub_lab import REPO, running_hub
from tests.data.hub_lab import TOKEN as HUB_TOKEN
from tests.data.s3_lab import BUCKET, KEY_ID, SECRET, Faults, running_lab
from tests.helpers.forked import run_python
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import put, run_apart, signalled_after_commits, start_apart

pytestmark = pytest.mark.second

ROWS = 12
SECRETS = (s3_lab.KEY_ID, s3_lab.SECRET, cloud_lab.TOKEN, cloud_lab.ACCOUNT_KEY, HUB_TOKEN)
Lab = s3_lab.Lab | CloudLab

only_s3 = pytest.mark.parametrize("server", ["s3"], indirect=True)


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if request.param == "s3":
        with running_lab() as s3:
            yield s3
    else:
        with running_gcs() if request.param == "gs" else running_azure(tmp_path_factory.mktemp("azurite")) as cloud:
            yield cloud


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


@pytest.fixture
def prompts(tmp_path: Path) -> dict[str, bytes]:
    rows = [{"id": f"q{i}", "prompt": f"Say word{i % 5} again", "topic": "ab"[i % 2]} for i in range(ROWS)]
    for i, part in enumerate((rows[:5], rows[5:])):
        pl.DataFrame(part).write_parquet(tmp_path / f"{i}.parquet")
    return {f"in/{i}.parquet": (tmp_path / f"{i}.parquet").read_bytes() for i in range(2)}


@pytest.fixture
def lab(server: Lab, prompts: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The emulator with nothing but a job's input: two files."""
    server.empty()
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    for key, data in prompts.items():
        server.put(key, data)
    return server


@pytest.fixture
def command(lab: Lab, model: Path) -> list[str]:
    return arguments(model, f"{lab.root}/in/*.parquet", f"{lab.root}/out")


def arguments(model: Path, source: str, out: str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={source}", f"output.dir={out}", "output.shard_rows=3",
        "decode.max_new_tokens=12", "output.token_ids=true", "packing.max_num_seqs=3", "draft=lookup",
    ]


def tokens(out: str) -> list[tuple[str, list[int]]]:
    return OutputFolder(out).scan().select("request_id", "token_ids").collect().rows()


def parts(lab: Lab) -> dict[str, bytes]:
    return {key: lab.body(key) for key in lab.keys("out/data/")}


def secrets_in(lab: Lab, *said: str) -> list[str]:
    """What must be in no object of the job and in nothing that was said."""
    everything = b"".join(lab.body(key) for key in lab.keys("out/")).decode("latin-1") + "".join(said)
    return [secret for secret in SECRETS if secret in everything]


def test_two_runs_of_one_job_leave_every_row_once_for_every_command_to_read(
    lab: Lab, command: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, logs = f"{lab.root}/out", [tmp_path / f"log{i}" for i in range(2)]
    runs = [start_apart(command, log) for log in logs]
    for process in runs:
        process.join(240)
    said = [log.read_text() for log in logs]
    assert [process.exitcode for process in runs] == [0, 0], said
    assert len(parts(lab)) == 4
    assert run.main(arguments(model, str(tmp_path / "*.parquet"), str(tmp_path / "out"))) == 0
    assert [name for name, _ in tokens(out)] == [f"q{i}" for i in range(ROWS)]
    assert tokens(out) == tokens(str(tmp_path / "out"))

    exported = tmp_path / "chat.jsonl"
    for words in (
        ["status", out],
        ["stats", out, "--by", "topic"],
        ["verify", out, "--rows", "2"],
        ["verify", out, "--files"],
        ["inspect", out, "q7"],
        ["export", out, str(exported), "--to", "chat", "--status", "ok,truncated"],
    ):
        assert cli.main(words) == 0, words
    assert len(exported.read_text().splitlines()) == ROWS
    shown = capsys.readouterr()
    assert f"{out}: complete\n  100.0% done, 4 of 4 shards committed (12 of 12 rows)" in shown.out
    assert "2 completions decoded again one at a time and without speculation: 0 differ" in shown.out
    assert not secrets_in(lab, shown.out, shown.err, *said)

    after = [word for word in command if not word.startswith(("input.path=", "output.dir="))]
    after += [f"input.from_job={out}/", "input.prompt=Again", f"output.dir={lab.root}/after"]
    assert run.main(after) == 0
    assert [name for name, _ in tokens(f"{lab.root}/after")] == [f"q{i}" for i in range(ROWS)]
    assert run.main([*after[:-1], f"output.dir={out}/after"]) == 2
    assert f"output.dir={out}/after lies in input.from_job={out}/" in capsys.readouterr().err


@only_s3
def test_a_job_that_was_killed_resumes_and_one_that_is_done_changes_nothing(
    lab: Lab, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = partial(signalled_after_commits, 2, signal.SIGKILL)
    assert run_apart(command, tmp_path / "log", killed)[0] == -signal.SIGKILL
    before = parts(lab)
    assert len(before) == 2
    assert run.main(command) == 0
    after = parts(lab)
    assert len(after) == 4
    assert {key: after[key] for key in before} == before
    assert run.main(command) == 0
    assert "already complete: 12 rows" in capsys.readouterr().err
    assert parts(lab) == after
    assert [name for name, _ in tokens(f"{lab.root}/out")] == [f"q{i}" for i in range(ROWS)]
    assert cli.main(["status", f"{lab.root}/out"]) == 0
    said = capsys.readouterr().out
    assert "ended: 1 gone, 1 done" in said or "ended: 1 done, 1 gone" in said
    assert lab.body("out/README.md").startswith(b"---")
    assert lab.keys("out/_batchspec/tmp") == []
    assert not secrets_in(lab, said)


def impatient() -> None:
    put(retry, "DEADLINE_S", 0.5)


@only_s3
def test_a_store_that_fails_in_the_middle_ends_the_run_with_74_and_the_same_command_resumes(
    lab: s3_lab.Lab, command: list[str], tmp_path: Path
) -> None:
    def fail(environ: dict[str, Any]) -> tuple[int, str] | None:
        committed = any(key.startswith("out/data/") for key in lab.names())
        return (503, "SlowDown") if committed and environ["REQUEST_METHOD"] == "PUT" else None

    lab.faults.before = fail
    code, text = run_apart(command, tmp_path / "log", impatient)
    lab.faults.before = Faults().before
    assert code == 74, text
    said = text.strip().splitlines()[-1]
    assert f"s3://{BUCKET}/out/" in said
    assert "SlowDown" in said
    assert "run the same command again" in said
    assert len(parts(lab)) == 1
    assert run.main(command) == 0
    assert [name for name, _ in tokens(f"{lab.root}/out")] == [f"q{i}" for i in range(ROWS)]


@only_s3
def test_one_of_two_commits_of_a_shard_wins(lab: s3_lab.Lab, command: list[str]) -> None:
    assert run.main(command) == 0
    key = "out/data/part-00001.parquet"
    table = pl.read_parquet(lab.body(key)).to_arrow(compat_level=pl.CompatLevel.oldest())
    lab.client.delete_object(Bucket=BUCKET, Key=key)
    folders = [OutputFolder(f"{lab.root}/out") for _ in range(4)]
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


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_a_dataset_of_the_hub_is_computed_and_written_to_a_bucket(lab: Lab, model: Path, prompts: dict[str, bytes]) -> None:
    """In a process that reads HF_ENDPOINT as it starts."""
    out = f"{lab.root}/out"
    with running_hub() as hub:
        hub.commit(prompts)
        command = arguments(model, f"hf://datasets/{REPO}@main/in", out)
        environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": HUB_TOKEN}
        code = "import sys; from batchspec import run; sys.exit(run.main(sys.argv[1:]))"
        ended = run_python(["-c", code, *command], env=environ)
    assert ended.returncode == 0, ended.stderr
    assert [name for name, _ in tokens(out)] == [f"q{i}" for i in range(ROWS)]
    written = b"".join(lab.body(key) for key in lab.keys("out/")).decode("latin-1")
    assert f"hf://datasets/{REPO}@main/in" in written
    assert not secrets_in(lab, ended.stderr, ended.stdout)


def test_credentials_in_a_url_are_refused_unsaid(lab: Lab, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = f"{lab.root}/in", f"{lab.root}/out"
    if isinstance(lab, CloudLab):
        account = "account.dfs.core.windows.net"
        wrong = (f"abfss://lab:canary@{account}/in", here[1]), (here[0], f"abfss://lab@{account}/out?sv=1&sig=canary")
    else:
        wrong = (f"s3://{KEY_ID}:{SECRET}@{BUCKET}/in", here[1]), (here[0], f"s3://{BUCKET}/out?secret_key={SECRET}")
    for source, out in wrong:
        assert run.main(arguments(model, f"'{source}'", f"'{out}'")) == 2
    said = capsys.readouterr().err
    assert said.count("holds credentials in a URL") == 2
    assert "canary" not in said
    assert SECRET not in said
    assert lab.keys("out") == []
