"""Bamba: Mamba2 layers and, at attn_layer_indices, attention that rotates half of each head; each is followed by a gated MLP.
Source: transformers, models/bamba."""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import (
    Family,
    partial_rope,
    read_attentions,
    read_mlp,
    refuses_layer_types,
    refuses_step_limits,
    refuses_windows,
)
from batchspec.model.families.granite import MAMBA_INTEGERS, read_mamba
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    num_layers, places = config.integer("num_hidden_layers"), config.integers("attn_layer_indices") or ()
    if not places or not {*places} <= {*range(num_layers)}:
        raise config.refusal(f"{config.shown('attn_layer_indices')}: some of the {num_layers} layers must attend; correct it")
    whole = config.replaced(layer_types=None, sliding_window=None)
    attentions, mamba = read_attentions(whole, bias=config.flag("attention_bias")), read_mamba(config)
    mlp = replace(read_mlp(config, bias=config.flag("mlp_bias")), name="feed_forward", norm="pre_ff_layernorm")
    return tuple(LayerSpec(own if i in places else mamba, (mlp,)) for i, own in enumerate(attentions))


BAMBA = Family(
    name="bamba",
    architecture="BambaForCausalLM",
    models="Bamba",
    example="ibm-ai-platform/Bamba-9B-v2",
    layers=_layers,
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "mamba_n_heads": 128, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    integers={**MAMBA_INTEGERS, "attn_layer_indices": (0, 4096)},
    rope=lambda config: partial_rope(config.replaced(partial_rotary_factor=0.5)),
    final_norm="model.final_layernorm.weight",
    computes=frozenset({"partial_rotary_factor"}),
    refuses=lambda config: refuses_windows(config) + refuses_layer_types(config) + refuses_step_limits(config),
)
