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


SHORT, LONG = (256, 1024), (64, 8192)
ROWS = {
    f"{short}-{batch}x{prompt}": Row(shape, batch, prompt)
    for short, shape, sizes in (
        ("8b", "llama8b", [LONG, SHORT]), ("8b-fp8", "llama8b-fp8", [LONG, SHORT]), ("8b-int4", "llama8b-int4", [LONG, SHORT]),
        ("1b", "llama1b", [SHORT]), ("135m", "smol135m", [(256, 512)]),
        ("20b", "gpt-oss-20b", [SHORT, LONG, (128, 4096)]), ("120b", "gpt-oss-120b", [SHORT, LONG]),
        ("30b", "qwen3-30b-a3b-fp8", [SHORT, LONG, (32, 16384)]), ("30b-bf16", "qwen3-30b-a3b", [SHORT, LONG]),
        ("30b-int4", "qwen3-30b-a3b-int4", [SHORT, LONG]), ("30b-nvfp4", "qwen3-30b-a3b-nvfp4", [SHORT, LONG]),
        ("qwen3.5-35b", "qwen3.5-35b-a3b", [SHORT, LONG]), ("qwen3.5-27b", "qwen3.5-27b", [(64, 4096)]),
        ("gemma4-31b", "gemma4-31b", [(32, 8192), (64, 1024)]), ("gemma4-26b", "gemma4-26b-a4b", [(128, 1024)]),
        ("glm-4.5-air", "glm-4.5-air-fp8", [(24, 4096)]),
    )
    for batch, prompt in sizes
} | {"gsm8k": Row("", 256, 1024, 256)}


def drafter_of(shape: str) -> str:
    """What drafts: `mtp`, a layer of the model's own; `assistant`, the small model made for it; else `eagle3`, a head."""
    if shape.startswith("gemma4"):
        return "assistant"
    return "mtp" if shape.startswith(("qwen3.5", "glm-4.5")) else "eagle3"


def model_config(shape: str) -> dict[str, Any]:
    """config.json of the shape as the other engines read it: each format names the routers, which are not quantised, its own way.
    """
    config: dict[str, Any] = json.loads(config_json(shape))
    quantization, layers = config.get("quantization_config", {}), range(config["num_hidden_layers"])
    routers = [f"model.layers.{i}.mlp.gate" for i in layers if "num_experts" in config]
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
    return config


def drafter_config(shape: str) -> dict[str, Any]:
    """config.json of an EAGLE-3 head as large as the one of `batchspec bench`, or of an assistant."""
    model = model_config(shape)
    if drafter_of(shape) == "assistant":
        return assistant_config(model)
    own = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rope_theta")
    return COMMON | {key: model[key] for key in own} | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB.get(shape, 32000),
        "intermediate_size": shape_spec(shape).intermediate_size,
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
