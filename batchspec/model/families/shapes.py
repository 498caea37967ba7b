"""config.json of the shapes that `batchspec bench` and `doctor` know by name, to measure and tune without a checkpoint."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from batchspec.checkpoint.config_values import read_text
from batchspec.errors import ConfigError
from batchspec.model.families.family_shapes import FAMILY_SHAPES
from batchspec.model.spec import ModelSpec, load_spec

COMMON: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}
"""Keys of every shape that has none of its own."""
_LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0,
}
_LLAMA_70B: dict[str, Any] = _LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
    "num_experts_per_tok": 4, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
    "vocab_size": 201088, "rope_theta": 150000.0, "attention_bias": True, "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    },
}
_QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
}
_QWEN3_235B: dict[str, Any] = _QWEN3_30B | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
_MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "hidden_size": 3072, "intermediate_size": 1536,
    "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
    "num_experts_per_tok": 8, "shared_intermediate_size": 0, "vocab_size": 200064, "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid", "use_routing_bias": True,
}
_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 256, "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25, "attention_bias": False,
}
_QWEN3_5_35B: dict[str, Any] = _QWEN3_5 | {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 256, "global_head_dim": 512,
    "hidden_act": None, "attention_k_eq_v": True, "sliding_window": 1024, "final_logit_softcapping": 30.0, "vocab_size": 262144,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
}
_GEMMA4_31B: dict[str, Any] = _GEMMA4 | {
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "num_global_key_value_heads": 4,
}
_GEMMA4_12B: dict[str, Any] = _GEMMA4 | {
    "model_type": "gemma4_unified_text", "architectures": ["Gemma4UnifiedForCausalLM"], "hidden_size": 3840,
    "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
}
_GEMMA4_26B: dict[str, Any] = _GEMMA4 | {
    "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
_GEMMA4_E4B: dict[str, Any] = _GEMMA4 | {
    "attention_k_eq_v": False, "sliding_window": 512, "max_position_embeddings": 131072, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
}
_GEMMA4_E2B: dict[str, Any] = _GEMMA4_E4B | {
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}
_QWEN3_NEXT: dict[str, Any] = _QWEN3_5_35B | {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 48, "vocab_size": 151936,
    "intermediate_size": 5120, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _fp8(*plain: str) -> dict[str, Any]:
    """FP8 weights with a scale for each 128 x 128 block, all but the output matrix and `plain` modules, by default a router."""
    return {
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *(plain or ("mlp.gate",))],
        }
    }


_INT4: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "checkpoint_format": "gptq"
    }
}
"""As in Qwen's own INT4 checkpoints: all but the output matrix and routers in symmetric groups of 128."""
_NVFP4: dict[str, Any] = {
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "mlp.gate"]}
}
"""As in NVIDIA's checkpoints: all but the output matrix and routers."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": _LLAMA_8B,
    "llama8b-fp8": _LLAMA_8B | _fp8(),
    "llama8b-int4": _LLAMA_8B | _INT4,
    "llama8b-nvfp4": _LLAMA_8B | _NVFP4,
    "llama70b": _LLAMA_70B,
    "llama70b-fp8": _LLAMA_70B | _fp8(),
    "llama70b-int4": _LLAMA_70B | _INT4,
    "llama1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "smol135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-30b-a3b-fp8": _QWEN3_30B | _fp8(),
    "qwen3-30b-a3b-int4": _QWEN3_30B | _INT4,
    "qwen3-30b-a3b-nvfp4": _QWEN3_30B | _NVFP4,
    "qwen3-235b-a22b": _QWEN3_235B,
    "qwen3-235b-a22b-fp8": _QWEN3_235B | _fp8(),
    "minimax-m2-fp8": _MINIMAX_M2 | _fp8("block_sparse_moe.gate"),
    "qwen3.5-27b": _QWEN3_5 | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "linear_num_value_heads": 48,
    },
    "qwen3.5-0.8b": _QWEN3_5 | {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "qwen3.5-35b-a3b": _QWEN3_5_35B,
    "qwen3.5-35b-a3b-fp8": _QWEN3_5_35B | _fp8("mlp.gate", "linear_attn.in_proj_a", "linear_attn.in_proj_b"),
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    "gemma4-12b": _GEMMA4_12B,
    "gemma4-31b": _GEMMA4_31B,
    "gemma4-31b-fp8": _GEMMA4_31B | _fp8(),
    "gemma4-26b-a4b": _GEMMA4_26B,
    "gemma4-e4b": _GEMMA4_E4B,
    "gemma4-e2b": _GEMMA4_E2B,
    **FAMILY_SHAPES,
    "mistral-small-4-nvfp4": FAMILY_SHAPES["mistral-small-4"] | _NVFP4,
}
DRAFT_VOCAB = {"smol135m": 16384}
"""Tokens that the head of a shape can draft, where not the usual number."""


def shape_spec(name: str) -> ModelSpec:
    """The shape of that name in SHAPES, or of that config.json. Raises ConfigError where there is neither."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_bytes(config_json(name))
        return load_spec(Path(scratch))


def config_json(name: str) -> bytes:
    """The file's text. Raises ConfigError for a name that is neither a shape nor a file."""
    if name in SHAPES:
        return json.dumps({**COMMON, **SHAPES[name]}).encode()
    if Path(name).is_file():
        return read_text(Path(name)).encode()
    raise ConfigError(f"--shape {name} is neither one of {', '.join(SHAPES)} nor a file; give a config.json")
