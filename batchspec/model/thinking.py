"""The tokens with which a model begins and ends a thought, and whether a prompt ends inside one. No torch here.

Thoughts are found by token ids, never by text: decoding may drop special tokens, and text can contain "<think>" by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchspec.errors import ConfigError
from batchspec.model.tokenizer import Tokenizer
from batchspec.records import Ids

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
"""Pairs that are single tokens in published tokenizers: Qwen3, QwQ, DeepSeek-R1, SmolLM3, GLM-4.5 and others; Magistral; Command
A Reasoning; Seed-OSS."""


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """`begin` and `end` are the tokens' texts, empty if only ids are known. begin_id None: every answer begins inside a thought.
    `boundary_ids` are the other added tokens, such as those that end a turn: a thought never extends across one."""

    begin: str
    end: str
    begin_id: int | None
    end_id: int
    boundary_ids: frozenset[int] = frozenset()

    def opened_by(self, prompt_ids: Ids) -> bool | None:
        """Whether a prompt ends inside a thought (True), after one (False), or without one (None).

        Only the tokens after the last boundary token, such as the one that ends a turn, belong to the answer.
        """
        for token in reversed(prompt_ids.tolist()):
            if token == self.end_id:
                return False
            if token == self.begin_id:
                return True
            if token in self.boundary_ids:
                break
        return True if self.begin_id is None else None


def find_think_tokens(setting: Any, tokenizer: Tokenizer | None, vocab_size: int) -> ThinkTokens | None:
    """The tokens of model.think_tokens; None if that is `none`, or `auto` and the tokenizer has none of the KNOWN pairs.

    Raises ConfigError if a name is not a single token of the model.
    """
    if setting == "none" or (setting == "auto" and tokenizer is None):
        return None
    if setting == "auto":
        assert tokenizer is not None
        pair = next(
            (pair for pair in KNOWN if all(tokenizer.added_ids.get(text, vocab_size) < vocab_size for text in pair)), None
        )
        return None if pair is None else _think_tokens(list(pair), tokenizer, vocab_size)
    return _think_tokens(setting, tokenizer, vocab_size)


def _think_tokens(names: list[str | int], tokenizer: Tokenizer | None, vocab_size: int) -> ThinkTokens:
    ids = [_single(name, tokenizer, vocab_size) for name in names]
    texts = [name if isinstance(name, str) else "" for name in names]
    if len(set(ids)) < len(ids):
        raise ConfigError(
            f"model.think_tokens={names} are the same token; name the one that begins and the one that ends a thought"
        )
    added = {} if tokenizer is None else tokenizer.added_ids
    boundary_ids = frozenset(token for text, token in added.items() if text.strip() and token not in ids)
    begin, begin_id = ("", None) if len(ids) == 1 else (texts[0], ids[0])
    return ThinkTokens(begin, texts[-1], begin_id, ids[-1], boundary_ids)


def _single(name: str | int, tokenizer: Tokenizer | None, vocab_size: int) -> int:
    if isinstance(name, int):
        ids = [name]
    elif tokenizer is None:
        raise ConfigError(f"model.think_tokens: {name!r} needs a tokenizer, and the model folder has none; give its id")
    else:
        ids = tokenizer.encode_part(name)
    if len(ids) != 1 or not 0 <= ids[0] < vocab_size:
        what = f"{len(ids)} tokens" if len(ids) != 1 else f"token {ids[0]}, outside the vocabulary of {vocab_size}"
        raise ConfigError(f"model.think_tokens: {name!r} is {what}; name one token each, or set model.think_tokens=none")
    return ids[0]
