"""The tokens with which a model begins and ends a thought, and whether a prompt ends inside one. No torch here.

Thoughts are found by token ids, never by text: decoding may drop special tokens, and text can contain "<think>" by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchspec.errors import ConfigError
from batchspec.model.tokenizer import Tokenizer
from batchspec.records import Channels, Ids, Thinking

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
"""Pairs that are single tokens in published tokenizers: Qwen3, QwQ, DeepSeek-R1, SmolLM3, GLM-4.5 and others; Magistral; Command
A Reasoning; Seed-OSS."""

HARMONY = ("start", "channel", "message", "end", "return", "call")
"""Special tokens of harmony, `<|NAME|>`, that every message or end of an answer needs."""
RECIPIENT = (" to", "to", " to=", "to=")
"""What a recipient begins with, if it is one token."""


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """`begin` and `end` are the tokens' texts, empty if only ids are known. begin_id None: every answer begins inside a thought.
    `boundary_ids` are the other added tokens, such as those that end a turn: a thought never extends across one."""

    begin: str
    end: str
    begin_id: int | None
    end_id: int
    boundary_ids: frozenset[int] = frozenset()
    closing: tuple[int, ...] = ()
    """Tokens that end a thought and lead to the answer."""
    channels: Channels | None = None
    """Of harmony: thoughts are a channel of their own."""
    marks: tuple[tuple[str, int], ...] = ()
    """Of harmony: text and id of its special tokens."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: of harmony all that end a message, but the end of one that others may follow."""
        return () if self.channels is None else tuple(sorted(self.channels.end_ids - {self.end_id}))

    def tokens(self) -> dict[str, int]:
        """Text -> id of the tokens whose texts are known."""
        if self.channels is not None:
            return dict(self.marks)
        found = {self.begin: self.begin_id, self.end: self.end_id}
        return {text: token for text, token in found.items() if text and token is not None}

    def of_row(self, prompt_ids: Ids, budget: int | None, closing: tuple[int, ...]) -> Thinking:
        """What the engine must know of a row; `closing` are the tokens of a text that comes before `self.closing`."""
        header = () if self.channels is None else open_header(self.channels, prompt_ids.tolist())
        return Thinking(
            begin_id=self.begin_id, end_id=self.end_id, opened=self.opened_by(prompt_ids), budget=budget,
            closing=(*closing, *self.closing), channels=self.channels, header=header,
        )  # fmt: skip

    def opened_by(self, prompt_ids: Ids) -> bool | None:
        """Whether a prompt ends inside a thought (True), after one (False), or without one (None).

        Only the tokens after the last boundary token, such as the one that ends a turn, belong to the answer.
        """
        if self.channels is not None:
            header = open_header(self.channels, prompt_ids.tolist())
            return True if self.channels.begins_thought(header) else None
        for token in reversed(prompt_ids.tolist()):
            if token == self.end_id:
                return False
            if token == self.begin_id:
                return True
            if token in self.boundary_ids:
                break
        return True if self.begin_id is None else None


def find_think_tokens(setting: Any, tokenizer: Tokenizer | None, vocab_size: int) -> ThinkTokens | None:
    """The tokens of model.think_tokens; None if that is `none`, or `auto` and the tokenizer has neither harmony nor a KNOWN pair.

    Raises ConfigError if a name is not a single token of the model.
    """
    if setting == "none" or (setting == "auto" and tokenizer is None):
        return None
    if setting == "auto":
        assert tokenizer is not None
        harmony = find_harmony(tokenizer, vocab_size)
        if harmony is not None:
            return harmony
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
    return ThinkTokens(begin, texts[-1], begin_id, ids[-1], boundary_ids, (ids[-1],))


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


def find_harmony(tokenizer: Tokenizer, vocab_size: int) -> ThinkTokens | None:
    """The channels of a tokenizer that has harmony's special tokens; None if it lacks one."""
    found = {name: tokenizer.added_ids.get(f"<|{name}|>", vocab_size) for name in HARMONY}
    if any(token >= vocab_size for token in found.values()):
        return None
    constrain_id = tokenizer.added_ids.get("<|constrain|>", vocab_size)
    channels = Channels(
        start_id=found["start"], channel_id=found["channel"], message_id=found["message"],
        constrain_id=constrain_id if constrain_id < vocab_size else None,
        end_ids=frozenset(found[name] for name in ("end", "return", "call")),
        role=tokenizer.spellings("assistant"),
        analysis=tokenizer.spellings("analysis"),
        others=tokenizer.spellings("final") | tokenizer.spellings("commentary"),
        recipient=frozenset(ids[0] for text in RECIPIENT for ids in tokenizer.spellings(text) if len(ids) == 1),
    )  # fmt: skip
    closing = (
        found["end"], found["start"], *tokenizer.encode_part("assistant"), found["channel"], *tokenizer.encode_part("final"),
        found["message"],
    )  # fmt: skip
    begin, end = "<|channel|>analysis<|message|>", "<|end|>"
    marks = tuple((f"<|{name}|>", token) for name, token in found.items())
    return ThinkTokens(begin, end, channels.message_id, found["end"], closing=closing, channels=channels, marks=marks)


def open_header(channels: Channels, prompt_ids: list[int]) -> tuple[int, ...]:
    """The tokens of a prompt's last message, up to `<|message|>`; () if that message has ended, or there is none."""
    for place in range(len(prompt_ids) - 1, -1, -1):
        token = prompt_ids[place]
        if token in channels.end_ids:
            return ()
        if token == channels.start_id:
            header = prompt_ids[place:]
            place_of_text = header.index(channels.message_id) if channels.message_id in header else len(header)
            return tuple(header[: place_of_text + 1])
    return ()
