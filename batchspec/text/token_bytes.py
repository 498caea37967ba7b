"""The exact bytes of each token of a vocabulary: concatenated, those of an output's tokens are its text.

Byte-level vocabularies (GPT-2, Llama 3, Qwen, ...) and those of SentencePiece with byte fallback or without (Llama 2, Mistral,
Gemma, ...) are supported. Does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from batchspec.automata.token_automaton import MARKS, OTHER, TokenSymbols
from batchspec.errors import ConfigError
from batchspec.text.text_bytes import byte_chars, parts_of

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UNMARKED = bytes.maketrans(bytes(MARKS), b"\xc0" * len(MARKS))
"""Another byte that no UTF-8 text has, in place of each of MARKS: such a token is no mark, and its text is U+FFFD too."""
_SENTENCEPIECE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
"""Decoders of such vocabularies. Strip drops a space before the text's first word; an answer that must match begins without
one."""


def token_symbols(
    tokenizer: tokenizers.Tokenizer, vocab_size: int, marks: Mapping[int, int], call_marks: Sequence[str] = ()
) -> TokenSymbols:
    """The bytes of each of the model's tokens; the symbol OTHER for added tokens and ids that the tokenizer lacks.

    marks  tokens that have symbols of their own: token -> symbol
    call_marks  texts of added tokens that mark tool calls: each that the tokenizer has is one of the bytes MARKS
    Raises ConfigError if the tokenizer's decoder is not supported.
    """
    decoders = parts_of(json.loads(tokenizer.to_str()).get("decoder"), "decoders")
    kinds = {str(part.get("type")) for part in decoders}
    pieces: list[bytes | int] = [OTHER] * vocab_size
    added = tokenizer.get_added_tokens_decoder()
    if kinds == {"ByteLevel"}:
        byte_of = {char: byte for byte, char in byte_chars().items()}

        def spelled(name: str) -> bytes:
            return bytes(byte_of[char] for char in name) if all(char in byte_of for char in name) else b""

    elif kinds <= _SENTENCEPIECE and _spaces(decoders):

        def spelled(name: str) -> bytes:
            byte = _BYTE.fullmatch(name) if "ByteFallback" in kinds else None
            return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode("utf-8", "surrogatepass")

    else:
        raise ConfigError(
            "structured output needs to know the bytes of each token, and this tokenizer's decoder is "
            f"{' + '.join(sorted(kinds)) or 'none'}; known are byte-level vocabularies and SentencePiece's. "
            "Remove decode.schema, regex, choice and such columns"
        )
    for name, token in tokenizer.get_vocab(with_added_tokens=False).items():
        if token < vocab_size and token not in added:
            pieces[token] = spelled(name).translate(_UNMARKED) or OTHER
    ids = {token.content: number for number, token in added.items() if number < vocab_size and number not in marks}
    found = tuple(text for text in call_marks if text in ids)
    for byte, text in zip(MARKS, found, strict=False):
        pieces[ids[text]] = bytes([byte])
    for token, symbol in marks.items():
        pieces[token] = symbol
    return TokenSymbols.of(pieces, found[: len(MARKS)])


def _spaces(decoders: list[Any]) -> bool:
    """Whether U+2581 becomes a space, and nothing else is replaced."""
    replaced = [(part.get("pattern"), part.get("content")) for part in decoders if part.get("type") == "Replace"]
    metaspace = [part.get("replacement") for part in decoders if part.get("type") == "Metaspace"]
    return (replaced, metaspace) in (([({"String": "\u2581"}, " ")], []), ([], ["\u2581"]))
