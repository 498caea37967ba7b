"""LFM2 and 2.5 (230M to 2.6B): most layers are short convolutions between two gates, the others attend, with normed heads.

Files have names of their own for norms, projections and some keys. The inner size of the MLP is two thirds of the number in
config.json, times block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of; with block_auto_adjust_ff_dim=false it
is the number itself. Source: transformers, models/lfm2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchspec.checkpoint.config_values import ConfigReader, Json, Ranges
from batchspec.model.families.base import Family, check_kinds, read_attentions, read_mlp, refuses_windows
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.short_conv.block import ShortConvSpec

_CONV, _ATTENDS = "conv", "full_attention"
FINAL_NORM, MLP_NORM = "model.embedding_norm.weight", "ffn_norm"
RENAMES = {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"}
DEFAULTS: Json = {
    "num_key_value_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True, "conv_L_cache": 3,
    "max_position_embeddings": 128_000,
}
INTEGERS: Ranges = {"conv_L_cache": (1, 16)}


def read_mixers(config: ConfigReader, kinds: Sequence[str]) -> list[AttentionSpec | ShortConvSpec]:
    """The mixer of every layer. kinds: as in layer_types. Raises CheckpointError for malformed values."""
    check_kinds(config, "layer_types", kinds, config.integer("num_hidden_layers"), (_CONV, _ATTENDS), needed=_ATTENDS)
    (attention, *_) = read_attentions(config.replaced(layer_types=None, sliding_window=None), qk_norm=True)
    attention = replace(attention, norm="operator_norm", out_name="out_proj", qk_norm_names=("q_layernorm", "k_layernorm"))
    conv = ShortConvSpec(
        hidden_size=config.integer("hidden_size"), inner_size=config.integer("hidden_size"), eps=config.number("rms_norm_eps"),
        width=config.integer("conv_L_cache"), bias=config.flag("conv_bias"),
    )
    return [attention if kind == _ATTENDS else conv for kind in kinds]


def read_dense(config: ConfigReader) -> GatedMlpSpec:
    """The MLP, of intermediate_size values."""
    return replace(read_mlp(config), name="feed_forward", parts=("w1", "w3", "w2"), norm=MLP_NORM)


def _inner_size(config: ConfigReader) -> int:
    size = config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in config and not config.given("block_ffn_dim_multiplier"):
        return size
    multiple = config.integer("block_multiple_of")
    return -(-int(config.number("block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple


def _kinds(config: ConfigReader) -> tuple[str, ...]:
    """layer_types; in files without it, the layers of full_attn_idxs attend; in files with neither, all do."""
    kinds, attends = config.texts("layer_types"), config.integers("full_attn_idxs")
    if kinds is not None:
        return kinds
    return tuple(_ATTENDS if attends is None or i in attends else _CONV for i in range(config.integer("num_hidden_layers")))


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    mlp = replace(read_dense(config), inner_size=_inner_size(config))
    return tuple(LayerSpec(mixer, (mlp,)) for mixer in read_mixers(config, _kinds(config)))


LFM2 = Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    models="LFM2 and 2.5",
    example="LiquidAI/LFM2-1.2B",
    layers=_layers,
    defaults={**DEFAULTS, "block_multiple_of": 256},
    integers={**INTEGERS, "block_ff_dim": (1, 2**24), "block_multiple_of": (1, 2**24), "full_attn_idxs": (0, 4096)},
    final_norm=FINAL_NORM,
    renames={**RENAMES, "intermediate_size": "block_ff_dim"},
    refuses=refuses_windows,
)
