"""quantization_config: formats that are not built and hostile values are refused in one line, with what there is instead."""

from __future__ import annotations

from typing import Any

import pytest

from batchspec.errors import CheckpointError
from batchspec.model.spec import read_spec
from tests.test_config_values import ODD_VALUES, ours
from tests.test_fp8 import MODELOPT, ODD, TOKEN, WEIGHTS, compressed


def refusal(quantisation: Any) -> str:
    config = {"model_type": "llama", **ODD, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    with pytest.raises(CheckpointError) as caught:
        read_spec({**config, "quantization_config": quantisation}, "config.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, 'quant_method="awq"'),
        ({"quant_method": "gptq", "bits": 4}, 'quant_method="gptq"'),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 'quant_method="bitsandbytes"'),
        ({"quant_method": "fbgemm_fp8"}, 'quant_method="fbgemm_fp8"'),
        ({"quant_method": "torchao"}, 'quant_method="torchao"'),
        ({"bits": 4}, "quant_method=null"),
        ([4], "not an object"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, 'quant_algo="NVFP4"'),
        ({**MODELOPT, "quant_algo": "W4A16_AWQ"}, 'quant_algo="W4A16_AWQ"'),
        (compressed("channel", TOKEN, format="pack-quantized"), 'format="pack-quantized"'),
        (compressed("channel", TOKEN, format="nvfp4-pack-quantized"), 'format="nvfp4-pack-quantized"'),
        (compressed("channel", TOKEN, format="int-quantized"), 'format="int-quantized"'),
        (compressed("group", TOKEN), 'weights of num_bits=8, type="float", strategy="group"'),
        (compressed("channel", {**TOKEN, "strategy": "tensor"}), "strategy channel and activations of num_bits=8"),
        (compressed("channel", {**TOKEN, "type": "int"}), 'type="int"'),
        (compressed("block", TOKEN), "strategy block and activations of num_bits=8"),
        (compressed("channel", TOKEN, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config="),
        (compressed("channel", TOKEN, ignore=["re:("]), "'(' is not a regular expression"),
        (compressed("channel", TOKEN, config_groups={}), "with 0 config_groups"),
    ],
)
def test_other_formats_are_refused_by_name_and_what_there_is_is_said(quantisation: Any, named: str) -> None:
    message = refusal(quantisation)
    assert named in message
    assert "FP8" in message or "regular expression" in message


def test_any_value_of_a_key_is_read_or_refused_in_one_line() -> None:
    config = {"model_type": "llama", **ODD, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    group = compressed("channel", TOKEN)["config_groups"]["group_0"]
    odd: list[Any] = [{**MODELOPT, key: value} for key in (*MODELOPT, "exclude_modules", "quantization") for value in ODD_VALUES]
    for value in ODD_VALUES:
        odd += [{**compressed("channel", TOKEN), key: value} for key in (*compressed("channel", TOKEN), "sparsity_config")]
        odd += [compressed("channel", TOKEN, config_groups={"g": {**group, key: value}}) for key in group]
        odd += [compressed("channel", {**TOKEN, key: value}) for key in TOKEN]
        groups = ({**group, "weights": {**WEIGHTS, "strategy": "channel", key: value}} for key in (*WEIGHTS, "strategy"))
        odd += [compressed("channel", TOKEN, config_groups={"g": own}) for own in groups]
    for quantisation in odd:
        ours({**config, "quantization_config": quantisation})
