"""An upper bound of the bytes of text in a token: a prompt with too many bytes is refused without tokenising it.

A token represents at most as many bytes as the longest vocabulary entry has. This assumes that every byte of the text is in some
token, so bytes that a tokenizer may drop are not counted: those that a byte-level vocabulary lacks, and white space if an added
token strips it. If tokenizer.json has a component for which this is not known to hold, there is no bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchspec.errors import OneLine

Json = Mapping[str, Any]

SHRINKS = {"NFC": 4, "NFD": 3, "ByteLevel": 1, "Prepend": 1}
"""Normaliser -> maximum number of bytes that become one byte, rounded up: U+1FEF (3 bytes) becomes a grave accent (1 byte), and
NFC reaches 3.5 if such letters are also composed."""
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
_LAST_SPACE = 0x3000
_WHITE_SPACE = bytes({byte for i in range(_LAST_SPACE + 1) if (char := chr(i)).isspace() for byte in char.encode()})


class LongText(OneLine, ValueError):
    """The text is too long for the allowed number of tokens; the message says how long it is."""


@dataclass(frozen=True, slots=True)
class TextBound:
    bytes_a_token: int
    """Maximum number of bytes of text, without those of `left_out`, that one token can represent."""
    left_out: bytes
    """Byte values that may not be in any token."""


def text_bound(tokenizer: Json) -> TextBound | None:
    """The bound for a tokenizer.json; None if the text of a token is not bounded."""
    model, added = tokenizer.get("model") or {}, tokenizer.get("added_tokens") or []
    factor, names = _shrink(tokenizer.get("normalizer")), entries(model)
    left_out = _left_out(model, names, tokenizer)
    if factor is None or left_out is None or not _keeps_all(tokenizer.get("pre_tokenizer")):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):  # such a token absorbs adjacent white space
        left_out |= set(_WHITE_SPACE)
    by_byte = _is_byte_level(tokenizer)  # then each character of an entry represents a byte
    longest = max((len(name) if by_byte else _size(name) for name in names), default=0)
    own = max((_size(str(token.get("content", ""))) for token in added), default=0)
    return TextBound(max(longest, own, 4) * factor, bytes(sorted(left_out)))


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def entries(model: Json) -> set[str]:
    """The texts of the vocabulary."""
    vocab = model.get("vocab") or {}
    return set(vocab) if isinstance(vocab, dict) else {entry[0] for entry in vocab}


def parts_of(part: Any, inner: str) -> list[Json]:
    """A component of a tokenizer.json, or those of a sequence of components, which are under `inner`."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [leaf for item in part.get(inner) or [] for leaf in parts_of(item, inner)]
    return [part]


def _shrink(normalizer: Any) -> int | None:
    factor = 1
    for part in parts_of(normalizer, "normalizers"):
        if part.get("type") == "Replace":
            pattern = (part.get("pattern") or {}).get("String")
            if not isinstance(pattern, str) or _size(str(part.get("content"))) < _size(pattern):
                return None
        elif part.get("type") not in SHRINKS:
            return None
        else:
            factor *= SHRINKS[part["type"]]
    return factor


def _keeps_all(pre_tokenizer: Any) -> bool:
    return all(
        part.get("behavior") != "Removed" if part.get("type") in ("Split", "Punctuation") else part.get("type") in _PRE_TOKENIZERS
        for part in parts_of(pre_tokenizer, "pretokenizers")
    )


def _is_byte_level(tokenizer: Json) -> bool:
    parts = [*parts_of(tokenizer.get("normalizer"), "normalizers"), *parts_of(tokenizer.get("pre_tokenizer"), "pretokenizers")]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _left_out(model: Json, names: set[str], tokenizer: Json) -> set[int] | None:
    """Byte values that are in no token; None if other text is dropped too, or a run of unknown characters becomes one token."""
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in names for byte in range(256)):
        return set()
    if model.get("type") != "BPE" or (model.get("unk_token") is not None and model.get("fuse_unk")):
        return None
    if _is_byte_level(tokenizer):
        return {byte for byte, char in byte_chars().items() if char not in names} if model.get("unk_token") is None else set()
    return set() if model.get("unk_token") is not None else None


def byte_chars() -> dict[int, str]:
    """Byte -> its character in byte-level vocabularies: itself if printable, else the next unused one from U+0100 on.

    Source: bytes_to_unicode of GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
