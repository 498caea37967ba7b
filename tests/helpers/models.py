"""Tiny random checkpoints and a tiny tokenizer for tests: made here with transformers and tokenizers, without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that greedy tokens do not repeat at once
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "In 2024 the city of Paris counted 2,102,650 people; the capital of France is Paris.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
]


def causal_models() -> Any:
    """AutoModelForCausalLM; it does not know Mistral4ForCausalLM and those of GLM-OCR."""
    from transformers import (
        AutoModelForCausalLM,
        GlmOcrConfig,
        GlmOcrForConditionalGeneration,
        GlmOcrTextConfig,
        Mistral4Config,
        Mistral4ForCausalLM,
    )

    from tests.helpers.glm_ocr_text import GlmOcrForCausalLM

    auto: Any = AutoModelForCausalLM
    auto.register(GlmOcrConfig, GlmOcrForConditionalGeneration, exist_ok=True)
    auto.register(GlmOcrTextConfig, GlmOcrForCausalLM, exist_ok=True)
    auto.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    return auto


def make_checkpoint(
    folder: Path, family: str, *, vocab: int = 320, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any
) -> Path:
    """A random model of `family` (llama, qwen2, qwen3, mistral) in `folder`; `config` overrides keys of its config.json."""
    from transformers import AutoConfig

    settings = AutoConfig.for_model(family, **{**_SHAPE, "vocab_size": vocab, **config})
    torch.manual_seed(seed)
    model = causal_models().from_config(settings).to(dtype)
    _vary(model)
    model.save_pretrained(folder)
    return folder


def make_classifier(folder: Path, family: str, labels: dict[int, str], *, seed: int = 0, **config: Any) -> Path:
    """As `make_checkpoint`, in fp32, of a model that scores these labels (`...ForSequenceClassification`)."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    names = {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}
    settings = AutoConfig.for_model(family, **{**_SHAPE, "vocab_size": 320, **needed(family, 3), **names, **config})
    torch.manual_seed(seed)
    auto: Any = AutoModelForSequenceClassification
    model = auto.from_config(settings).float()
    _vary(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def _vary(model: torch.nn.Module) -> None:
    """Give random values to what transformers makes as ones and zeros, which would hide a mistake, and usual ones to decays."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.uniform_(-3, 0)
        elif name.endswith("A_log"):
            parameter.uniform_(0.1, 8).log_()
        elif name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, mean=float(parameter.mean()), std=0.2)
        elif name.endswith(("norm_1.weight", "norm_2.weight", "router.scale", "per_expert_scale")):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif name.endswith("position_embedding_table"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm1.weight", "norm2.weight")) and type(model).__name__.startswith("GlmOcr"):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):  # of clipped products
            buffer.uniform_(0.1, 1.0).mul_(-1 if name.endswith("_min") else 1)
        if name.endswith("std_scale"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.3)
        if name.endswith("bias"):
            torch.nn.init.normal_(buffer, std=0.2)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.3)


def needed(family: str, num_layers: int) -> dict[str, Any]:
    """Keys without which the config.json of a family, with 4 heads, is refused (Granite's has Mamba and experts, that of LFM2
    with experts names no kinds of layers), or is that of a model with large tables (Gemma 4's) or matrices (Nemotron's)."""
    if family in ("deepseek_v3", "glm4_moe_lite", "mistral4"):
        return {"num_key_value_heads": 4}
    if family == "glm_ocr_text":
        return {"head_dim": 64}
    if family.startswith("gemma4"):
        return {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0}
    if family == "lfm2_moe":
        return {"layer_types": ["full_attention"] * num_layers}
    if family == "nemotron_h":
        kinds = [["linear_attention", "full_attention", "mlp", "moe"][i % 4] for i in range(num_layers)]
        sizes = {"mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8, "head_dim": 16}
        experts = {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20}
        return {"layers_block_type": kinds, **sizes, **experts, "time_step_min": 1e-30}
    if family == "falcon_h1":
        return {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_norm_before_gate": False}
    if family == "bamba":
        return {"attn_layer_indices": [*range(0, num_layers, 2)], "mamba_n_heads": 4, "mamba_d_state": 8}
    if family != "granitemoehybrid":
        return {}
    return {"layer_types": ["full_attention"] * num_layers, "num_local_experts": 0, "mamba_n_heads": 4}


def write_weights(folder: Path) -> Path:
    """model.safetensors of zeros: the tensors that the folder's config.json asks for."""
    from safetensors.torch import save_file

    from batchspec.model.spec import load_spec
    from batchspec.model.weights import expected_shapes

    shapes = expected_shapes(load_spec(folder))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


THINKING_TEMPLATE = CHAT_TEMPLATE.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if quick is defined %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}",
)
"""Begins the answer inside a thought; with the variable `quick` after an empty one."""


def make_thinking_tokenizer(folder: Path, *, chat_template: str = THINKING_TEMPLATE, more: Sequence[str] = ()) -> Path:
    """A tokenizer of 300 tokens, and <think> 300 and </think> 301, which are no special tokens: as those of Qwen3; and `more`."""
    from tokenizers import AddedToken, Tokenizer

    make_tokenizer(folder, vocab=300, chat_template=chat_template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>", *more)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer(folder: Path, *, vocab: int = 320, chat_template: str = CHAT_TEMPLATE) -> Path:
    """A byte-level BPE of at most `vocab` tokens; special are <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 (end of turn)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[2],
        "unk_token": SPECIAL_TOKENS[0],
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


_VISION: dict[str, Any] = {
    "siglip_vision_model": {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
    "pixtral": {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "head_dim": 16},
    "gemma4_vision": {
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 8,
    },
    "gemma4_unified_vision": {"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 8},
    "qwen2_5_vl_vision": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "window_size": 16},
    "glm_ocr_vision": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4},
    "qwen3_vl_vision": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4},
    "qwen3_5_vision": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4},
    "qwen3_5_moe_vision": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4},
}
_WRAPPED = {
    "gemma3": ("gemma3_text", "siglip_vision_model"), "mistral3": ("mistral", "pixtral"),
    "gemma4": ("gemma4_text", "gemma4_vision"), "gemma4_unified": ("gemma4_unified_text", "gemma4_unified_vision"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision"), "qwen3_vl": ("qwen3_vl_text", "qwen3_vl_vision"),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_vision"), "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_vision"),
    "lighton_ocr": ("qwen3", "pixtral"), "glm_ocr": ("glm_ocr_text", "glm_ocr_vision"),
}


def make_wrapped(
    folder: Path, kind: str, text: dict[str, Any], *, vocab: int = 320, seed: int = 0, scores: bool = False,
    vision: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, **config: Any,
) -> Path:
    """A random model of text and images in `folder`, of two layers of text; `text` and `vision` override keys of its text_config
    and vision_config. scores: it scores labels in place of tokens."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSequenceClassification

    of_text, of_images = _WRAPPED[kind]
    sizes = {} if kind == "gemma4_unified" else {"hidden_size": 32, "intermediate_size": 40}
    images = {"model_type": of_images, **sizes, **_VISION[of_images], **(vision or {})}
    inner = {**_SHAPE, "num_hidden_layers": 2, "model_type": of_text, "vocab_size": vocab, **text}
    settings = AutoConfig.for_model(kind, text_config=inner, vision_config=images, **config)
    torch.manual_seed(seed)
    auto: Any = AutoModelForSequenceClassification if scores else AutoModelForImageTextToText
    model = auto.from_config(settings).to(dtype)
    _vary(model)
    model.save_pretrained(folder)
    return folder
