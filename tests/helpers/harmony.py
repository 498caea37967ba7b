"""A tokenizer with harmony's special tokens, a chat template of the same structure, and a tiny gpt-oss that speaks harmony."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.helpers.models import make_checkpoint

SPECIAL = ("return", "constrain", "channel", "start", "end", "message", "call")
WORDS = (
    "assistant",
    "analysis",
    "commentary",
    "final",
    "json",
    "system",
    "user",
    " to",
    "=functions.",
    "add",
    "rain",
    " sun",
    " 7",
)
"""Each is one token of the tokenizer."""
HARMONY_TEMPLATE = (
    "<|start|>system<|message|>Today is {{ strftime_now('%Y-%m-%d') }}. "
    "Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if 'content' in m and '<|channel|>' in m.content %}{{ raise_exception('a channel in the content') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.add to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def make_harmony_tokenizer(folder: Path) -> Path:
    """Byte-level: 256 bytes, the merges of WORDS, then the special tokens, in no particular order."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        pieces = list(word.replace(" ", "\u0120"))
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces[:2] = [pieces[0] + pieces[1]]
            vocab.setdefault(pieces[0], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(HARMONY_TEMPLATE, encoding="utf-8")
    return folder


FOLLOWS: dict[str, tuple[str, ...]] = {
    "<|start|>": ("assistant",),
    "assistant": ("<|channel|>", "<|channel|>", " to"),
    " to": ("=functions.",),
    "=functions.": ("add",),
    "add": ("<|channel|>", "<|constrain|>"),
    "<|channel|>": ("analysis", "final", "commentary"),
    "analysis": ("<|message|>",),
    "final": ("<|message|>",),
    "commentary": ("<|message|>", " to", "<|constrain|>"),
    "<|constrain|>": ("json",),
    "json": ("<|message|>",),
    "<|message|>": ("rain", " sun", " 7"),
    "<|end|>": ("<|start|>",),
} | dict.fromkeys(("rain", " sun", " 7"), ("rain", " sun", " 7", " sun", "<|end|>", "<|return|>", "<|call|>"))
"""Token -> those that follow it equally likely in what the model says; after others any may come."""


def make_harmony_model(folder: Path, *, likely: float = 10.0) -> Path:
    """A gpt-oss without attention or experts that count: sampled at temperature 1 it walks through FOLLOWS.

    likely  logit of the tokens that follow; all others have 0, so that now and then a message is malformed
    """
    from safetensors.torch import load_file, save_file

    from batchspec.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(make_harmony_tokenizer(folder))
    vocab = 32 * -(-max(tokenizer.added_ids.values()) // 32)
    shape: dict[str, Any] = {
        "hidden_size": vocab, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "max_position_embeddings": 512,
        "eos_token_id": tokenizer.added_ids["<|return|>"], "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False,
    }
    make_checkpoint(folder, "gpt_oss", vocab=vocab, **shape)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
        if name.endswith("norm.weight"):
            weight.fill_(1)
    weights["model.embed_tokens.weight"] = torch.eye(vocab)
    head = torch.zeros(vocab, vocab)
    for token, followers in FOLLOWS.items():
        for follower in followers:
            head[_id(tokenizer, follower), _id(tokenizer, token)] = likely / vocab**0.5
    weights["lm_head.weight"] = head
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def _id(tokenizer: Any, text: str) -> int:
    (found,) = tokenizer.encode_part(text)
    return int(found)
