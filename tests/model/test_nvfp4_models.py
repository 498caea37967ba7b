"""Models with NVFP4 weights are those of their dequantised weights: to the bit in fp64, on ranks, with adapters."""

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
from batchspec.model.layers.base import Shard
from batchspec.model.quant.nvfp4 import Nvfp4Linear
from batchspec.model.quant.plain import PLAIN
from batchspec.model.shard import part_of
from batchspec.model.spec import load_spec
from batchspec.model.weights import judge_model
from tests.helpers.models import needed
from tests.helpers.moe_models import tiny_spec
from tests.helpers.nvfp4_layouts import MODELOPT, Packer, all_but_one, make, nvfp4, of_compressed_tensors
from tests.model.test_int4_models import (
    EXPERTS,
    changed,
    check_adapter,
    check_adapters_of_rows,
    check_two_ranks,
    load,
    logits,
    on_two_ranks,
    products,
    put,
    without,
)

CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[dict[str, Any], Packer]] = {
    "modelopt": (MODELOPT, nvfp4(divides=False)),
    "modelopt, without scales of activations": ({**MODELOPT, "quant_algo": "W4A16_NVFP4"}, nvfp4(divides=False, inputs=False)),
    "modelopt, scalars without dimensions": (MODELOPT, nvfp4(divides=False, scalars=())),
    "compressed-tensors": (of_compressed_tensors(), nvfp4(divides=True)),
    "compressed-tensors, without scales of activations": (
        of_compressed_tensors(inputs=False), nvfp4(divides=True, inputs=False)
    ),
}
BOTH = ("modelopt", "compressed-tensors")


def make_in(folder: Path, name: str, family: str = "llama", **config: Any) -> tuple[Path, Path]:
    quantisation, packer = LAYOUTS[name]
    return make(folder, quantisation, all_but_one(packer), family, **config)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_the_model_of_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    """One projection is not quantised, others have biases, and q, k and v, gate and up differ in their global scales."""
    folder, plain = make_in(tmp_path, name, attention_bias=True)
    target = load(folder)
    assert sum(isinstance(product, Nvfp4Linear) for product in products(target)) == 7
    assert torch.equal(logits(target), logits(load(plain)))
    near, exact = logits(load(folder, torch.float32)), logits(load(plain, torch.float32))
    torch.testing.assert_close(near, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BOTH)
