"""`batchspec train draft=mtp`: MTP layers of tiny recurrent models, through the command line and in jobs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from batchspec import cli, run
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import open_source
from batchspec.errors import BatchspecError, CheckpointError, ConfigError, OutputError
from batchspec.heads.data import read_rows
from batchspec.heads.evaluate import Acceptance, acceptance
from batchspec.heads.folder import HeadFolder
from batchspec.heads.mtp_network import MtpNetwork
from batchspec.heads.mtp_weights import plain, read_weights
from batchspec.heads.teacher import Teacher
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint
from tests.heads.mtp_models import add_mtp, checkpoint_with_mtp
from tests.helpers.models import make_checkpoint
from tests.helpers.mtp_checkpoints import make_mtp_model

pytestmark = pytest.mark.second

CPU = torch.device("cpu")
NUM_PROMPTS, CAP = 12, 20
QUICK = ["device=cpu", "train.steps=40", "train.held_out=0", "train.batch_tokens=700", "train.max_len=64", "train.ahead=3"]


def job(folder: Path, out: Path, *overrides: str) -> pl.DataFrame:
    """The output of a job over the prompts that lie beside the model; all rows are equally long."""
    words = [f"model.path={folder / 'model'}", f"input.path={folder / 'prompts.parquet'}", f"output.dir={out}", "device=cpu"]
    words += [f"decode.max_new_tokens={CAP}", "decode.ignore_eos=true", "packing.max_num_seqs=8", *overrides]
    assert run.main(words) == 0
    return pl.read_parquet(out / "data" / "*.parquet").sort("row_index")


def folder_of(folder: Path, name: str, **options: Any) -> Path:
    """A folder with a model, prompts, and what a job without a drafter made of them: model, prompts.parquet, out."""
    checkpoint_with_mtp(folder / "model", name, vocab=96, **options)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, 3 + i % 5).tolist() for i in range(NUM_PROMPTS)]
    pl.DataFrame({"prompt_ids": prompts}).write_parquet(folder / "prompts.parquet")
    job(folder, folder / "out", "draft=none")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("mtp"), "dense")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a model with experts, and in the folder `tuned` a layer some of whose drafts are accepted."""
    folder = folder_of(tmp_path_factory.mktemp("moe"), "moe", fused=True)
    assert train(folder, folder / "tuned", "train.steps=100", "train.lr=3e-2") == 0
    return folder


def train(folder: Path, out: Path, *overrides: str) -> int:
    words = [f"model.path={folder / 'model'}", f"input.path={folder / 'out'}", f"output.dir={out}", *QUICK]
    return cli.main(["train", *words, *([] if any(x.startswith("draft=") for x in overrides) else ["draft=mtp"]), *overrides])


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "training.json").read_text())
    return found


