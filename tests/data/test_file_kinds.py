"""Whatever has the name of a file that a job reads, it is read whole or refused by name, at once: a pipe is not waited for, a
link to nothing is not an absent file, and no row is left out without a word.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec import cli, run
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import open_source
from batchspec.errors import InputError, StorageError
from batchspec.model.spec import load_spec
from batchspec.process.local_files import fault_of
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import make_prompts
from tests.model.test_lora import make_adapter

LIMIT_S = 120


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """What waits for a pipe fails instead of hanging."""

    def late(*_: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "a pipe, not a file"),
    "socket": (_bind, "a socket, not a file"),
    "folder": (Path.mkdir, "a folder, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device, not a file"),
    "link to nothing": (lambda path: path.symlink_to("gone"), "a link to gone, which is not there"),
    "link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "unreadable": (lambda path: path.touch(mode=0), "Permission denied"),
}
"""Kind -> what makes it, and what is said of it."""


@pytest.fixture
def as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions hold for root too."""
    opened, listed = os.open, os.scandir

    def check(path: Any) -> None:
        if isinstance(path, str | Path) and os.path.exists(path) and not os.stat(path).st_mode & 0o400:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def open_checked(path: Any, *more: Any, **named: Any) -> int:
        check(path)
        return opened(path, *more, **named)

    def list_checked(path: Any = ".") -> Any:
        check(path)
        return listed(path)

    monkeypatch.setattr(os, "open", open_checked)
    monkeypatch.setattr(os, "scandir", list_checked)


def replaced(path: Path, kind: str) -> str:
    """Put something of this kind in the place of a file; returns what is said of it."""
    path.unlink(missing_ok=True)
    make, said = KINDS[kind]
    make(path)
    return said


# --- input


def rows(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"prompt": "a"}\n')
    return path


