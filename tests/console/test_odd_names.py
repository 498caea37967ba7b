"""Names are names: no character in a path is a wildcard, a URL, a partition or an option to whatever opens it.

Whole tiny jobs, each beside another one whose name a pattern would match; a name that nothing can have is refused before any
work.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec import cli, run
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import open_source
from batchspec.data.runstate.output_folder import OutputFolder
from tests.data.cloud_lab import CloudLab, running_gcs
from tests.data.hub_lab import REPO, running_hub
from tests.data.s3_lab import Lab, running_lab
from tests.data.test_remote_input import set_endpoint
from tests.helpers.runs import make_model, make_prompts

ODD = [
    "run[1]", "run[lr=3", "run? a%20#'{a}", "**", " ends ", '~x"ü日本', "-new\nline\\", "$HOME;&|", "true", "1e3", "key: v",
    "hf:x", "x" * 255, "+@(!x)", "..x\x1b[31m",
]
"""Characters that mean nothing beside each other share a name."""
ALL = "run[1]?* lr=3 ~%20#'\"{a}$;&|!@+(ü日"
"""Every odd character that a key of an object may have, in one name."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of another job, with other rows, and its input."""
    folder = tmp_path_factory.mktemp("other")
    prompts = make_prompts(folder / "in.parquet", 7)
    assert run.main(words(model, prompts, folder / "run1")) == 0
    return folder / "run1"


def words(model: Path | str, source: Path | str, out: Path | str, *more: str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={source}", f"output.dir={out}", "output.shard_rows=2",
        "decode.max_new_tokens=3", "packing.max_num_seqs=3", "draft=lookup", *more,
    ]


def typed(path: str) -> str:
    """A path as a command takes it: one that begins with a dash would be an option."""
    return f"./{path}" if path.startswith("-") else path


