"""What a run could not load is refused by run, plan and submit alike, before anything is made or fetched, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec import cli
from batchspec.checkpoint.files import LocalFiles
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import InputConfig, ModelConfig, RunConfig
from batchspec.console.text import ERROR_CHARS
from batchspec.draft.weights import read_head_spec
from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.prepare import open_job
from batchspec.model.weights import judge_model
from tests.data.hub_lab import Hub, running_hub
from tests.helpers.eagle_reference import Design
from tests.helpers.heads import random_tensors, write_head
from tests.helpers.models import make_checkpoint, make_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer(tmp_path_factory.mktemp("judged") / "model")
    return make_checkpoint(folder, "llama", num_hidden_layers=1, tie_word_embeddings=False, max_position_embeddings=2048)


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(change(tensors), folder / WEIGHTS)


def only(name: str, content: bytes = b"anything") -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(content)

    return change


def cut(size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


def named(change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: rewritten(folder, lambda tensors: {change(name): tensor for name, tensor in tensors.items()})


def with_norm(tensor: torch.Tensor) -> Callable[[Path], object]:
    return lambda folder: rewritten(folder, lambda tensors: {**tensors, NORM: tensor})


def header(content: bytes, *, length: int | None = None) -> Callable[[Path], object]:
    return only(WEIGHTS, (len(content) if length is None else length).to_bytes(8, "little") + content)


def index(content: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(json.dumps(content))


def set_key(key: str, text: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config.pop(key, None)
        (folder / "config.json").write_text(json.dumps(config)[:-1] + f', "{key}": {text}}}')

    return change


def twice(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "model-2.safetensors")
    index({"weight_map": {"a": WEIGHTS, "b": "model-2.safetensors"}})(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "only .bin": (only("pytorch_model.bin"), "only pytorch_model.bin: safetensors only"),
    "only .gguf": (only("model-Q4_K_M.gguf"), "only model-Q4_K_M.gguf: safetensors only"),
    "an adapter": (only("adapter_model.safetensors"), "only adapter_model.safetensors: safetensors only"),
    "nothing": (lambda folder: (folder / WEIGHTS).unlink(), "no weights: neither model.safetensors nor"),
    "an LFS pointer": (only(WEIGHTS, POINTER), "model.safetensors: a pointer of Git LFS, not the weights; run `git lfs pull`"),
    "an empty file": (only(WEIGHTS, b""), "cannot be read as safetensors (0 bytes"),
    "cut off in the header": (cut(100), "cannot be read as safetensors (100 bytes"),
    "cut off in the data": (cut(20_000), "cannot be read as safetensors (cut off: by its header it has "),
    "a page of HTML": (only(WEIGHTS, b"<!DOCTYPE html><html>" * 9), "cannot be read as safetensors (189 bytes"),
    "a header that is not valid JSON": (header(b"{nope}"), "its header is not JSON"),
    "a header nested deeply": (header(b'{"a":' + b"[" * 100_000), "its header is not JSON"),
    "a header of an array": (header(b"[1, 2]"), "its header is not an object"),
    "a header without offsets": (header(b'{"a": {"dtype": "F32"}}'), "no dtype, shape and offsets of 'a'"),
    "a header too long": (header(b"{}", length=2**62), "not the length of a header"),
    "a missing shard": (index({"weight_map": {"a": WEIGHTS, "b": "gone.safetensors"}}), "1 of 2 weight files missing: gone"),
    "an index that leads out": (index({"weight_map": {"a": "../other.safetensors"}}), "other.safetensors' is not a safetensors"),
    "an index of nothing": (index({"weight_map": []}), "the index names no weight files"),
    "a tensor in two files": (twice, "lm_head.weight is in model.safetensors and in another file too"),
    "a compiled model": (named(lambda name: "_orig_mod." + name), "_orig_mod.lm_head.weight is there instead of lm_head.weight"),
    "a multimodal model": (
        named(lambda name: name.replace("model.", "model.language_model.").replace("lm_head", "model.lm_head")),
        "model.lm_head.weight is there instead of lm_head.weight: saved from inside a wrapper",
    ),
    "names of many lines": (named(lambda name: name + "\n\x1b[31m" + "x" * 500), "lm_head.weight\\n\\x1b[31mxxx"),
    "int8": (with_norm(torch.ones(64, dtype=torch.int8)), f"{NORM} is I8: F64, F32, F16, BF16 are supported"),
    "float8": (with_norm(torch.ones(64).to(torch.float8_e4m3fn)), f"{NORM} is F8_E4M3: F64"),
    "int64": (with_norm(torch.ones(64, dtype=torch.int64)), f"{NORM} is I64: F64"),
    "bool": (with_norm(torch.ones(64, dtype=torch.bool)), f"{NORM} is BOOL: F64"),
    "another shape": (with_norm(torch.ones(65)), f"{NORM} is [65], config.json says [64]"),
    "NaN in config.json": (set_key("rms_norm_eps", "NaN"), "config.json: rms_norm_eps is NaN; it must be a number in 1e-20 .. 1"),
    "yarn by nothing": (set_key("rope_scaling", '{"type": "yarn", "factor": 0}'), "rope_scaling.factor is 0; it must"),
    "another architecture": (set_key("model_type", '"gpt2"'), 'model_type="gpt2" is not supported'),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
    "no template": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}'),
        "a chat needs a template, and the model has none",
    ),
}


def prompts(folder: Path) -> Path:
    turns = pa.array([[{"role": "user", "content": "Say again"}]] * 3)
    pq.write_table(pa.table({"messages": turns}), folder / "in.parquet")
    return folder / "in.parquet"


THROUGH_THE_COMMAND_LINE = ("only .gguf", "cut off in the data", "int8", "no template")
"""All commands call open_job, as the other cases do: composing a configuration takes a second."""


def job(model: Path | str, source: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(model)), input=InputConfig(path=str(source)), draft=DraftConfig(name="none"), device="cpu"
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused_in_one_line(name: str, model: Path, tmp_path: Path) -> None:
    change, said = BROKEN[name]
    folder = shutil.copytree(model, tmp_path / "model")
    change(folder)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        open_job(job(folder, prompts(tmp_path)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= ERROR_CHARS


@pytest.mark.parametrize("name", THROUGH_THE_COMMAND_LINE)
def test_run_plan_and_submit_refuse_it_with_the_same_line(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = BROKEN[name]
    folder = shutil.copytree(model, tmp_path / "model")
    change(folder)
    words = [f"model.path={folder}", f"input.path={prompts(tmp_path)}", f"output.dir={tmp_path}/out", "device=cpu", "draft=none"]
    lines = []
    for command in ("run", "plan", "submit"):
        assert cli.main([command, *words]) == 2, command
        lines.append(capsys.readouterr().err)
    assert said in lines[0]
    assert lines[0] == lines[1] == lines[2]
    assert lines[0].count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_all_that_does_not_fit_is_counted_and_the_first_of_it_named(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    named(lambda name: f"x{name}")(folder)
    with pytest.raises(CheckpointError) as caught:
        judge_model(LocalFiles(folder))
    said = "12 missing tensors: lm_head.weight and 11 more; 12 unexpected tensors: xlm_head.weight and 11 more"
    assert str(caught.value).endswith(said)


def test_what_is_right_passes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model.path={model}", f"input.path={prompts(tmp_path)}", f"output.dir={tmp_path}/out", "device=cpu", "draft=none"]
    assert cli.main(["plan", *words]) == 0
    assert cli.main(["submit", *words]) == 0
    assert "sbatch --array=0-0" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", [{"num_hidden_layers": 4096, "hidden_size": 8192}, {"vocab_size": 2**26, "hidden_size": 2**20}])
def test_a_shape_that_no_memory_holds_is_refused_before_its_noise_is_made(
    shape: dict[str, int], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True, **shape}))
    pq.write_table(pa.table({"prompt_ids": [[1, 2, 3]]}), tmp_path / "in.parquet")
    words = [f"model.path={tmp_path}/model", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out", "device=cpu"]
    assert cli.main(["run", *words, "model.load_format=dummy", "draft=none", "decode.max_new_tokens=4"]) == 2
    assert "the weights take " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- heads


@pytest.mark.parametrize(
    ("tensor", "dtype", "said"),
    [
        ("norm.weight", torch.int32, "norm.weight is I32: F64, F32, F16, BF16 are supported, quantized weights are not"),
        ("fc.weight", torch.float8_e5m2, "fc.weight is F8_E5M2: F64"),
        ("d2t", torch.float32, "d2t is F32, it must be I64 or I32"),
        ("d2t", torch.bool, "d2t is BOOL, it must be"),
        ("t2d", torch.float32, "t2d is F32, it must be BOOL or U8"),
    ],
)
def test_tensors_of_a_head_have_the_dtypes_that_they_need(
    tensor: str, dtype: torch.dtype, said: str, model: Path, tmp_path: Path
) -> None:
    design = Design(hidden=64, target_hidden=64, vocab=320, draft_vocab=40, taps=(0, 1))
    head = write_head(tmp_path / "head", design, random_tensors(design))
    assert read_head_spec(head, judge_model(LocalFiles(model)), aux_layers="input").aux_layer_ids == (0, 1)
    rewritten(head, lambda tensors: {**tensors, tensor: tensors[tensor].to(dtype)})
    config = job(model, prompts(tmp_path))
    config.draft = DraftConfig(name="eagle3", path=str(head), aux_layers="input")
    with pytest.raises(CheckpointError) as caught:
        open_job(config)
    assert said in str(caught.value)


def test_a_vocabulary_that_leads_nowhere_is_refused_before_a_run(model: Path, tmp_path: Path) -> None:
    design = Design(hidden=64, target_hidden=64, vocab=320, draft_vocab=40, taps=(0, 1))
    head = write_head(tmp_path / "head", design, random_tensors(design))
    config = job(model, prompts(tmp_path))
    config.draft = DraftConfig(name="eagle3", path=str(head), aux_layers="input")
    open_job(config, fetch=False)
    rewritten(head, lambda tensors: {**tensors, "d2t": tensors["d2t"].int() + 900})
    with pytest.raises(CheckpointError, match="d2t leads 40 draft ids out of the vocabulary of 320"):
        open_job(config, fetch=False)


def test_a_tensor_of_a_head_that_exists_under_both_of_its_names_is_refused(model: Path, tmp_path: Path) -> None:
    design = Design(hidden=64, target_hidden=64, vocab=320, draft_vocab=40, taps=(0, 1))
    head = write_head(tmp_path / "head", design, random_tensors(design))
    rewritten(head, lambda tensors: {**tensors, "model.norm.weight": tensors["norm.weight"] + 1})
    with pytest.raises(CheckpointError, match="is stored twice, under two names"):
        read_head_spec(head, judge_model(LocalFiles(model)))


# --- the hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as lab:
        yield lab


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.second
def test_on_the_hub_headers_are_judged_before_a_byte_of_weights_is_fetched(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Every broken model under its own id; refusals name that id and no path in the cache."""
    ids = {f"owner/m{number}": name for number, name in enumerate(BROKEN)}
    for hub_id, name in ids.items():
        BROKEN[name][0](shutil.copytree(model, hub.folder / hub_id))
    source = prompts(tmp_path)
    said = hub.refusals(tmp_path / "home", {hub_id: asdict(job(hub_id, source)) for hub_id in ids})
    for hub_id, name in ids.items():
        assert BROKEN[name][1] in said[hub_id]
        assert said[hub_id].startswith(hub_id) or name == "no template"
        assert "\n" not in said[hub_id]
        assert "models--" not in said[hub_id]
    largest = max(header_bytes(model / WEIGHTS), 100_100)
    assert all(start in (0, 8) and count <= largest for _, start, count in hub.weight_bytes())
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.second
def test_a_model_of_the_hub_is_planned_without_its_weights_and_run_with_them_also_offline(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, hub.folder / "owner/good")
    design = Design(hidden=64, target_hidden=64, vocab=320, draft_vocab=40, taps=(0, 1))
    write_head(hub.folder / "owner/head", design, random_tensors(design))
    hub.given.clear()
    words = ["model.path=owner/good", f"input.path={prompts(tmp_path)}", "device=cpu", "decode.max_new_tokens=4", "draft=eagle3",
             "draft.path=owner/head", "draft.aux_layers=input"]
    home = tmp_path / "home"
    ((code, out, err),) = hub.run(home, ["plan", *words])
    assert code == 0, err
    assert "rounds " in out
    headers = [header_bytes(folder / WEIGHTS) - 8 for folder in (model, hub.folder / "owner/head")]
    asked = [(WEIGHTS, *part) for size in headers for part in ((0, 8), (8, size))]
    counts = [count for item in hub.weight_bytes() if item not in asked for count in item[2:]]
    assert counts == [40 * 8, 320], "and the tables of the head's vocabulary: d2t, t2d"
    assert len(hub.weight_bytes()) == len(asked) + 2
    assert not list(home.rglob("*.safetensors"))
    ((code, _, err),) = hub.run(home, ["run", *words, f"output.dir={tmp_path}/out"])
    assert code == 0, err
    assert len(list(home.rglob("*.safetensors"))) == 2
    ((code, _, err),) = hub.run(home, ["run", *words, f"output.dir={tmp_path}/again"], HF_HUB_OFFLINE="1")
    assert code == 0, err


@pytest.mark.second
def test_what_the_hub_does_not_have_is_one_line(hub: Hub, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, hub.folder / "owner/there", dirs_exist_ok=True)
    common = [f"input.path={prompts(tmp_path)}", "device=cpu", "draft=none"]
    found = hub.run(
        tmp_path / "home",
        ["plan", "model.path=owner/nothing", *common],
        ["plan", "model.path=owner/there", "model.revision=v9", *common],
    )
    assert [code for code, _, _ in found] == [2, 2]
    assert "model.path=owner/nothing: neither a folder here nor a hub model that you may read" in found[0][2]
    assert "model.path=owner/there: the hub has no revision 'v9' of it" in found[1][2]
