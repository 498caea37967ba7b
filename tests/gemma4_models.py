"""Keys of config.json of tiny Gemma 4 models."""

from __future__ import annotations

from typing import Any

MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
NO_LAYER_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
HEADS: dict[str, Any] = {
    "head_dim": 12, "global_head_dim": 20, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 7,
}
DENSE: dict[str, Any] = {
    **HEADS, **NO_LAYER_INPUTS, "num_hidden_layers": 2, "layer_types": MIXED[:2], "final_logit_softcapping": 3.0,
}
"""As the 12B and the 31B: layers differ in heads, V of some is what their k_proj computes, logits are capped."""
