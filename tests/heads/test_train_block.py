"""`batchspec train draft=block`: a DSpark head of a tiny model from its own completions, through the command line and a job."""

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

from batchspec.checkpoint.files import LocalFiles
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import open_source
from batchspec.draft.block_head import BlockWeights, load_block, open_block
from batchspec.errors import ConfigError
from batchspec.heads import training
from batchspec.heads.block_network import BlockNetwork
from batchspec.heads.data import read_rows
from batchspec.heads.evaluate import acceptance
from batchspec.heads.teacher import Teacher
from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.train.prefix_attention import runs_on_gpu, tile_of
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from tests.heads.test_train import BLOCK, CPU, job, mean_length, prepared, record, refused, train
from tests.helpers.models import make_checkpoint

pytestmark = pytest.mark.second

LEARN = ["train.lr=1e-2", "train.held_out=0", "draft.num_speculative_tokens=3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("block"))


@pytest.fixture(scope="module")
def trained(made: Path) -> Path:
    """A head that has learnt some of the completions, so that rounds keep 0 .. K drafts."""
    assert train(made, made / "head", *BLOCK, *LEARN, "train.steps=50") == 0
    return made / "head"


@pytest.fixture(scope="module")
def drafted(made: Path, trained: Path) -> pl.DataFrame:
    return job(made / "model", made / "o", "draft=block", f"draft.path={trained}", "draft.num_speculative_tokens=3")


def head_of(made: Path, folder: Path) -> BlockWeights:
    spec = open_block(LocalFiles(folder), load_spec(made / "model"))
    return load_block(folder, spec, dtype=torch.float32, device=CPU)


def test_a_trained_head_is_accepted_in_the_engine_where_a_random_one_is_not(
    made: Path, drafted: pl.DataFrame, tmp_path: Path
) -> None:
    assert train(made, tmp_path / "random", *BLOCK, *LEARN, "train.steps=1", "train.lr=1e-12") == 0
    words = ["draft=block", f"draft.path={tmp_path / 'random'}", "draft.num_speculative_tokens=3"]
    random = job(made / "model", tmp_path / "r", *words)
    assert mean_length(random) < 1.2
    assert mean_length(drafted) > 1.7
    plain = pl.read_parquet(made / "out" / "data" / "*.parquet").sort("row_index")["token_ids"]
    assert all(frame.sort("row_index")["token_ids"].equals(plain) for frame in (random, drafted))


def test_the_replay_counts_the_rounds_that_the_engine_runs(made: Path, trained: Path, drafted: pl.DataFrame) -> None:
    """Rows end in mid-block too: the last block of a row, which is cut there, is counted as it was."""
    counts, spec, head = drafted["spec_decode"].struct.unnest(), load_spec(made / "model"), head_of(made, trained)
    assert head.map_ids is None
    target = Target.load(made / "model", spec, dtype=torch.float32, device=CPU)
    network = BlockNetwork(head.spec, target.embedding)
    network.load_state_dict(dict(head.tensors))
    rows = read_rows(open_source(InputConfig(path=str(made / "out"))), vocab_size=spec.vocab_size, max_len=64)
    teacher = Teacher(target, head.spec.aux_layer_ids, torch.arange(spec.vocab_size), torch.float32)
    found = acceptance(network, teacher, rows, draft_len=3, batch_tokens=100, cast=nullcontext())
    assert found.tokens == sum(len(ids) - 1 for ids in drafted["token_ids"])
    assert 0.1 < found.by_position[0] < 0.99
    # A block that would pass the end of its row has fewer queries in a job, whose drafts may be others.
    for replayed, name in ((found.rounds, "num_spec_steps"), (sum(found.accepted), "num_accepted_draft_tokens")):
        assert abs(replayed - int(counts[name].sum())) <= len(rows)


def test_the_head_says_how_sure_it_is(made: Path, trained: Path) -> None:
    """Its confidence has learnt: it is no longer the same for all drafts."""
    head = head_of(made, trained)
    assert head.spec.confidence == "markov"
    for name in ("confidence_head.proj.weight", "markov_head.markov_w2.weight"):
        assert head.tensors[name].abs().max() > 1e-3


def test_both_layouts_hold_the_same_head(made: Path, tmp_path: Path) -> None:
    words = ["train.draft_vocab=40", "train.steps=3", "draft.num_speculative_tokens=2"]
    for layout in ("flat", "speculators"):
        assert train(made, tmp_path / layout, f"output.layout={layout}", *BLOCK, *words) == 0
    flat, other = (head_of(made, tmp_path / name) for name in ("flat", "speculators"))
    assert flat.spec.draft_vocab_size == 40
    assert flat.spec.aux_layer_ids == other.spec.aux_layer_ids == (1, 2)
    differing = {"windows_at_anchor"}  # of layers without windows, which it says nothing of
    fields = {name for name in flat.spec.__slots__ if getattr(flat.spec, name) != getattr(other.spec, name)}
    assert fields <= differing
    assert flat.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in flat.tensors.items())
    assert flat.map_ids is not None
    assert other.map_ids is not None
    assert torch.equal(flat.map_ids, other.map_ids)


