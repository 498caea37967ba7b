"""corpus_lookup: drafts from a corpus, if their match is longer than the row's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.draft.corpus import build_table
from batchspec.kernels.drafting.corpus_lookup import corpus_lookup, pack_entries

POISON = 9
Proposal = tuple[list[int], int]


def flat(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in (*document, -1)]


def look_up(
    rows: list[list[int]], corpus: list[int], interpret: bool, device: torch.device, *,
    table: Tensor | None = None, lengths: tuple[int, ...] = (2, 3), max_ngram: int = 3, growth: int = 9, max_draft_len: int = 4,
    own: list[int] | None = None, live: list[int] | None = None, buffer: int = 0, entries: int = 64,
) -> list[Proposal]:
    """(draft tokens, match_len) of each row; a row that keeps its own match has (POISON, POISON) as drafts."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    longest = max(map(len, rows)) + 2
    tokens = torch.tensor([row + [1] * (longest - len(row)) for row in rows], **ints)
    buffers = torch.full((2, len(corpus) + 3), -1, **ints)
    buffers[buffer, : len(corpus)] = torch.tensor(corpus, **ints)
    tables = torch.zeros(2, entries, dtype=torch.int64, device=device)
    tables[buffer] = (build_table(torch.tensor(corpus, dtype=torch.int32), lengths, entries) if table is None else table).to(
        device
    )
    ids, lens = torch.full((len(rows), max_draft_len), POISON, **ints), torch.full((len(rows),), 2, **ints)
    matched = torch.tensor(own or [0] * len(rows), **ints)
    corpus_lookup(
        tokens, torch.tensor([len(row) for row in rows], **ints), torch.tensor(live or [1] * len(rows), **ints),
        torch.tensor([buffer], **ints), tables, buffers, lengths=lengths, max_ngram=max_ngram, max_draft_len=max_draft_len,
        growth=growth, draft_ids=ids, draft_len=lens, match_len=matched, interpret=interpret,
    )
    found = []
    for line, length, match in zip(ids.tolist(), lens.tolist(), matched.tolist(), strict=True):
        assert match <= max_ngram or line[length:] == [0] * (max_draft_len - length)
        found.append((line[:length], match))
    return found


