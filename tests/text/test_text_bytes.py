"""The bound on the text of a token: never too low for any text, and no bound where a tokenizer may leave text out."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from batchspec.text import tokenizer as tokenizer_module
from batchspec.text.text_bytes import SHRINKS, LongText, text_bound
from batchspec.text.tokenizer import Tokenizer as ModelTokenizer
from tests.helpers.models import make_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def made(model: Any = None, normalizer: Any = None, pre: Any = None, added: list[AddedToken] | None = None) -> Tokenizer:
    found = Tokenizer(model if model is not None else models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    if normalizer is not None:
        found.normalizer = normalizer
    found.pre_tokenizer = pre if pre is not None else pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.add_tokens(added or [])
    return found


def fallback_bpe() -> Any:
    vocab = FALLBACK | {"▁": 256, "a": 257, "▁a": 258, "<unk>": 259}
    return models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def bound_of(found: Tokenizer) -> Any:
    import json

    return text_bound(json.loads(found.to_str()))


LIKE_LLAMA_2 = pre_tokenizers.Metaspace()
BOUNDED = [
    made(),
    made(normalizer=normalizers.NFC()),
    made(models.BPE({char: i for i, char in enumerate(ALPHABET) if char not in "ab!"}, [])),  # text of these bytes is left out
    made(added=[AddedToken("<|end|>", rstrip=True, normalized=False)]),
    made(pre=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()])),
    made(fallback_bpe(), normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), LIKE_LLAMA_2),
]
UNBOUNDED = [
    made(normalizer=normalizers.Strip()),
    made(normalizer=normalizers.Replace("  ", " ")),
    made(normalizer=normalizers.NFKC()),
    made(pre=pre_tokenizers.WhitespaceSplit()),
    made(pre=pre_tokenizers.Split(" ", "removed")),
    made(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    made(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    made(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
    made(models.BPE({"a": 0}, []), pre=pre_tokenizers.Metaspace()),  # what is not "a" is left out
]
texts = st.text(st.sampled_from("ab !<|end|>0é각각e\u0301\u1100\u1161\u11a8 \u212b\u2028\t😀"), max_size=80)


@pytest.mark.parametrize("found", BOUNDED)
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_no_text_has_more_bytes_than_its_tokens_can_decode_to(found: Tokenizer, text: str) -> None:
    bound = bound_of(found)
    assert bound is not None
    counted = len(text.encode().translate(None, bound.left_out))
    assert counted <= bound.bytes_a_token * len(found.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("found", UNBOUNDED)
def test_there_is_no_bound_where_text_may_be_left_out(found: Tokenizer) -> None:
    assert bound_of(found) is None


@pytest.mark.second
def test_normalisers_shrink_no_more_than_is_known() -> None:
    def size(text: str) -> int:
        return len(text.encode())

    chars = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    parts = {char: unicodedata.normalize("NFD", char) for char in chars}
    # The most bytes that a text may have spent on each decomposed character of it, and so on each composed one.
    most: dict[str, int] = {}
    for char, pieces in parts.items():
        if len(pieces) == 1:
            most[pieces] = max(most.get(pieces, 0), size(char))
    assert all(size(char) <= sum(most[piece] for piece in pieces) for char, pieces in parts.items())
    assert max(most[piece] / size(piece) for piece in most) <= SHRINKS["NFD"]
    composed = [char for char in chars if unicodedata.normalize("NFC", char) == char]
    assert max(sum(most[piece] for piece in parts[char]) / size(char) for char in composed) <= SHRINKS["NFC"]


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelTokenizer:
    monkeypatch.setattr(tokenizer_module, "END_CHARS", 4096)
    return ModelTokenizer(make_tokenizer(tmp_path / "model"))


def test_a_text_that_cannot_fit_is_not_tokenised(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokenizer.encode("say it again")
    assert tokenizer.encode("say it again", max_tokens=len(ids)) == ids
    monkeypatch.setattr(tokenizer, "_tokenizer", None)
    with pytest.raises(LongText, match=r"1,000,000 bytes of prompt \(too many to fit"):
        tokenizer.encode("x" * 1_000_000, max_tokens=100)
    with pytest.raises(LongText, match=r"bytes of prompt"):
        tokenizer.encode_chat([{"role": "user", "content": "x" * 1_000_000}], max_tokens=100)


@pytest.mark.second
def test_a_template_that_writes_too_much_keeps_it_to_itself(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    (tmp_path / "grow.jinja").write_text("{{ messages[0].content * 100000 }}")
    grown = ModelTokenizer(tmp_path / "model", tmp_path / "grow.jinja")
    chat = [{"role": "user", "content": "abcdefghij"}]
    with pytest.raises(LongText, match="1,000,000 bytes"):
        grown.encode_chat(chat, max_tokens=100)
    assert len(grown.encode_chat(chat, max_tokens=100, keep_end=True)) == 100


@pytest.mark.second
def test_of_a_long_text_only_the_end_is_tokenised_and_its_last_ids_are_those_of_the_whole(tokenizer: ModelTokenizer) -> None:
    text = " ".join(f"word{i} of the fox" for i in range(20_000))
    whole = tokenizer.encode(text)
    for max_tokens in (1, 100, 3000):
        assert tokenizer.encode(text, max_tokens=max_tokens, keep_end=True) == whole[-max_tokens:]
    chat = [{"role": "user", "content": text}]
    assert tokenizer.encode_chat(chat, max_tokens=700, keep_end=True) == tokenizer.encode_chat(chat)[-700:]
    assert tokenizer.encode("short", max_tokens=700, keep_end=True) == tokenizer.encode("short")


def test_byte_level_decoders_agree_about_the_characters_of_bytes() -> None:
    from batchspec.text.text_bytes import byte_chars

    found = Tokenizer(models.BPE({char: byte for byte, char in byte_chars().items()}, []))
    found.decoder = decoders.ByteLevel()
    assert sorted(byte_chars().values()) == ALPHABET
    assert [found.decode([byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]
