"""The folder of a trained reader: config.json, preprocessor_config.json, tokenizer.json, chat template, weights in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from reader_model import Reader
from reader_vision import Shape
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(256, 263)
"""Tokens 0 to 255 are bytes."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
PIXELS = (32 * 32, 1024 * 1024)


def prompt_of(question: str) -> tuple[list[int], list[int]]:
    """The tokens before and after those of the picture, as the template writes `<image>` and a question."""
    return [IM_START, VISION_START], [VISION_END, *question.encode(), IM_END, IM_START]


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json."""
    text = {
        "model_type": "qwen3_5_text", "vocab_size": shape.vocab, "hidden_size": shape.size, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "attention_bias": False, "tie_word_embeddings": True, "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.key_heads, "linear_key_head_dim": shape.key_dim,
        "linear_value_head_dim": shape.value_dim, "linear_conv_kernel_dim": shape.kernel, "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"] * (shape.layers // 2),
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "eos_token_id": IM_END, "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": shape.theta, "partial_rotary_factor": 2 * sum(shape.sections) / shape.head_dim,
            "mrope_section": list(shape.sections), "mrope_interleaved": True,
        },
    }
    vision = {
        "model_type": "qwen3_5_vision", "depth": shape.vision_depth, "hidden_size": shape.vision_size,
        "intermediate_size": shape.vision_inner, "num_heads": shape.vision_heads, "in_channels": 3, "patch_size": shape.patch,
        "spatial_merge_size": shape.merge, "temporal_patch_size": 2, "out_hidden_size": shape.size,
        "num_position_embeddings": shape.positions, "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "bfloat16",
        "image_token_id": IMAGE_PAD, "video_token_id": VIDEO_PAD, "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END, "tie_word_embeddings": True, "text_config": text, "vision_config": vision,
    }


def preprocessor_of(shape: Shape) -> dict[str, Any]:
    """preprocessor_config.json."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": shape.patch, "temporal_patch_size": 2,
        "merge_size": shape.merge, "size": {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }


def make_tokenizer() -> Tokenizer:
    """One token a byte, and the special ones."""
    known = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [byte for byte in range(256) if byte not in known]
    names = {byte: chr(byte) for byte in known} | {byte: chr(256 + i) for i, byte in enumerate(others)}  # GPT-2's names of bytes
    tokenizer = Tokenizer(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def save(folder: Path, model: Reader, weights: dict[str, Tensor]) -> Path:
    """weights: by names of the model's parameters; those that are no part of a checkpoint are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: own for name, own in weights.items() if name.startswith(("model.", "mtp."))}
    kept = {name: own.detach().to("cpu", torch.bfloat16).contiguous() for name, own in stored.items()}
    partial = folder / "model.safetensors.partial"
    save_file(kept, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
    special = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "bos_token": None}
    files: dict[str, Any] = {
        "config.json": config_of(model.shape), "preprocessor_config.json": preprocessor_of(model.shape),
        "generation_config.json": {"eos_token_id": [IM_END, END_OF_TEXT], "do_sample": False},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **special},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
