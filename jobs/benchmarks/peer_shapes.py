"""The rows of `peers.py`, and config.json of their models and drafters as vLLM and SGLang read them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batchspec.model.families.shapes import COMMON, DRAFT_VOCAB, config_json, shape_spec


class Row(NamedTuple):
    """shape: a name of model/families/shapes.py; "": real weights, `batch` prompts at a time, up to the model's own ends."""

    shape: str
    batch: int
    prompt: int
    gen: int = 512


SHORT, MIDDLE, LONG = (256, 1024), (64, 4096), (64, 8192)
ROWS = {
    f"{short}-{batch}x{prompt}": Row(shape, batch, prompt)
    for short, shape, sizes in (
        ("8b", "llama8b", [LONG, SHORT]), ("8b-fp8", "llama8b-fp8", [LONG, SHORT]), ("8b-int4", "llama8b-int4", [LONG, SHORT]),
        ("1b", "llama1b", [SHORT]), ("135m", "smol135m", [(256, 512)]),
        ("20b", "gpt-oss-20b", [SHORT, LONG, (128, 4096)]), ("120b", "gpt-oss-120b", [SHORT, LONG]),
        ("30b", "qwen3-30b-a3b-fp8", [SHORT, LONG, (32, 16384)]), ("30b-bf16", "qwen3-30b-a3b", [SHORT, LONG]),
        ("30b-int4", "qwen3-30b-a3b-int4", [SHORT, LONG]), ("30b-nvfp4", "qwen3-30b-a3b-nvfp4", [SHORT, LONG]),
        ("qwen3.5-35b", "qwen3.5-35b-a3b", [SHORT, LONG]), ("qwen3.5-27b", "qwen3.5-27b", [MIDDLE]),
        ("gemma4-31b", "gemma4-31b", [(32, 8192), (64, 1024)]), ("gemma4-26b", "gemma4-26b-a4b", [(128, 1024)]),
        ("glm-4.5-air", "glm-4.5-air-fp8", [(24, 4096)]), ("glm-4.7-flash", "glm-4.7-flash", [SHORT, LONG]),
        ("nano", "nemotron3-nano-30b-a3b", [SHORT, LONG]), ("mistral-small-4", "mistral-small-4-nvfp4", [SHORT]),
        ("70b", "llama70b", [SHORT, MIDDLE, LONG]), ("70b-fp8", "llama70b-fp8", [SHORT, MIDDLE, LONG]),
        ("qwen3-8b", "qwen3-8b", [SHORT, LONG]),
    )
    for batch, prompt in sizes
} | {"gsm8k": Row("", 256, 1024, 256)}


def drafter_of(shape: str) -> str:
    """What drafts: `mtp`, a layer of the model's own; `assistant`, the small model made for it; `none`; else `eagle3`, a head."""
    if shape.startswith("gemma4"):
        return "assistant"
    if shape.startswith("mistral-small-4"):
        return "none"
    return "mtp" if shape.startswith(("qwen3.5", "glm-4", "nemotron3")) else "eagle3"


def model_config(shape: str) -> dict[str, Any]:
    """config.json of the shape as the other engines read it: each format names the routers, which are not quantised, its own way.
    """
    config: dict[str, Any] = json.loads(config_json(shape))
    quantization, layers = config.get("quantization_config", {}), range(config["num_hidden_layers"])
    routers = [f"model.layers.{i}.mlp.gate" for i in layers if {"num_experts", "n_routed_experts"} & config.keys()]
    if quantization.get("quant_method") == "fp8":
        quantization["modules_to_not_convert"] = ["lm_head", *routers]
    elif quantization.get("quant_method") == "gptq":
        quantization["dynamic"] = {r"-:.*mlp\.gate$": {}}
    elif quantization.get("quant_method") == "modelopt":
        quantization |= {"ignore": ["lm_head", *routers], "group_size": 16}
    family = config["model_type"]
    if family == "gpt_oss":
        config["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    elif family.startswith("qwen3_5"):  # the states of recurrent layers are fp32 in published configs, as batchspec's
        config |= {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "output_router_logits": False}
    elif family == "nemotron_h":
        config["mamba_ssm_cache_dtype"] = "float32"
    elif family == "mistral4":
        config |= mistral_config(config["rope_parameters"])
    return config


def mistral_config(rope: dict[str, Any]) -> dict[str, Any]:
    """What differs in Mistral Small 4: vLLM knows no `mistral4`, but reads Mistral's params.json of such a model as this."""
    start, beta = rope["original_max_position_embeddings"], rope["llama_4_scaling_beta"]
    beyond = ("llama_4_scaling_beta", "partial_rotary_factor")  # a share of qk_head_dim; vLLM would take it of the rotated part
    return {
        "model_type": "deepseek_v3", "architectures": ["MistralLarge3ForCausalLM"], "scoring_func": "softmax",
        "topk_method": None, "moe_layer_freq": 1, "llama_4_scaling": {"original_max_position_embeddings": start, "beta": beta},
        "rope_parameters": {key: value for key, value in rope.items() if key not in beyond},
    }


def drafter_config(shape: str, drafter: str = "") -> dict[str, Any]:
    """config.json of a head as large as the one of `batchspec bench` (`eagle3`, `block`), or of an assistant."""
    model, drafter = model_config(shape), drafter or drafter_of(shape)
    if drafter == "assistant":
        return assistant_config(model)
    own = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rope_theta")
    head = COMMON | {key: model[key] for key in own} | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB.get(shape, 32000),
        "intermediate_size": shape_spec(shape).intermediate_size,
    }
    return head | block_config(model) if drafter == "block" else head


def block_config(model: dict[str, Any]) -> dict[str, Any]:
    """What a DSpark head has besides, in DeepSpec's layout: five layers, as many states of the target, Markov matrices."""
    num, depth = 5, model["num_hidden_layers"]
    return {
        "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": num,
        "target_layer_ids": [round(i * (depth - 1) / num) for i in range(num)], "num_target_layers": depth, "block_size": 8,
        "mask_token_id": model["vocab_size"] - 1, "sample_from_anchor": True, "num_anchors": 512, "markov_rank": 256,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
        "rms_norm_eps": model["rms_norm_eps"], "attention_bias": False,
    }


def assistant_config(model: dict[str, Any]) -> dict[str, Any]:
    """The assistant of a large Gemma 4, as published: four layers of 1,024, and logits of all tokens."""
    same = (
        "head_dim", "global_head_dim", "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "vocab_size",
        "sliding_window", "attention_k_eq_v", "max_position_embeddings", "rms_norm_eps", "hidden_size_per_layer_input",
        "tie_word_embeddings",
    )
    text = {key: model[key] for key in same} | {
        "model_type": "gemma4_text", "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4,
        "num_kv_shared_layers": 4, "vocab_size_per_layer_input": 0, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    return {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "text_config": text,
        "backbone_hidden_size": model["hidden_size"], "use_ordered_embeddings": False, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """Makes a model's folder, without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_assistant(folder: Path, shape: str) -> str:
    """Makes the folder of an assistant with small random weights, for batchspec, which makes none of its own."""
    write_config(folder, drafter_config(shape))
    spec = importlib.import_module("batchspec.draft.assistant_spec").read_assistant(folder, shape_spec(shape))
    chance = torch.Generator().manual_seed(0)
    made = {tensor.name: torch.randn(tensor.shape, generator=chance).mul_(0.02).bfloat16() for tensor in spec.tensors()}
    importlib.import_module("safetensors.torch").save_file(made, folder / "model.safetensors")
    return str(folder)
