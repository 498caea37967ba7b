"""config.json of a published model of each family, for `shapes.py`: the keys that decide its shape."""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GLM_4_5_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "use_qk_norm": False, "attention_bias": True,
    "partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "num_nextn_predict_layers": 1, "vocab_size": 151552,
}
_GLM_4_6: dict[str, Any] = _GLM_4_5_AIR | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
    "n_routed_experts": 160, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    "max_position_embeddings": 202752,
}
_GLM_4_7_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "routed_scaling_factor": 1.8, "norm_topk_prob": True, "attention_bias": False,
    "rope_theta": 1000000.0, "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1, "max_position_embeddings": 202752,
    "vocab_size": 154880,
}
_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "attention_bias": False, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 129280,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    },
}
_MISTRAL_SMALL_4: dict[str, Any] = {
    "model_type": "mistral4", "architectures": ["Mistral4ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 32,
    "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 0, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6, "vocab_size": 131072,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5,
    },
}
_FP8_TOKENS: dict[str, Any] = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}
_FP8_ROWS: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "ignore": ["lm_head", "re:.*eh_proj", "re:.*mlp\\.gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "input_activations": _FP8_TOKENS,
                "weights": {**_FP8_TOKENS, "dynamic": False, "strategy": "channel"},
            }
        },
    }
}
"""FP8 weights with a scale for each row, as in GLM's own FP8 checkpoints."""
_GRANITE: dict[str, Any] = {
    "num_hidden_layers": 40, "num_key_value_heads": 8, "rope_theta": 10000000.0, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "tie_word_embeddings": True,
}
_GRANITE_H: dict[str, Any] = _GRANITE | {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "position_embedding_type": "nope",
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)], "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "vocab_size": 100352,
}
_LFM2: dict[str, Any] = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "rms_norm_eps": None, "norm_eps": 1e-5,
    "tie_word_embeddings": None, "tie_embedding": True, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 65536,
    "max_position_embeddings": 128000, "rope_theta": 1000000.0, "conv_L_cache": 3, "conv_bias": False, "eos_token_id": 7,
}
_LFM2_1_2B: dict[str, Any] = _LFM2 | {
    "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_ff_dim": 12288, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
}
_LFM2_8B: dict[str, Any] = _LFM2 | {
    "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "num_hidden_layers": 24, "intermediate_size": 7168,
    "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
}
_NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "rms_norm_eps": None, "layer_norm_epsilon": 1e-5,
    "hidden_act": None, "head_dim": 128, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "mlp_hidden_act": "relu2",
    "vocab_size": 131072,
}
_NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NEMOTRON3_NANO: dict[str, Any] = _NEMOTRON_H | {
    "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52, "hybrid_override_pattern": _NANO_PATTERN,
    "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "max_position_embeddings": 262144,
    "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"],
}
"""With the MTP layer of Nemotron 3.5 Lightning, which has the same layers; Nemotron 3 Nano has none."""
_NEMOTRON3_SUPER: dict[str, Any] = _NEMOTRON3_NANO | {
    "hidden_size": 4096, "intermediate_size": 2688, "num_hidden_layers": 88, "mamba_num_heads": 128, "n_routed_experts": 512,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024, "routed_scaling_factor": 5.0,
}


def _modelopt(algorithm: str) -> dict[str, Any]:
    """As in NVIDIA's checkpoints: all but attention, the Mamba2 layer before it, routers, the MTP layer and the output matrix."""
    ends = [i for i, letter in enumerate(_NANO_PATTERN) if letter == "*"]
    plain = [f"backbone.layers.{i}.mixer.{part}_proj" for i in ends for part in "qkvo"]
    plain += [f"backbone.layers.{i - 1}.mixer.{part}_proj" for i in ends for part in ("in", "out")]
    ignore = ["lm_head", "mtp*", "mixer.gate", *plain]
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore}}


def _mixed(pattern: str) -> dict[str, Any]:
    """Experts in NVFP4; projections of Mamba2 layers and shared experts in FP8: NVIDIA's checkpoint leaves some in bf16."""
    layers = {f"backbone.layers.{i}.mixer.experts": "NVFP4" for i, letter in enumerate(pattern) if letter == "E"}
    layers |= {f"backbone.layers.{i}.mixer.shared_experts": "FP8" for i, letter in enumerate(pattern) if letter == "E"}
    parts = ("in_proj", "out_proj")
    layers |= {f"backbone.layers.{i}.mixer.{part}": "FP8" for i, letter in enumerate(pattern) if letter == "M" for part in parts}
    return {
        "quantization_config": {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": [],
            "quantized_layers": {name: {"quant_algo": algorithm} for name, algorithm in layers.items()},
        }
    }


FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
    "mistral-small-24b": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "sliding_window": None, "rope_theta": 1000000000.0,
    },
    "ministral3-8b": {
        "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    },
    "gemma3-27b": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "query_pre_attn_scalar": 168, "sliding_window": 1024, "sliding_window_pattern": 6, "vocab_size": 262208,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi4-14b": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
        "max_position_embeddings": 16384, "rope_theta": 250000.0,
    },
    "olmo2-7b": {
        "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
    },
    "olmo3-32b": {
        "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 100278,
        "sliding_window": 4096, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
        },
    },
    "glm4-32b": {
        "model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "hidden_size": 6144, "intermediate_size": 23040,
        "num_hidden_layers": 61, "num_attention_heads": 48, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
        "attention_bias": False, "partial_rotary_factor": 0.5, "max_position_embeddings": 32768, "rope_theta": 10000.0,
    },
    "glm-4.5-air": _GLM_4_5_AIR,
    "glm-4.5-air-fp8": _GLM_4_5_AIR | _FP8_ROWS,
    "glm-4.7-flash": _GLM_4_7_FLASH,
    "glm-ocr": {
        "model_type": "glm_ocr_text", "architectures": ["GlmOcrForCausalLM"], "hidden_size": 1536, "intermediate_size": 4608,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 59392,
        "attention_bias": False, "num_nextn_predict_layers": 1,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0, "mrope_section": [16, 24, 24],
        },
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "mistral-small-4": _MISTRAL_SMALL_4,
    "glm-4.6-fp8": _GLM_4_6 | _FP8_ROWS,
    "seed-oss-36b": {
        "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136,
        "attention_bias": True, "attention_out_bias": False, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
    },
    "smollm3-3b": {
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256,
        "no_rope_layer_interval": 4, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
    },
    "granite3-8b": _GRANITE | {
        "model_type": "granite", "architectures": ["GraniteForCausalLM"], "hidden_size": 4096, "intermediate_size": 12800,
        "num_attention_heads": 32, "attention_multiplier": 0.0078125, "logits_scaling": 16.0, "vocab_size": 49159,
    },
    "granite4-micro": _GRANITE | {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 2560,
        "shared_intermediate_size": 8192, "num_attention_heads": 40, "attention_multiplier": 0.015625, "logits_scaling": 10.0,
        "num_local_experts": 0, "layer_types": ["attention"] * 40, "position_embedding_type": "rope", "vocab_size": 100352,
    },
    "granite4-h-micro": _GRANITE_H | {
        "hidden_size": 2048, "shared_intermediate_size": 8192, "num_attention_heads": 32, "attention_multiplier": 0.015625,
        "logits_scaling": 8.0, "num_local_experts": 0, "mamba_n_heads": 64,
    },
    "granite4-h-tiny": _GRANITE_H | {
        "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_attention_heads": 12,
        "num_key_value_heads": 4, "attention_multiplier": 0.0078125, "logits_scaling": 6.0, "num_local_experts": 64,
        "num_experts_per_tok": 6, "mamba_n_heads": 48,
    },
    "exaone4-32b": {
        "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "hidden_size": 5120, "intermediate_size": 27392,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 102400,
        "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 1000000.0, "rope_scaling": _LLAMA3_ROPE,
    },
    "lfm2-1.2b": _LFM2_1_2B,
    "lfm2-8b-a1b": _LFM2_8B,
    "nemotron3-nano-30b-a3b": _NEMOTRON3_NANO,
    "nemotron3-nano-30b-a3b-fp8": _NEMOTRON3_NANO | _modelopt("FP8"),
    "nemotron3-nano-30b-a3b-nvfp4": _NEMOTRON3_NANO | _modelopt("NVFP4"),
    "nemotron3-super-120b-a12b": _NEMOTRON3_SUPER,
    "nemotron3-super-120b-a12b-nvfp4": _NEMOTRON3_SUPER | _mixed(_NEMOTRON3_SUPER["hybrid_override_pattern"]),
    "bamba-9b": {
        "model_type": "bamba", "architectures": ["BambaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
    "falcon-h1-0.5b": {
        "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32784,
        "max_position_embeddings": 16384, "rope_theta": 1e11, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "projectors_bias": False, "mamba_rms_norm": False, "mamba_norm_before_gate": False,
        "mamba_use_mlp": True, "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625,
        "key_multiplier": 0.39062499999999994, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
    },
    "nemotron-nano-9b": _NEMOTRON_H | {
        "hidden_size": 4480, "intermediate_size": 15680, "num_hidden_layers": 56, "num_attention_heads": 40,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "num_key_value_heads": 8,
        "mamba_num_heads": 128, "mamba_head_dim": 80,
    },
}
