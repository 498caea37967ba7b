"""The text and the bytes of single tokens, for log-probabilities. Does not import torch."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from batchspec.automata.token_automaton import TokenSymbols
from batchspec.errors import ConfigError

if TYPE_CHECKING:
    from batchspec.text.tokenizer import Tokenizer


class TokenTexts:
    """Token id -> (text, bytes), as inside of a text: with the space before a word.

    Bytes that are not UTF-8 by themselves are U+FFFD in the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        if token not in self._found:
            data = self._bytes(token)
            self._found[token] = data.decode("utf-8", "replace"), list(data)
        return self._found[token]

    @cached_property
    def _added(self) -> dict[int, str]:
        return {token: text for text, token in self._tokenizer.added_ids.items()}

    @cached_property
    def _symbols(self) -> TokenSymbols | None:
        """None: the decoder's tokens have no bytes of their own."""
        try:
            return self._tokenizer.symbols(self._tokenizer.vocab_size, {})
        except ConfigError:
            return None

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if self._symbols is None or token >= self._symbols.num_tokens:
            before = self._tokenizer.encode_part("a")  # a decoder may drop the space before the first word of a text
            whole, begin = (self._tokenizer.decode(ids, False) for ids in ([*before, token], before))
            return whole[len(begin) :].encode()
        found, _ = self._symbols.symbols_of([token])
        return bytes(symbol for symbol in found.tolist() if symbol < 256)
