"""What the tokens of an output are: thought, answer, tool call, or marks between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a token is."""

    THOUGHT = "thought"
    ANSWER = "answer"
    CALL = "tool call"
    """A token of a tool call's arguments."""
    BEGIN = "begin"
    """The mark that begins a thought."""
    BEGIN_CALL = "begin of a tool call"
    """The mark that begins the arguments of a tool call, whose header is complete."""
    HEADER = "header"
    """A token before a message's text, which begins a message of its own. Should its text never begin, `take_dropped` or `finish`
    gives the header."""
    END = "end"
    """The mark that ends one."""
    END_OF_OUTPUT_SO_FAR = "end of output so far"
    """An end mark without a begin, in the prompt neither: all tokens before it were a thought."""


@dataclass(frozen=True, slots=True)
class Header:
    """A header after which no message began."""

    tokens: list[int]
    text: list[int]
    """Its tokens that are no part of a header."""
    is_call: bool


class Tracker(ABC):
    """Says of each token of an output, in order, what it is."""

    inside: bool
    """Within a thought."""
    header: list[int]
    """The header of the last message, its special tokens included. Empty without channels."""

    def __init__(self) -> None:
        self.inside, self.header = False, []

    @abstractmethod
    def push(self, token: int) -> Kind:
        """The next token."""

    def take_dropped(self) -> Header | None:
        """The header that the last token ended without a message."""
        return None

    def finish(self) -> Header | None:
        """The header in which the output ended. Tokens may be pushed afterwards."""
        return None
