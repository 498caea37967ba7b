"""Keys of config.json that no code reads: those that cannot change a logit are listed here, the user is told about the others.

A key of a computation that batchspec does not support is refused by name (`families/base.py`). New models bring keys that are in
no list yet; transformers and vLLM ignore such keys without a message.
"""

from __future__ import annotations

from typing import Any

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.files import listed
from batchspec.console.text import as_json, one_line

_OF_ANY_MODEL = frozenset({
    "_name_or_path", "transformers_version", "auto_map", "model_type", "torch_dtype", "use_cache", "name_or_path",
    "initializer_range", "initializer_factor", "attention_dropout", "attention_probs_dropout_prob", "hidden_dropout",
    "hidden_dropout_prob", "residual_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout", "eos_token_id",
    "bos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class",
    "id2label", "label2id", "num_labels", "problem_type", "return_dict", "output_hidden_states", "output_attentions",
    "output_router_logits", "output_past", "torchscript", "use_bfloat16", "pruned_heads", "tie_encoder_decoder",
    "chunk_size_feed_forward", "finetuning_task", "task_specific_params", "return_dict_in_generate", "output_scores",
    "gradient_checkpointing", "pretraining_tp", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "cache_implementation", "experts_implementation", "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan",
    "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "neftune_noise_alpha", "transformers.js_config",
    "unsloth_fixed", "unsloth_version", "model_max_length", "seq_length", "max_sequence_length", "quantization_config",
})
"""Keys of any model: names and paths; dropout and loss terms, which only training uses; what transformers returns or how it
computes; ids of special tokens and quantization_config, which other modules read."""
_OF_GENERATION = frozenset({
    "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "remove_invalid_values",
})
"""Keys of generation_config.json, which older versions of transformers saved in config.json with default values."""
_OF_FAMILIES = frozenset({
    "is_llama_config",  # SmolLM2
    "max_window_layers", "max_position_embeddings", "original_max_position_embeddings", "intermediate_size",  # some ignore them
    "sliding_window_pattern", "_sliding_window_pattern",  # Gemma 3 with layer_types
    "type", "partial_rotary_factor",  # rope_type, or the factor of rope_parameters, replaces it
    "long_factor",  # longrope is supported up to its first length only
    "full_attn_mod", "interpolate_factor",  # Phi-4-mini
    "experts_per_token", "initial_context_length",  # gpt-oss, which has the same numbers under their usual names
    "mlp_intermediate_size", "shared_moe_mode", "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta",
    "mamba_ssm_dtype",  # of states in memory, which are in fp32 whatever it says
    "mrope_interleaved",  # of positions of images
    "no_rope_layer_interval",  # SmolLM3 with no_rope_layers
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size",
    "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",  # Granite 4 without Mamba layers
    "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual",  # initial values of Mamba2 layers
    "chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "moe_shared_expert_overlap",
    "mtp_layers_block_type", "mtp_hybrid_override_pattern",  # of its MTP layers
    "normalization_function", "init_method", "z_loss_coefficient",
    "block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads",  # LFM2, which has the same under other names
    "block_use_swiglu", "use_pos_enc", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
    "conv_use_xavier_init",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",  # layers whose tensors are not read (`wrapped.py`)
    "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "num_nextn_predict_layers",  # layers that are in no file, or refused
})
HARMLESS = _OF_ANY_MODEL | _OF_GENERATION | _OF_FAMILIES
"""Keys that change no logit of the supported families; a key of a nested object is listed by its last part."""
_OBJECTS = ("auto_map.", "quantization_config.")
"""Objects that other code checks: the classes that auto_map names, the tensors that quantization_config describes."""
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})  # 0 equals False


def unread_keys(config: ConfigReader) -> tuple[str, ...]:
    """`key=value` for each key that may mean something and that nothing has read, after a family has read its own."""
    return tuple(
        f"{one_line(name, 60)}={as_json(value)}"
        for name, value in config.unread()
        if not {name, name.rpartition(".")[2]} & HARMLESS and not name.startswith(_OBJECTS) and value not in _EMPTY
    )


def unread_note(unread: tuple[str, ...]) -> str:
    """One line about the keys that `unread_keys` found; empty if there are none."""
    if not unread:
        return ""
    return f"config.json: nothing reads {listed(unread, 4)}; if that changes what the model computes, the job's output is wrong"
