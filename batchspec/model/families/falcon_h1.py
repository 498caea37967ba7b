"""Falcon-H1: every layer runs attention and Mamba2 in parallel, then a gated MLP; all with factors (muP).

The input of both mixers has a factor of its own: it is applied after their products, which are linear. That of attention is
applied to the scores (squared, as q and k have it) and to the output, like key_multiplier; that of the Mamba2 layer to z, x, B, C
and dt, each of which also has one of ssm_multipliers.
Source: transformers, models/falcon_h1; Falcon-H1 (arXiv 2507.22448).
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Ranges
from batchspec.model.families.base import (
    Family,
    plain_rope,
    read_attentions,
    read_mlp,
    refuses_layer_types,
    refuses_step_limits,
    refuses_windows,
)
from batchspec.model.families.granite import MAMBA_INTEGERS, read_mamba
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.parallel.block import ParallelSpec

_INTEGERS: Ranges = {**MAMBA_INTEGERS, "mamba_d_ssm": (1, 2**24)}
_IN_FACTORS = {"attention_bias": "attention_in_multiplier", "mamba_proj_bias": "ssm_in_multiplier"}
"""Biases -> the factor of the input of their products, which is applied after these, so to the bias too."""


def _factor(config: ConfigReader, key: str) -> float | None:
    """None for 1, so that nothing is multiplied."""
    value = config.number(key, 1.0)
    return None if value == 1 else value


def _list(config: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    return config.numbers(key, count) if config.given(key) else (1.0,) * count


def _mixer(config: ConfigReader) -> ParallelSpec:
    whole = config.replaced(layer_types=None, sliding_window=None)
    attention = read_attentions(whole, bias=config.flag("attention_bias"))[0]
    factor, of_keys = config.number("attention_in_multiplier", 1.0), config.number("key_multiplier", 1.0)
    of_output = factor * config.number("attention_out_multiplier", 1.0)
    attention = replace(
        attention, norm=None, rope=plain_rope(config), scale=factor**2 * of_keys * attention.head_dim**-0.5,
        out_scale=None if of_output == 1 else of_output,
    )
    inner = config.integer("mamba_d_ssm", config.integer("mamba_expand") * config.integer("hidden_size"))
    mamba = read_mamba(config, inner=inner, out_scale=_factor(config, "ssm_out_multiplier"))
    z, x, b, c, dt = (config.number("ssm_in_multiplier", 1.0) * own for own in _list(config, "ssm_multipliers", 5))
    mamba = replace(mamba, norm=None, out_norm=config.flag("mamba_rms_norm"), scales=(z, x, b, c, dt))
    return ParallelSpec(hidden_size=attention.hidden_size, eps=attention.eps, attention=attention, mamba=mamba)


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    gate, down = _list(config, "mlp_multipliers", 2)
    mlp = replace(
        read_mlp(config, bias=config.flag("mlp_bias")), name="feed_forward", norm="pre_ff_layernorm", gate_scale=gate,
        out_scale=None if down == 1 else down,
    )
    return (LayerSpec(_mixer(config), (mlp,)),) * config.integer("num_hidden_layers")


def _logits_scaling(config: ConfigReader) -> float | None:
    factor = _factor(config, "lm_head_multiplier")
    return None if factor is None else 1 / factor


def _refuses(config: ConfigReader) -> list[str]:
    """What no published model has."""
    found = [
        f"{config.shown(bias)} with {config.shown(factor)}" for bias, factor in _IN_FACTORS.items()
        if config.flag(bias) and _factor(config, factor) is not None
    ]
    if config.flag("projectors_bias") != config.flag("mamba_proj_bias"):
        found.append(f"{config.shown('projectors_bias')} with {config.shown('mamba_proj_bias')}")
    before_gate = config.flag("mamba_norm_before_gate")  # it counts as read, also without the norm
    if config.flag("mamba_rms_norm") and before_gate:
        found.append(f"{config.shown('mamba_rms_norm')} with {config.shown('mamba_norm_before_gate')}")
    if not config.flag("mamba_use_mlp", True):
        found.append(config.shown("mamba_use_mlp"))
    return found + refuses_windows(config) + refuses_layer_types(config) + refuses_step_limits(config)


FALCON_H1 = Family(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    models="Falcon-H1",
    example="tiiuae/Falcon-H1-7B-Instruct",
    layers=_layers,
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_norm_before_gate": True,
    },
    integers=_INTEGERS,
    final_norm="model.final_layernorm.weight",
    embedding_scale=lambda config: _factor(config, "embedding_multiplier"),
    logits_scaling=_logits_scaling,
    computes=frozenset({"embedding_multiplier"}),
    refuses=_refuses,
)
