"""quantization_config of INT4 checkpoints: what it says, which modules it leaves out, what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from batchspec.errors import CheckpointError
from batchspec.model.quant.awq import Awq
from batchspec.model.quant.gptq import Gptq
from batchspec.model.quant.int4_format import Int4
from batchspec.model.quant.pack_quantized import PackQuantized
from batchspec.model.spec import read_spec
from tests.helpers.int4_layouts import of_awq, of_compressed_tensors, of_gptq
from tests.helpers.moe_models import tiny_config


def formats(config: dict[str, Any]) -> Any:
    return read_spec(tiny_config("llama", quantization_config=config), "config.json").formats


NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj")


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (of_gptq(32, dynamic=None).config, ()),
        (of_gptq(32, dynamic={"-:.*attn.*": {}, "lm_head": {}}).config, NAMES[:2]),
        (of_gptq(32, dynamic={r"+:.*layers\.0\..*": {"bits": 4}, "-:.*attn.*": {}}).config, NAMES[1:2]),
        (of_gptq(32, dynamic={"-:.*attn.*": {}, r"model\.layers\.1": {}, "-:.*": None}).config, (*NAMES[:1], NAMES[1])),
        (of_gptq(32, dynamic={r"-:model\.language_model\.layers\.1\.": {}}).config, NAMES[1:]),
        (of_gptq(32, dynamic={r"layers\.1": {}, r"-:model\.layers\.1": {}}).config, NAMES[1:]),
        (of_gptq(32, dynamic=None, modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]).config, NAMES[2:]),
        (of_gptq(32, dynamic=None, modules_in_block_to_quantize=["mlp.down_proj", "proj"]).config, NAMES[:2]),
        (
            of_gptq(32, dynamic=None, modules_in_block_to_quantize=["model.language_model.layers.1.mlp.down_proj"]).config,
            NAMES[:2],
        ),
        (of_awq(32, modules_to_not_convert=None).config, ()),
        (of_awq(32, modules_to_not_convert=["model.layers.1.", "gate"]).config, NAMES[1:]),
        (of_awq(32, modules_to_not_convert=["model.language_model.layers.1.mlp"]).config, NAMES[2:]),
        (of_awq(32, modules_to_not_convert=["q"], dynamic={"-:.*down.*": {}}).config, NAMES[2:]),
        (of_compressed_tensors(32, ignore=["re:.*attn.*", "lm_head"]).config, NAMES[:2]),
    ],
)
def test_modules_that_are_not_quantised(config: dict[str, Any], plain: tuple[str, ...]) -> None:
    """The first pattern of `dynamic` that matches the beginning of a name decides."""
    own = formats(config)
    assert tuple(name for name in NAMES if not isinstance(own.of(name), Int4)) == plain


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (of_gptq(128, v1=False, sym=False, desc_act=True).config, Gptq(128, False, True)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "format": "gptq_v2"}, Gptq(64, True)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, Gptq(64, True, minus_one=True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"}, Awq(128, False)),
        ({"quant_method": "awq", "bits": 4, "group_size": -1, "format": "gemm", "zero_point": False}, Awq(None, True)),
        (of_compressed_tensors(128, actorder="static").config, PackQuantized(128, True)),
        (of_compressed_tensors(128, actorder="dynamic", symmetric=False).config, PackQuantized(128, False, True)),
        (of_compressed_tensors(-1).config, PackQuantized(None, True)),
    ],
)
def test_what_a_config_says(config: dict[str, Any], found: Int4) -> None:
    assert formats(config).quantised == found


def ct_weights(**changes: Any) -> dict[str, Any]:
    layout = of_compressed_tensors(32)
    group = layout.config["config_groups"]["group_0"]
    return {**layout.config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def ct_group(**changes: Any) -> dict[str, Any]:
    layout = of_compressed_tensors(32)
    return {**layout.config, "config_groups": {"group_0": {**layout.config["config_groups"]["group_0"], **changes}}}


INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (of_gptq(32, bits=8).config, "gptq with quantization_config.bits=8"),
        (of_gptq(12).config, "gptq with quantization_config.group_size=12"),
        (of_gptq(0).config, "gptq with quantization_config.group_size=0"),
        (of_gptq(32, checkpoint_format="marlin").config, 'gptq with quantization_config.checkpoint_format="marlin"'),
        (of_gptq(32, is_marlin_format=True).config, "is_marlin_format=true"),
        (of_gptq(32, lm_head=True).config, "gptq with quantization_config.lm_head=true"),
        (of_gptq(32, pack_dtype="int16").config, 'pack_dtype="int16"'),
        (of_gptq(32, rotation="hadamard").config, 'rotation="hadamard"'),
        (of_gptq(32, activation={"mode": "w4afp8"}).config, "activation={"),
        (of_gptq(32, adapter={"name": "lora"}).config, "adapter={"),
        (of_gptq(32, dynamic={"+:.*down.*": {"bits": 8}}).config, "gptq with dynamic '+:.*down.*' with bits=8"),
        (of_gptq(32, dynamic={".*down.*": {"group_size": 64}}).config, "gptq with dynamic '.*down.*' with group_size=64"),
        (of_awq(32, bits=8).config, "awq with quantization_config.bits=8"),
        (of_awq(32, version="gemv").config, 'awq with quantization_config.version="gemv"'),
        (of_awq(32, backend="llm-awq").config, 'awq with quantization_config.backend="llm-awq"'),
        (of_awq(32, desc_act=True).config, "awq with quantization_config.desc_act=true"),
        (of_awq(32, lm_head=True).config, "awq with quantization_config.lm_head=true"),
        (ct_weights(num_bits=8), "weights of num_bits=8"),
        (ct_weights(type="float"), 'type="float"'),
        (ct_weights(strategy="tensor", group_size=None), 'strategy="tensor"'),
        (ct_weights(group_size=12), "group_size=12"),
        (ct_weights(strategy="channel"), 'strategy="channel", group_size=32'),
        (ct_weights(dynamic=True), "dynamic=true"),
        (ct_weights(actorder="other"), 'actorder="other"'),
        (ct_group(input_activations=INT8), "compressed-tensors pack-quantized with "),
        (ct_group(output_activations=INT8), "output_activations="),
        (ct_group(format="int-quantized"), 'format="int-quantized"'),
        (ct_group(targets=["Linear", "Embedding"]), "targets="),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        formats(config)
    message = str(caught.value)
    assert "\n" not in message
    assert named in message
    assert "INT4 (GPTQ, AWQ, compressed-tensors)" in message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (of_gptq(32, dynamic={"-:(": {}}).config, "'(' is not a regular expression"),
        (of_gptq(32, dynamic={"a": {}, "-:(?i)b": {}}).config, "is not a regular expression"),
        (of_gptq(32, dynamic={"+:a": 5}).config, "quantization_config.dynamic.+:a is 5; it must be an object"),
        (of_gptq(32, modules_in_block_to_quantize=[["a"], "b"]).config, "it must be a list of strings, or of lists of strings"),
        ({**of_gptq(32).config, "sym": 1}, "quantization_config.sym is 1; it must be true or false"),
        (of_awq(32, modules_to_not_convert="lm_head").config, "it must be a list of strings"),
        ({"quant_method": "gptq", "group_size": 32}, "quantization_config.bits is null; it must be an integer in 1 .. 64"),
        ({"quant_method": "awq", "bits": 4}, "quantization_config.group_size is null"),
        (ct_weights(actorder=True), "actorder is true; it must be a string"),
    ],
)
def test_malformed_values_are_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        formats(config)
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)
