"""What draft=mtp opens: the layer of the model's files or of draft.path, and what it refuses in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.spec import ModelSpec
from batchspec.model.weights import judge_model
from tests.helpers.drafting import synthetic
from tests.helpers.engines import DEVICE
from tests.helpers.models import make_checkpoint
from tests.helpers.mtp_checkpoints import (
    LAYOUTS,
    Tensors,
    change_config,
    make_mtp_model,
    mtp_tensors,
    published,
    stored_mtp,
    text_config,
)
from tests.helpers.mtp_definition import read_mtp
from tests.helpers.mtp_drafting import Model, drafter_of, drafter_spec, load_model, mixed_requests, run, wide_batch, wrong_drafts


def judged(folder: Path) -> ModelSpec:
    return judge_model(LocalFiles(folder))


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_bytes_are_those_of_its_matrices(name: str, tmp_path: Path) -> None:
    own = drafter_spec(make_mtp_model(tmp_path, name), judged(tmp_path))
    matrices = [tensor for tensor in stored_mtp(tmp_path).values() if tensor.dim() > 1 and tensor.numel() > 40]
    numbers = sum(tensor.numel() for tensor in matrices)
    assert own.weight_bytes(dtype=torch.bfloat16, device=DEVICE) == pytest.approx(2 * numbers, rel=0.02)
    (kept,) = own.layer_states(torch.bfloat16, 16)
    config = text_config(tmp_path)
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"] if config.get("kv_lora_rank") else None
    assert kept.page_bytes == 16 * 2 * (latent or 2 * 2 * 16)  # 16 tokens: latents, or K and V of 2 heads of 16 numbers
    # The first draft of the next round, the state that it was chosen from, and the confidence in it.
    assert [one.shape for one in kept.row] == [(), (config["hidden_size"],), ()]


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def without_layer(folder: Path) -> None:
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "mtp." not in name}
    save_file(tensors, folder / "model.safetensors")


def cut_fc(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :36].clone()
    save_file(tensors, folder / "model.safetensors")


def other_name(folder: Path) -> None:
    save_file(renamed(load_file(folder / "model.safetensors"), "pre_fc_norm_hidden", "hnorm"), folder / "model.safetensors")


NO_LAYER = r"draft=mtp: .*has no MTP layer in its files, or none that is supported; choose draft=lookup, or draft=eagle3"


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (without_layer, ConfigError, NO_LAYER),
        (lambda folder: change_config(folder, mtp_num_hidden_layers=0), ConfigError, NO_LAYER),
        (lambda folder: change_config(folder, mtp_num_hidden_layers=2), ConfigError, NO_LAYER),
        (lambda folder: change_config(folder, mtp_use_dedicated_embeddings=True), ConfigError, NO_LAYER),
        (cut_fc, CheckpointError, r"mtp\.fc\.weight is \[36, 36\], config\.json says \[36, 72\]"),
        (other_name, CheckpointError, r"1 missing tensors: mtp\.pre_fc_norm_hidden\.weight; 1 unexpected tensors: mtp\.hnorm"),
    ],
)
def test_a_checkpoint_without_a_layer_that_fits_is_refused_in_one_line(
    change: Callable[[Path], None], error: type[Exception], said: str, tmp_path: Path
) -> None:
    change(make_mtp_model(tmp_path, "dense"))
    with pytest.raises(error, match=said) as caught:
        drafter_spec(tmp_path, judged(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_model_of_another_family_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=NO_LAYER):
        drafter_spec(make_checkpoint(tmp_path, "qwen3"), judged(tmp_path))


def tuned_folder(folder: Path, model: Path, *, seed: int) -> Path:
    """A folder with an MTP layer and nothing else, in bf16."""
    folder.mkdir()
    tensors = published(mtp_tensors(text_config(model), seed=seed), text_config(model))
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def mistakes(model: Model) -> int:
    """Number of proposals that are not the reference's."""
    drafter = drafter_of(model, 3, slots=2)
    run(model.target, mixed_requests(3), wide_batch(2, 3), drafter, options=synthetic(3))
    return len(wrong_drafts(model, drafter.seen))


@pytest.mark.second
@pytest.mark.parametrize("name", ["dense", "next", "fp8, mtp too", "wrapped"])
def test_a_layer_in_a_folder_of_its_own_drafts_in_place_of_the_model_s(name: str, tmp_path: Path) -> None:
    """Plain, though the model's own may be in FP8."""
    folder = make_mtp_model(tmp_path / "model", name)
    tuned = tuned_folder(tmp_path / "tuned", folder, seed=9)
    model, own = load_model(folder, path=str(tuned)), load_file(tuned / "model.safetensors")
    assert mistakes(model) > 5
    tensors = {name.removeprefix("mtp."): tensor.double() for name, tensor in own.items()}
    assert mistakes(replace(model, mtp=replace(read_mtp(folder), tensors=tensors))) == 0


def test_a_folder_without_the_layer_is_refused(tmp_path: Path) -> None:
    folder, other = make_mtp_model(tmp_path / "model", "dense"), make_checkpoint(tmp_path / "other", "qwen3")
    with pytest.raises(CheckpointError, match=r"missing tensors: mtp\.") as caught:
        drafter_spec(folder, judged(folder), path=str(other))
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"draft\.path"):
        drafter_spec(folder, judged(folder), path=str(tmp_path / "nowhere"))
