"""The rows and the card of a job go to a dataset of the hub: once, in one commit, and on after any failure."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from huggingface_hub import lfs

from batchspec import run
from batchspec.cli import main as cli
from batchspec.commands import push as command
from batchspec.config.compose import compose
from batchspec.data.dataset.reader import open_source
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage import hub_push, retry
from batchspec.errors import ConfigError, InputError, OutputError, StorageError
from tests.commands.push_lab import CUT, CUT_AFTER, SILENT, TOKEN, PushHub, running_push_hub
from tests.data.test_remote_input import set_endpoint, set_times
from tests.helpers.models import make_checkpoint, make_tokenizer

REPO = "org/answers"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


def words(model: Path, folder: Path, out: Path, *more: str) -> list[str]:
    pl.DataFrame({"prompt": [f"Say word{i}" for i in range(7)]}).write_parquet(folder / "in.parquet")
    keys = ["draft=none", "decode.max_new_tokens=3", "output.shard_rows=2", f"output.dir={out}", *more]
    return [f"model.path={model}", f"input.path={folder}/in.parquet", *keys]


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of four shards."""
    folder = tmp_path_factory.mktemp("job")
    assert run.main(words(model, folder, folder / "out")) == 0
    return folder / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "out")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushHub]:
    set_times(monkeypatch, deadline_s=20.0)
    with running_push_hub() as server:
        set_endpoint(monkeypatch, server.server_port)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", server.url, raising=False)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url, raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def shards(out: Path) -> dict[str, bytes]:
    return {f"data/{file.name}": file.read_bytes() for file in (out / "data").iterdir()}


def holds(hub: PushHub, out: Path) -> bool:
    files = hub.datasets[REPO].files
    return {name: data for name, data in files.items() if name.startswith("data/")} == shards(out) and "README.md" in files


@pytest.mark.second
def test_a_job_becomes_a_private_dataset_whose_card_names_its_files(
    hub: PushHub, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["push", str(out), REPO]) == 0
    assert capsys.readouterr().out == f"{hub.url}/datasets/{REPO}: 5 files sent\n"
    dataset = hub.datasets[REPO]
    assert dataset.private
    assert dataset.num_commits == 1
    assert holds(hub, out)
    card = dataset.files["README.md"].decode()
    assert f'datasets.load_dataset("{REPO}", split="train")  # its rows with status ok' in card
    assert f'or polars.read_parquet("hf://datasets/{REPO}/data/*.parquet")' in card
    assert "FOLDER/data" not in card
    assert 'load_dataset("FOLDER"' not in card
    path = f"input.path=hf://datasets/{REPO}"
    config = compose([path, "input.config_name=all", "input.split=train"], require=())
    assert open_source(config.input).num_rows == 7  # batchspec reads it by the card
    with pytest.raises(InputError, match=r"config 'ok' holds only the rows that pass .*; choose .* input.config_name=all"):
        open_source(compose([path], require=()).input)


