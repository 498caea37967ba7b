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
EXPERTS: dict[str, Any] = {
    **DENSE, "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 20,
}
"""As the 26B-A4B: experts beside the MLP."""
LAYER_INPUTS: dict[str, Any] = {
    **DENSE, "num_hidden_layers": 5, "layer_types": [MIXED[0], *MIXED], "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 320,
}
"""As the E2B: inputs of layers, and late layers that read the K and V of earlier ones."""
