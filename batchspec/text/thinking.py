"""The tokens with which a model begins and ends a thought, and whether a prompt ends inside one. Does not import torch.

Thoughts are found by token ids, never by text: decoding may drop special tokens, and text can contain "<think>" by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchspec.errors import ConfigError
from batchspec.records import Channels, Ids, Thinking
from batchspec.text.tokenizer import Tokenizer

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>", "<channel|>"),
)
"""Pairs that are single tokens in published tokenizers: Qwen3, QwQ, DeepSeek-R1, SmolLM3, GLM-4.5 and others; Magistral; Command
A Reasoning; Seed-OSS; Gemma 4."""
LABELS = {"<|channel>": "thought\n"}
"""Begin token -> the text that always follows it: Gemma 4 names the channel."""

HARMONY = ("start", "channel", "message", "end", "return", "call")
"""Names of the special tokens `<|NAME|>` that a tokenizer must have to count as one of harmony."""
RECIPIENT = (" to", "to", " to=", "to=")
"""Texts with which a recipient can begin; those that are one token of the tokenizer are searched for."""


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """The tokens around a model's thoughts: a pair of think tokens, or the special tokens of harmony."""

    begin: str
    """Text that begins a thought; empty if only the id is known, or if there is no such token."""
    end: str
    """Text that ends a thought; empty if only the id is known."""
    begin_id: int | None
    """None: every answer begins inside a thought, without a token. With harmony: `<|message|>`."""
    end_id: int
    boundary_ids: frozenset[int] = frozenset()
    """The tokenizer's other added tokens, such as those that end a turn: a thought never extends across one."""
    closing: tuple[int, ...] = ()
    """Tokens that end a thought and begin the answer."""
    channels: Channels | None = None
    """Only with harmony, where a thought is a message in a channel of its own."""
    marks: tuple[tuple[str, int], ...] = ()
    """Only with harmony: (text, id) of each special token in HARMONY."""

    @property
    def label(self) -> str:
        """Text with which each thought begins and that is not part of it."""
        return LABELS.get(self.begin, "")

    @property
    def opening(self) -> str:
        """What comes before a thought, its label included, without the line break after it."""
        return self.begin + self.label.rstrip("\n")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """With harmony `<|return|>` and `<|call|>`, which end an answer; not `<|end|>`, after which other messages may follow.
        Otherwise ()."""
        return () if self.channels is None else tuple(sorted(self.channels.end_ids - {self.end_id}))

    def tokens(self) -> dict[str, int]:
        """Text -> id of these tokens, of those with a known text."""
        if self.channels is not None:
            return dict(self.marks)
        found = {self.begin: self.begin_id, self.end: self.end_id}
        return {text: token for text, token in found.items() if text and token is not None}

    def of_row(self, prompt_ids: Ids, budget: int | None, closing: tuple[int, ...]) -> Thinking:
        """The engine's `Thinking` for a row with this prompt. closing: tokens of a text to force before `self.closing`."""
        header = () if self.channels is None else open_header(self.channels, prompt_ids.tolist())
        return Thinking(
            begin_id=self.begin_id, end_id=self.end_id, opened=self.opened_by(prompt_ids), budget=budget,
            label=self.label, closing=(*closing, *self.closing), channels=self.channels, header=header,
        )

    def opened_by(self, prompt_ids: Ids) -> bool | None:
        """Whether a prompt ends inside a thought (True) or after one (False). None: the answer has no thought so far.

        Only tokens after the last boundary token, such as the one that ends a turn, count as part of the answer.
        With harmony: True or None, by the prompt's last message.
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
        raise ConfigError(f"model.think_tokens={names} has the same token twice; name one that begins and another that ends it")
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
    """The tokens of harmony, if tokenizer and vocabulary have all special tokens in HARMONY; else None."""
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
    )
    closing = (
        found["end"], found["start"], *tokenizer.encode_part("assistant"), found["channel"], *tokenizer.encode_part("final"),
        found["message"],
    )
    begin, end = "<|channel|>analysis<|message|>", "<|end|>"
    marks = tuple((f"<|{name}|>", token) for name, token in found.items())
    return ThinkTokens(begin, end, channels.message_id, found["end"], closing=closing, channels=channels, marks=marks)


def open_header(channels: Channels, prompt_ids: list[int]) -> tuple[int, ...]:
    """The header of a prompt's last message, with its `<|message|>` if there; () if that message has ended, or there is none."""
    for place in range(len(prompt_ids) - 1, -1, -1):
        token = prompt_ids[place]
        if token in channels.end_ids:
            return ()
        if token == channels.start_id:
            header = prompt_ids[place:]
            place_of_text = header.index(channels.message_id) if channels.message_id in header else len(header)
            return tuple(header[: place_of_text + 1])
    return ()
