"""How much text so many tokens can stand for, at most: a prompt that is longer in bytes need not be tokenised to be refused.

A token stands for no more bytes than the longest entry of the vocabulary has. It holds where every byte of the text ends up in
some token: no part of the tokenizer may delete text, or make one token of a run of unknown characters. Where tokenizer.json has
anything that is not known here to keep to that, there is no bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

SHRINKS = {"NFC": 5, "NFD": 2, "ByteLevel": 1, "Prepend": 1}
"""Normalisers -> bytes that become one, at most: 3 jamo of 3 bytes are a syllable of 3, a 3-byte letter with a singleton
decomposition 2 bytes, and both can meet."""
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts"}


class LongText(ValueError):
    """A text that so few tokens cannot hold; the message says how long it is."""


def bytes_a_token(tokenizer: Json) -> int | None:
    """The most bytes of text that one token can stand for; None where nothing bounds them. `tokenizer` is tokenizer.json."""
    model, added = tokenizer.get("model") or {}, tokenizer.get("added_tokens") or []
    factor = _shrink(tokenizer.get("normalizer"))
    if factor is None or not _keeps_all(tokenizer.get("pre_tokenizer")) or not _knows_all(model, tokenizer):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):  # such a token takes the spaces around it
        return None
    vocab = model.get("vocab") or {}
    texts = vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab)
    by_byte = _has(tokenizer, "ByteLevel")  # then a character of an entry stands for a byte
    longest = max((len(text) if by_byte else len(text.encode("utf-8", "surrogatepass")) for text in texts), default=4)
    own = max((len(str(token.get("content", "")).encode("utf-8", "surrogatepass")) for token in added), default=0)
    return max(longest, own, 4) * factor


def _parts(part: Any, inner: str) -> list[Json]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [leaf for item in part.get(inner) or [] for leaf in _parts(item, inner)]
    return [part]


def _shrink(normalizer: Any) -> int | None:
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        if part.get("type") == "Replace":
            pattern = (part.get("pattern") or {}).get("String")
            if not isinstance(pattern, str) or len(str(part.get("content")).encode()) < len(pattern.encode()):
                return None
        elif part.get("type") not in SHRINKS:
            return None
        else:
            factor *= SHRINKS[part["type"]]
    return factor


def _keeps_all(pre_tokenizer: Any) -> bool:
    return all(
        part.get("behavior") != "Removed" if part.get("type") in ("Split", "Punctuation") else part.get("type") in _PRE_TOKENIZERS
        for part in _parts(pre_tokenizer, "pretokenizers")
    )


def _has(tokenizer: Json, kind: str) -> bool:
    parts = [*_parts(tokenizer.get("normalizer"), "normalizers"), *_parts(tokenizer.get("pre_tokenizer"), "pretokenizers")]
    return any(part.get("type") == kind for part in parts)


def _knows_all(model: Json, tokenizer: Json) -> bool:
    """Whether no text is left out, and no run of unknown characters becomes one token."""
    vocab = model.get("vocab") or {}
    names = set(vocab) if isinstance(vocab, dict) else {entry[0] for entry in vocab}
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in names for byte in range(256)):
        return True
    if model.get("type") != "BPE":
        return False
    if _has(tokenizer, "ByteLevel"):
        import tokenizers

        return set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= names
    return model.get("unk_token") is not None and not model.get("fuse_unk")