def weights_of(model: Path, folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, as a drafter of the model reads them: with the offsets of norms."""
    mtp = load_spec(model).mtp
    assert mtp is not None
    with Checkpoint(folder, plain(mtp), dtype=torch.float32, device=CPU) as weights:
        return {tensor.name: weights.tensor(tensor.name) for tensor in plain(mtp).tensors()}


def mean_length(frame: pl.DataFrame) -> float:
    """Tokens per round."""
    return sum(len(ids) - 1 for ids in frame["token_ids"]) / int(frame["spec_decode"].struct.field("num_spec_steps").sum())


# --- what is learnt


def test_a_tuned_layer_is_accepted_in_a_job_where_that_of_the_checkpoint_is_not(tuned: Path, tmp_path: Path) -> None:
    """In just the rounds that the replay of the network counts over the finished rows."""
    before = job(tuned, tmp_path / "a", "draft=mtp")
    after = job(tuned, tmp_path / "b", "draft=mtp", f"draft.path={tuned / 'tuned'}")
    assert mean_length(before) < 1.3
    assert mean_length(after) > 1.6
    plain_ids = pl.read_parquet(tuned / "out" / "data" / "*.parquet").sort("row_index")["token_ids"]
    assert all(frame["token_ids"].equals(plain_ids) for frame in (before, after))
    found, counts = replayed(tuned, draft_len=3), after["spec_decode"].struct.unnest()
    assert found.rounds == counts["num_spec_steps"].sum()
    assert found.tokens == sum(len(ids) - 1 for ids in after["token_ids"])
    assert sum(found.accepted) == counts["num_accepted_draft_tokens"].sum()
    assert sum(found.drafted) == counts["num_draft_tokens"].sum()
    assert 0.1 < found.by_position[0] < 0.95


def replayed(folder: Path, *, draft_len: int) -> Acceptance:
    """The acceptance of the trained network on the rows of the job."""
    spec = load_spec(folder / "model")
    assert spec.mtp is not None
    target = Target.load(folder / "model", spec, dtype=torch.float32, device=CPU)
    network = MtpNetwork(spec.mtp, target.output_rows(torch.arange(spec.vocab_size)))
    with Checkpoint(folder / "tuned", spec.mtp, dtype=torch.float32, device=CPU) as weights:
        read_weights(network, spec.mtp, weights)
    rows = read_rows(open_source(InputConfig(path=str(folder / "out"))), vocab_size=spec.vocab_size, max_len=64)
    teacher = Teacher(target, (), None, torch.float32)
    return acceptance(network, teacher, rows, draft_len=draft_len, batch_tokens=100, cast=nullcontext())


def test_the_loss_falls_and_acceptance_on_held_out_rows_is_measured(made: Path, tmp_path: Path) -> None:
    assert train(made, tmp_path / "t", "train.lr=3e-2", "train.held_out=3", "train.eval_steps=20") == 0
    found = record(tmp_path / "t")
    first, *_, last = found["loss"]
    assert last["loss"] < 0.95 * first["loss"]
    assert [point["step"] for point in found["acceptance"]] == [20, 40]


def test_it_starts_from_the_layer_of_the_checkpoint_and_goes_on_from_a_tuned_one(made: Path, tmp_path: Path, capfd: Any) -> None:
    still = ["train.steps=1", "train.lr=1e-12"]
    assert train(made, tmp_path / "same", *still) == 0
    assert f"starts from the weights of {made / 'model'} and drafts all 96 tokens" in capfd.readouterr().err
    for name, tensor in weights_of(made / "model", made / "model").items():
        torch.testing.assert_close(weights_of(made / "model", tmp_path / "same")[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert train(made, tmp_path / "tuned", "train.steps=10", "train.lr=1e-2") == 0
    assert train(made, tmp_path / "on", f"draft.path={tmp_path / 'tuned'}", *still) == 0
    assert f"starts from the weights of {tmp_path / 'tuned'}" in capfd.readouterr().err
    tuned, on, own = (weights_of(made / "model", folder) for folder in (tmp_path / "tuned", tmp_path / "on", made / "model"))
    for name, tensor in tuned.items():
        torch.testing.assert_close(on[name], tensor, rtol=0, atol=1e-6, msg=name)
        assert not torch.allclose(own[name], tensor, atol=1e-4), name


@pytest.mark.parametrize("kind", ["no tensors", "dummy"])
def test_a_layer_without_weights_starts_from_random_ones_and_says_so(
    kind: str, made: Path, tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "out").symlink_to(made / "out")
    if kind == "dummy":
        (tmp_path / "model").symlink_to(made / "model")
    else:
        bare = load_file(made / "model" / "model.safetensors")
        (tmp_path / "model").mkdir()
        save(tmp_path / "model", {name: tensor for name, tensor in bare.items() if not name.startswith("mtp.")}, made / "model")
    words = ["model.load_format=dummy"] if kind == "dummy" else []
    assert train(tmp_path, tmp_path / "a", *words, "train.steps=2") == 0
    said = capfd.readouterr().err
    why = "model.load_format=dummy reads none" if words else f"{tmp_path / 'model'} has no tensors of its MTP layer"
    assert f"{why}: the layer starts from random weights" in said
    assert record(tmp_path / "a")["facts"]["train.lr"] is None
    assert train(tmp_path, tmp_path / "b", *words, "train.steps=2", "train.seed=1") == 0
    first, second = (weights_of(made / "model", tmp_path / name)["mtp.fc.weight"] for name in "ab")
    assert not torch.allclose(first, second, atol=1e-3)
    assert 0.01 < float(first.std()) < 0.03


def save(folder: Path, tensors: dict[str, Tensor], model: Path) -> None:
    """A model with these tensors, and the other files of `model`."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())


def test_an_eagle_head_can_be_trained_for_a_model_with_recurrent_layers_too(made: Path, tmp_path: Path) -> None:
    assert train(made, tmp_path / "head", "draft=eagle3", "train.steps=120", "train.lr=1e-2", "train.muon=false") == 0
    assert mean_length(job(made, tmp_path / "o", "draft=eagle3", f"draft.path={tmp_path / 'head'}")) > 2.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_a_gpu_trains_in_bf16(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    folder = folder_of(tmp_path, name, **sizes)
    words = ["device=cuda", "model.dtype=bfloat16", "train.steps=200", "train.lr=1e-2", "train.held_out=2"]
    assert train(folder, tmp_path / "t", *words) == 0
    first, *_, last = record(tmp_path / "t")["loss"]
    assert max(first["match"]) < 0.3
    assert min(last["match"]) > 0.6


# --- the folder


def test_the_folder_has_the_tensors_of_the_layer_one_by_one_and_names_its_target(tuned: Path) -> None:
    spec, stored = load_spec(tuned / "model"), load_file(tuned / "tuned" / "model.safetensors")
    assert spec.mtp is not None
    assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == {own.name: own.shape for own in spec.mtp.tensors()}
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    config = json.loads((tuned / "tuned" / "config.json").read_text())
    assert config["draft"] == "mtp"
    assert config["target"]["name_or_path"] == str(tuned / "model")
    assert config["target"]["model_type"] == spec.family
    assert sorted(path.name for path in (tuned / "tuned").iterdir()) == ["config.json", "model.safetensors", "training.json"]


def test_a_killed_training_resumes_to_the_same_layer(made: Path, tmp_path: Path, capfd: Any) -> None:
    words = ["train.steps=12", "train.save_s=0"]
    assert train(made, tmp_path / "a", *words) == 0
    with pytest.MonkeyPatch.context() as patch:
        before, seen = HeadFolder.save_state, []

        def killed(self: HeadFolder, state: dict[str, Any]) -> None:
            before(self, state)
            seen.append(state["step"])
            if len(seen) == 5:
                raise KeyboardInterrupt

        patch.setattr(HeadFolder, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            train(made, tmp_path / "b", *words)
    assert train(made, tmp_path / "b", *words) == 0
    assert "continuing after 5 of 12 batches" in capfd.readouterr().err
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert train(made, tmp_path / "b", *words) == 0
    assert f"already complete; draft=mtp draft.path={tmp_path / 'b'} drafts with it" in capfd.readouterr().err


# --- what is refused


def refused(kind: type[BatchspecError], folder: Path, out: Path, capfd: Any, *overrides: str) -> str:
    capfd.readouterr()
    assert train(folder, out, *overrides) == kind.exit_code
    lines: list[str] = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert not out.exists()
    return lines[0]


@pytest.mark.parametrize(
    "word",
    [
        "train.draft_vocab=40", "train.aux_layer_ids=[0]", "train.layers=2", "train.inner=40", "train.mask_token=5",
        "output.layout=speculators", "draft.aux_layers=output", "draft.parallel=true",
    ],
)
def test_keys_of_heads_are_refused(word: str, made: Path, tmp_path: Path, capfd: Any) -> None:
    said = refused(ConfigError, made, tmp_path / "t", capfd, word)
    assert said.endswith("is not used by draft=mtp, whose layer has the shape and the tokens of the model; remove the key")
    assert word.partition("=")[0] in said


def test_a_model_whose_family_has_no_such_layer_is_refused(made: Path, tmp_path: Path, capfd: Any) -> None:
    make_checkpoint(tmp_path / "model", "llama", vocab=96, hidden_size=32, intermediate_size=48)
    (tmp_path / "out").symlink_to(made / "out")
    said = refused(ConfigError, tmp_path, tmp_path / "t", capfd)
    assert "(llama) has no MTP layer that is supported; use draft=eagle3 or draft=parallel" in said


@pytest.mark.parametrize(("name", "family"), [("glm", "glm4_moe"), ("deepseek", "deepseek_v3"), ("nemotron", "nemotron_h")])
def test_a_layer_whose_router_has_a_bias_is_refused(name: str, family: str, made: Path, tmp_path: Path, capfd: Any) -> None:
    make_mtp_model(tmp_path / "model", name)
    (tmp_path / "out").symlink_to(made / "out")
    said = refused(ConfigError, tmp_path, tmp_path / "t", capfd)
    assert "gate.e_score_correction_bias of the MTP layer of" in said
    assert f"({family}) chooses experts and has no gradient, so that layer is not trained" in said


def test_weights_of_another_shape_are_refused_before_anything_is_loaded(made: Path, tmp_path: Path, capfd: Any) -> None:
    checkpoint_with_mtp(tmp_path / "wide", "dense", vocab=96, hidden_size=24)
    said = refused(CheckpointError, made, tmp_path / "t", capfd, f"draft.path={tmp_path / 'wide'}")
    assert "mtp.fc.weight is [24, 48], config.json says [20, 40]" in said
    assert "no such folder" in refused(CheckpointError, made, tmp_path / "t", capfd, f"draft.path={tmp_path / 'none'}")


def test_a_folder_of_another_kind_of_drafter_is_left_alone(made: Path, tmp_path: Path, capfd: Any) -> None:
    assert train(made, tmp_path / "h", "draft=eagle3", "train.steps=1") == 0
    capfd.readouterr()
    assert train(made, tmp_path / "h", "train.steps=1") == OutputError.exit_code
    assert 'belongs to a training with draft.name "eagle3", now "mtp"' in capfd.readouterr().err


def test_the_tensors_of_the_layer_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    """Of the helper: else a test could pass because two models differ."""
    folders = [checkpoint_with_mtp(tmp_path / name, "dense", vocab=31) for name in "ab"]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert {name for name in first if name.startswith("mtp.")} == set(add_mtp(folders[0]))
