"""Stand-ins for a model folder: shapes and a byte tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchspec.config.schema import TEMPLATE_DATE
from batchspec.model.families.base import dense_layers
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.spec import ModelSpec
from batchspec.packing.rates import card_rates
from batchspec.text.chat_templates import ChatTemplates
from batchspec.tuning.cards import known_card

H200 = card_rates(known_card("H200"))
"""The measured rates of the card on which most figures were measured."""


def dense_spec(
    *, num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int, windows: Sequence[int | None],
    qkv_bias: bool = False, o_bias: bool = False, mlp_bias: bool = False, qk_norm: bool = False, **shared: Any,
) -> ModelSpec:
    """A dense decoder, all layers alike but for the window; `shared`: fields of ModelSpec."""
    hidden, eps = shared["hidden_size"], shared["rms_eps"]
    attentions = [
        AttentionSpec(
            hidden_size=hidden, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, eps=eps, window=window,
            rope=shared["rope"], qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm,
        )
        for window in windows
    ]
    mlp = GatedMlpSpec(hidden_size=hidden, inner_size=intermediate_size, eps=eps, bias=mlp_bias)
    return ModelSpec(layers=dense_layers(attentions, mlp), **shared)


def small_spec(**changes: Any) -> ModelSpec:
    """Two layers, 300 tokens, 512 positions."""
    shape: dict[str, Any] = {
        "family": "llama", "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "vocab_size": 300, "rms_eps": 1e-5, "rope": RopeSpec(type="default", theta=1e4),
        "windows": (None, None), "tie": True,
        "eos_ids": (257,), "max_len": 512, "dtype": "float32", "generation": {},
    }
    return dense_spec(**(shape | changes))


LLAMA_8B = small_spec(
    hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336, vocab_size=128256,
    windows=(None,) * 32, tie=False, max_len=131_072, dtype="bfloat16",
)


class ByteTokenizer:
    """A token a byte; 256 begins a turn, 257 ends it. Its template wants user and assistant in turns."""

    eos_ids: tuple[int, ...] = (257,)
    special_ids: Mapping[str, int] = {"<turn>": 256, "<end>": 257}
    added_ids = special_ids
    fingerprint = "bytes"
    has_chat_template = True
    chats = ChatTemplates({}, {}, "a stand-in", date=TEMPLATE_DATE)

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def encode(self, text: str, **limits: Any) -> list[int]:
        return list(text.encode())

    def encode_part(self, text: str) -> list[int]:
        return list(text.encode())

    def problem_of(self, template_kwargs: Mapping[str, Any]) -> str | None:
        return None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
        **limits: Any,
    ) -> list[int]:
        self.seen = {"messages": messages, "tools": tools, "template_kwargs": template_kwargs}
        turns = [message["role"] for message in messages if message["role"] != "system"]
        wanted = (["user", "assistant"] * len(turns))[: len(turns)]
        if turns != wanted or not turns or (turns[-1] == "assistant") != continue_final:
            raise ValueError("roles must\nalternate")
        ids: list[int] = []
        for message in messages:
            ids += [256, *message["content"].encode(), 257]
        return ids[:-1] if continue_final else [*ids, 256]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")