def test_the_files_have_the_published_names(made: Path, trained: Path) -> None:
    tensors = load_file(trained / "model.safetensors")
    layer = [f"self_attn.{x}_proj" for x in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm"]
    layer += [f"mlp.{x}_proj" for x in ("gate", "up", "down")] + ["post_attention_layernorm"]
    wanted = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in layer}
    wanted |= {f"{name}.weight" for name in ("fc", "hidden_norm", "norm", "lm_head", "confidence_head.proj")}
    wanted |= {"confidence_head.proj.bias", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert tensors.keys() == wanted
    config = json.loads((trained / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["target_layer_ids"] == [0, 1]
    assert (config["block_size"], config["markov_rank"], config["num_target_layers"]) == (3, 256, 3)


def test_acceptance_on_held_out_rows_is_measured(made: Path, tmp_path: Path, capfd: Any) -> None:
    words = [*BLOCK, "train.steps=6", "train.eval_steps=3", "train.held_out=3", "draft.num_speculative_tokens=2"]
    assert train(made, tmp_path / "h", *words) == 0
    found = record(tmp_path / "h")
    assert found["facts"]["train.anchors"] == 0.5
    assert [point["step"] for point in found["acceptance"]] == [3, 6]
    assert len(found["loss"][-1]["match"]) == 3
    assert len(found["acceptance"][-1]["by_position"]) == 2
    said = capfd.readouterr().err
    assert "in 2 layers reads layers 1, 2 and drafts blocks of 3 from 96 tokens, 100.0% of those completions; its mask" in said
    assert "tokens per round with K=2 on 3 held-out completions" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("draft.path=/h", "draft.path=/h is not used by draft=block, which trains a new head; remove the key"),
        ("train.missed=0.5", "train.missed=0.5 is not used by draft=block, which trains a new head; remove the key"),
        ("draft.num_speculative_tokens=4", "draft.num_speculative_tokens=4 exceeds train.ahead=3, the size of a block"),
        ("train.anchors=0", "train.anchors=0.0 must be above 0 and at most 1; 0.25 is usual"),
        ("train.mask_token=96", "train.mask_token=96 is outside the target's vocabulary of 96; null chooses one"),
        ("train.aux_layer_ids=[0,9]", "train.aux_layer_ids=[0, 9] must be different boundaries in 0 .. 3"),
        ("train.aux_layer_ids=[0,3]", "train.aux_layer_ids=[0, 3]: 3 is the state after the last layer, which programs read"),
        ("train.ahead=1", "train.ahead=1: a block has at least 2"),
    ],
)
def test_what_does_not_fit_a_block_is_refused_in_one_line(
    override: str, said: str, made: Path, tmp_path: Path, capfd: Any
) -> None:
    words = [*BLOCK, "draft.num_speculative_tokens=1"]
    assert said in refused(ConfigError, made, tmp_path / "h", capfd, *words, override)
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "said"),
    [
        (8, "float64", "a head of 8 numbers in float64 is not trained on a GPU"),
        (264, "float32", "at most 1,024 bytes a head in float32 or bfloat16; set model.dtype=bfloat16 or device=cpu"),
        (520, "bfloat16", "a head of 520 numbers in bfloat16 is not trained on a GPU"),
        (520, "bfloat16", "in float32 or bfloat16; set device=cpu"),
    ],
)
def test_heads_that_no_kernel_reads_are_refused_before_rows_are_read_and_weights_loaded(
    head_dim: int, dtype: str, said: str, made: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "model", "llama", vocab=96, hidden_size=32, head_dim=head_dim)
    (tmp_path / "out").symlink_to(made / "out")
    monkeypatch.setattr(training, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(training, "read_rows", None)
    words = [*BLOCK, "draft.num_speculative_tokens=1", f"model.dtype={dtype}"]
    assert said in refused(ConfigError, tmp_path, tmp_path / "h", capfd, *words)
    assert not (tmp_path / "h").exists()


def test_kernels_and_what_is_refused_for_them_agree() -> None:
    sizes = [(size, dtype) for size in (64, 256, 257, 512, 513) for dtype in (torch.float32, torch.bfloat16)]
    for size, dtype in sizes:
        with nullcontext() if runs_on_gpu(size, dtype) else pytest.raises(ValueError, match="does not fit shared memory"):
            tile_of(size, dtype.itemsize, INTERPRETER)
    assert [size for size, dtype in sizes if not runs_on_gpu(size, dtype)] == [257, 512, 513, 513]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_trains_in_bf16(made: Path, tmp_path: Path) -> None:
    words = [*BLOCK, "device=cuda", "model.dtype=bfloat16", "train.steps=200", *LEARN]
    assert train(made, tmp_path / "h", *words) == 0
    first, *_, last = record(tmp_path / "h")["loss"]
    assert max(first["match"]) < 0.2
    assert min(last["match"]) > 0.5
    assert np.isfinite([point["loss"] for point in record(tmp_path / "h")["loss"]]).all()
