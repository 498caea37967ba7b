"""Refuses a tokenizer whose rules let text grow without bounds: each prompt would take hours, or all memory.

A bound of the growth is found from tokenizer.json alone. A normaliser, a pre-tokeniser and a decoder are chains of steps, and the
bounds of the steps multiply: thirty steps that double a character make a billion of it.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from batchspec.checkpoint.name_patterns import BadPattern, parse_pattern
from batchspec.text.text_bytes import Json, entries, parts_of

MAX_GROWTH = 10_000
"""Bytes that a byte of text may become. NFKD, lower case, the charsmap of NFKC (33) and Metaspace together have 3,267."""
MAX_STRING = 1 << 14
"""Maximum length of a string in the rules, of a vocabulary entry and of an added token. Known ones have some hundreds."""
MAX_ADDED_IDS = 1_000
"""Maximum number of tokens that are added to each prompt."""
_CHARSMAP = "precompiled_charsmap"
_GROWTH = {
    "NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5, "BertNormalizer": 5.0, "ByteLevel": 2.0,
    "Metaspace": 6.0, "WordPiece": 2.0,
}
"""Bytes for a byte by the type of a step, 1 where it is not listed. Of normal forms: Unicode Standard Annex 15, and
https://www.unicode.org/faq/normalization.html#12. Metaspace: U+2581 for a space, and another one before the word."""
_ZERO_WIDTH = re.compile(r"\^|\$|\(\?[=!<]|\\[bBAGKzZyY]")


def growth_problem(tokenizer: Json) -> str | None:
    """Why a tokenizer.json is refused; None if it is not."""
    model = tokenizer.get("model") or {}
    rules = {name: tokenizer.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
    rules["model"] = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
    for name, rule in rules.items():
        if (size := _longest(_strings(rule))) > MAX_STRING:
            return f"{name} holds a string of {size:,} characters, more than the maximum of {MAX_STRING:,}"
    if (size := _longest(entries(model))) > MAX_STRING:
        return f"an entry of the vocabulary has {size:,} characters, more than the maximum of {MAX_STRING:,}"
    before = [*parts_of(rules["normalizer"], "normalizers"), *parts_of(rules["pre_tokenizer"], "pretokenizers")]
    for what, steps in (("encoding", before), ("decoding", parts_of(rules["decoder"], "decoders"))):
        if growth_of(steps) > MAX_GROWTH:
            return f"{what} may make more than {MAX_GROWTH:,} bytes of a byte of text"
    return None


def added_problem(contents: Iterable[str], num_added_ids: int) -> str | None:
    """The same of the added tokens, and of the number of tokens that are added to each prompt."""
    if (size := _longest(contents)) > MAX_STRING:
        return f"an added token has {size:,} characters, more than the maximum of {MAX_STRING:,}"
    if num_added_ids > MAX_ADDED_IDS:
        return f"{num_added_ids:,} tokens are added to each prompt, more than the maximum of {MAX_ADDED_IDS:,}"
    return None


def growth_of(steps: Iterable[Json]) -> float:
    """A bound of the bytes that a chain of steps makes of a byte."""
    return math.prod(map(_growth, steps))


def _growth(step: Json) -> float:
    match step.get("type"):
        case "Prepend":  # before each part of the text between added tokens, which may be one byte
            return 1 + _size(step.get("prepend"))
        case "Precompiled":
            return max(1, _longest_replacement(step.get(_CHARSMAP)))
        case "Replace":
            pattern, content = step.get("pattern") or {}, _size(step.get("content"))
            text = pattern.get("String")
            if isinstance(text, str) and text:
                return max(1, content / _size(text))
            return max(1, content) if _takes_text(pattern.get("Regex")) else 1 + content
    return _GROWTH.get(str(step.get("type")), 1)


def _size(text: object) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _takes_text(regex: object) -> bool:
    """Whether each match of a regex has a character for certain: then there are no more matches than characters."""
    with suppress(BadPattern):
        return isinstance(regex, str) and not _ZERO_WIDTH.search(regex) and not parse_pattern(regex).begins("")
    return False


def _longest_replacement(charsmap: object) -> int:
    """Length of the longest text that a SentencePiece charsmap puts in place of another one: after a trie of as many bytes as the
    first four say, all these texts, each ended by a zero."""
    data = b""
    with suppress(ValueError):
        data = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value but a charsmap, whose replacements count instead."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != _CHARSMAP:
                yield key
                yield from _strings(item)