def refusal(*paths: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_source(InputConfig(path=[*map(str, paths)]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("as_others")
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv", ".jsonl.gz"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_is_no_file_is_refused_by_name(tmp_path: Path, kind: str, suffix: str) -> None:
    """As the entry itself, in a folder, by a pattern, and by one that looks into folders; beside a good file."""
    bad = rows(tmp_path / "good.jsonl").with_name(f"bad{suffix}")
    said = replaced(bad, kind)
    (tmp_path / "deep").mkdir()
    shutil.move(bad, tmp_path / "deep" / bad.name)
    there = tmp_path / "deep" / bad.name
    entries = [there, tmp_path / "deep" / f"*{suffix}", tmp_path / f"*/bad{suffix}"]
    if kind != "folder":
        entries += [tmp_path, tmp_path / "**", tmp_path / f"**/b*{suffix}"]
    for entry in entries[1:] if kind == "folder" else entries:
        error = refusal(entry, *([] if entry in (tmp_path, tmp_path / "**") else [tmp_path / "good.jsonl"]))
        assert bad.name in error
        assert said in error, error


def test_a_folder_with_the_name_of_a_file_is_a_folder(tmp_path: Path) -> None:
    """As Spark writes them; a pattern that would match the folder alone is refused (above)."""
    rows(tmp_path / "x.jsonl/part-0.jsonl")
    for entry in ("", "x.jsonl", "*/*.jsonl", "**/*.jsonl", "x.jsonl/*"):
        [file] = open_source(InputConfig(path=str(tmp_path / entry))).files
        assert file.num_rows == 1


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    rows(tmp_path / "elsewhere/year/a.jsonl")
    rows(tmp_path / "in/b.jsonl")
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    for entry, names in (
        ("in", ["b.jsonl", "linked/year/a.jsonl"]), ("in/**/*.jsonl", ["b.jsonl", "linked/year/a.jsonl"]),
        ("in/*/year/*.jsonl", ["linked/year/a.jsonl"]), ("in/linked", ["year/a.jsonl"]),
    ):
        assert [file.name for file in open_source(InputConfig(path=str(tmp_path / entry))).files] == names


@pytest.mark.parametrize("entry", ["in", "in/**", "in/**/*.jsonl"])
@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("moved", "/scratch/gone", "in/moved: a link to /scratch/gone, which is not there"),
        ("circle", ".", "in/circle: a link to a folder that it lies in"),
        ("deep/circle", "../..", "in/deep/circle/in: a link to a folder that it lies in"),
        ("circle", "circle", "in/circle: Too many levels of symbolic links"),
        ("twice", "deep", "names one file twice, as {}/in/deep/a.jsonl and as {}/in/twice/a.jsonl; remove the link"),
        ("twice.jsonl", "deep/a.jsonl", "names one file twice, as {}/in/deep/a.jsonl and as {}/in/twice.jsonl; remove the link"),
    ],
)
def test_a_link_by_which_rows_would_be_lost_or_read_twice_is_refused_by_name(
    tmp_path: Path, entry: str, name: str, target: str, said: str
) -> None:
    rows(tmp_path / "in/deep/a.jsonl")
    (tmp_path / "in" / name).symlink_to(target)
    assert said.format(tmp_path, tmp_path) in refusal(tmp_path / entry)


@pytest.mark.usefixtures("as_others")
@pytest.mark.parametrize("entry", ["in", "in/**/*.jsonl", "in/*/*.jsonl", "in/deep/*.jsonl", "in/deep"])
def test_a_folder_that_cannot_be_listed_is_refused_by_name(tmp_path: Path, entry: str) -> None:
    rows(tmp_path / "in/good/a.jsonl")
    (tmp_path / "in/deep").mkdir(mode=0)
    error = refusal(tmp_path / entry)
    assert f"{tmp_path}/in/deep: Permission denied" in error


@pytest.mark.usefixtures("as_others")
def test_hidden_names_and_names_that_are_no_datas_are_left_out_whatever_they_are(tmp_path: Path) -> None:
    rows(tmp_path / "in/a.jsonl")
    for name in ("_tmp", ".git", "_x.jsonl", ".y.jsonl"):
        (tmp_path / "in" / name).symlink_to("gone")
    (tmp_path / "in/_no").mkdir(mode=0)
    for name in ("notes.txt", "README"):
        os.mkfifo(tmp_path / "in" / name)
    for entry in ("in", "in/*", "in/**"):
        assert [file.name for file in open_source(InputConfig(path=str(tmp_path / entry))).files] == ["a.jsonl"]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd\x04"])
def test_an_empty_or_torn_file_is_refused_by_name(tmp_path: Path, suffix: str, content: bytes) -> None:
    rows(tmp_path / "in/a.jsonl")
    (tmp_path / f"in/bad{suffix}").write_bytes(content)
    assert f"bad{suffix}" in refusal(tmp_path / "in")


def test_an_empty_file_of_lines_has_no_rows(tmp_path: Path) -> None:
    """As writers of shards leave them."""
    rows(tmp_path / "in/a.jsonl")
    (tmp_path / "in/b.jsonl").touch()
    assert [file.num_rows for file in open_source(InputConfig(path=str(tmp_path / "in"))).files] == [1, 0]


# --- models, and the files that a job names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With every file that a model may have."""
    folder = make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))
    for name in ("special_tokens_map.json", "added_tokens.json", "hf_quant_config.json", "generation_config.json"):
        if not (folder / name).exists():
            (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    design = tiny_design(load_spec(model), draft_vocab=64)
    return write_head(tmp_path_factory.mktemp("head"), design, random_tensors(design))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), model, ["q_proj"])


