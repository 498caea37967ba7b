"""The text and the bytes of single tokens, as OpenAI's log-probabilities have them. Does not import torch."""

from __future__ import annotations

from batchspec.automata.token_automaton import TokenSymbols
from batchspec.errors import ConfigError
from batchspec.model.tokenizer import Tokenizer


class TokenTexts:
    """Token id -> (text, bytes). Bytes that are not UTF-8 by themselves are U+FFFD in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, tuple[str, list[int]]] = {}
        self._added = {token: text for text, token in tokenizer.added_ids.items()}
        try:
            self._symbols: TokenSymbols | None = tokenizer.symbols(tokenizer.vocab_size, {})
        except ConfigError:  # a decoder whose tokens have no bytes of their own
            self._symbols = None

    def __call__(self, token: int) -> tuple[str, list[int]]:
        if token not in self._found:
            data = self._bytes(token)
            self._found[token] = data.decode("utf-8", "replace"), list(data)
        return self._found[token]

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if self._symbols is None or token >= self._symbols.num_tokens:
            return self._tokenizer.decode([token], False).encode()
        found, _ = self._symbols.symbols_of([token])
        return bytes(symbol for symbol in found.tolist() if symbol < 256)
