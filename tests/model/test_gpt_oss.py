"""gpt-oss against transformers, in plain dtypes and in MXFP4; its sinks and windows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError
from batchspec.kernels.moe.mxfp4 import VALUES, dequantise_blocks
from batchspec.model.layers.base import Shard, Share
from batchspec.model.quant.mxfp4 import Mxfp4, PackedExperts
from batchspec.model.shard import part_of
from batchspec.model.spec import load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights, expected_shapes, judge_model
from batchspec.packing.cost import num_multiplied
from tests.helpers.attentions import windows
from tests.helpers.models import make_checkpoint
from tests.helpers.moe_models import tiny_config
from tests.model.test_target import Runner, assert_like_transformers, oracle, prompts

CPU = torch.device("cpu")
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64, "rope_theta": 150_000.0,
}
ODD: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5, "rope_parameters": YARN,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200_002, "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "max_position_embeddings": 131_072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150_000,
    "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"}
    | {"factor": 32.0, "original_max_position_embeddings": 4096},
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201_088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    },
}


NO_WINDOWS = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}


@pytest.mark.second
@pytest.mark.parametrize("config", [{}, {"attention_bias": False, "num_experts_per_tok": 1, **NO_WINDOWS}])
def test_logits_and_greedy_tokens_equal_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt_oss", **{**ODD, **config})
    assert_like_transformers(folder, experts_implementation="eager")
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_shapes(load_spec(folder)) == saved


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": None}, {"rope_parameters": None, "rope_scaling": None}])
def test_without_a_rotary_embedding_a_config_has_that_of_the_published_models(rope: dict[str, Any]) -> None:
    values = {key: value for key, value in GPT_OSS_20B.items() if key != "rope_scaling"}
    assert read_spec({**values, **rope}, "config.json").rope == read_spec(GPT_OSS_20B, "config.json").rope


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> blocks and scales: the exponent of the largest of 32 numbers less 2, the nearest value, low half first."""
    groups = weight.double().unflatten(1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100).log2().floor() - 2
    table = torch.tensor(VALUES[:8], dtype=torch.float64)
    codes = ((groups / 2**exponent).abs().clamp(max=6).unsqueeze(-1) - table).abs().argmin(-1) + 8 * (groups < 0)
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent.squeeze(-1) + 127).to(torch.uint8)