FILES = {
    "model.path": (
        "config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ),
    "draft.path": ("config.json", "model.safetensors"),
    "model.adapter": ("adapter_config.json", "adapter_model.safetensors"),
}
PLACES = [(key, name) for key, names in FILES.items() for name in names]


@pytest.fixture
def copies(model: Path, head: Path, adapter: Path, tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """For each of PLACES: its name, the file in a copy of its folder, and the arguments of a run that reads the copy."""
    source = make_prompts(tmp_path / "in.parquet", 1)
    folders = {"model.path": model, "draft.path": head, "model.adapter": adapter}
    base = [f"model.path={model}", f"input.path={source}", f"output.dir={tmp_path / 'out'}", "decode.max_new_tokens=2"]

    def made() -> Iterator[tuple[str, Path, list[str]]]:
        for index, (key, name) in enumerate(PLACES):
            folder = shutil.copytree(folders[key], tmp_path / str(index))
            more = ["draft=eagle3"] if key == "draft.path" else []
            yield name, folder / name, [*base, *more, "input.chat=true", f"{key}={folder}"]

    return made()


@pytest.mark.second
@pytest.mark.usefixtures("as_others")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_model_that_is_no_file_is_refused_by_name(
    copies: Iterator[tuple[str, Path, list[str]]], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file, words in copies:
        said = replaced(file, kind)
        assert run.main(words) == 2, words
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert name in error
        assert said in error, error
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("as_others")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["model.path", "draft.path", "model.adapter"])
def test_a_name_of_a_model_that_leads_to_no_folder_is_refused_and_not_looked_for_on_the_hub(
    model: Path, tmp_path: Path, key: str, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in ("folder", "unreadable"):
        pytest.skip("a folder is refused by what it lacks")
    monkeypatch.chdir(tmp_path)
    source, said = make_prompts(tmp_path / "in.parquet", 1), replaced(tmp_path / "name", kind)
    more = ["draft=eagle3"] if key == "draft.path" else []
    assert run.main([f"model.path={model}", f"input.path={source}", "output.dir=out", *more, f"{key}=name"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{key}=name: {said.replace('not a file', 'not a folder')}" in error


@pytest.mark.usefixtures("as_others")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_a_job_names_and_is_none_is_refused_by_name(
    model: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, bad = make_prompts(tmp_path / "in.parquet", 1), tmp_path / "bad"
    said = replaced(bad, kind)
    base = [f"model.path={model}", f"input.path={source}", f"output.dir={tmp_path / 'out'}", "decode.max_new_tokens=2"]
    commands = [
        ["run", *base, "input.chat=true", f"model.chat_template={bad}"], ["run", *base, f"decode.schema={bad}"],
        ["run", *base, f"decode.grammar={bad}"], ["export", "--from-openai", str(bad), str(tmp_path / "new.parquet")],
    ]
    for words in commands:
        assert cli.main(words) == 2, words
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert said in error, error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_empty_or_torn_file_of_a_model_is_refused_by_name(
    model: Path, tmp_path: Path, name: str, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * share)])
    source = make_prompts(tmp_path / "in.parquet", 1)
    assert run.main([f"model.path={folder}", f"input.path={source}", f"output.dir={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1


def test_a_pipe_in_an_output_folder_is_not_waited_for(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_prompts(tmp_path / "in.parquet", 1)
    words = [f"model.path={model}", f"input.path={source}", f"output.dir={tmp_path / 'out'}", "decode.max_new_tokens=2"]
    assert run.main(words) == 0
    manifest = tmp_path / "out/_batchspec/manifest.json"
    assert json.loads(manifest.read_text())
    replaced(manifest, "pipe")
    capsys.readouterr()
    assert run.main(words) == 74
    assert "a pipe, not a file" in capsys.readouterr().err


# --- a disk that fails says nothing about the file


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EIO, "x"), 74), (OSError(errno.ENOSPC, "x"), 74), (OSError(errno.ESTALE, "x"), 74),
        (RuntimeError("of a library in Rust: Input/output error (os error 5)"), 74),
        (FileNotFoundError(errno.ENOENT, "x"), 2), (OSError("Is a directory (os error 21)"), 2), (OSError("5"), 2),
        (ValueError(), 2),
    ],
)
def test_errors_that_a_repair_of_the_disk_mends_are_told_from_others(error: Exception, code: int) -> None:
    assert fault_of(error, "a", InputError("b")).exit_code == code


def fail(monkeypatch: pytest.MonkeyPatch, call: str, bad: Path) -> None:
    """This function of module os fails for this path; `read`: the file can be opened, and reading it fails."""
    if call == "read":
        bad.unlink()
        bad.symlink_to("/proc/self/mem")  # reading its first byte is an I/O error, by the kernel
        return
    real = getattr(os, call)

    def failing(path: Any, *more: Any, **named: Any) -> Any:
        if isinstance(path, str | Path) and os.fspath(path) == str(bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(bad))
        return real(path, *more, **named)

    monkeypatch.setattr(os, call, failing)


def check_broken(code: int, name: str, said: str) -> None:
    assert code == 74, said
    assert said.count("\n") == 1, said
    assert name in said
    assert "Input/output error (EIO)" in said
    assert "run the same command again" in said


@pytest.mark.second
@pytest.mark.parametrize("call", ["stat", "lstat", "open", "read"])
def test_an_io_error_at_any_file_of_a_model_is_no_bad_file(
    copies: Iterator[tuple[str, Path, list[str]]], tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file, words in copies:
        if call == "lstat" and (name.endswith(".safetensors") or "/" in name):
            continue  # a list of the folder tells that these are there
        with pytest.MonkeyPatch.context() as patched:
            fail(patched, call, file)
            code = run.main(words)
        check_broken(code, name, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.second
@pytest.mark.parametrize("key", FILES)
def test_an_io_error_at_any_reading_of_weights_is_no_bad_file(
    model: Path, head: Path, adapter: Path, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are opened several times: for their headers, for digests, and to be loaded."""
    source = make_prompts(tmp_path / "in.parquet", 1)
    folder = {"model.path": model, "draft.path": head, "model.adapter": adapter}[key]
    name, opened = FILES[key][-1] if key == "model.adapter" else "model.safetensors", os.open
    words = [f"model.path={model}", f"input.path={source}", "decode.max_new_tokens=2", f"{key}={folder}"]
    words += ["draft=eagle3"] if key == "draft.path" else []
    code, good = 74, -1
    while code:
        good, left = good + 1, [good + 1]

        def failing(path: Any, *more: Any, left: list[int] = left, **named: Any) -> int:
            left[0] -= str(path) == str(folder / name)
            if left[0] <= 0 and str(path) == str(folder / name):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return opened(path, *more, **named)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "open", failing)
            code = run.main([*words, f"output.dir={tmp_path / str(good)}"])
        said = capsys.readouterr().err
        if code:
            check_broken(code, name, said[said.rindex("\nbatchspec: ") + 1 :] if "\nbatchspec: " in said else said)
    assert good > 1


@pytest.mark.parametrize("call", ["stat", "lstat", "listdir"])
def test_an_io_error_at_the_folder_of_a_model_is_no_bad_folder(
    model: Path, tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = make_prompts(tmp_path / "in.parquet", 1), shutil.copytree(model, tmp_path / "there")
    fail(monkeypatch, call, folder)
    code = run.main([f"model.path={folder}", f"input.path={source}", f"output.dir={tmp_path / 'out'}"])
    check_broken(code, str(folder), capsys.readouterr().err)


@pytest.mark.parametrize("call", ["stat", "open", "read"])
def test_an_io_error_at_a_file_that_a_job_names_is_no_bad_file(
    model: Path, tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, bad = make_prompts(tmp_path / "in.parquet", 1), tmp_path / "bad"
    bad.write_text("{}")
    fail(monkeypatch, call, bad)
    base = [f"model.path={model}", f"input.path={source}", f"output.dir={tmp_path / 'out'}", "decode.max_new_tokens=2"]
    commands = [
        ["run", *base, "input.chat=true", f"model.chat_template={bad}"], ["run", *base, f"decode.schema={bad}"],
        ["run", *base, f"decode.grammar={bad}"], ["export", "--from-openai", str(bad), str(tmp_path / "new.parquet")],
    ]
    for words in commands:
        check_broken(cli.main(words), "bad", capsys.readouterr().err)


@pytest.mark.parametrize("call", ["stat", "open"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv", ".jsonl.gz"])
@pytest.mark.parametrize("entry", ["in/bad{}", "in", "in/*{}", "**/bad{}"])
def test_an_io_error_at_an_input_is_no_bad_file(
    tmp_path: Path, entry: str, suffix: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = rows(tmp_path / f"in/bad{suffix}")
    fail(monkeypatch, call, bad)
    with pytest.raises(StorageError) as caught:
        open_source(InputConfig(path=str(tmp_path / entry.format(suffix))))
    check_broken(caught.value.exit_code, bad.name, f"{caught.value}\n")


@pytest.mark.parametrize("entry", ["in", "in/**/*.jsonl", "in/deep/*.jsonl", "in/deep"])
def test_an_io_error_at_a_folder_of_an_input_is_no_bad_folder(
    tmp_path: Path, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(tmp_path / "in/deep/a.jsonl")
    fail(monkeypatch, "scandir", tmp_path / "in/deep")
    with pytest.raises(StorageError) as caught:
        open_source(InputConfig(path=str(tmp_path / entry)))
    check_broken(caught.value.exit_code, "in/deep", f"{caught.value}\n")
