"""FP8 weights in blocks of 128 x 128: the model of their dequantised weights, at sizes that are no multiples of 128."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.layers.base import Projection, Share
from batchspec.model.quant.fp8_block import FP8_BLOCK
from batchspec.model.quant.fp8_products import BLOCK
from batchspec.model.spec import load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint, expected_shapes, judge_model
from tests.helpers.models import make_checkpoint
from tests.model.test_target import Runner, assert_like_transformers, prompts

CPU = torch.device("cpu")
ODD: dict[str, Any] = {"hidden_size": 136, "intermediate_size": 200, "num_hidden_layers": 2, "head_dim": 34}
CONFIG: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn", "down_proj", "in_proj_a", "in_proj_b", "in_proj_ba"],
}
CONVERTED = (
    "_proj.weight", "w1.weight", "w2.weight", "w3.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight",
)
PLAIN = (".1.self_attn.", "down_proj")
"""What of the projections CONFIG leaves plain."""


def is_converted(name: str) -> bool:
    return name.endswith(CONVERTED) and not any(part in name for part in PLAIN)


def by_definition(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 and a scale of each block, block by block, in the weight's own dtype."""
    rows, columns = (range(0, size, BLOCK) for size in weight.shape)
    scales = torch.empty(len(rows), len(columns), dtype=weight.dtype)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = weight[row : row + BLOCK, column : column + BLOCK]
            largest = block.abs().max()
            scales[i, j] = largest / 448 if largest > 0 else torch.finfo(weight.dtype).eps
            values[row : row + BLOCK, column : column + BLOCK] = (block / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales.float()


def _block(i: int, j: int) -> tuple[slice, slice]:
    return slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)


def _spread(scale: Tensor, weight: Tensor) -> Tensor:
    """The scale of each number of the weight."""
    out = torch.empty_like(weight)
    for i, j in [(i, j) for i in range(scale.shape[0]) for j in range(scale.shape[1])]:
        out[_block(i, j)] = scale[i, j]
    return out


