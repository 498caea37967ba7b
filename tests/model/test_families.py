"""`batchspec families` and README name the same models; every family has a shape of the size of a published model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.commands.families import main
from batchspec.commands.families_table import Row, row_of, table
from batchspec.model.checkpoint_part import block_tensors
from batchspec.model.families.registry import FAMILIES
from batchspec.model.families.shapes import COMMON, SHAPES, shape_spec
from batchspec.model.layers.base import projections
from batchspec.model.quant.plain import PLAIN
from batchspec.model.spec import read_spec

README = Path(__file__).parents[2] / "README.md"


def test_the_list_of_the_readme_is_that_of_the_families() -> None:
    (cell,) = re.findall(r"^\| Which models\? \| (.*?); any folder", README.read_text(encoding="utf-8"), re.M)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)
    assert plain == ", ".join(family.models for family in FAMILIES.values())


def test_the_table_has_a_line_of_each_family(capsys: Any) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{table()}\n", "run python -m batchspec.commands.families_table"
    head, *lines = printed.splitlines()
    assert re.split(r"  +", head) == ["models", "model type", "weights", "drafters", "gpus", "model", "shape"]
    for family, line in zip(FAMILIES.values(), lines, strict=False):
        assert re.split(r"  +", line) == list(row_of(family))
        assert re.fullmatch(r"[\w-]+/[\w.-]+", family.example)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ("bf16, FP8, INT4, NVFP4", "all", "1, 2, 4, 8")),
        ("gpt_oss", ("bf16, MXFP4", "all", "1, 2, 4, 8")),
        ("qwen3_next", ("bf16, FP8, INT4, NVFP4", "no window, no trees, mtp", "1, 2, 4, 8")),
        ("lfm2", ("bf16, FP8, INT4, NVFP4", "no trees", "1, 2, 4, 8")),
        ("nemotron_h", ("bf16, FP8, INT4, NVFP4", "no window, no trees, mtp", "1, 2, 4, 8")),
        ("falcon_h1", ("bf16, FP8, INT4, NVFP4", "no window, no trees", "1")),
        ("phi3", ("bf16, FP8, INT4, NVFP4", "all", "1, 2")),
        ("glm4_moe", ("bf16, FP8, INT4, NVFP4", "all, mtp", "1, 2, 4, 8")),
        ("glm4_moe_lite", ("bf16, FP8, INT4, NVFP4", "no trees, mtp", "1, 2, 4")),
        ("mistral4", ("bf16, FP8, INT4, NVFP4", "no trees", "1, 2, 4, 8")),
        ("deepseek_v3", ("bf16, FP8, INT4, NVFP4", "no trees, mtp", "1, 2, 4, 8")),
        ("gemma4_text", ("bf16, FP8, INT4, NVFP4", "all, mtp", "1, 2, 4, 8")),
        ("gemma4_unified_text", ("bf16, FP8, INT4, NVFP4", "all, mtp", "1, 2, 4, 8")),
    ],
)
def test_facts_are_those_of_the_shape(family: str, expected: tuple[str, str, str]) -> None:
    found: Row = row_of(FAMILIES[family])
    assert (found.weights, found.drafters, found.gpus) == expected


@pytest.mark.parametrize("name", ["FP8", "INT4", "NVFP4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_listed_format_can_hold_all_products(family: str, name: str) -> None:
    """As the sizes of the published model are; of a family without it, at least its experts are plain."""
    found = row_of(FAMILIES[family])
    quantised = SHAPES[f"llama8b-{name.lower()}"]["quantization_config"]
    spec = read_spec({**COMMON, **SHAPES[found.shape], "quantization_config": quantised}, "config.json")
    plain = []
    for prefix, block in spec.blocks():
        list(block_tensors(block, prefix, spec.formats))  # raises CheckpointError for sizes that the format cannot hold
        parts = [part.name for part in projections(block)] + [grouped.of(0).parts[0].name for grouped in block.grouped]
        plain += [prefix + part for part in parts if spec.formats.of(prefix + part) is PLAIN]
    assert (name in found.weights.split(", ")) == (not plain)


NUMBERS = {
    "qwen2.5-7b": 7.62, "qwen3-8b": 8.19, "mistral-small-24b": 23.57, "ministral3-8b": 8.49, "mixtral-8x7b": 46.7,
    "gemma3-27b": 27.0, "phi4-14b": 14.66, "olmo2-7b": 7.3, "olmo3-32b": 32.23, "glm4-32b": 32.57, "glm-ocr": 0.673,
    "glm-4.5-air": 106.9,
    "glm-4.5-air-fp8": 106.9, "glm-4.6-fp8": 352.8, "seed-oss-36b": 36.15, "smollm3-3b": 3.08, "granite3-8b": 8.17,
    "granite4-micro": 3.4, "exaone4-32b": 32.0, "glm-4.7-flash": 29.94, "lfm2-1.2b": 1.17, "lfm2-8b-a1b": 8.34,
    "granite4-h-micro": 3.19, "granite4-h-tiny": 6.94, "nemotron-nano-9b": 8.89, "bamba-9b": 9.78,
    "falcon-h1-0.5b": 0.521,
    "nemotron3-nano-30b-a3b": 31.58, "nemotron3-super-120b-a12b": 120.67,
}
"""Thousand millions of weights of the published models, without layers for images and MTP."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_shape_has_the_size_of_the_published_model(name: str) -> None:
    spec = shape_spec(name)
    assert spec.unread == ()
    assert spec.weight_bytes(torch.bfloat16) / 2e9 == pytest.approx(NUMBERS[name], rel=0.003)


