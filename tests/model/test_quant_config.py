"""quantization_config: formats that are not supported and hostile values are refused in one line, with what there is instead."""

from __future__ import annotations

from typing import Any

import pytest

from batchspec.errors import CheckpointError
from batchspec.model.quant.formats import ALL_PLAIN
from batchspec.model.quant.plain import PLAIN
from batchspec.model.spec import read_spec
from tests.checkpoint.test_config_values import ODD_VALUES, ours
from tests.helpers.int4_layouts import of_awq, of_compressed_tensors, of_gptq
from tests.helpers.nvfp4_layouts import MODELOPT as NVFP4
from tests.helpers.nvfp4_layouts import of_compressed_tensors as nvfp4_of_compressed_tensors
from tests.model.test_fp8 import MODELOPT, ODD, TOKEN, WEIGHTS, compressed


def kv_only(**changes: Any) -> dict[str, Any]:
    """compressed-tensors of a checkpoint whose weights are not quantised, but its K/V cache has scales."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme, "ignore": [],
        **changes,
    }


NO_WEIGHTS: dict[str, Any] = {"targets": [], "weights": None, "input_activations": None, "output_activations": None}


@pytest.mark.parametrize(
    "quantisation",
    [
        kv_only(),
        kv_only(config_groups={"group_0": NO_WEIGHTS}, format=None),
        kv_only(config_groups={"group_0": NO_WEIGHTS}, format="float-quantized"),
        {"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "ignore": []},
    ],
)
def test_a_checkpoint_that_has_scales_for_k_and_v_alone_has_plain_weights(quantisation: dict[str, Any]) -> None:
    config = {"model_type": "llama", **ODD, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    assert read_spec({**config, "quantization_config": quantisation}, "config.json").formats == ALL_PLAIN


def grouped(**changes: Any) -> dict[str, Any]:
    """compressed-tensors whose one group has other values; those of `weights` are changes too."""
    group = compressed("channel", TOKEN)["config_groups"]["group_0"]
    weights = {**group["weights"], **changes.pop("weights", {})}
    return compressed("channel", TOKEN, config_groups={"group_0": {**group, "weights": weights, **changes}})


GROUP = {**TOKEN, "strategy": "group", "group_size": 128}


def nvfp4_group(**changes: Any) -> dict[str, Any]:
    """NVFP4 of compressed-tensors whose one group has other values; those of `weights` are changes too."""
    config = nvfp4_of_compressed_tensors()
    group = config["config_groups"]["group_0"]
    weights = {**group["weights"], **changes.pop("weights", {})}
    return {**config, "config_groups": {"group_0": {**group, "weights": weights, **changes}}}


def test_names_with_stars_match_whole_names_and_others_whole_modules() -> None:
    """`*.mlp.gate`, the name of a router, does not match gate_proj."""
    config = {"model_type": "llama", **ODD, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    quantisation = {
        **MODELOPT,
        "ignore": ["lm_head", "*.mlp.gate", "*.q_proj", "model.layers.1"],
        "exclude_modules": ["*.v_proj"],
    }
    formats = read_spec({**config, "quantization_config": quantisation}, "config.json").formats
    names = ["layers.0.mlp.gate", "layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.mlp.up_proj"]
    assert {formats.of(f"model.{name}") for name in names} == {PLAIN}
    names = ["layers.0.mlp.gate_proj", "layers.0.self_attn.q_proj_2", "layers.11.mlp.up_proj"]
    assert {formats.of(f"model.{name}") for name in names} == {formats.quantised}


def refusal(quantisation: Any) -> str:
    config = {"model_type": "llama", **ODD, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    with pytest.raises(CheckpointError) as caught:
        read_spec({**config, "quantization_config": quantisation}, "config.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, 'version="gemv"'),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, "bits=8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 'quant_method="bitsandbytes"'),
        ({"quant_method": "fbgemm_fp8"}, 'quant_method="fbgemm_fp8"'),
        ({"quant_method": "torchao"}, 'quant_method="torchao"'),
        ({"bits": 4}, "quant_method=null"),
        ([4], "not an object"),
        ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, 'quant_algo="W4A16_AWQ"'),
        ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, 'quant_algo="NVFP4_AWQ"'),
        ({**MODELOPT, "quant_algo": "NVFP4", "group_size": 32}, 'quant_algo="NVFP4", quantization_config.group_size=32'),
        ({**MODELOPT, "quant_algo": "NVFP4", "pre_quant_scale": True}, "pre_quant_scale=true"),
        ({**MODELOPT, "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, 'kv_cache_quant_algo="NVFP4"'),
        ({**NVFP4, "kv_cache_scheme": "NVFP4"}, 'kv_cache_scheme="NVFP4"'),
        (compressed("channel", TOKEN, format="pack-quantized"), "pack-quantized with "),
        (compressed("channel", TOKEN, format="nvfp4-pack-quantized"), "nvfp4-pack-quantized with weights of num_bits=8"),
        (compressed("channel", TOKEN, format="mxfp4-pack-quantized"), 'format="mxfp4-pack-quantized"'),
        (compressed("channel", TOKEN, format="mixed-precision"), 'format="mixed-precision"'),
        (nvfp4_group(weights={"group_size": 32}), "group_size=32"),
        (nvfp4_group(weights={"strategy": "group"}), 'strategy="group"'),
        (nvfp4_group(weights={"symmetric": False}), "symmetric=false"),
        (nvfp4_group(weights={"type": "int"}), 'type="int"'),
        (nvfp4_group(weights={"scale_dtype": "torch.uint8"}), 'scale_dtype="torch.uint8"'),
        (nvfp4_group(input_activations={"num_bits": 8, "type": "int"}), 'activations of num_bits=8, type="int"'),
        (compressed("channel", TOKEN, format="int-quantized"), 'format="int-quantized"'),
        (compressed("group", TOKEN), 'weights of num_bits=8, type="float", strategy="group"'),
        (compressed("channel", {**TOKEN, "strategy": "tensor"}), "strategy channel and activations of num_bits=8"),
        (compressed("channel", {**TOKEN, "type": "int"}), 'type="int"'),
        (compressed("block", TOKEN), "strategy block and activations of num_bits=8"),
        (grouped(output_activations=TOKEN), "output_activations="),
        (grouped(targets=["Linear", "Embedding"]), "targets="),
        (grouped(weights={"symmetric": False}), "symmetric=false"),
        (grouped(weights={"dynamic": True}), "dynamic=true"),
        (grouped(weights={"num_bits": 4}), "num_bits=4"),
        (grouped(weights={"strategy": "block", "block_structure": [64, 128]}, input_activations=GROUP), "block_structure="),
        (compressed("block", {**GROUP, "group_size": 64}), "strategy block and activations of"),
        (compressed("channel", {**TOKEN, "symmetric": False}), "activations of num_bits=8"),
        (compressed("tensor", {**TOKEN, "dynamic": False}), "activations of num_bits=8"),
        (compressed("tensor", {**TOKEN, "dynamic": "local"}), 'dynamic is "local"'),
        (compressed("channel", TOKEN, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config="),
        (compressed("channel", TOKEN, transform_config={"config_groups": {"R4": {"type": "hadamard"}}}), "transform_config="),
        (compressed("channel", TOKEN, ignore=["re:("]), "'(' is not a regular expression"),
        (compressed("channel", TOKEN, config_groups={}, kv_cache_scheme=None), "with 0 config_groups"),
        (kv_only(format="sparse-24-bitmask", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config="),
        (kv_only(config_groups={"g": {"targets": ["Qwen3Attention"], "input_activations": TOKEN}}), "Qwen3Attention"),
        (kv_only(config_groups={"g": 5}), "with 0 config_groups"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"}, 'kv_cache_quant_algo="NVFP4"'),
        ({"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"}, "quant_algo=null"),
        ({"quant_method": "modelopt"}, "quant_algo=null"),
    ],
)
def test_other_formats_are_refused_by_name_with_a_list_of_the_supported_ones(quantisation: Any, named: str) -> None:
    message = refusal(quantisation)
    assert named in message
    assert "FP8" in message or "regular expression" in message or "must be true or false" in message


def test_any_value_of_a_key_is_read_or_refused_in_one_line() -> None:
    config = {"model_type": "llama", **ODD, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    group = compressed("channel", TOKEN)["config_groups"]["group_0"]
    odd: list[Any] = [{**MODELOPT, key: value} for key in (*MODELOPT, "exclude_modules", "quantization") for value in ODD_VALUES]
    mixed = {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"model": {"quant_algo": "FP8"}}}
    for value in ODD_VALUES:
        odd += [{**compressed("channel", TOKEN), key: value} for key in (*compressed("channel", TOKEN), "sparsity_config")]
        odd += [compressed("channel", TOKEN, config_groups={"g": {**group, key: value}}) for key in group]
        odd += [compressed("channel", {**TOKEN, key: value}) for key in TOKEN]
        groups = ({**group, "weights": {**WEIGHTS, "strategy": "channel", key: value}} for key in (*WEIGHTS, "strategy"))
        odd += [compressed("channel", TOKEN, config_groups={"g": own}) for own in groups]
        for layout in (of_gptq(32), of_awq(32)):
            keys = (*layout.config, "dynamic", "modules_in_block_to_quantize", "lm_head")
            odd += [{**layout.config, key: value} for key in keys]
            odd.append({**layout.config, "dynamic": {".*": value}})
        odd += [{**NVFP4, key: value} for key in (*NVFP4, "group_size", "pre_quant_scale")]
        odd += [{**mixed, key: value} for key in (*mixed, "kv_cache_scheme", "ignore")]
        odd += [{**mixed, "quantized_layers": {"model": value}}]
        in_nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
        odd += [{**mixed, "quantized_layers": {"model": {**in_nvfp4, key: value}}} for key in in_nvfp4]
        odd += [nvfp4_group(weights={key: value}) for key in nvfp4_group()["config_groups"]["group_0"]["weights"]]
        odd += [nvfp4_group(**{key: value}) for key in nvfp4_group()["config_groups"]["group_0"] if key != "weights"]
        int4 = of_compressed_tensors(32).config
        own_group = int4["config_groups"]["group_0"]
        odd += [{**int4, key: value} for key in int4]
        odd += [
            {**int4, "config_groups": {"g": {**own_group, "weights": {**own_group["weights"], key: value}}}}
            for key in own_group["weights"]
        ]
    for quantisation in odd:
        ours({**config, "quantization_config": quantisation})
