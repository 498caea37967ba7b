"""The job-wide index of draft=lookup: what it keeps, when it is built anew, and that tokens never depend on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from batchspec.draft import corpus as corpus_module
from batchspec.draft.base import DrafterUpdate
from batchspec.draft.corpus import ROOM, Corpus, build_table, corpus_bytes, default_lengths, table_entries
from batchspec.draft.lookup import LookupDrafter
from tests.helpers.engines import DEVICE, make_engine, packed, request, tiny_target

LENGTHS = (2, 3)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "FEWEST", 1)


def make(num_tokens: int = 64, *, background: bool = False) -> Corpus:
    return Corpus(num_tokens, lengths=LENGTHS, device=DEVICE, background=background)


def feed(corpus: Corpus, *documents: list[int], prompt_len: int = 1) -> Corpus:
    for document in documents:
        ids = np.array(document, np.int32)
        corpus.learn(ids[:prompt_len], ids[prompt_len:])
    return corpus


def kept(corpus: Corpus) -> list[int]:
    """The corpus that rounds read, up to its last document."""
    tokens: list[int] = corpus.tokens[int(corpus.which)].tolist()
    return tokens[: max((place + 1 for place, token in enumerate(tokens) if token >= 0), default=0)]


def test_prompts_and_outputs_are_kept_with_a_border_between_rows() -> None:
    corpus = feed(make(), [1, 2, 3], [4, 5, 6])
    assert kept(corpus) == []
    corpus.refresh(corpus.next_update())
    assert kept(corpus) == [1, 2, 3, -1, 4, 5, 6]


def test_a_prefix_shared_with_the_previous_row_is_stored_once() -> None:
    """But for as much as the longest run needs in front of what is new."""
    corpus = feed(make(), [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 9])
    corpus.refresh(corpus.next_update())
    assert kept(corpus) == [1, 2, 3, 4, 5, 6, -1, 3, 4, 5, 9, -1, 4, 5, 9]


def test_a_document_of_one_run_with_no_token_after_it_is_not_kept() -> None:
    shortest = LENGTHS[0]
    corpus = feed(make(), list(range(10, 10 + shortest)), list(range(20, 21 + shortest)))
    corpus.refresh(corpus.next_update())
    assert kept(corpus) == list(range(20, 21 + shortest))


def test_the_oldest_rows_are_evicted_and_a_row_that_is_too_long_keeps_its_end() -> None:
    corpus = make(12)
    for first in range(10, 90, 10):
        feed(corpus, [first, first + 1, first + 2])
    corpus.refresh(corpus.next_update())
    assert kept(corpus) == [60, 61, 62, -1, 70, 71, 72, -1, 80, 81, 82]
    feed(corpus, list(range(100, 140)))
    corpus.refresh(corpus.next_update())
    assert kept(corpus) == list(range(129, 140))
    assert corpus.tokens.shape == (2, 12 + ROOM)


@pytest.mark.parametrize("num_tokens", [1, 2, LENGTHS[0] + 1])
def test_a_corpus_with_no_room_for_a_run_stays_empty(num_tokens: int) -> None:
    corpus = feed(make(num_tokens), list(range(5, 15)))
    corpus.refresh(corpus.next_update())
    assert kept(corpus) == []


def test_memory_is_what_the_plan_says() -> None:
    corpus = make(1000)
    assert corpus_bytes(1000) == corpus.table.nbytes + corpus.tokens.nbytes
    assert corpus.table.shape == (2, 4096)
    assert corpus_bytes(0) == 0
    assert table_entries(1000) == 4096
    assert default_lengths(2, 6) == (2, 4, 6)
    assert default_lengths(3, 3) == (3,)


def test_a_table_follows_from_its_documents_alone() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 5, 40).tolist() for _ in range(20)]
    tables = []
    for background in (False, True):
        corpus = feed(make(2048, background=background), *documents)
        while not corpus.table.any() or corpus._arriving is not None:
            corpus.refresh(corpus.next_update())
        tables.append((corpus.table[int(corpus.which)], kept(corpus)))
    assert torch.equal(tables[0][0], tables[1][0])
    assert tables[0][1] == tables[1][1]


def test_where_runs_meet_the_one_seen_more_often_stays() -> None:
    words = torch.tensor([1, 2, 7, -1, 1, 2, 7, -1, 3, 4, 9, -1], dtype=torch.int32)
    (entry,) = build_table(words, (2,), 1).tolist()
    assert (entry >> 8) & 0x7FFFFFFF == 5  # the place of the second "2", after which 7 came twice
    assert entry & 255 == 255 * 2 // 3


def test_a_table_is_built_anew_when_a_quarter_of_the_corpus_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    corpus, build = make(1000), Corpus._build

    def noted(self: Corpus, documents: list[np.ndarray]) -> object:
        built.append(len(documents))
        return build(self, documents)

    monkeypatch.setattr(Corpus, "_build", noted)
    for turn in range(40):
        feed(corpus, [3 * turn, 3 * turn + 1, 3 * turn + 2])
        corpus.refresh(corpus.next_update())
    assert built[:3] == [1, 2, 3]
    assert len(built) < 16
    assert built[-1] >= 30


def test_rounds_read_the_old_table_until_the_new_one_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building does not block rounds, and the buffer in use is never written to."""
    may_build, build = threading.Event(), Corpus._build

    def slowly(self: Corpus, documents: list[np.ndarray]) -> object:
        may_build.wait(30)
        return build(self, documents)

    corpus = feed(make(background=True), [1, 2, 3])
    monkeypatch.setattr(Corpus, "_build", slowly)
    for _ in range(5):
        corpus.refresh(corpus.next_update())
        assert kept(corpus) == []
    may_build.set()
    seen = list(_states(corpus))
    assert [1, 2, 3] in seen
    in_use = int(corpus.which)
    before = corpus.table[in_use].clone()
    feed(corpus, [4, 5, 6])
    while int(corpus.which) == in_use:
        assert torch.equal(corpus.table[in_use], before)
        corpus.refresh(corpus.next_update())
    assert kept(corpus) == [1, 2, 3, -1, 4, 5, 6]


def _states(corpus: Corpus) -> Iterator[list[int]]:
    while not kept(corpus):
        corpus.refresh(corpus.next_update())
        yield kept(corpus)


def test_a_failed_build_ends_the_run_rather_than_going_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Corpus, documents: list[np.ndarray]) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(Corpus, "_build", fail)
    with pytest.raises(MemoryError, match="out of memory"):
        feed(make(), [1, 2, 3]).refresh(DrafterUpdate())


def test_a_row_is_drafted_from_one_that_ended_before() -> None:
    """Two rows with one prompt, one after the other: greedy, the second gives what the first one gave."""
    prompts = [request(i, [5, 9, 2], cap=40) for i in range(2)]
    rates = []
    for corpus in (None, make(200)):
        drafter = LookupDrafter(6, min_ngram=2, max_ngram=3, corpus=corpus)
        engine = make_engine(tiny_target(), drafter, packed(1, num_verified=6), device=DEVICE)
        done = list(engine.run(iter(prompts)))
        assert done[0].token_ids is not None
        assert done[0].token_ids.tolist() == done[1].token_ids.tolist()  # type: ignore[union-attr]
        rates.append([c.stats.num_accepted / c.stats.num_rounds for c in done if c.stats])
    assert rates[0][1] == rates[0][0] == rates[1][0]
    assert rates[1][1] > rates[0][1] + 1