def test_experts_too(name: str, tmp_path: Path) -> None:
    folder, plain = make_in(tmp_path, name, "qwen3_moe", **EXPERTS)
    assert torch.equal(logits(load(folder)), logits(load(plain)))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("glm4", {"head_dim": 48}),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"], "head_dim": 48, "linear_num_value_heads": 8,
                          "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}),
        ("nemotron_h", {**needed("nemotron_h", 4), "mamba_head_dim": 16, "ssm_state_size": 16, "n_routed_experts": 3,
                        "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32}),
    ],
)
@pytest.mark.parametrize("name", BOTH)
def test_fused_projections_and_recurrent_layers_too(name: str, family: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Projections whose names end otherwise stay plain, which the config does not say and the files do."""
    folder, plain = make_in(tmp_path, name, family, **config)
    assert torch.equal(logits(load(folder)), logits(load(plain)))


def fuse(folder: Path) -> None:
    """The experts of each layer in two tensors, and their scales in two each; global scales of a layer are one number."""
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 1):
        experts = f"model.layers.{layer}.mlp.experts"
        for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for ending in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                own = [[tensors.pop(f"{experts}.{i}.{part}.{ending}") for part in parts] for i in range(3)]
                name = f"{experts}.{fused}{'' if ending == 'weight' else f'_{ending}'}"
                scalar = ending in ("weight_scale_2", "input_scale")
                tensors[name] = own[0][0].clone() if scalar else torch.stack([torch.cat(pair) for pair in own])
    save_file(tensors, folder / "model.safetensors")


def test_experts_that_a_file_holds_in_two_tensors_are_the_same(tmp_path: Path) -> None:
    """On two ranks too."""
    folder, _ = make_in(tmp_path, "modelopt", "qwen3_moe", head_dim=24, **EXPERTS)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale_2") and "experts" in name]:
        tensors[name] = torch.full((1,), 0.0007 if "down" in name else 0.0005)
    save_file(tensors, folder / "model.safetensors")
    spec = judge_model(LocalFiles(folder))
    expected, of_rank = logits(load(folder)), on_two_ranks(folder, spec)[1]
    fuse(folder)
    assert torch.equal(logits(load(folder)), expected)
    for key, value in on_two_ranks(folder, judge_model(LocalFiles(folder)))[1].items():
        assert torch.equal(value, of_rank[key])


def test_weights_stay_packed(tmp_path: Path) -> None:
    """Nine bits for two numbers, four bytes a row; `plan` counts these bytes, and says what they are."""
    folder, _ = make_in(tmp_path, "modelopt")
    spec = judge_model(LocalFiles(folder))
    held = [product.weight for product in products(load(folder)) if isinstance(product, Nvfp4Linear)]
    nbytes = sum(own.codes.nbytes + own.scales.nbytes + own.row_scales.nbytes for own in held)
    assert spec.block_bytes(torch.bfloat16) == nbytes + 176 * 304 * 2
    assert spec.formats.kept == "NVFP4 weights"


def test_a_config_beside_the_model_s_is_read(tmp_path: Path) -> None:
    """As older versions of ModelOpt wrote it."""
    folder, plain = make_in(tmp_path, "modelopt")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": MODELOPT["ignore"]}
    beside = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": own}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    assert torch.equal(logits(load(folder)), logits(load(plain)))


def test_scales_of_an_fp8_kv_cache_are_no_matter(tmp_path: Path) -> None:
    folder, plain = make_in(tmp_path, "modelopt")
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 1):
        tensors |= {f"model.layers.{layer}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.5) for x in "kv"}
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)), logits(load(plain)))


# --- several ranks


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", BOTH)
def test_two_ranks_compute_what_one_process_does(name: str, family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 304, "head_dim": 24, "num_hidden_layers": 1}
    folder, _ = make_in(tmp_path, name, family, **{**sizes, **(EXPERTS if family == "qwen3_moe" else {})})
    check_two_ranks(folder)


def test_groups_are_not_divided(tmp_path: Path) -> None:
    folder, _ = make_in(tmp_path, "modelopt", head_dim=20)
    with pytest.raises(ConfigError, match=r"self_attn\.o_proj: a part of 40 of 80 divides a block of 16; lower cluster"):
        part_of(judge_model(LocalFiles(folder)), Shard(0, 2))


# --- adapters


@pytest.mark.parametrize("name", BOTH)
def test_an_adapter_is_added_to_the_products_of_nvfp4_weights(name: str, tmp_path: Path) -> None:
    folder, plain = make_in(tmp_path, name)
    check_adapter(tmp_path, folder, plain)


def test_rows_have_adapters_of_their_own(tmp_path: Path) -> None:
    folder, plain = make_in(tmp_path, "compressed-tensors")
    check_adapters_of_rows(folder, plain)


# --- what is refused


UP = "model.layers.0.mlp.up_proj"


def zero(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def as_nan(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor.float(), float("nan")).to(tensor.dtype)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("modelopt", put(f"{UP}.weight", lambda x: x[:, :-1]), f"{UP}.weight is [304, 87], config.json says [304, 88]"),
        ("modelopt", put(f"{UP}.weight", lambda x: x.int()), f"{UP}.weight is I32, it must be U8"),
        ("modelopt", put(f"{UP}.weight_scale", lambda x: x[:, 1:]), f"{UP}.weight_scale is [304, 10], config.json says [304, 11"),
        ("modelopt", put(f"{UP}.weight_scale", lambda x: x.float()), f"{UP}.weight_scale is F32, it must be F8_E4M3"),
        ("modelopt", put(f"{UP}.weight_scale_2", lambda x: x.repeat(304)), f"{UP}.weight_scale_2 is [304], config.json says [1]"),
        ("modelopt", without(f"{UP}.weight_scale_2"), f"1 missing tensors: {UP}.weight_scale_2"),
        ("modelopt", put(f"{UP}.weight_scale_2", zero), f"{UP}.weight_scale_2 is 0, and it must be positive and finite"),
        ("modelopt", put(f"{UP}.weight_scale", as_nan), f"{UP}.weight_scale holds NaN or negative numbers"),
        ("modelopt", lambda tensors: tensors.update({f"{UP}.pre_quant_scale": torch.ones(176)}), f"{UP}.pre_quant_scale"),
        (
            "modelopt", lambda tensors: tensors.update({"lm_head.weight_scale": torch.ones(320, 11)}),
            "lm_head.weight_scale: a quantised output matrix is not supported",
        ),
        ("compressed-tensors", without(f"{UP}.weight_packed"), f"1 missing tensors: {UP}.weight_packed"),
        ("compressed-tensors", without(f"{UP}.weight_scale"), f"1 missing tensors: {UP}.weight_scale"),
        ("compressed-tensors", put(f"{UP}.weight_global_scale", as_nan), f"{UP}.weight_global_scale is nan, and it must be"),
    ],
)
def test_malformed_files_are_refused_in_one_line_by_the_name_of_the_tensor(
    name: str, change: Any, said: str, tmp_path: Path
) -> None:
    folder, _ = make_in(tmp_path, name)
    assert said in changed(folder, change)


def test_a_file_of_the_other_layout_is_refused(tmp_path: Path) -> None:
    folder, _ = make_in(tmp_path, "modelopt")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": of_compressed_tensors()}))
    with pytest.raises(CheckpointError, match=r"missing tensors: .*weight_global_scale.*unexpected tensors") as caught:
        judge_model(LocalFiles(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("sizes", "said"), [
    ({"intermediate_size": 100}, "mlp.down_proj: 100 inputs are no multiple of 16"),
    ({"hidden_size": 72}, "self_attn.q_proj: 72 inputs are no multiple of 16"),
])
@pytest.mark.parametrize("config", [MODELOPT, of_compressed_tensors()], ids=BOTH)
def test_sizes_that_it_cannot_hold_are_refused(config: dict[str, Any], sizes: dict[str, int], said: str) -> None:
    spec = tiny_spec("llama", **{"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, **sizes}, quantization_config=config)
    with pytest.raises(CheckpointError) as caught:
        list(spec.tensors())
    assert str(caught.value).startswith(f"{said}, so that it cannot be in NVFP4 as quantization_config says; use a checkpoint")


def test_stacked_experts_stay_plain_because_quantisers_convert_modules_alone(tmp_path: Path) -> None:
    """gpt-oss with attention in NVFP4."""
    sizes: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 32, "num_hidden_layers": 1}
    folder, plain = make_in(tmp_path, "modelopt", "gpt_oss", initializer_range=0.05, **sizes)
    judge_model(LocalFiles(folder))
    assert load_spec(folder).formats.of("model.layers.0.mlp.experts.gate_up_proj") is PLAIN
    assert torch.equal(logits(load(folder)), logits(load(plain)))
