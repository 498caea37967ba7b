"""The token sequences of `bad_words`, of a row or of the job, which its output never completes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchspec.errors import BadRow
from batchspec.records import MAX_BAD_WORD, MAX_BAD_WORDS

if TYPE_CHECKING:
    from batchspec.text.tokenizer import Tokenizer


def read_bad_words(words: Any, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences of these texts: each as at the beginning of a text, and as after a space. Raises BadRow."""
    texts = [words] if isinstance(words, str) else words
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadRow("bad_parameter", f"bad_words={words!r} must be texts that are not empty; correct it or leave it out")
    if not texts:
        return ()
    if tokenizer is None:
        raise BadRow("bad_parameter", f"bad_words={words!r} needs a tokenizer, and the model folder has none; leave it out")
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        both = [tuple(tokenizer.encode_part(f"{space}{text.lstrip()}")) for space in ("", " ")]
        if max(map(len, both)) > MAX_BAD_WORD:
            said = f"bad_words: {text!r} has {max(map(len, both))} tokens, at most {MAX_BAD_WORD} are supported; shorten it"
            raise BadRow("bad_parameter", said)
        found |= dict.fromkeys(ids for ids in both if ids and max(ids) < vocab_size)
    if len(found) > MAX_BAD_WORDS:
        said = f"bad_words has {len(found)} token sequences, at most {MAX_BAD_WORDS} are supported; shorten the list"
        raise BadRow("bad_parameter", said)
    return tuple(found)
