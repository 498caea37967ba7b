"""The config.json of a published EAGLE-3 or P-EAGLE head: two layouts and their keys; unknown keys are refused by name.

flat          SafeAILab, SpecForge, SGLang: `midlayer.*`, with or without `model.` in front, more layers as `layers.1..` or
              `additional_layers.0..`
speculators   vLLM's speculators: `layers.0.*`, the decoder's shape under `transformer_layer_config`
A head that can draft in parallel also has a tensor mask_hidden and a mask token id, in either layout (`peagle` in the second).
Source: SafeAILab/EAGLE cnets.py, sgl-project/SpecForge to_sglang.py, vllm-project/speculators models/eagle3 (config.py, core.py)
and models/peagle/config.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchspec.checkpoint.config_values import ConfigReader, has_file, read_json, shown
from batchspec.checkpoint.files import listed
from batchspec.console.text import quoted
from batchspec.errors import CheckpointError

# Values of missing keys: transformer_layer_config is saved as the difference to these (transformers 5).
LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
              "vocab_size": 32000, "max_position_embeddings": 2048},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768},
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_PEAGLE = ("PEagleSpeculator", "PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM")
SPECFORGE = "LlamaForCausalLMEagle3"
_FLAT = (SPECFORGE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", *_PEAGLE)
_SPECULATORS = {"eagle3": ("Eagle3Speculator", "Eagle3DraftModel"), "peagle": _PEAGLE}

SHAPE_KEYS = frozenset((
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "max_position_embeddings", "original_max_position_embeddings", "vocab_size", "hidden_act", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "attention_bias", "mlp_bias",
))
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_EAGLE = frozenset((
    "architectures", "draft_vocab_size", "truncated_vocab_size", "target_hidden_size", "num_aux_hidden_states", "bias", "fc_norm",
    "norm_before_fc", "norm_before_residual", "norm_output", "eagle_aux_hidden_state_layer_ids", "eagle_config", "layer_ids",
    "speculators_model_type", "transformer_layer_config", "parallel_drafting", *MASK_KEYS,
))
# These keys do not change what a loaded head computes. tie_word_embeddings: a head without lm_head uses the target's anyway.
HARMLESS = frozenset((
    "attention_dropout", "hidden_dropout", "dropout", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "sep_token_id", "decoder_start_token_id", "initializer_range", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "pretraining_tp", "model_max_length", "embed_requires_grad", "enable_sp_ulysses", "auto_map", "_name_or_path",
    "name_or_path", "tie_word_embeddings", "speculators_version", "speculators_config", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "return_dict", "output_hidden_states", "output_attentions",
    "torchscript", "is_decoder", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "tokenizer_class", "prefix",
    "finetuning_task", "task_specific_params", "tie_encoder_decoder", "add_cross_attention", "use_bfloat16", "tf_legacy_loss",
    "pruned_heads", "ttt_length", "_experts_implementation", "target_layer_count",
))
# Keys that configs of dense heads repeat from a gpt-oss target.
_OF_GPT_OSS = frozenset(("num_local_experts", "experts_per_token", "num_experts_per_tok"))
# Keys of eagle_config; a value is the only one that is supported (NVIDIA ModelOpt exports them).
_EAGLE_CONFIG: dict[str, Any] = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "has_lm_head": True, "next_layer_regular": True, "parallel_draft_step": 1,
}
_EAGLE_CONFIG_READ = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "norm_before_fc", "use_aux_hidden_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A config.json whose keys are all known."""

    layout: str
    """flat or speculators."""
    whole: ConfigReader
    shape: ConfigReader
    """The part with the decoder layer's shape, defaults filled in; in the flat layout the whole config."""
    eagle: ConfigReader
    """Its eagle_config; empty if it has none."""


def read_config(folder: Path) -> HeadConfig:
    """Read config.json of a head's folder. Raises CheckpointError if there is none, and for unsupported keys."""
    path = folder / "config.json"
    if not has_file(path):
        raise CheckpointError(f"{shown(folder)}: no config.json; draft.path must be the folder of an EAGLE-3 head")
    config = ConfigReader(read_json(path), shown(path))
    layout, shape = _layout(config)
    eagle = _eagle_config(config)
    _refuse(config, shape, layout)
    return HeadConfig(layout=layout, whole=config, shape=shape, eagle=eagle)


def _layout(config: ConfigReader) -> tuple[str, ConfigReader]:
    """The layout's name, and the part of the config with the decoder layer's shape, defaults filled in."""
    kind = config.text("speculators_model_type") or None
    if kind is not None and kind not in _SPECULATORS:
        raise config.refusal(f"speculators_model_type {quoted(kind)} is not supported; draft=eagle3 needs 'eagle3' or 'peagle'")
    if kind is not None and not config.given("transformer_layer_config"):
        raise config.refusal("no transformer_layer_config, which holds the shape of the head's layers; export the head again")
    shape = config if kind is None else config.part("transformer_layer_config")
    family = family_of(shape)
    if family not in FAMILIES:
        raise config.refusal(f"model_type {quoted(family)} of the head is not supported; supported are {', '.join(FAMILIES)}")
    layout, known = ("flat", _FLAT) if kind is None else ("speculators", _SPECULATORS[kind])
    for name in config.texts("architectures") or ():
        if name not in known:
            raise config.refusal(f"architectures {quoted(name)} is not supported; a {layout} head has {listed(known, 4)}")
    return layout, shape if kind is None else shape.filled(LAYER_DEFAULTS.get(family, {}))


def family_of(shape: ConfigReader) -> str:
    """The family of its decoder layer. SpecForge's dense heads of gpt-oss name the target's family, but are Llama layers."""
    family = shape.text("model_type", "llama")
    return "llama" if family == "gpt_oss" and shape.texts("architectures") == (SPECFORGE,) else family


def _eagle_config(config: ConfigReader) -> ConfigReader:
    eagle = config.part("eagle_config")
    wrong = [
        eagle.shown(key)
        for key in eagle
        if key not in _EAGLE_CONFIG_READ and (eagle.differs(key, None, *([_EAGLE_CONFIG[key]] if key in _EAGLE_CONFIG else [])))
    ]
    if wrong:
        raise config.refusal(f"not supported: {', '.join(wrong)}; use an EAGLE-3 head without them")
    return eagle


def _refuse(config: ConfigReader, shape: ConfigReader, layout: str) -> None:
    parts = [config] if layout == "flat" else [config, shape]
    of_target = _OF_GPT_OSS if shape.text("model_type", "llama") == "gpt_oss" else frozenset()
    allowed = [SHAPE_KEYS | _EAGLE | HARMLESS] if layout == "flat" else [_EAGLE | HARMLESS, SHAPE_KEYS | HARMLESS]
    found = [
        part.shown(key)
        for part, known in zip(parts, allowed, strict=True)
        for key in part
        # False is the neutral value of all keys but this one: then dimension 2j is rotated with 2j + 1.
        if key not in known | of_target and part.differs(key, None, key == "is_neox_style", [], {})
    ]
    if shape.text("hidden_act", "silu") not in ("silu", "swish"):
        found.append(shape.shown("hidden_act"))
    if found:
        raise config.refusal(
            f"not known to draft=eagle3: {', '.join(found)}; remove a key from config.json if it changes no computation"
        )