def by_hand(
    row: list[int], documents: list[list[int]], lengths: tuple[int, ...], max_ngram: int, growth: int, max_draft_len: int
) -> Proposal | None:
    """The same over lists: for each n the latest occurrence with the most frequent next token, then the longest match."""
    corpus, best = flat(documents), None
    for n in lengths:
        if len(row) < n:
            continue
        ends = [e for e in range(n - 1, len(corpus) - 1) if corpus[e - n + 1 : e + 1] == row[-n:] and corpus[e + 1] >= 0]
        if not ends:
            continue
        follow = [corpus[e + 1] for e in ends]
        best_next = max((follow.count(t), max(e for e in ends if corpus[e + 1] == t), t) for t in set(follow))
        count, end, _ = best_next
        length = n
        while length < min(max_ngram, len(row), end + 1) and corpus[end - length] == row[-length - 1]:
            length += 1
        trust = max(1, 255 * count // (len(ends) + 1))
        if best is None or length >= best[0]:
            best = (length, end, trust)
    if best is None:
        return None
    length, end, trust = best
    following = corpus[end + 1 : corpus.index(-1, end + 1)]
    return following[: min(max_draft_len, max(1, growth * length * trust // 256))], max_ngram + length


def test_the_continuation_in_a_finished_row_is_proposed(interpret: bool, device: torch.device) -> None:
    corpus = flat([[1, 2, 3, 4, 5, 6, 7]])
    assert look_up([[9, 2, 3], [3, 4], [8, 8, 8]], corpus, interpret, device) == [
        ([4, 5, 6, 7], 5), ([5, 6, 7], 5), ([POISON, POISON], 0),
    ]


def test_a_match_ends_with_its_document(interpret: bool, device: torch.device) -> None:
    corpus = flat([[1, 2, 3], [4, 5, 6]])
    assert look_up([[1, 2], [3, 4], [2, 3], [5, 6]], corpus, interpret, device) == [
        ([3], 5), ([POISON] * 2, 0), ([POISON] * 2, 0), ([POISON] * 2, 0),
    ]


def test_the_usual_continuation_wins_over_the_latest(interpret: bool, device: torch.device) -> None:
    corpus = flat([[1, 2, 7, 7], [1, 2, 7, 8], [1, 2, 5, 5]])
    assert look_up([[1, 2]], corpus, interpret, device) == [([7, 8], 5)]


def test_the_draft_length_grows_with_the_match_and_with_its_agreement(interpret: bool, device: torch.device) -> None:
    """growth * match * equal / (count + 1), in 256ths: after one occurrence the trust is a half."""
    run = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    rest: dict[str, Any] = {"growth": 2, "max_draft_len": 8, "lengths": (2, 3, 4), "max_ngram": 4, "entries": 256}
    once, often = flat([run]), flat([[i + 20, *run] for i in range(9)])
    assert [len(ids) for ids, _ in look_up([[1, 2], [1, 2, 3], [1, 2, 3, 4]], once, interpret, device, **rest)] == [1, 2, 3]
    assert [len(ids) for ids, _ in look_up([[1, 2], [1, 2, 3], [1, 2, 3, 4]], often, interpret, device, **rest)] == [3, 5, 6]
    half = flat([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 6, 6, 6]])
    assert look_up([[1, 2, 3, 4]], half, interpret, device, **rest) == [([6, 6], 8)]


def test_a_longer_match_within_the_row_is_kept(interpret: bool, device: torch.device) -> None:
    corpus, row = flat([[1, 2, 3, 4, 5]]), [1, 2, 3]
    found = look_up([row, row, row], corpus, interpret, device, own=[0, 2, 3])
    assert found == [([4, 5], 6), ([4, 5], 6), ([POISON, POISON], 3)]


def test_dead_and_short_rows_stay_unchanged(interpret: bool, device: torch.device) -> None:
    corpus = flat([[1, 1, 1, 1, 2]])
    assert look_up([[1, 1], [1], [1, 1]], corpus, interpret, device, live=[0, 1, 1])[:2] == [([POISON] * 2, 0)] * 2


def test_hash_collisions_are_no_matches(interpret: bool, device: torch.device) -> None:
    """Every entry of the table points to tokens other than the row's."""
    corpus = flat([[1, 2, 3, 4, 5, 6]])
    entry = pack_entries(torch.tensor([7]), torch.tensor([2]), torch.tensor([255])).expand(64)
    assert look_up([[8, 9, 7], [5, 6, 4]], corpus, interpret, device, table=entry) == [([POISON] * 2, 0)] * 2
    assert look_up([[2, 3]], corpus, interpret, device, table=entry) == [([4, 5, 6], 5)]


def test_an_empty_index_proposes_nothing(interpret: bool, device: torch.device) -> None:
    assert look_up([[1, 2, 3]], [-1], interpret, device, table=torch.zeros(64, dtype=torch.int64)) == [([POISON] * 2, 0)]


def test_which_selects_the_buffer(interpret: bool, device: torch.device) -> None:
    assert look_up([[1, 2]], flat([[1, 2, 3]]), interpret, device, buffer=1) == [([3], 5)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_a_plain_search(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    """A table without collisions finds what a search over the whole corpus finds."""
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12)
    documents, rows = data.draw(st.lists(tokens, min_size=1, max_size=5)), data.draw(st.lists(tokens, min_size=1, max_size=4))
    max_ngram = data.draw(st.integers(1, 5))
    lengths = tuple(sorted(data.draw(st.sets(st.integers(1, max_ngram), min_size=1))))
    limits: dict[str, Any] = {"growth": data.draw(st.integers(1, 4)), "max_draft_len": data.draw(st.integers(1, 5))}
    expected = [by_hand(row, documents, lengths, max_ngram, **limits) for row in rows]
    entries = 1 << 14
    found = look_up(
        rows, flat(documents), interpret, device, lengths=lengths, max_ngram=max_ngram, entries=entries, **limits
    )
    for want, got in zip(expected, found, strict=True):
        if want is None:
            assert got[1] == 0
        else:
            assert got == want


def test_wrong_arguments_are_refused() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    good: dict[str, Any] = {
        "tokens": torch.zeros(2, 9, dtype=torch.int32), "num_tokens": ints, "live": ints, "which": ints[:1],
        "table": torch.zeros(2, 8, dtype=torch.int64), "corpus": torch.zeros(2, 5, dtype=torch.int32), "lengths": (2, 3),
        "max_ngram": 3, "max_draft_len": 4, "growth": 2, "draft_ids": torch.zeros(2, 4, dtype=torch.int32),
        "draft_len": ints.clone(), "match_len": ints.clone(),
    }
    corpus_lookup(**good)
    for name in ("tokens", "num_tokens", "live", "which", "corpus", "draft_ids", "draft_len", "match_len"):
        with pytest.raises(ValueError, match=f"corpus_lookup: {name} is int64"):
            corpus_lookup(**{**good, name: good[name].long()})
    with pytest.raises(ValueError, match="table has 6 entries; must be a power of two"):
        corpus_lookup(**{**good, "table": good["table"][:, :6].contiguous()})
    for lengths in ((), (3, 2), (0, 2), (2, 4)):
        with pytest.raises(ValueError, match="corpus_lookup: lengths are"):
            corpus_lookup(**{**good, "lengths": lengths})
    with pytest.raises(ValueError, match=r"growth=2, max_draft_len=5; must be at least 1, and in 0\.\.4"):
        corpus_lookup(**{**good, "max_draft_len": 5})
