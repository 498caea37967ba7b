"""`batchspec train`: heads of tiny models from their own completions, through the command line and the engine of a job."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from batchspec import cli, run
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import open_source
from batchspec.draft.weights import load_head
from batchspec.errors import BatchspecError, ConfigError, InputError, Interrupted, OutputError, StorageError
from batchspec.heads.data import read_rows
from batchspec.heads.evaluate import acceptance
from batchspec.heads.folder import HeadFolder
from batchspec.heads.head import published_network
from batchspec.heads.step_network import draft_loss
from batchspec.heads.teacher import Teacher
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from tests.checkpoint.test_weight_sums import edit_unseen
from tests.helpers.models import make_checkpoint

pytestmark = pytest.mark.second

CPU = torch.device("cpu")
NUM_PROMPTS, CAP = 16, 20
BLOCK = ["draft=block", "train.layers=2", "train.anchors=0.5"]
QUICK = ["device=cpu", "train.steps=40", "train.held_out=2", "train.batch_tokens=700", "train.max_len=64", "train.ahead=3"]


def job(model: Path, out: Path, *overrides: str) -> pl.DataFrame:
    """The output of a job over the prompts that lie beside the model."""
    words = [f"model.path={model}", f"input.path={model.parent / 'prompts.parquet'}", f"output.dir={out}", "device=cpu"]
    words += [f"decode.max_new_tokens={CAP}", "packing.max_num_seqs=8", *overrides]
    assert run.main(words) == 0
    return pl.read_parquet(out / "data" / "*.parquet")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("train"))


def prepared(folder: Path) -> Path:
    """A folder with a tiny model, prompts, and what a job without a drafter made of them: model, prompts.parquet, out."""
    make_checkpoint(folder / "model", "llama", vocab=96, hidden_size=32, intermediate_size=48)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, 3 + i % 5).tolist() for i in range(NUM_PROMPTS)]
    pl.DataFrame({"prompt_ids": prompts}).write_parquet(folder / "prompts.parquet")
    job(folder / "model", folder / "out", "draft=none")
    return folder


def train(made: Path, out: Path, *overrides: str) -> int:
    words = [f"model.path={made / 'model'}", f"input.path={made / 'out'}", f"output.dir={out}", *QUICK]
    kind = [] if any(word.startswith("draft=") for word in overrides) else ["draft=eagle3"]
    return cli.main(["train", *words, *kind, *overrides])


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "training.json").read_text())
    return found


@pytest.fixture(scope="module")
def trained(made: Path) -> Path:
    """A head that knows the completions by heart."""
    assert train(made, made / "head", "train.steps=120", "train.muon=false", "train.lr=1e-2", "train.held_out=0") == 0
    return made / "head"


def mean_length(frame: pl.DataFrame) -> float:
    """Tokens per round."""
    return sum(len(ids) - 1 for ids in frame["token_ids"]) / int(frame["spec_decode"].struct.field("num_spec_steps").sum())


def test_a_trained_head_is_accepted_in_the_engine_where_a_random_one_is_not(made: Path, trained: Path, tmp_path: Path) -> None:
    assert train(made, tmp_path / "random", "train.steps=1", "train.lr=1e-12") == 0
    heads = {"random": tmp_path / "random", "trained": trained}
    frames = {
        name: job(made / "model", tmp_path / name[:1], "draft=eagle3", f"draft.path={path}") for name, path in heads.items()
    }
    assert mean_length(frames["random"]) < 1.2
    assert mean_length(frames["trained"]) > 2.3
    plain = pl.read_parquet(made / "out" / "data" / "*.parquet").sort("row_index")["token_ids"]
    assert all(frame.sort("row_index")["token_ids"].equals(plain) for frame in frames.values())


@pytest.mark.parametrize("words", [["draft=eagle3"], ["draft=parallel", "train.layers=2", "train.inner=40"]], ids=lambda x: x[0])
def test_the_replay_counts_the_rounds_that_the_engine_runs(made: Path, tmp_path: Path, words: list[str]) -> None:
    """A half-trained head, so that rounds keep 0 .. K drafts."""
    assert train(made, tmp_path / "head", "train.steps=45", "train.lr=1e-2", "train.held_out=0", *words) == 0
    draft_len = 4
    frame = job(
        made / "model", tmp_path / "o", words[0], f"draft.path={tmp_path / 'head'}", f"draft.num_speculative_tokens={draft_len}"
    )
    counts = frame["spec_decode"].struct.unnest()
    spec = load_spec(made / "model")
    target = Target.load(made / "model", spec, dtype=torch.float32, device=CPU)
    head = load_head(tmp_path / "head", spec, dtype=torch.float32, device=CPU)
    assert head.map_ids is None
    network, _ = published_network(tmp_path / "head", target, aux_layers="auto", mask_id=None, seed=0)
    rows = read_rows(open_source(InputConfig(path=str(made / "out"))), vocab_size=spec.vocab_size, max_len=64)
    teacher = Teacher(target, head.spec.aux_layer_ids, torch.arange(spec.vocab_size), torch.float32)
    found = acceptance(network, teacher, rows, draft_len=draft_len, batch_tokens=100, cast=nullcontext())
    assert found.rounds == counts["num_spec_steps"].sum()
    assert found.tokens == sum(len(ids) - 1 for ids in frame["token_ids"])
    assert 0.1 < found.by_position[0] < 0.95
    assert sum(found.accepted) == counts["num_accepted_draft_tokens"].sum()
    assert sum(found.drafted) == counts["num_draft_tokens"].sum()


KINDS = [
    ["draft=eagle3"], ["draft=parallel", "train.muon=false"], [*BLOCK, "draft.num_speculative_tokens=3"],
    pytest.param(["draft=parallel"], marks=pytest.mark.slow),
]


def test_a_training_ends_after_its_minutes_over_all_of_its_runs(made: Path, tmp_path: Path, capfd: Any) -> None:
    assert train(made, tmp_path / "a", "train.minutes=1e-7") == 0
    assert "train.minutes=1e-07 are over after 1 of 40 batches" in capfd.readouterr().err
    assert record(tmp_path / "a")["complete"] is True
    assert [point["step"] for point in record(tmp_path / "a")["acceptance"]] == [1]
    words, before = ["train.save_s=0", "train.minutes=60"], HeadFolder.save_state
    with pytest.MonkeyPatch.context() as patch:

        def killed(self: HeadFolder, state: dict[str, Any]) -> None:
            before(self, {**state, "seconds": 3600.0 + state["seconds"]})
            raise KeyboardInterrupt

        patch.setattr(HeadFolder, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            train(made, tmp_path / "b", *words)
    assert torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=True)["seconds"] > 3600.0
    assert train(made, tmp_path / "b", *words) == 0
    assert "train.minutes=60 are over after 1 of 40 batches" in capfd.readouterr().err


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_a_killed_training_resumes_to_the_same_head_and_the_same_curves(
    made: Path, tmp_path: Path, capfd: Any, kind: list[str]
) -> None:
    words = ["train.eval_steps=15", "train.save_s=0", *kind]
    assert train(made, tmp_path / "a", *words) == 0
    with pytest.MonkeyPatch.context() as patch:
        before, seen = HeadFolder.save_state, []

        def killed(self: HeadFolder, state: dict[str, Any]) -> None:
            before(self, state)
            seen.append(state["step"])
            if len(seen) == 17:
                raise KeyboardInterrupt  # nothing after this line runs, as after a kill

        patch.setattr(HeadFolder, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            train(made, tmp_path / "b", *words)
    assert not (tmp_path / "b" / "config.json").exists()
    assert train(made, tmp_path / "b", *words, "train.save_s=1000") == 0
    assert "continuing after 17 of 40 batches" in capfd.readouterr().err
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert record(tmp_path / "a") == record(tmp_path / "b")
    assert [point["step"] for point in record(tmp_path / "b")["acceptance"]] == [15, 30, 40]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors", "training.json"]


def test_a_signal_ends_it_after_a_checkpoint_with_the_code_of_an_interrupted_job(made: Path, tmp_path: Path, capfd: Any) -> None:
    from batchspec.heads import step_network

    def signalled(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return draft_loss(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_network, "draft_loss", signalled)
        assert train(made, tmp_path / "h") == Interrupted.exit_code
    assert "SIGTERM: 1 of 40 batches are trained; run the same command again to go on" in capfd.readouterr().err
    assert train(made, tmp_path / "h") == 0
    assert train(made, tmp_path / "h") == 0
    assert "already complete" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["eagle3", "parallel"])
def test_both_layouts_hold_the_same_head_and_draft_the_same(made: Path, tmp_path: Path, kind: str) -> None:
    words = [f"draft={kind}", "train.draft_vocab=40", "train.steps=15", "train.lr=1e-2", "train.layers=2"]
    for layout in ("flat", "speculators"):
        assert train(made, tmp_path / layout, f"output.layout={layout}", *words) == 0
    spec = load_spec(made / "model")
    flat, other = (load_head(tmp_path / name, spec, dtype=torch.float32, device=CPU) for name in ("flat", "speculators"))
    assert (flat.spec.layout, other.spec.layout) == ("flat", "speculators")
    assert flat.spec.draft_vocab_size == 40
    assert flat.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in flat.tensors.items())
    assert flat.map_ids is not None
    assert other.map_ids is not None
    assert torch.equal(flat.map_ids, other.map_ids)
    frames = [
        job(made / "model", tmp_path / f"o-{name}", f"draft={kind}", f"draft.path={tmp_path / name}")
        for name in ("flat", "speculators")
    ]
    assert frames[0]["spec_decode"].equals(frames[1]["spec_decode"])
    assert frames[0]["spec_decode"].struct.field("num_accepted_draft_tokens").sum() > 0


def test_the_flat_files_have_the_published_names(made: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert train(made, tmp_path / "h", "train.draft_vocab=40", "train.steps=1") == 0
    tensors = load_file(tmp_path / "h" / "model.safetensors")
    attention, mlp = (f"midlayer.{part}" for part in ("self_attn", "mlp"))
    norms = [f"midlayer.{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    wanted = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *norms}
    wanted |= {f"{attention}.{x}_proj.weight" for x in "qkvo"} | {f"{mlp}.{x}_proj.weight" for x in ("gate", "up", "down")}
    assert tensors.keys() == wanted
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["t2d"].nonzero().squeeze(1), tensors["d2t"] + torch.arange(40))
    config = json.loads((tmp_path / "h" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "eagle_aux_hidden_state_layer_ids" not in config  # the usual ones of three layers: 2, 1, 0
    assert config["draft_vocab_size"] == 40


def test_a_parallel_head_is_written_as_published_ones_are(made: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    words = ["draft=parallel", "train.steps=1", "train.layers=2"]
    assert train(made, tmp_path / "flat", *words) == 0
    assert train(made, tmp_path / "other", *words, "output.layout=speculators", "train.mask_token=7") == 0
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("flat", "other")]
    seen = set(
        pl.read_parquet(made / "out" / "data" / "*.parquet").select("prompt_ids", "token_ids").unpivot()["value"].explode()
    )
    mask_id = max(set(range(96)) - seen)
    assert configs[0]["parallel_drafting"] is True
    assert configs[0]["mask_token_id"] == configs[0]["ptd_token_id"] == mask_id
    assert configs[1]["speculators_model_type"] == "peagle"
    assert configs[1]["architectures"] == ["PEagleDraftModel"]
    assert configs[1]["mask_token_id"] == 7
    flat, other = (load_file(tmp_path / name / "model.safetensors") for name in ("flat", "other"))
    assert flat["mask_hidden"].shape == (1, 1, 3 * 32)
    assert {name.replace("midlayer.", "layers.0.") for name in flat} == set(other)
    assert "layers.1.self_attn.q_proj.weight" in other


def test_a_parallel_head_learns_the_tokens_that_masks_replace(made: Path, tmp_path: Path) -> None:
    """Drafts after the first one are made of masks alone, and are accepted."""
    words = ["draft=parallel", "draft.num_speculative_tokens=3", "train.steps=100", "train.lr=1e-2", "train.held_out=0"]
    assert train(made, tmp_path / "h", *words) == 0
    drafts = ["draft=parallel", "draft.num_speculative_tokens=3", f"draft.path={tmp_path / 'h'}"]
    frame = job(made / "model", tmp_path / "o", *drafts)
    assert mean_length(frame) > 2.0
    counts = frame["spec_decode"].struct.unnest()
    assert counts["num_accepted_draft_tokens"].sum() > counts["num_spec_steps"].sum()
    plain = pl.read_parquet(made / "out" / "data" / "*.parquet").sort("row_index")["token_ids"]
    assert frame.sort("row_index")["token_ids"].equals(plain)


def test_a_chain_learns_to_draft_in_parallel(made: Path, trained: Path, tmp_path: Path) -> None:
    words = ["draft=parallel", f"draft.path={trained}", "train.lr=1e-12", "train.steps=1"]
    assert train(made, tmp_path / "h", *words) == 0
    spec = load_spec(made / "model")
    before, after = (load_head(path, spec, dtype=torch.float32, device=CPU) for path in (trained, tmp_path / "h"))
    assert after.spec.mask_token_id is not None
    assert after.tensors.keys() - before.tensors.keys() == {"mask_hidden"}
    assert all(torch.allclose(tensor, after.tensors[name], atol=1e-6) for name, tensor in before.tensors.items())


def test_a_training_starts_from_a_published_head(made: Path, trained: Path, tmp_path: Path) -> None:
    words = [f"draft.path={trained}", "train.steps=1", "train.lr=1e-12", "train.held_out=8"]
    assert train(made, tmp_path / "h", *words) == 0
    assert record(tmp_path / "h")["acceptance"][-1]["mean_length"] > 2.3
    spec = load_spec(made / "model")
    before, after = (load_head(path, spec, dtype=torch.float32, device=CPU).tensors for path in (trained, tmp_path / "h"))
    assert all(torch.allclose(tensor, after[name], atol=1e-6) for name, tensor in before.items())


def test_layers_that_a_head_gets_change_nothing_until_they_have_learnt(made: Path, trained: Path, tmp_path: Path) -> None:
    words = [f"draft.path={trained}", "train.layers=3", "train.steps=1", "train.held_out=8"]
    assert train(made, tmp_path / "h", *words, "train.lr=1e-12") == 0
    assert record(tmp_path / "h")["acceptance"][-1]["mean_length"] > 2.3
    spec = load_spec(made / "model")
    before, after = (load_head(path, spec, dtype=torch.float32, device=CPU) for path in (trained, tmp_path / "h"))
    assert (before.spec.num_layers, after.spec.num_layers) == (1, 3)
    assert all(torch.allclose(tensor, after.tensors[name], atol=1e-6) for name, tensor in before.tensors.items())
    assert train(made, tmp_path / "learnt", *words, "train.lr=1e-2") == 0
    learnt = load_head(tmp_path / "learnt", spec, dtype=torch.float32, device=CPU).tensors
    for name in (f"layers.{i}.{part}.weight" for i in (1, 2) for part in ("self_attn.o_proj", "mlp.down_proj")):
        assert after.tensors[name].abs().max() < 1e-6
        assert learnt[name].abs().max() > 1e-4


def test_a_head_cannot_lose_layers_and_a_refused_training_leaves_nothing_that_blocks_the_next(
    made: Path, tmp_path: Path, capfd: Any
) -> None:
    """The same command without the key takes the same folder, and the layers of the head."""
    assert train(made, tmp_path / "two", "train.layers=2", "train.steps=1") == 0
    capfd.readouterr()
    words = [f"draft.path={tmp_path / 'two'}", "train.steps=1"]
    assert train(made, tmp_path / "h", *words, "train.draft_vocab=50") == ConfigError.exit_code
    line = capfd.readouterr().err.splitlines()[-1]
    assert (
        line
        == f"batchspec: train.draft_vocab=50: the head {tmp_path / 'two'} can draft 96 different tokens, and training cannot "
        "remove any; leave the key out"
    )
    assert train(made, tmp_path / "h", *words, "train.layers=1") == ConfigError.exit_code
    line = capfd.readouterr().err.splitlines()[-1]
    assert line == f"batchspec: train.layers=1: the head {tmp_path / 'two'} has 2; leave the key out, or ask for more"
    assert not (tmp_path / "h").exists()
    assert train(made, tmp_path / "h", *words) == 0
    assert load_head(tmp_path / "h", load_spec(made / "model"), dtype=torch.float32, device=CPU).spec.num_layers == 2
    assert train(made, tmp_path / "same", *words, "train.layers=2") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "h").iterdir()}
    assert train(made, tmp_path / "h", *words, "train.layers=1", "output.overwrite=true") == ConfigError.exit_code
    assert {path.name: path.read_bytes() for path in (tmp_path / "h").iterdir()} == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["eagle3", "parallel"])
def test_a_gpu_trains_in_bf16(kind: str, made: Path, tmp_path: Path) -> None:
    words = [f"draft={kind}", "device=cuda", "model.dtype=bfloat16", "train.steps=200", "train.lr=1e-2", "train.held_out=0"]
    assert train(made, tmp_path / "h", *words) == 0
    first, *_, last = record(tmp_path / "h")["loss"]
    assert max(first["match"]) < 0.2
    assert min(last["match"]) > 0.6


# -- what is refused ----------------------------------------------------------------------------------------------------------


def refused(kind: type[BatchspecError], made: Path, out: Path, capfd: Any, *overrides: str) -> str:
    capfd.readouterr()
    assert train(made, out, *overrides) == kind.exit_code
    lines: list[str] = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lrr=1", "train.lrr is not a key of the configuration; did you mean train.lr?"),
        ("train.lr=0", "train.lr=0.0 must be above 0 and at most 1; 3e-3 is usual, 1e-4 for draft=mtp"),
        ("train.ahead=fast", "train.ahead=fast must be a whole number, without point, exponent or unit"),
        ("train.max_len=4096", "train.max_len=4096 exceeds train.batch_tokens=700"),
        ("draft=lookup", "draft=lookup cannot be trained; use draft=eagle3, draft=parallel, draft=block or draft=mtp"),
        ("draft=eagel3", "draft=eagel3 is not a choice of the group draft; did you mean eagle3?"),
        ("draft.window=8", "draft.window=8 is not used by train; remove the key"),
        ("train.aux_layer_ids=[0,9]", "train.aux_layer_ids=[0, 9] must be different boundaries in 0 .. 3"),
        ("train.mask_token=5", "train.mask_token=5 applies only to draft=parallel and draft=block; remove it or use one"),
        ("train.anchors=0.5", "train.anchors=0.5 applies only to draft=block; remove the key"),
        ("draft.parallel=maybe", "draft.parallel=maybe must be one of auto, true, false"),
        ("train.layers=9", "train.layers=9 must be"),
        (
            "draft.aux_layers=output",
            "draft.aux_layers=output says how the head draft.path is read, and draft.path is not set; remove the key",
        ),
        ("train.aux_layer_ids=[1,2]", "other programs read ids that begin with 1 as layer outputs; put another first"),
        ("output.layout=gguf", "output.layout=gguf must be one of flat, speculators"),
        ("output.dir=s3://b/h", "output.dir=s3://b/h: what is trained must go to a local folder"),
        ("model.path=null", "model.path is required; give model.path="),
        ("--cfg", "--cfg is not an option of train"),
    ],
)
def test_a_wrong_key_or_value_is_refused_in_one_line(override: str, said: str, made: Path, tmp_path: Path, capfd: Any) -> None:
    assert said in refused(ConfigError, made, tmp_path / "h", capfd, override)
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize(("key", "value"), [("aux_layer_ids", "[0, 1]"), ("inner", "40")])
def test_a_head_to_start_from_keeps_its_shape(key: str, value: str, made: Path, tmp_path: Path, capfd: Any) -> None:
    said = refused(ConfigError, made, tmp_path / "h", capfd, "draft.path=HEAD", f"train.{key}={value.replace(' ', '')}")
    assert said.endswith(f"train.{key}={value} and draft.path: that head has its own; remove one of them")


def test_completions_that_cannot_be_learnt_from_are_refused(made: Path, tmp_path: Path, capfd: Any) -> None:
    def data(**columns: Any) -> str:
        pl.DataFrame(columns).write_parquet(tmp_path / "d.parquet")
        return f"input.path={tmp_path / 'd.parquet'}"

    for build, expected in (
        ({"prompt_ids": [[1, 2]]}, "column token_ids is not there; train reads the output of a job with output=training"),
        ({"prompt_ids": ["1 2"], "token_ids": ["3"]}, "column prompt_ids is"),
        ({"prompt_ids": [[1, 2]], "token_ids": [[3]]}, "none of 1 rows has a prompt and two completion tokens"),
        ({"prompt_ids": [[1, 2]], "token_ids": [[3, 4]], "status": ["error"]}, "none of 1 rows"),
        ({"prompt_ids": [[1, 2]] * 9, "token_ids": [[3, 500]] * 9}, "token id 500 is outside the target's vocabulary of 96"),
        ({"prompt_ids": [[1, 2]] * 2, "token_ids": [[3, 5]] * 2}, "2 completions of 1 prompts, all held out by train.held_out=2"),
    ):
        assert expected in refused(InputError, made, tmp_path / "h", capfd, data(**build))
    assert not (tmp_path / "h").exists()


def test_a_folder_of_something_else_is_left_alone(made: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    assert "holds files that do not belong to a training" in refused(OutputError, made, tmp_path / "full", capfd)
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(OutputError, made, tmp_path / "file", capfd)
    assert train(made, tmp_path / "h", "train.steps=2") == 0
    assert "train.anchors" not in record(tmp_path / "h")["facts"], "a key of draft=block, which earlier versions did not have"
    said = refused(OutputError, made, tmp_path / "h", capfd, "train.steps=3")
    assert said.endswith("belongs to a training with train.steps 2, now 3; give another folder, or output.overwrite=true")
    assert train(made, tmp_path / "h", "train.steps=3", "output.overwrite=true") == 0
    assert record(tmp_path / "h")["facts"]["train.steps"] == 3


def stopped(made: Path, model: Path, out: Path) -> None:
    """A training that ends after a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        before = HeadFolder.save_state

        def killed(self: HeadFolder, state: dict[str, Any]) -> None:
            before(self, state)
            raise KeyboardInterrupt

        patch.setattr(HeadFolder, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            train(made, out, f"model.path={model}", "train.save_s=0")


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    return Path(shutil.copytree(made / "model", tmp_path / "model"))


EDITED = "model.embed_tokens.weight"


def test_a_training_goes_on_only_with_the_weights_that_it_began_with(
    made: Path, own: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where no sample of the files shows that they are others: samples of usual size are all of so small a model."""
    monkeypatch.setattr("batchspec.checkpoint.weight_files._SAMPLE_BYTES", 64)
    monkeypatch.setattr("batchspec.checkpoint.weight_files._TENSOR_BYTES", 64)
    out = tmp_path / "h"
    stopped(made, own, out)
    edit_unseen(own, EDITED)
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    capfd.readouterr()
    assert train(made, out, f"model.path={own}") == OutputError.exit_code
    said = capfd.readouterr().err.splitlines()[-1]
    assert f"holds a training with other weights: {EDITED} (1 of" in said
    assert said.endswith("from those of its first run; give that model, or another output.dir")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept
    assert train(made, out, f"model.path={own}", "output.overwrite=true") == 0


def test_another_config_of_the_target_is_another_training(made: Path, own: Path, tmp_path: Path, capfd: Any) -> None:
    """It changes what the target computes, and no weight."""
    stopped(made, own, tmp_path / "h")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    said = refused(OutputError, made, tmp_path / "h", capfd, f"model.path={own}")
    assert "belongs to a training with another model.config; give another folder" in said


def test_a_damaged_checkpoint_is_named(made: Path, tmp_path: Path, capfd: Any) -> None:
    assert train(made, tmp_path / "h", "train.steps=2") == 0
    done = record(tmp_path / "h")
    (tmp_path / "h" / "training.json").write_text(json.dumps(done | {"complete": False}))
    (tmp_path / "h" / "checkpoint.pt").write_bytes(b"not a checkpoint")
    capfd.readouterr()
    assert train(made, tmp_path / "h", "train.steps=2") == StorageError.exit_code
    assert "checkpoint.pt: cannot be read" in capfd.readouterr().err
    assert train(made, tmp_path / "h", "train.steps=2", "output.overwrite=true") == 0
    assert "continuing after" not in capfd.readouterr().err
