"""EXAONE 4: each block's output is normed, not its input, and every head of q and k.

In the hybrid models (32B) all but each sliding_window_pattern-th layer have a window, unless layer_types says otherwise, and the
layers without one do not rotate q and k. If sliding_window is null (1.2B), all layers attend to all keys and rotate.
Source: transformers, models/exaone4.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import Family, read_attentions, read_post_normed, windows_in_turn
from batchspec.model.layers.attention.rope_config import NO_ROPE
from batchspec.model.layers.base import PLAIN_NORM
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    hybrid = config.given("sliding_window")
    if hybrid and not config.given("layer_types"):
        config = windows_in_turn(config, config.integer("sliding_window_pattern"))
    attentions = read_attentions(config, qk_norm=True)
    return read_post_normed(
        config, [replace(own, rope=NO_ROPE if hybrid and own.window is None else None) for own in attentions], PLAIN_NORM
    )


EXAONE4 = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    models="EXAONE 4",
    example="LGAI-EXAONE/EXAONE-4.0-32B",
    layers=_layers,
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    integers={"sliding_window_pattern": (1, 4096)},
)
