"""Random assistants of Gemma 4, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from batchspec.model.spec import load_spec
from tests.gemma4_models import NO_LAYER_INPUTS


def make_assistant(folder: Path, target: Path, *, text: dict[str, Any] | None = None, **config: Any) -> Path:
    """One of three layers, in fp64, for the model in a folder; `config` and `text` override keys of its config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = load_spec(target)
    windowed, full = ([own for own in spec.kv_attentions if (own.window is None) == every][-1] for every in (False, True))
    values = {
        **NO_LAYER_INPUTS, "model_type": "gemma4_text", "hidden_size": 20, "intermediate_size": 26, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 3,
        "head_dim": windowed.head_dim, "num_key_value_heads": windowed.num_kv_heads, "sliding_window": windowed.window,
        "global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_kv_heads, "attention_k_eq_v": True,
        "num_attention_heads": 4, "vocab_size": spec.vocab_size, "initializer_range": 0.3, **(text or {}),
    }
    settings = AutoConfig.for_model(
        "gemma4_assistant",
        **{"text_config": values, "backbone_hidden_size": spec.hidden_size, "initializer_range": 0.3, **config},
    )
    torch.manual_seed(3)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(settings).double()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.2)
            elif name.endswith("layer_scalar"):
                tensor.uniform_(0.6, 1.3)
            elif name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(spec.vocab_size))
    model.save_pretrained(folder)
    return folder
