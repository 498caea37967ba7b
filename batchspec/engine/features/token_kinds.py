"""The kinds of output tokens (thought, answer, tool call, or a mark between them), and the interface that tells them apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of an output token."""

    THOUGHT = "thought"
    ANSWER = "answer"
    CALL = "tool call"
    """A token of a tool call's arguments."""
    BEGIN = "begin"
    """The mark that begins a thought."""
    BEGIN_CALL = "begin of a tool call"
    """The mark that begins the arguments of a tool call, whose header is complete."""
    HEADER = "header"
    """A token of the header of a message, before its text. If the text never begins, `take_dropped` or `finish` returns the
    header."""
    END = "end"
    """The mark that ends a thought or a message, or a special token that is not text."""
    END_OF_OUTPUT_SO_FAR = "end of output so far"
    """A mark that ends a thought, if no mark began it in prompt or output: all earlier tokens of the output were that thought."""


@dataclass(frozen=True, slots=True)
class Header:
    """A header without the text of a message after it."""

    tokens: list[int]
    text: list[int]
    """Those of `tokens` that belong to the answer: all but special tokens, role and channel name."""
    is_call: bool
    """Whether the header names a recipient, which makes it a tool call without arguments. `text` is then empty."""


class Tracker(ABC):
    """Tells the kind of each token of an output, pushed one after another."""

    inside: bool
    """Whether the next token is inside a thought."""
    header: list[int]
    """The tokens of the newest header, special tokens included. Empty for a model without channels."""

    def __init__(self) -> None:
        self.inside, self.header = False, []

    @property
    def in_call(self) -> bool:
        """Whether the next token is one of a tool call's arguments, unless it is a mark."""
        return False

    @abstractmethod
    def push(self, token: int) -> Kind:
        """The kind of the next token of the output."""

    def take_dropped(self) -> Header | None:
        """The header that the last token ended before its text began, if it did so; returned once."""
        return None

    def finish(self) -> Header | None:
        """The header that is incomplete at the end of the output, or None. Tokens may still be pushed afterwards."""
        return None