def test_a_push_again_sends_nothing(hub: PushHub, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cli(["push", str(out), REPO]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("has all of it already")
    assert hub.datasets[REPO].num_commits == 1
    assert hub.num("PUT", "/upload/") == 4


def test_a_job_on_an_object_store_is_read_from_there(hub: PushHub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: OutputFolder, names: Sequence[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
        return ((name, partial(self._store.read, name)) for name in names)

    monkeypatch.setattr(OutputFolder, "contents", read)
    monkeypatch.setattr(hub_push, "IN_MEMORY", 2)
    for _ in range(2):
        assert command.main([str(out), REPO]) == 0
        assert holds(hub, out)
    assert hub.num("PUT", "/upload/") == 4
    assert hub.datasets[REPO].num_commits == 1


FAULTS: list[tuple[str, str, int]] = [
    ("POST", "/api/repos/create", 503), ("GET", "/api/datasets/", 429), ("GET", "/api/datasets/", CUT),
    ("POST", "/preupload/", 500), ("POST", "/objects/batch", 502), ("PUT", "/upload/", 503), ("PUT", "/upload/", CUT),
    ("PUT", "/upload/", CUT_AFTER), ("POST", "/commit/", 500), ("POST", "/commit/", 429), ("POST", "/commit/", CUT),
    ("POST", "/commit/", CUT_AFTER), ("POST", "/commit/", SILENT), ("PUT", "/upload/", SILENT),
]


def first_only(method: str, part: str, fault: int) -> Callable[[str, str], int | None]:
    left = [fault]
    return lambda asked, path: left.pop() if left and asked == method and part in path else None


@pytest.mark.parametrize(("method", "part", "fault"), FAULTS)
def test_a_request_that_fails_once_is_repeated(
    hub: PushHub, out: Path, monkeypatch: pytest.MonkeyPatch, method: str, part: str, fault: int
) -> None:
    monkeypatch.setattr(retry, "REQUEST_S", 1.0)
    hub.fault = first_only(method, part, fault)
    assert command.main([str(out), REPO]) == 0
    assert holds(hub, out)
    assert hub.datasets[REPO].num_commits == 1
    assert hub.num("PUT", "/upload/") <= 5  # what came up is not sent again


@pytest.mark.second
@pytest.mark.parametrize("fault", [503, CUT, CUT_AFTER, SILENT])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_push_ends_well_although_every_few_requests_fail(
    hub: PushHub, out: Path, monkeypatch: pytest.MonkeyPatch, every: int, fault: int
) -> None:
    """A request is repeated alone: one that fails never repeats those before it, which would fail again in the same order."""
    monkeypatch.setattr(retry, "REQUEST_S", 0.3)
    monkeypatch.setattr(lfs, "http_backoff", partial(vars(lfs)["http_backoff"], base_wait_time=0.01, max_wait_time=0.01))
    hub.fault = lambda method, path: fault if len(hub.requests) % every == 0 else None
    assert command.main([str(out), REPO]) == 0
    assert holds(hub, out)
    assert hub.datasets[REPO].num_commits == 1
    assert not hub.num("POST", "/api/validate-yaml")


def test_a_dataset_that_changes_meanwhile_is_not_overwritten(hub: PushHub, out: Path) -> None:
    def change(method: str, path: str) -> None:
        if "/upload/" in path:
            hub.datasets[REPO].files["data/train.parquet"] = b"of another writer"

    hub.fault = change
    with pytest.raises(StorageError, match="org/answers: it was changed on the hub while files were sent; run the same command"):
        command.main([str(out), REPO])
    with pytest.raises(OutputError, match="which no job of batchspec made"):
        command.main([str(out), REPO])
    assert not hub.datasets[REPO].num_commits


def test_a_killed_push_resumes_and_publishes_nothing_until_its_end(
    hub: PushHub, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_push, "AT_ONCE", 1)

    class Killed(BaseException):
        pass

    groups = hub_push._groups

    def two_groups(files: Any) -> Iterator[Any]:
        for number, group in enumerate(groups(files)):
            if number == 2:
                raise Killed
            yield group

    monkeypatch.setattr(hub_push, "_groups", two_groups)
    with pytest.raises(Killed):
        command.main([str(out), REPO])
    assert hub.num("PUT", "/upload/") == 2
    assert hub.datasets[REPO].files.keys() == {".gitattributes"}
    monkeypatch.setattr(hub_push, "_groups", groups)
    assert command.main([str(out), REPO]) == 0
    assert holds(hub, out)
    assert hub.num("PUT", "/upload/") == 4


def test_a_changed_job_replaces_its_files_and_deletes_the_old_ones(
    hub: PushHub, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(out), REPO]) == 0
    dataset = hub.datasets[REPO]
    dataset.files |= {
        "data/part-00077.parquet": b"of a longer job",
        "data/part-00001.parquet": b"other rows",
        "notes.txt": b"mine",
    }
    capsys.readouterr()
    assert command.main([str(out), REPO, "--overwrite"]) == 0
    assert capsys.readouterr().out.endswith(": 1 file sent, 1 old ones deleted\n")
    assert holds(hub, out)
    assert dataset.files["notes.txt"] == b"mine"


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: PushHub, out: Path) -> None:
    """Its second try would delete what is deleted already."""
    assert command.main([str(out), REPO]) == 0
    hub.datasets[REPO].files |= {"data/part-00077.parquet": b"of a longer job", "data/part-00001.parquet": b"other"}
    hub.fault = first_only("POST", "/commit/", CUT_AFTER)
    assert command.main([str(out), REPO, "--overwrite"]) == 0
    assert holds(hub, out)


@pytest.mark.parametrize("file", ["data/train.parquet", "README.md"])
def test_another_dataset_is_left_alone(hub: PushHub, out: Path, file: str) -> None:
    assert command.main([str(out), REPO]) == 0
    dataset = hub.datasets[REPO]
    dataset.files[file] = b"---\nlicense: mit\n---\n# of somebody\n"
    before = dict(dataset.files)
    with pytest.raises(OutputError, match=rf"^org/answers: it holds {re.escape(file)}, which no job of batchspec made; .*--over"):
        command.main([str(out), REPO])
    assert dataset.files == before
    assert command.main([str(out), REPO, "--overwrite"]) == 0
    assert holds(hub, out)


@pytest.fixture(scope="module")
def another(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of the same rows that writes more tokens."""
    folder = tmp_path_factory.mktemp("another")
    assert run.main(words(model, folder, folder / "out", "decode.max_new_tokens=4")) == 0
    return folder / "out"


def id_of(out: Path) -> str:
    return OutputFolder(out).manifest.job


@pytest.mark.second
def test_the_dataset_of_another_job_is_replaced_only_with_overwrite(hub: PushHub, out: Path, another: Path) -> None:
    assert command.main([str(another), REPO]) == 0
    before, requests = dict(hub.datasets[REPO].files), len(hub.requests)
    with pytest.raises(OutputError) as caught:
        command.main([str(out), REPO])
    assert str(caught.value) == (
        f"org/answers: it holds the rows of another job, {id_of(another)[:8]} "
        f"(Completions by `{model_of(another)}`: 7 truncated); this one is {id_of(out)[:8]}; "
        "batchspec push with --overwrite replaces all of data/ and the card; or give another name"
    )
    assert hub.datasets[REPO].files == before
    assert all(one.startswith("GET ") for one in hub.requests[requests:])  # nothing was sent
    assert command.main([str(out), REPO, "--overwrite"]) == 0
    assert holds(hub, out)
    assert command.main([str(out), REPO]) == 0  # it is this job's dataset now


def model_of(out: Path) -> str:
    return str(Path(OutputFolder(out).manifest.config["model"]["path"]).name)


@pytest.mark.parametrize("place", ["data/part-00000.parquet", "data/part-00003.parquet"])
@pytest.mark.parametrize("content", [b"no Parquet file", None])
def test_files_that_name_no_job_are_replaced_only_with_overwrite(
    hub: PushHub, out: Path, place: str, content: bytes | None
) -> None:
    """Whose rows they are is unknown, and rows cannot be brought back."""
    assert command.main([str(out), REPO]) == 0
    if content is None:
        pl.read_parquet(out / place).write_parquet(sink := io.BytesIO())
        content = sink.getvalue()
    hub.datasets[REPO].files[place] = content
    with pytest.raises(OutputError, match=f"it holds {place}, which names no job and may be of another one .*--overwrite"):
        command.main([str(out), REPO])
    assert hub.datasets[REPO].files[place] == content
    assert command.main([str(out), REPO, "--overwrite"]) == 0
    assert holds(hub, out)


@pytest.mark.second
def test_a_job_may_push_again_after_a_retry_has_changed_its_rows(hub: PushHub, model: Path, tmp_path: Path) -> None:
    assert run.main(words(model, tmp_path, tmp_path / "out", f"output.push_to_hub={REPO}")) == 0
    first = dict(hub.datasets[REPO].files)
    more = ["resume=length", "decode.max_new_tokens=5", f"output.push_to_hub={REPO}"]
    assert run.main(words(model, tmp_path, tmp_path / "out", *more)) == 0
    assert hub.datasets[REPO].files.keys() == first.keys()
    assert hub.datasets[REPO].files != first
    assert holds(hub, tmp_path / "out")


def told(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says of a refusal: on stderr, or in the figures of `plan`."""
    said = capsys.readouterr()
    return said.out if name == "plan" else said.err


@pytest.mark.second
def test_a_job_whose_push_would_replace_another_one_is_refused_before_it_begins(
    hub: PushHub, model: Path, another: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(another), REPO]) == 0
    before = dict(hub.datasets[REPO].files)
    arguments = words(model, tmp_path, tmp_path / "out", f"output.push_to_hub={REPO}")
    capsys.readouterr()
    for name in ("run", "plan", "submit"):
        assert cli([name, *arguments]) == 2
        assert f"it holds the rows of another job, {id_of(another)[:8]}" in told(name, capsys)
    assert cli(["plan", *(word for word in arguments if "output.dir" not in word)]) == 2
    assert "this one is new; output.push_overwrite=true replaces all of data/" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert hub.datasets[REPO].files == before
    assert cli(["plan", *arguments[:-1], "output.push_to_hub=org/free"]) == 0
    assert "org/free" not in hub.datasets  # a check makes no dataset


def night(model: Path, folder: Path, cap: int, *more: str) -> list[str]:
    """The command that a timer runs every night, with other outputs each time."""
    keys = (f"output.push_to_hub={REPO}", "output.push_overwrite=true", "output.overwrite=true", f"decode.max_new_tokens={cap}")
    return words(model, folder, folder / "out", *keys, *more)


@pytest.mark.second
def test_a_job_of_every_night_replaces_the_dataset_of_the_night_before(hub: PushHub, model: Path, tmp_path: Path) -> None:
    """Also where the folder of the night before was deleted."""
    out, ids = tmp_path / "out", set()
    for cap in (3, 4, 5):
        assert cli(["plan", *night(model, tmp_path, cap)]) == 0
        assert run.main(night(model, tmp_path, cap)) == 0
        assert holds(hub, out)
        ids.add(id_of(out))
        if cap == 4:
            shutil.rmtree(out)
    assert len(ids) == 3, "three jobs"


@pytest.mark.second
def test_a_job_that_overwrites_its_folder_alone_never_replaces_a_dataset(
    hub: PushHub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(night(model, tmp_path, 3)) == 0
    before, done = dict(hub.datasets[REPO].files), shards(tmp_path / "out")
    careful = [word for word in night(model, tmp_path, 4) if "push_overwrite" not in word]
    for name in ("run", "plan", "submit"):
        capsys.readouterr()
        assert cli([name, *careful]) == 2
        assert "it holds the rows of another job" in told(name, capsys)
    assert (hub.datasets[REPO].files, shards(tmp_path / "out")) == (before, done), "the job in the folder stays too"


@pytest.mark.second
def test_fewer_shards_of_a_job_that_was_extended_elsewhere_are_not_pushed_over_more(
    hub: PushHub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy, and in the folder after it was deleted: the job there has the same id and none of the rows that were added."""
    out, pushed = tmp_path / "out", f"output.push_to_hub={REPO}"
    few = words(model, tmp_path, out, pushed, "input.limit=4")
    more = words(model, tmp_path, out, pushed, "resume=extend")
    assert run.main(few) == 0
    copy = shutil.copytree(out, tmp_path / "copy")
    assert run.main(more) == 0, "the extended job is the same one"
    assert holds(hub, out)
    before = dict(hub.datasets[REPO].files)
    with pytest.raises(OutputError) as refused:
        command.main([str(copy), REPO])
    assert str(refused.value) == (
        "org/answers: it holds 2 files of this job that this folder lacks, such as data/part-00002.parquet; "
        "batchspec push with --overwrite replaces all of data/ and the card; or give another name"
    )
    shutil.rmtree(out)
    capsys.readouterr()
    assert run.main(few) == 2
    assert "2 files of this job that this folder lacks" in capsys.readouterr().err
    assert hub.datasets[REPO].files == before
    assert command.main([str(copy), REPO, "--overwrite"]) == 0
    assert holds(hub, copy)


def test_a_public_dataset_is_refused_before_a_job_begins(
    hub: PushHub, model: Path, another: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(another), REPO, "--public"]) == 0
    assert run.main(words(model, tmp_path, tmp_path / "out", f"output.push_to_hub={REPO}")) == 2
    assert "org/answers is public on the hub" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unfinished_job_is_pushed_only_on_demand(hub: PushHub, out: Path) -> None:
    (out / "data/part-00002.parquet").unlink()
    (out / "README.md").unlink()
    with pytest.raises(OutputError, match="1 of 4 shards are missing; run the job to its end, or push what is there with --inc"):
        command.main([str(out), REPO])
    assert not hub.datasets
    assert command.main([str(out), REPO, "--incomplete"]) == 0
    assert holds(hub, out)


def test_a_private_push_never_goes_to_a_public_dataset(hub: PushHub, out: Path) -> None:
    assert command.main([str(out), REPO, "--public"]) == 0
    assert not hub.datasets[REPO].private
    with pytest.raises(ConfigError, match="org/answers is public on the hub; make it private there, or push to it as public"):
        command.main([str(out), REPO])


def test_a_public_push_to_a_private_dataset_says_that_it_stays_private(
    hub: PushHub, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for options in ([], ["--public"]):
        assert command.main([str(out), REPO, *options]) == 0
        said.append(capsys.readouterr().out)
    assert hub.datasets[REPO].private
    assert ["stays so: make it public on its page" in line for line in said] == [False, True]


@pytest.mark.parametrize(("status", "kind"), [(401, ConfigError), (403, ConfigError), (400, StorageError)])
def test_what_trying_again_does_not_mend_is_said_at_once(hub: PushHub, out: Path, status: int, kind: type[Exception]) -> None:
    hub.fault = lambda method, path: status if "/commit/" in path else None
    with pytest.raises(kind) as caught:
        command.main([str(out), REPO])
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert hub.num("POST", "/commit/") == 1


def test_a_hub_that_fails_for_long_ends_the_command_with_74(
    hub: PushHub, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_times(monkeypatch, deadline_s=0.5)
    hub.fault = lambda method, path: 503 if "/commit/" in path else None
    assert cli(["push", str(out), REPO]) == 74
    said = capsys.readouterr().err.splitlines()[-1]
    assert "committing to hf://datasets/org/answers failed for" in said
    hub.fault = lambda method, path: None
    assert cli(["push", str(out), REPO]) == 0
    assert holds(hub, out)
    assert hub.num("PUT", "/upload/") == 4


@pytest.mark.parametrize("status", [404, None])
def test_a_server_without_xet_gets_the_files_by_lfs(
    hub: PushHub, out: Path, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    """hf_xet would ask such a server for a token again and again, for minutes."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.fault = lambda method, path: status if "/xet-write-token/" in path else None
    assert command.main([str(out), REPO]) == 0
    assert holds(hub, out)
    assert hub.num("GET", "/xet-write-token/") == 1
    assert not constants.HF_HUB_DISABLE_XET


def test_the_first_try_that_fails_says_that_it_is_repeated_and_why(
    hub: PushHub, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fault = first_only("POST", "/commit/", 503)
    assert command.main([str(out), REPO]) == 0
    assert (
        "committing to hf://datasets/org/answers fails (HTTP status 503; check the endpoint (HF_ENDPOINT where it is set) and "
        "the hub's health); it is tried again for up to 20 s\n"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("repo", ["answers", "org/", "a/b/c", "org/a b", "org/a..b", "https://hub/org/name"])
def test_a_name_that_no_dataset_has_is_refused(hub: PushHub, out: Path, repo: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a dataset; give ORG/NAME"):
        command.main([str(out), repo])
    assert not hub.requests


def test_without_a_token_nothing_is_asked(hub: PushHub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="a push needs a token that may write; set HF_TOKEN"):
        command.main([str(out), REPO])
    with pytest.raises(OutputError, match="holds no batchspec job"):
        command.main([str(out.parent / "nowhere"), REPO])
    assert not hub.requests


@pytest.mark.second
def test_a_job_pushes_when_it_is_complete_and_when_it_is_run_again(
    hub: PushHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words(model, tmp_path, tmp_path / "out", f"output.push_to_hub={REPO}")
    set_times(monkeypatch, deadline_s=0.5)
    soon = partial(vars(lfs)["http_backoff"], max_wait_time=0.01)  # the client library itself tries each upload six times
    monkeypatch.setattr(lfs, "http_backoff", soon)
    hub.fault = lambda method, path: 503 if "/upload/" in path else None
    assert run.main(arguments) == 74  # the job is done, the push is not
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"batchspec: all rows are committed but not pushed: sending files to hf://datasets/{REPO} failed for" in said
    assert said.endswith(f"run the same command again after that, or: batchspec push OUTPUT_DIR {REPO}")
    hub.fault = lambda method, path: None
    assert run.main(arguments) == 0
    assert "already complete" in (said := capsys.readouterr().err)
    assert f"/datasets/{REPO}: 5 files sent" in said
    assert holds(hub, tmp_path / "out")
    assert hub.datasets[REPO].private
    assert TOKEN not in "".join(file.read_text("utf-8", "replace") for file in (tmp_path / "out").rglob("*") if file.is_file())


def test_a_job_that_could_not_push_is_refused_before_it_begins(
    hub: PushHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert run.main(words(model, tmp_path, tmp_path / "out", f"output.push_to_hub={REPO}")) == 2
    for name in ("plan", "submit"):
        assert cli([name, *words(model, tmp_path, tmp_path / "out", f"output.push_to_hub={REPO}")]) == 2
    assert capsys.readouterr().err.count("a push needs a token") == 3
    assert not (tmp_path / "out").exists()