def make_fp8(folder: Path, family: str, **config: Any) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the plain one of its dequantised weights."""
    plain, fp8 = make_checkpoint(folder / "plain", family, **{**ODD, **config}), folder / "fp8"
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        stored[name] = tensor
        if is_converted(name):
            weight, scale = by_definition(tensor)
            stored |= {name: weight, f"{name}_scale_inv": scale}
            tensors[name] = weight.float() * _spread(scale, tensor)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    fp8.mkdir()
    save_file(stored, fp8 / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**values, "quantization_config": CONFIG}))
    return fp8, plain


def logits(folder: Path) -> Tensor:
    target = Target.load(folder, load_spec(folder), dtype=torch.float32, device=CPU)
    return torch.cat(Runner.start(target, 2).feed(prompts([23, 5], 320))[0])


MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 150, "norm_topk_prob": True}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3, "linear_num_key_heads": 3,
    "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 23, "max_position_embeddings": 512,
}
SHARED = {**MOE, "shared_expert_intermediate_size": 70}
MINIMAX = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 150, "rotary_dim": 10}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {}), ("qwen2", {}), ("qwen3_moe", MOE), ("minimax_m2", MINIMAX), ("qwen3_5_text", RECURRENT),
        ("qwen3_5_moe_text", {**RECURRENT, **SHARED}), ("qwen3_next", {**RECURRENT, **SHARED}),
    ],
)
def test_an_fp8_checkpoint_is_the_model_of_its_dequantised_weights(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    fp8, plain = make_fp8(tmp_path, family, **config)
    assert torch.equal(logits(fp8), logits(plain))


@pytest.mark.second
@pytest.mark.parametrize(("family", "config"), [("qwen3", {}), ("qwen3_5_text", RECURRENT)])
def test_the_dequantised_model_is_that_of_transformers(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    assert_like_transformers(make_fp8(tmp_path, family, **config)[1], dtype=torch.float64)


def test_a_plain_tensor_is_refused_if_the_config_declares_fp8_and_vice_versa(tmp_path: Path) -> None:
    fp8, plain = make_fp8(tmp_path, "qwen3")
    judge_model(LocalFiles(fp8))
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "model.layers.1.self_attn"]
    (fp8 / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"2 missing tensors: .*scale_inv.*is F32, it must be F8_E4M3"):
        judge_model(LocalFiles(fp8))
    plain_config = json.loads((plain / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps(plain_config))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: .*is F8_E4M3.*: F64, F32, F16, BF16 are supported"):
        Checkpoint(fp8, load_spec(fp8), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_block_size": None},
        {"weight_block_size": [64, 128]},
        {"fmt": "e5m2"},
        {"activation_scheme": "static"},
        {"scale_fmt": "ue8m0"},
        {"quant_method": "bitsandbytes"},
    ],
)
def test_other_variants_are_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": {**CONFIG, **changes}}))
    with pytest.raises(CheckpointError, match="not supported: quantization_config"):
        load_spec(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"modules_to_not_convert": ["model.layers.*.self_attn", ".*down_proj"]},
        {"modules_to_not_convert": [r"model\.layers\.(0|1)\.self_attn", "down_proj"]},
        {"modules_to_not_convert": None, "ignored_layers": ["self_attn", "down_proj"]},
    ],
)
def test_plain_modules_may_be_regular_expressions_and_have_two_keys(changes: dict[str, Any]) -> None:
    def plain(quantisation: dict[str, Any]) -> list[str]:
        config = {"model_type": "qwen3", **ODD, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 12}
        values = {**config, "vocab_size": 64, "max_position_embeddings": 64, "quantization_config": quantisation}
        shapes = expected_shapes(read_spec(values, "config.json"))
        weights = [name for name in shapes if name.endswith("_proj.weight")]
        return [name for name in weights if f"{name}_scale_inv" not in shapes]

    found = plain({**CONFIG, **changes})
    layers = {int(name.split(".")[2]) for name in found if ".self_attn." in name}
    assert layers == ({0, 1} if "(0|1)" in str(changes) else set(range(12)))
    assert len(found) == 12 + 4 * len(layers)
    own = plain({**CONFIG, "modules_to_not_convert": ["model.layers.1"]})
    assert {name.split(".")[2] for name in own} == {"1"}  # not 10 and 11
    assert len(own) == 7
    for name in ("(", "(?i)lm_head"):  # flags of a whole expression may not stand in a part of one
        with pytest.raises(CheckpointError, match=r"modules_to_not_convert=.* is not a regular expression"):
            plain({**CONFIG, "modules_to_not_convert": [name]})


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    fp8, _ = make_fp8(tmp_path, "qwen3")
    target = Target.load(fp8, load_spec(fp8), dtype=torch.float32, device=CPU, dummy=True)
    assert torch.cat(Runner.start(target, 1).feed(prompts([9], 320))[0]).std() > 0


def test_ranks_hold_whole_blocks_with_their_scales() -> None:
    part, fp8 = Projection("mlp.down_proj", 300, 512), FP8_BLOCK
    assert fp8.shard(part, Share("rows", (slice(256, 512),))) == {
        "mlp.down_proj.weight": ((slice(0, 300), slice(256, 512)),),
        "mlp.down_proj.weight_scale_inv": ((slice(0, 3), slice(2, 4)),),
    }
    assert fp8.shard(part, Share("columns", (slice(0, 128), slice(256, 300)))) == {
        "mlp.down_proj.weight": ((slice(0, 128), slice(0, 512)), (slice(256, 300), slice(0, 512))),
        "mlp.down_proj.weight_scale_inv": ((slice(0, 1), slice(0, 4)), (slice(2, 3), slice(0, 4))),
    }
    for cut, own in (("rows", slice(0, 64)), ("rows", slice(64, 512)), ("columns", slice(128, 290))):
        with pytest.raises(
            ConfigError, match=rf"^mlp\.down_proj: a part of {own.stop - own.start} of .* divides a block of 128;"
        ):
            fp8.shard(part, Share(cut, (own,)))  # type: ignore[arg-type]
