"""SmolLM3: a Llama in which each fourth layer does not rotate q and k.

no_rope_layers has a 1 for each layer that rotates, whatever its name; if it is missing, each no_rope_layer_interval-th layer does
not. With use_sliding_window the layers that do not rotate have a window, unless layer_types says otherwise.
Source: transformers, models/smollm3.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import GLOBAL, LOCAL, Family, dense_layers, read_attentions, read_mlp
from batchspec.model.layers.attention.rope_config import NO_ROPE
from batchspec.model.layers.layer import LayerSpec


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    num_layers = config.integer("num_hidden_layers")
    rotates = config.integers("no_rope_layers")
    if rotates is None:
        interval = config.integer("no_rope_layer_interval")
        rotates = tuple(int((i + 1) % interval != 0) for i in range(num_layers))
    if len(rotates) < num_layers:
        raise config.refusal(f"no_rope_layers has {len(rotates)} numbers for {num_layers} layers; correct it")
    if not config.given("layer_types"):
        has_windows = config.flag("use_sliding_window") and config.given("sliding_window")
        kinds = [LOCAL if has_windows and not own else GLOBAL for own in rotates[:num_layers]]
        config = config.replaced(layer_types=kinds)
    attentions = read_attentions(config, bias=config.flag("attention_bias"))
    attentions = [replace(own, rope=None if turns else NO_ROPE) for own, turns in zip(attentions, rotates, strict=False)]
    return dense_layers(attentions, read_mlp(config, bias=config.flag("mlp_bias")))


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    example="HuggingFaceTB/SmolLM3-3B",
    layers=_layers,
    defaults={
        "num_key_value_heads": 4, "no_rope_layer_interval": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    },
    integers={"no_rope_layers": (0, 1), "no_rope_layer_interval": (1, 4096)},
    computes=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
)