QWEN3_CODER: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5472,
    "max_position_embeddings": 262144, "max_window_layers": 28, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "qkv_bias": False, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0, "sliding_window": None,
    "tie_word_embeddings": False, "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 151936,
}
QWEN3_8B: dict[str, Any] = SHAPES["qwen3-8b"] | {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.8782488562869419,
    },
}
MISTRAL: dict[str, Any] = SHAPES["mistral-small-24b"] | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
OTHER_NAMES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "Qwen3-Coder-30B-A3B": ("qwen3_moe", 30.5, QWEN3_CODER),
    "Qwen3-Coder-480B-A35B": (
        "qwen3_moe", 480.2,
        QWEN3_CODER | {
            "hidden_size": 6144, "intermediate_size": 8192, "moe_intermediate_size": 2560, "num_attention_heads": 96,
            "num_experts": 160, "num_hidden_layers": 62, "num_key_value_heads": 8,
        },
    ),
    "Qwen3-Coder-Next": ("qwen3_next", 79.7, SHAPES["qwen3-next-80b-a3b"] | {"rope_theta": 5000000}),
    "DeepSeek-R1-0528-Qwen3-8B": ("qwen3", 8.19, QWEN3_8B),
    "DeepSeek-R1-Distill-Llama-70B": ("llama", 70.6, SHAPES["llama70b"]),
    "QwQ-32B": (
        "qwen2", 32.8,
        SHAPES["qwen2.5-7b"] | {
            "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
    ),
    "Devstral-Small-2507": ("mistral", 23.6, MISTRAL),
    "Magistral-Small-2509": (
        "mistral", 23.6,
        {
            "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
            "text_config": COMMON | MISTRAL, "vision_config": {"hidden_size": 1024},
        },
    ),
    "LightOnOCR-2-1B": (
        "qwen3", 0.596,
        {
            "model_type": "mistral3", "architectures": ["LightOnOCRForConditionalGeneration"], "image_token_id": 151655,
            "text_config": COMMON | {
                "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
                "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                "rms_norm_eps": 1e-6, "vocab_size": 151936, "rope_theta": 1000000, "max_position_embeddings": 40960,
            },
            "vision_config": {"model_type": "pixtral", "patch_size": 14, "image_size": 1540},
        },
    ),
    "Devstral-2-123B": (
        "ministral3", 125.0,
        SHAPES["ministral3-8b"] | {
            "hidden_size": 12288, "intermediate_size": 28672, "num_hidden_layers": 88, "num_attention_heads": 96,
        },
    ),
    "GLM-Z1-32B-0414": ("glm4", 32.57, SHAPES["glm4-32b"]),
    "GLM-4.7": ("glm4_moe", 352.8, {key: own for key, own in SHAPES["glm-4.6-fp8"].items() if key != "quantization_config"}),
}
"""Published models that are of a family of another name: the family, thousand millions of weights, and their config.json."""


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_models_of_other_names_are_read_as_their_family(name: str) -> None:
    family, weights, config = OTHER_NAMES[name]
    spec = read_spec(config if "text_config" in config else {**COMMON, **config}, "config.json")
    assert (spec.family, spec.unread) == (family, ())
    assert spec.weight_bytes(torch.bfloat16) / 2e9 == pytest.approx(weights, rel=0.005)


def test_every_family_has_a_shape() -> None:
    assert {{**COMMON, **config}["model_type"] for config in SHAPES.values()} == set(FAMILIES)
