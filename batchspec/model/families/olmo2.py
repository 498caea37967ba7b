"""OLMo 2: each block's output is normed, not its input; q and k are normed over all heads at once.

Norms multiply by their weight in fp32 and round once. transformers rotates q and k of this family in fp32; here cos and sin are
rounded to the model's dtype, as in the other families. Source: transformers, models/olmo2.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.model.blocks.base import NormForm
from batchspec.model.blocks.layer import LayerSpec
from batchspec.model.config_values import ConfigReader
from batchspec.model.families.base import Family, dense_layers, read_attentions, read_mlp, refuses_windows

_NORMS = NormForm(wide=True)


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    attentions = [
        replace(attention, qk_norm_rows=True, norm=None, post_norm="post_attention_layernorm", norms=_NORMS)
        for attention in read_attentions(config, bias=config.flag("attention_bias"))
    ]
    mlp = replace(read_mlp(config), norm=None, post_norm="post_feedforward_layernorm", norms=_NORMS)
    return dense_layers(attentions, mlp)


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    layers=_layers,
    defaults={"rms_norm_eps": 1e-5},
    norms=_NORMS,
    refuses=refuses_windows,
)
