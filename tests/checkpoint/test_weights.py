"""Checkpoint files: one or several, checked against the config before anything is computed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles, weight_names
from batchspec.checkpoint.weight_files import weight_files
from batchspec.errors import CheckpointError
from batchspec.model.spec import load_spec
from batchspec.model.weights import Checkpoint, DummyWeights, expected_shapes
from tests.helpers.models import make_checkpoint

CPU = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", vocab=64, num_hidden_layers=2, tie_word_embeddings=True)


def open_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(folder, load_spec(folder), dtype=dtype, device=CPU)


def change(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors; `__` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert f"/{folder.name}" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 24}),
        ("mistral", {}),
    ],
)
def test_the_expected_tensors_are_those_that_transformers_saves(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, vocab=64, **config)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_shapes(load_spec(folder)) == saved


def test_tensors_come_in_the_dtype_asked_for(folder: Path) -> None:
    with open_checkpoint(folder, torch.bfloat16) as checkpoint:
        tensor = checkpoint.tensor(EMBEDDING)
    assert torch.equal(tensor, load_file(folder / "model.safetensors")[EMBEDDING].bfloat16())


EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}


def test_experts_in_another_form_are_refused_by_what_is_supported(tmp_path: Path) -> None:
    """Some quantisers and converters store the stacked experts of gpt-oss one by one, others stack those of other families."""
    one_by_one, stacked = "model.layers.0.mlp.experts.0.down_proj.weight", "model.layers.0.block_sparse_moe.experts.down_proj"
    for family, key, name, said in (
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", one_by_one, "one by one, .*only experts in one tensor are"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w2.weight", stacked, "in one tensor, .*only experts one by one"),
    ):
        folder = make_checkpoint(tmp_path / family, family, vocab=64, **EXPERTS)
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensors.pop(key)
        save_file(tensors, folder / "model.safetensors")
        assert re.search(f"1 missing and 1 unexpected tensors: the file has a layer's experts {said}", refusal(folder))
        change(folder, **{name: None})
        assert "a layer's experts" not in refusal(folder)


def test_shards_are_found_through_the_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert [path.name for path in weight_files(folder).paths] == sorted(parts)
    with open_checkpoint(folder) as checkpoint:
        assert all(torch.equal(checkpoint.tensor(name), tensors[name]) for name in names)

    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "1 of 2 weight files missing: model-00002-of-00002.safetensors" in refusal(folder)


def test_one_file_beside_the_shards_of_an_index_is_refused(folder: Path) -> None:
    """transformers would load the one file, vLLM the shards; an index that names that file is no second model."""
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert weight_names(LocalFiles(folder)) == ("model.safetensors",)
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, "model-00001-of-00001.safetensors")}))
    with pytest.raises(CheckpointError, match=r"has model\.safetensors, and model\.safetensors\.index\.json names"):
        weight_names(LocalFiles(folder))


def test_everything_that_does_not_fit_is_listed_at_once(folder: Path) -> None:
    change(folder, model__norm__weight=None, model__layers__0__mlp__up_proj__weight=None, extra__bias=torch.zeros(3))
    change(folder, model__layers__1__self_attn__q_proj__weight=torch.zeros(64, 32))
    message = refusal(folder)
    assert "2 missing tensors: model.layers.0.mlp.up_proj.weight, model.norm.weight; " in message
    assert "1 unexpected tensors: extra.bias" in message
    assert "model.layers.1.self_attn.q_proj.weight is [64, 32], config.json says [64, 64]" in message


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    open_checkpoint(folder)


def test_a_tied_head_may_be_there_if_it_is_the_embedding(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    change(folder, lm_head__weight=embedding.clone())
    open_checkpoint(folder)
    change(folder, lm_head__weight=embedding + 1)
    assert "lm_head.weight differs from the embedding although tie_word_embeddings is true" in refusal(folder)


def test_an_untied_head_must_be_there(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "1 missing tensors: lm_head.weight" in refusal(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    assert "only pytorch_model.bin: safetensors only" in refusal(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


def test_a_broken_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "model.safetensors: cannot be read as safetensors" in refusal(folder)


def test_the_fingerprint_follows_shapes_names_and_sizes(folder: Path) -> None:
    before = weight_files(folder).fingerprint
    assert weight_files(folder).fingerprint == before
    change(folder, extra__bias=torch.zeros(3))
    assert weight_files(folder).fingerprint != before


def test_the_digest_of_tensors_follows_each_of_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tensors than are read evenly chosen ones count."""
    before, tensors = weight_files(folder).tensors, load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, folder / "model.safetensors")
        assert weight_files(folder).tensors != before, name
    save_file(tensors, folder / "model.safetensors")
    assert weight_files(folder).tensors == before
    monkeypatch.setattr("batchspec.checkpoint.weight_files.MOST_TENSORS", len(tensors) // 3)
    noticed = []
    few = weight_files(folder).tensors
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, folder / "model.safetensors")
        noticed.append(weight_files(folder).tensors != few)
    assert len(tensors) // 4 <= sum(noticed) <= len(tensors) // 3


def test_dummy_weights_have_the_shapes_of_the_spec_and_the_usual_spread(folder: Path) -> None:
    spec = load_spec(folder)
    weights = DummyWeights(spec, dtype=torch.float32, device=CPU)
    for name, shape in expected_shapes(spec).items():
        tensor = weights.tensor(name)
        assert tensor.shape == shape
        assert tensor.eq(1).all() if name.endswith("norm.weight") else 0.015 < tensor.std() < 0.025