def check_job(command: list[str], out: str, ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The finished job has these rows and no others, for every command; it is complete, and goes on when a shard is gone."""
    folder = OutputFolder(out)
    assert folder.scan().select("request_id").collect()["request_id"].to_list() == ids
    [completions] = re.findall(r"^\| Completions \| (.+) \|$", folder.card().decode(), re.MULTILINE)
    assert sum(map(int, re.findall(r"\d+", completions))) == len(ids)
    capsys.readouterr()
    assert cli.main(["stats", typed(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completions"] == len(ids)
    for more in (["verify"], ["verify", "--files"], ["status"], ["inspect"]):
        assert cli.main([more[0], typed(out), *more[1:], *(["q1"] if more == ["inspect"] else [])]) == 0, more
    assert run.main(command) == 0
    assert f": already complete: {len(ids)} rows" in capsys.readouterr().err


@pytest.mark.second
@pytest.mark.parametrize("name", ODD)
def test_an_output_folder_may_have_any_name(
    model: Path, other: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once as a relative path, which begins with the odd character."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(other, tmp_path / "run1")
    command = words(model, make_prompts(tmp_path / "in.parquet", 3), name)
    assert run.main(command) == 0
    check_job(command, name, ["q0", "q1", "q2"], capsys)
    before = (tmp_path / name / "data/part-00000.parquet").read_bytes()
    (tmp_path / name / "data/part-00001.parquet").unlink()
    assert run.main(command) == 0
    assert (tmp_path / name / "data/part-00000.parquet").read_bytes() == before
    check_job(command, name, ["q0", "q1", "q2"], capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in.parquet", "run1", name])


@pytest.mark.second
def test_the_report_of_a_folder_whose_name_is_a_pattern_shows_its_own_rows(
    model: Path, other: Path, tmp_path: Path, draws: None
) -> None:
    shutil.copytree(other, tmp_path / "run1")
    assert run.main(words(model, make_prompts(tmp_path / "in.parquet", 3), tmp_path / "run*")) == 0
    assert "3 completions" in (tmp_path / "run*/report.html").read_text()


@pytest.mark.second
def test_the_lines_about_a_finished_job_are_commands_that_a_shell_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_prompts(tmp_path / "in.parquet", 3)
    for out in ("-a 'b' [c]*", "plain"):
        assert run.main(words(model, "in.parquet", out)) == 0
        stats, read = (shlex.split(line) for line in capsys.readouterr().err.splitlines()[-2:])
        assert cli.main(stats[3:]) == 0
        assert "completions" in capsys.readouterr().out
        exec(read[2])
        assert "shape: (3," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 256, "a name in it has 256 bytes, and the file system takes 255"),
        ("ü" * 128 + "/y", "a name in it has 256 bytes, and the file system takes 255"),
        ("/".join(["y" * 250] * 16), "and the file system takes 3,840"),
        ("\udcff", "is not valid Unicode; rename what it names, in UTF-8"),
        ("a,b", "one value with a comma is \"output.dir='a,b'\""),
    ],
)
def test_a_name_that_no_output_folder_can_have_is_refused_before_any_work(
    model: Path, tmp_path: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(words(model, make_prompts(tmp_path / "in.parquet", 1), name)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


# --- input


@pytest.mark.parametrize("name", [name for name in ODD if len(name) < 200 and not name.startswith("..")])
def test_an_input_file_or_folder_may_have_any_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own name, in a folder, by a pattern, and in a folder of that name below which a pattern looks."""
    monkeypatch.chdir(tmp_path)
    file, folder = Path("files") / f"{name}.jsonl", Path("folders") / name
    for path, prompt in ((file, "own"), (folder / "in.jsonl", "own"), (Path("beside/run1/in.jsonl"), "other")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"prompt": prompt}) + "\n")
    shutil.copytree("beside/run1", "folders/run1")
    for entry in (file, Path("files"), Path("files/*.jsonl"), folder, folder / "*.jsonl", folder / "in.jsonl"):
        source = open_source(InputConfig(path=str(entry)))
        assert [row for shard in source.shards(9) for row in shard.table.to_pylist()] == [{"prompt": "own"}], entry
    monkeypatch.chdir("files")
    [(file_name, rows)] = [(one.name, one.num_rows) for one in open_source(InputConfig(path=f"./{name}.jsonl")).files]
    assert (file_name, rows) == (f"{name}.jsonl", 1)


def test_a_column_of_the_input_is_no_partition_of_its_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "lr=3").mkdir()
    pl.DataFrame({"id": ["a"], "prompt": ["Say"], "lr": ["own"]}).write_parquet(tmp_path / "lr=3/in.parquet")
    assert run.main(words(model, tmp_path / "lr=3/in.parquet", tmp_path / "lr=4")) == 0
    assert OutputFolder(tmp_path / "lr=4").scan().select("lr").collect()["lr"].to_list() == ["own"]


