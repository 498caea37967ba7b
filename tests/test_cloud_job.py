"""Whole jobs with input and output on Google Cloud Storage and Azure, and input from the Hugging Face hub, by command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import torch

from batchspec import cli, run
from batchspec.runstate.output_folder import OutputFolder
from tests.cloud_lab import ACCOUNT_KEY, TOKEN, CloudLab, running_azure, running_gcs
from tests.dataset_hub_lab import REPO, running_hub
from tests.dataset_hub_lab import TOKEN as HUB_TOKEN
from tests.models import make_checkpoint, make_tokenizer

ROOT = Path(__file__).parents[1]
ROWS = 12


@pytest.fixture(scope="module", params=["gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudLab]:
    with running_gcs() if request.param == "gs" else running_azure(tmp_path_factory.mktemp("azurite")) as lab:
        yield lab


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
def lab(server: CloudLab, prompts: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> CloudLab:
    server.empty()
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    for key, data in prompts.items():
        server.put(key, data)
    return server


def arguments(model: Path, source: str, out: str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={source}", f"output.dir={out}", "output.shard_rows=3",
        "decode.max_new_tokens=12", "output.token_ids=true", "packing.max_num_seqs=3", "draft=lookup",
    ]  # fmt: skip


def tokens(out: str) -> list[tuple[str, list[int]]]:
    return OutputFolder(out).scan().select("request_id", "token_ids").collect().rows()


def test_a_job_of_two_runs_has_every_row_once_and_is_read_by_every_command(
    lab: CloudLab, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"{lab.root}/out"
    command = arguments(model, f"{lab.root}/in/*.parquet", out)
    whole = "import sys; from batchspec import run; sys.exit(run.main(sys.argv[1:]))"
    runs = [
        subprocess.Popen([sys.executable, "-c", whole, *command], cwd=ROOT, stderr=subprocess.PIPE, env=os.environ)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=240)[1].decode() for process in runs]
    assert [process.returncode for process in runs] == [0, 0], said
    assert len([key for key in sorted(lab.keys()) if key.startswith("out/data/")]) == 4
    assert run.main(arguments(model, str(tmp_path / "*.parquet"), str(tmp_path / "out"))) == 0
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
    assert f"{out}: complete" in shown.out
    everything = b"".join(lab.body(key) for key in sorted(lab.keys()) if key.startswith("out/")).decode("latin-1")
    everything += shown.out + shown.err + "".join(said)
    assert not [secret for secret in (TOKEN, ACCOUNT_KEY) if secret in everything]


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_a_dataset_of_the_hub_is_computed_and_written_to_a_bucket(lab: CloudLab, model: Path, prompts: dict[str, bytes]) -> None:
    out = f"{lab.root}/out"
    with running_hub() as hub:
        hub.commit(prompts)
        command = arguments(model, f"hf://datasets/{REPO}@main/in", out)
        environ = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": HUB_TOKEN}
        code = "import sys; from batchspec import run; sys.exit(run.main(sys.argv[1:]))"
        ended = subprocess.run(
            [sys.executable, "-c", code, *command], cwd=ROOT, check=False, capture_output=True, env=environ, text=True
        )
    assert ended.returncode == 0, ended.stderr
    assert [name for name, _ in tokens(out)] == [f"q{i}" for i in range(ROWS)]
    written = b"".join(lab.body(key) for key in lab.keys() if key.startswith("out/")).decode("latin-1")  # noqa: SIM118
    assert f"hf://datasets/{REPO}@main/in" in written
    assert HUB_TOKEN not in written + ended.stderr + ended.stdout


def test_credentials_in_a_url_are_refused_unsaid(lab: CloudLab, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, out in (
        ("abfss://lab:canary@account.dfs.core.windows.net/in", f"{lab.root}/out"),
        (f"{lab.root}/in", "abfss://lab@account.dfs.core.windows.net/out?sv=1&sig=canary"),
    ):
        assert run.main(arguments(model, f"'{source}'", f"'{out}'")) == 2
    said = capsys.readouterr().err
    assert said.count("holds credentials in a URL") == 2
    assert "canary" not in said
    assert not [key for key in sorted(lab.keys()) if key.startswith("out")]