def make_mxfp4(folder: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the bf16 one of its values, as transformers and copies on the hub have it."""
    plain, packed_ = make_checkpoint(folder / "plain", "gpt_oss", dtype=torch.bfloat16, **ODD), folder / "mxfp4"
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        stored[name] = tensor
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            pairs = [quantised(expert.t().float() * 2.0 ** (i - 4)) for i, expert in enumerate(tensor)]
            del stored[name]
            stored |= {f"{name}_blocks": torch.stack([b for b, _ in pairs]), f"{name}_scales": torch.stack([s for _, s in pairs])}
            tensors[name] = torch.stack([dequantise_blocks(*pair).t() for pair in pairs]).bfloat16().contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    packed_.mkdir()
    save_file(stored, packed_ / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((plain / "config.json").read_text())
    config = {**values, "quantization_config": GPT_OSS_20B["quantization_config"]}
    (packed_ / "config.json").write_text(json.dumps(config))
    return packed_, plain


def test_an_mxfp4_checkpoint_is_the_bf16_model_of_its_values(tmp_path: Path) -> None:
    from transformers.utils.quantization_config import Mxfp4Config

    mxfp4, plain = make_mxfp4(tmp_path)
    found = []
    for folder, dtype in ((mxfp4, torch.float32), (plain, torch.float32), (mxfp4, torch.bfloat16), (plain, torch.bfloat16)):
        target = Target.load(folder, load_spec(folder), dtype=dtype, device=CPU)
        found.append(torch.cat(Runner.start(target, 2).feed(prompts([23, 5], 320))[0]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    theirs, bf16 = (oracle(folder, torch.bfloat16, **options) for folder, options in (
        (mxfp4, {"quantization_config": Mxfp4Config(dequantize=True)}), (plain, {}),
    ))
    for one, other in zip(theirs.model.layers, bf16.model.layers, strict=True):
        assert torch.equal(one.mlp.experts.gate_up_proj, other.mlp.experts.gate_up_proj)
        assert torch.equal(one.mlp.experts.down_proj, other.mlp.experts.down_proj)


def test_bytes_are_two_values_the_low_half_first_times_a_power_of_two() -> None:
    blocks = torch.tensor([[list(range(0, 256, 16)), [0x21] * 16]], dtype=torch.uint8)
    values = dequantise_blocks(blocks, torch.tensor([[127, 125]], dtype=torch.uint8))
    assert values[0, 0:32:2].tolist() == [0.0] * 16
    assert values[0, 1:32:2].tolist() == list(VALUES)
    assert values[0, 32:].tolist() == [0.125, 0.25] * 16


@pytest.mark.parametrize(("scale", "refused"), [(128, False), (129, True), (255, True)])
def test_scales_that_the_kernels_cannot_read_are_refused(scale: int, refused: bool) -> None:
    """The kernels would read another number. Two scales of one of four experts are larger than the others."""

    class Large(DummyWeights):
        def entry(self, name: str, index: int) -> Tensor:
            found = super().entry(name, index)
            return found.index_fill_(0, torch.tensor([3, 7]), scale) if name.endswith("_scales") and index == 2 else found

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4}
    spec = read_spec(tiny_config("gpt_oss", **sizes, quantization_config=GPT_OSS_20B["quantization_config"]), "config.json")
    (prefix, moe), weights = list(spec.blocks())[1], Large(spec, dtype=torch.bfloat16, device=CPU)
    for grouped in moe.grouped:
        own = replace(grouped, name=prefix + grouped.name)
        if refused:
            with pytest.raises(CheckpointError, match=rf"_scales: a scale is 2\^{scale - 127}, but .* read at most 2\^1; set"):
                Mxfp4(packed=True).load_grouped(weights, own)
        else:
            assert isinstance(Mxfp4(packed=True).load_grouped(weights, own), PackedExperts)


def test_dummy_weights_need_no_file() -> None:
    config = {**GPT_OSS_20B, **ODD, "vocab_size": 320}
    target = Target.load(Path(), read_spec(config, "config.json"), dtype=torch.float32, device=CPU, dummy=True)
    logits = torch.cat(Runner.start(target, 1).feed(prompts([9], 320))[0])
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_ranks_hold_whole_blocks_and_whole_pairs_of_gate_and_up() -> None:
    gate_up, down = read_spec(GPT_OSS_20B, "config.json").layers[0].mlp.grouped
    own = Mxfp4().shard_grouped(gate_up, Share("columns", (slice(1440, 2880),)))
    assert own["mlp.experts.gate_up_proj_blocks"][0][1] == slice(2880, 5760)
    assert own["mlp.experts.gate_up_proj_bias"] == ((slice(0, 32), slice(2880, 5760)),)
    own = Mxfp4().shard_grouped(down, Share("rows", (slice(1440, 2880),), adds_bias=False))
    assert own["mlp.experts.down_proj_scales"] == ((slice(0, 32), slice(0, 2880), slice(45, 90)),)
    assert "mlp.experts.down_proj_bias" not in own


@pytest.mark.parametrize(
    ("ranks", "blocks"), [(2, [45, 45]), (4, [23, 23, 22, 22]), (8, [12, 12, 11, 11, 11, 11, 11, 11])]
)
def test_published_experts_are_cut_in_whole_blocks_on_2_4_and_8_ranks(ranks: int, blocks: list[int]) -> None:
    spec = read_spec({**GPT_OSS_20B, "quantization_config": {"quant_method": "mxfp4"}}, "config.json")
    parts = [part_of(spec, Shard(rank, ranks)) for rank in range(ranks)]
    assert [part.layers[0].mlp.inner_size for part in parts] == [4 * 32 * count for count in blocks]
    assert [part.weight_bytes(torch.bfloat16) for part in parts] == sorted(
        (part.weight_bytes(torch.bfloat16) for part in parts), reverse=True
    )


def test_published_configs_are_read() -> None:
    spec = read_spec(GPT_OSS_20B, "config.json", {"eos_token_id": [200_002, 199_999, 200_012]}, "generation_config.json")
    assert spec.unread == ()
    assert spec.eos_ids == (200_002, 199_999, 200_012)
    assert windows(spec) == (128, None) * 12
    assert not spec.rope.truncate
    assert spec.rope.attention_factor == pytest.approx(1.34657, abs=1e-5)
    assert spec.weight_bytes(torch.bfloat16) == pytest.approx(2 * 20.9e9, rel=0.003)
    assert num_multiplied(spec) == pytest.approx(3.6e9, rel=0.01)
    shapes = expected_shapes(spec)
    assert shapes["model.layers.23.mlp.experts.gate_up_proj_blocks"] == (32, 5760, 90, 16)
    assert shapes["model.layers.0.mlp.experts.down_proj_scales"] == (32, 2880, 90)
    assert shapes["model.layers.0.self_attn.sinks"] == (64,)
    large = read_spec({**GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128}, "config.json")
    assert large.weight_bytes(torch.bfloat16) == pytest.approx(2 * 116.8e9, rel=0.003)


def test_names_of_the_original_folder_are_refused_with_what_to_use(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt_oss", **{**ODD, "num_hidden_layers": 1})
    save_file({"block.0.attn.sinks": torch.zeros(8), "embedding.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"block\.0\.attn\.sinks.*as in gpt-oss's folder original/: use the files of the"):
        judge_model(LocalFiles(folder))