def test_a_folder_below_the_input_whose_name_is_a_pattern_cannot_be_the_output(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in[1]").mkdir()
    prompts = make_prompts(tmp_path / "in[1]/in.parquet", 1)
    for source in (prompts.parent, prompts.parent / "**"):
        assert run.main(words(model, source, prompts.parent / "out")) == 2
    assert [path.name for path in prompts.parent.iterdir()] == ["in.parquet"]


# --- model, template, adapter, export


@pytest.mark.parametrize("name", ["m[1]*?", "~no-such-user", " lr=3 #%20", "-m", "1e3", "it's\n{a}"])
def test_a_model_and_what_belongs_to_it_may_have_any_name(
    model: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / name)
    Path(f"{name}.jinja").write_text("{{ messages[0].content }}")
    more = ["input.chat=true", f"model.chat_template={name}.jinja"]
    assert run.main(words(name, make_prompts(tmp_path / "in.parquet", 1), "out", *more)) == 0
    assert OutputFolder("out").manifest.config["model"]["path"] == name


@pytest.mark.second
def test_a_home_of_a_user_that_does_not_exist_is_a_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_prompts(tmp_path / "in.parquet", 1)
    for key in (
        "model.path",
        "draft.path",
        "model.adapter",
        "model.chat_template",
        "decode.schema",
        "decode.grammar",
        "input.path",
    ):
        draft = ["draft=eagle3"] if key == "draft.path" else []
        assert run.main([*words(model, source, tmp_path / "out"), *draft, f"{key}=~no-such-user/x"]) == 2, key
    assert capsys.readouterr().err.count("\n") == 7


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", ["e[1]*?", "x" * 240, " lr=3 #%20", "hf:x", "new\nline"])
def test_an_export_may_have_any_name(
    other: Path, tmp_path: Path, name: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = f"{name}{suffix}"
    assert cli.main(["export", str(other), target, "--to", "chat", "--status", "ok,truncated"]) == 0
    rows = Path(target).read_text().count("\n") if suffix == ".jsonl" else pq.ParquetFile(pa.OSFile(target)).metadata.num_rows
    assert (rows, [path.name for path in tmp_path.iterdir()]) == (7, [target])


def test_a_compacted_folder_may_have_any_name(other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compact", str(other), "hf:[1]*"]) == 0
    assert pq.ParquetFile(pa.OSFile("./hf:[1]*/data/part-00000.parquet")).metadata.num_rows == 7


@pytest.mark.parametrize("name", ["x" * 256, "\udcff"])
def test_a_name_that_no_file_can_have_is_refused(
    other: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["export", str(other), f"{tmp_path}/{name}.jsonl", "--to", "chat"],
        ["compact", str(other), f"{tmp_path}/{name}"],
    ):
        assert cli.main(words) == 2
    assert capsys.readouterr().err.count("cannot be written") == 2
    assert list(tmp_path.iterdir()) == []


# --- object stores


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[Lab | CloudLab]:
    with running_lab() if request.param == "s3" else running_gcs() as lab:
        yield lab


@pytest.fixture
def lab(server: Lab | CloudLab, monkeypatch: pytest.MonkeyPatch) -> Lab | CloudLab:
    server.empty()
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.mark.second
def test_a_prefix_of_a_bucket_may_have_any_name(
    lab: Lab | CloudLab, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The input too: a file, in a folder, by a pattern below it."""
    lab.put(f"in/{ALL}/{ALL}.parquet", make_prompts(tmp_path / "in.parquet", 3).read_bytes())
    lab.put("in/run1/x.parquet", b"of another input")
    out = f"{lab.root}/{ALL}"
    command = words(model, f"{lab.root}/in/{ALL}/{ALL}.parquet", out)
    assert run.main(command) == 0
    check_job(command, out, ["q0", "q1", "q2"], capsys)
    for source in (f"in/{ALL}", f"in/{ALL}/*.parquet"):
        [file] = open_source(InputConfig(path=f"{lab.root}/{source}")).files
        assert (file.name, file.num_rows) == (f"{ALL}.parquet", 3)


@pytest.mark.parametrize("name", ["a//b", "a/./b", "a/../b", "a\nb", "a\tb", "x" * 800])
def test_a_prefix_that_is_no_folder_to_every_reader_is_refused_before_any_work(
    lab: Lab | CloudLab, model: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(words(model, make_prompts(tmp_path / "in.parquet", 1), f"{lab.root}/{name}")) == 2
    error = capsys.readouterr().err
    assert "cannot be a folder of a bucket" in error
    assert error.count("\n") == 1
    assert lab.keys() == []


def test_a_file_of_a_dataset_of_the_hub_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub() as hub:
        set_endpoint(monkeypatch, hub.server_port)
        prompts = make_prompts(tmp_path / "in.parquet", 3).read_bytes()
        hub.commit({f"{ALL}/{ALL}.parquet": prompts, "run1/x.parquet": b"of another input"})
        for source in (ALL, f"{ALL}/*.parquet", f"{ALL}/{ALL}.parquet"):
            [file] = open_source(InputConfig(path=f"hf://datasets/{REPO}/{source}")).files
            assert (file.name, file.num_rows) == (f"{ALL}.parquet", 3)
