"""OLMo 2 and 3: each block's output is normed, not its input; q and k are normed over all heads at once.

Most layers of OLMo 3 have a window: all but each fourth one, unless layer_types says otherwise. `rope_scaling` is that of layers
without one, and transformers gives rope_theta to those alone. Norms multiply by their weight in fp32 and round once. transformers
rotates q and k of this family in fp32; here cos and sin are rounded to the model's dtype, as in the other families.
Source: transformers, models/olmo2 and models/olmo3.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.model.families.base import (
    GLOBAL,
    LOCAL,
    Family,
    read_attentions,
    read_post_normed,
    refuses_other_ropes,
    refuses_windows,
    rope_of_kind,
    windows_in_turn,
)
from batchspec.model.layers.attention.rope_config import RopeSpec, read_part, read_theta
from batchspec.model.layers.base import NormForm
from batchspec.model.layers.layer import LayerSpec

_NORMS = NormForm(wide=True)
_THETA_3 = 500_000.0


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = read_attentions(config, bias=config.flag("attention_bias"))
    return read_post_normed(config, [replace(own, qk_norm_rows=True) for own in attentions], _NORMS)


def _global_rope(config: ConfigReader) -> RopeSpec:
    rope = rope_of_kind(config, GLOBAL)
    return read_part(config, rope, config.integer("max_position_embeddings"), read_theta(config, rope, usual=_THETA_3))


def _local_rope(config: ConfigReader) -> RopeSpec:
    rope = rope_of_kind(config, LOCAL).filled({"rope_theta": _THETA_3})
    return read_part(config, rope, config.integer("max_position_embeddings"), rope.number("rope_theta"))


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    example="allenai/OLMo-2-1124-7B-Instruct",
    layers=_layers,
    defaults={"rms_norm_eps": 1e-5},
    norms=_NORMS,
    refuses=refuses_windows,
)
OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    models="OLMo 3",
    example="allenai/Olmo-3-32B-Think",
    layers=lambda config: _layers(windows_in_turn(config, 4)),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    rope=_global_rope,
    local_rope=_local_rope,
    norms=_NORMS,
    refuses=refuses_other_ropes,
)
