"""draft=hybrid: head and lookup side by side; the head's K/V stays right whichever drafts, and the better one is chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.draft_chances import DraftChances
from batchspec.packed_batch import PackedBatch
from batchspec.records import Request
from tests.helpers.engines import DEVICE, make_engine, packed, plain_tokens, request, tiny_target

SLOTS = 4


@cache
def head() -> Head:
    """With a mask, which a chain makes no use of."""
    spec = dummy_spec(tiny_target().spec, draft_vocab_size=19, parallel=True)
    return dummy_head(replace(spec, aux_layer_ids=(0, 1, 2)), dtype=torch.float64, device=DEVICE)


def hybrid(kind: type[ChainDrafter] | type[ParallelDrafter], *, head_len: int = 2, draft_len: int = 5) -> HybridDrafter:
    own = kind(head(), tiny_target(), head_len, slots=SLOTS)
    return HybridDrafter(own, LookupDrafter(draft_len, min_ngram=1, max_ngram=3), slots=SLOTS, device=DEVICE)


def favour(drafter: HybridDrafter, lookup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the head be expected to give nothing, or everything, whatever was seen of it."""
    propose = drafter.propose

    def with_odds(rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        drafter._head_odds[:, 0] = 1e-6 if lookup else 1e6
        propose(rows, draft_ids, draft_len, cache)

    monkeypatch.setattr(drafter, "propose", with_odds)


def run(drafter: HybridDrafter | ChainDrafter | ParallelDrafter, requests: list[Request], batch: PackedBatch) -> Engine:
    engine = make_engine(tiny_target(), drafter, batch, device=DEVICE)
    for done in engine.run(iter(requests)):
        assert done.token_ids is not None
        assert done.token_ids.tolist() == plain_tokens(tiny_target(), requests[done.row_index])
    return engine


def jobs(count: int = 6) -> list[Request]:
    return [request(i, [i, 3, 4, i, 3], cap=20 + i) for i in range(count)]


@pytest.mark.parametrize("kind", [ChainDrafter, ParallelDrafter])
def test_the_heads_keys_and_values_do_not_depend_on_who_proposed(
    kind: type[ChainDrafter] | type[ParallelDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K/V after a job with the lookup's drafts alone equal those of a job with the head's, at every place of true features."""
    found = []
    for lookup in (True, False):
        drafter = hybrid(kind)
        favour(drafter, lookup, monkeypatch)
        one = request(0, [7, 3, 4, 7, 3], cap=24)
        engine = run(drafter, [one], packed(SLOTS, num_verified=5))
        place = torch.arange(len(one.prompt_ids) + 24 - 2)
        pages = engine.executor.rows.page_tables[0][0].long()[place // engine.batch.page_size]
        layer = engine.executor.cache.layers[tiny_target().spec.num_layers]
        found.append(layer.pages[:, pages, place % engine.batch.page_size])
        assert (drafter.counts[1] > 0) == lookup
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_a_row_that_repeats_itself_is_drafted_by_lookup_after_some_rounds() -> None:
    """The head is noise: after a few rounds in which it failed, rows that match go to the lookup, which fares better."""
    drafter = hybrid(ChainDrafter)
    run(drafter, jobs(), packed(SLOTS, num_verified=5))
    head_rounds, look_rounds, head_accepted, look_accepted = drafter.counts.tolist()
    assert look_rounds > 0
    assert head_rounds > 0
    assert look_accepted / look_rounds > head_accepted / head_rounds


def test_what_was_learnt_of_both_is_kept_for_rows_that_follow() -> None:
    drafter = hybrid(ChainDrafter)
    run(drafter, jobs(), packed(SLOTS, num_verified=5))
    known = [odds.clone() for odds in (drafter._head_odds, drafter._lookup_odds)]
    assert not torch.equal(known[0], drafter._head_prior.repeat(len(known[0]), 1))
    assert not torch.equal(known[1], drafter._lookup_prior.repeat(len(known[1]), 1))
    engine = make_engine(tiny_target(), drafter, packed(SLOTS, num_verified=5), device=DEVICE)
    assert len(list(engine.run(iter([request(0, [5, 6], cap=1)])))) == 1
    assert torch.equal(drafter._head_odds, known[0])
    assert torch.equal(drafter._lookup_odds, known[1])


@pytest.mark.parametrize("copies_are_right", [True, False])
def test_places_go_to_the_rows_whose_source_proved_right(copies_are_right: bool) -> None:
    """Two rows with the head's drafts and two with the lookup's, in the same positions; one of both is always right."""
    drafter = hybrid(ChainDrafter, head_len=3, draft_len=3)
    chances = DraftChances(drafter, SLOTS, DEVICE)
    live, bins = torch.ones(SLOTS, dtype=torch.int32), len(drafter.head.prior_chances)
    is_copied = torch.tensor([False, True, False, True])
    chances.confidence[:] = torch.where(is_copied, bins + 2, 20)[:, None]
    right = 3 * (is_copied == copies_are_right).int()
    log = torch.zeros(SLOTS, 8, dtype=torch.int32)
    log[:, 0], log[:, 1], log[:, 2] = right, 3, right + 1
    for _ in range(20):
        chances.learn(log)
    verified = torch.full((SLOTS,), 3, dtype=torch.int32)
    chances.allocate(live, verified, width=3, num_positions=SLOTS + 6)
    assert verified.tolist() == right.tolist()
    assert {number: one.accepted for number, one in chances.calibration().items() if one.accepted} == (
        {bins + 2 if copies_are_right else 20: 20 * 2 * 3}
    )


@pytest.mark.parametrize("kind", [ChainDrafter, ParallelDrafter])
@pytest.mark.parametrize("lengths", [4, 5])
def test_rows_with_draft_lengths_of_their_own_have_the_tokens_of_no_drafts(
    kind: type[ChainDrafter] | type[ParallelDrafter], lengths: int
) -> None:
    drafter, requests = hybrid(kind), jobs(8)
    engine = make_engine(tiny_target(), drafter, packed(SLOTS, num_verified=5), device=DEVICE, lengths=lengths)
    done = {one.row_index: one.token_ids for one in engine.run(iter(requests))}
    for one in requests:
        assert done[one.row_index].tolist() == plain_tokens(tiny_target(), one)  # type: ignore[union-attr]
    head_rounds, look_rounds, *_ = drafter.counts.tolist()
    assert min(head_rounds, look_rounds) > 0
    bins = len(drafter.head.prior_chances)
    assert {number < bins for number in engine.calibration()} == {True, False}


def test_more_drafts_than_the_head_gives_come_from_the_lookup_alone() -> None:
    drafter = hybrid(ChainDrafter, head_len=1, draft_len=6)
    assert drafter.draft_len == 6
    requests = [request(0, [1, 2] * 8, cap=60)]
    engine = run(drafter, requests, packed(1, num_verified=6))
    assert engine.totals.accepted > 0
    with_head = make_engine(tiny_target(), drafter, packed(1, num_verified=6), device=DEVICE)
    (done,) = with_head.run(iter(requests))
    assert done.stats is not None
    assert done.stats.drafter == "hybrid"
    assert max(k for k, count in enumerate(done.stats.drafted_at, 1) if count) > 1
