"""A vocabulary for drafts of the tokens that are most frequent in ended rows; no output depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.draft.base import DrafterUpdate
from batchspec.draft.frequent_tokens import FIRST_UPDATE, FrequentTokens
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.mtp_head import Mtp, MtpShape, dummy_mtp
from batchspec.model.target import Target
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, request
from tests.helpers.recurrent import LoudNoise, mtp_of, recurrent_spec

COUNT = 12


def ints(ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, np.int32)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 19), max_size=30), max_size=4), st.integers(1, 10), st.integers(1, 2))
def test_the_most_frequent_tokens_are_chosen_equally_many_of_each_part(rows: list[list[int]], each: int, ranks: int) -> None:
    parts = [range(20)] if ranks == 1 else [range(10), range(10, 20)]
    tokens = FrequentTokens(each * ranks, parts)
    for row in rows:
        tokens.learn(ints(row[:5]), ints(row[5:]))
    seen = Counter(token for row in rows for token in row)
    expected = [sorted(sorted(part, key=lambda token: (-seen[token], token))[:each]) for part in parts]
    assert tokens.choose().tolist() == list(chain.from_iterable(expected))


def test_it_is_chosen_again_when_twice_as_many_tokens_were_seen() -> None:
    tokens, row = FrequentTokens(2, [range(9)]), ints([7] * (FIRST_UPDATE // 2))
    due = []
    for _ in range(9):
        tokens.learn(row, ints([]))
        due.append(tokens.is_due)
        if due[-1]:
            assert tokens.choose().tolist() == [0, 7]
    assert due == [False, True, False, True, False, False, False, True, False]


def test_tokens_outside_the_vocabulary_are_not_counted() -> None:
    tokens = FrequentTokens(1, [range(4)])
    tokens.learn(ints([-1, -1, 9, 9, 9, 2]), ints([4, 4]))
    assert tokens.choose().tolist() == [2]


# --- in a drafter


def recurrent_with_mtp() -> Target:
    spec = recurrent_spec()
    spec = replace(spec, mtp=mtp_of(spec))
    return Target(spec, LoudNoise(spec, dtype=torch.float64, device=DEVICE), DEVICE)


def drafter(target: Target, vocabulary: FrequentTokens | None) -> MtpDrafter:
    assert target.spec.mtp is not None
    mtp: Mtp = dummy_mtp(MtpShape.of(target.spec, target.spec.mtp), dtype=torch.float64, device=DEVICE)
    return MtpDrafter(replace(mtp, vocabulary=vocabulary), target, 3, slots=2)


@pytest.mark.second
def test_only_tokens_of_the_vocabulary_are_drafted_and_outputs_are_the_same() -> None:
    target, outputs, drafted = recurrent_with_mtp(), [], []
    for vocabulary in (None, FrequentTokens(COUNT, [range(VOCAB)])):
        own = drafter(target, vocabulary)
        found: set[int] = set()
        propose = own.propose

        def noting(rows, draft_ids, draft_len, cache, propose=propose, found=found):  # type: ignore[no-untyped-def]
            propose(rows, draft_ids, draft_len, cache)
            found.update(draft_ids[rows.live != 0].flatten().tolist())

        own.propose = noting  # type: ignore[method-assign]
        engine = make_engine(target, own, packed(2, num_verified=3, prefill_tokens=64, max_len=90), device=DEVICE)
        rows = [request(i, [3 + i, 1, 2] * (4 + i), cap=30) for i in range(5)]
        outputs.append({done.request_id: np.array(done.token_ids).tolist() for done in engine.run(iter(rows))})
        drafted.append(found)
    assert outputs[0] == outputs[1]
    assert len(drafted[0]) > COUNT
    assert drafted[1] <= set(range(COUNT))


def test_an_update_changes_what_is_drafted_in_place() -> None:
    vocabulary, target = FrequentTokens(COUNT, [range(VOCAB)]), recurrent_with_mtp()
    hidden = torch.randn(9, target.spec.hidden_size, dtype=torch.float64, device=DEVICE)
    own = drafter(target, vocabulary)
    table = own.head.output.map_ids
    assert table is not None
    assert own.next_update() == DrafterUpdate()
    own.learn(ints([VOCAB - 1, VOCAB - 2] * FIRST_UPDATE), ints([]))
    assert own.next_update() == DrafterUpdate(swap=True)
    own.refresh(own.next_update())
    assert own.next_update() == DrafterUpdate()
    ids = [*range(COUNT - 2), VOCAB - 2, VOCAB - 1]
    assert table.tolist() == ids
    logits = target.all_logits(hidden)[:, ids]
    torch.testing.assert_close(own.head.output.logits(hidden), logits)
    chosen = torch.empty(9, dtype=torch.int32, device=DEVICE)
    own.head.output.choose(hidden, chosen)
    assert chosen.tolist() == [ids[best] for best in logits.argmax(1).tolist()]
