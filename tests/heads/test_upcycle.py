"""The tool that makes models for checks on real text: experts of copies are the dense model, formats are near it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from batchspec.kernels.moe.mxfp4 import dequantise_blocks
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from tests.heads import upcycle
from tests.heads.upcycle import compare, fp8_block, fp8_channel, make, mxfp4_blocks
from tests.helpers.four_bit_models import FOUR_BITS
from tests.helpers.models import make_checkpoint
from tests.model.test_target import Runner, prompts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dense model and every model made of it. Blocks do not divide its sizes; its output matrix is tied."""
    folder = tmp_path_factory.mktemp("upcycle")
    shape: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "tie_word_embeddings": True}
    dense = make_checkpoint(folder / "dense", "llama", vocab=320, dtype=torch.bfloat16, **shape)
    assert [path.name for path in make(dense, folder, num_experts=5)] == [
        "fp8_block", "fp8_channel", "int4", "gptq", "awq", "nvfp4", "nvfp4_ct", "fp8_nvfp4", "moe", "moe_fp8_block",
        "moe_fp8_channel", "moe_int4", "moe_nvfp4", "gpt_oss", "gpt_oss_mxfp4",
    ]
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 320, 4 + i).tolist() for i in range(6)]
    pl.DataFrame({"prompt_ids": rows}).write_parquet(folder / "prompts.parquet")
    return folder


def logits(folder: Path) -> Tensor:
    target = Target.load(folder, load_spec(folder), dtype=torch.float32, device=CPU)
    return torch.cat(Runner.start(target, 2).feed(prompts([33, 9], 320))[0])


@pytest.mark.parametrize("name", ["moe", "gpt_oss"])
def test_copies_of_the_mlp_are_the_dense_model(made: Path, name: str) -> None:
    torch.testing.assert_close(logits(made / name), logits(made / "dense"), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "int4", "nvfp4"])
def test_so_are_copies_of_the_quantised_mlp(made: Path, name: str) -> None:
    torch.testing.assert_close(logits(made / f"moe_{name}"), logits(made / name), atol=2e-4, rtol=1e-4)
    assert (logits(made / name) - logits(made / "dense")).abs().max() > 1e-3


@pytest.mark.parametrize("name", FOUR_BITS)
def test_models_of_four_bits_are_near_the_dense_one(made: Path, name: str) -> None:
    found, expected = logits(made / name), logits(made / "dense")
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.6  # of unrelated logits it is 1.4


def test_routers_differ_and_choose_different_experts(made: Path) -> None:
    from safetensors.torch import load_file

    found = load_file(made / "moe/model.safetensors")
    gates = [found[f"model.layers.{i}.block_sparse_moe.gate.weight"].float() for i in (0, 1)]
    assert not torch.equal(*gates)
    hidden = torch.randn(200, 96, generator=torch.Generator().manual_seed(0))
    assert (hidden @ gates[0].t()).topk(2).indices.unique().numel() == 5


def test_numbers_are_within_half_a_step_of_their_format() -> None:
    weight = torch.randn(200, 96, generator=torch.Generator().manual_seed(1))
    weight[0, :3] = torch.tensor([6.0, -6.0, 0.0])
    for stored, scale in (fp8_block(weight), fp8_channel(weight)):
        spread = scale.float()
        if scale.shape[1] != 1 or scale.shape[0] != 200:
            spread = spread.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :96]
        error = (stored.float() * spread - weight).abs()
        assert (error <= weight.abs() / 16 + spread * 2**-9).all()
    blocks, scales = mxfp4_blocks(weight)
    found = dequantise_blocks(blocks, scales).float()
    step = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    assert ((found - weight).abs() <= torch.maximum(weight.abs() / 4, step / 4) + 2 * step * (weight.abs() > 6 * step)).all()
    assert found[0, :3].tolist() == [6.0, -6.0, 0.0]


@pytest.mark.second
def test_a_comparison_reports_the_distance_of_a_model(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = compare(made / "dense", made / "moe", str(made / "prompts.parquet"), rows=6, tokens=12)
    assert same.mean_kl < 1e-6
    assert same.changed <= 1 / same.positions
    assert same.positions > 40
    near = compare(made / "dense", made / "fp8_channel", str(made / "prompts.parquet"), rows=6, tokens=12)
    assert same.mean_kl < near.mean_kl < 1.0
    capsys.readouterr()
    words = [str(made / "gpt_oss"), str(made / "gpt_oss_mxfp4"), str(made / "prompts.parquet"), "--rows", "3", "--tokens", "8"]
    assert upcycle.main(["compare", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("mean KL ")


def test_a_model_with_biases_is_refused(made: Path, tmp_path: Path) -> None:
    config = json.loads((made / "dense/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    with pytest.raises(ValueError, match="model_type is qwen2, or it has biases"):
        make(tmp_path, tmp_path / "out", num_experts=2)
