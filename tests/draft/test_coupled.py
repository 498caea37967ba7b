"""Sampled runs: drafts that share the noise of the target's draws, and what is drawn with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.rounds.records import RoundOptions
from batchspec.records import Completion, Request, SamplingParams
from tests.helpers.chi_square import chi_square
from tests.helpers.engines import DEVICE, VOCAB, full_logits, make_engine, packed, request, tiny_target
from tests.kernels.covering import covering

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

SLOTS, K = 8, 3


@cache
def head() -> Head:
    """So small that its logits are nearly the same for all tokens: what it drafts is the noise alone."""
    spec = replace(dummy_spec(tiny_target().spec, draft_vocab_size=VOCAB, parallel=True), aux_layer_ids=(0, 1, 2))
    return dummy_head(spec, dtype=torch.float64, device=DEVICE)


def pard(parallel: bool) -> Drafter:
    """The target itself drafts, in parallel with a mask that it never learnt."""
    model = PardModel(PardSpec(model=tiny_target().spec, mask_token_id=VOCAB - 1), tiny_target())
    return PardDrafter(model, tiny_target().spec, K, slots=SLOTS, parallel=parallel)


def eagle3(**options: bool) -> ChainDrafter:
    return ChainDrafter(head(), tiny_target(), K, slots=SLOTS, **options)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "eagle3": eagle3,
    "eagle3, general": lambda: eagle3(uniform_slots=False, dead_positions=False),
    "parallel": lambda: ParallelDrafter(head(), tiny_target(), K, slots=SLOTS),
    "tree": lambda: TreeDrafter(head(), tiny_target(), TreeShape(topk=2, depth=K, nodes=7), slots=SLOTS),
    "window": lambda: WindowDrafter(tiny_target(), K, slots=SLOTS, window=3),
    "pard": lambda: pard(parallel=True),
    "pard chain": lambda: pard(parallel=False),
    "hybrid": lambda: HybridDrafter(eagle3(), LookupDrafter(K, min_ngram=2, max_ngram=6), slots=SLOTS, device=DEVICE),
}


def run(
    drafter: Drafter, requests: list[Request], *, coupled: bool = True, lengths: int | None = None
) -> dict[str, Completion]:
    options, batch = RoundOptions(coupled=coupled), packed(SLOTS, num_verified=drafter.draft_len)
    engine = make_engine(tiny_target(), drafter, batch, device=DEVICE, options=options, lengths=lengths)
    return {done.request_id: done for done in engine.run(iter(requests))}


def tokens(done: dict[str, Completion]) -> dict[str, list[int]]:
    return {name: c.token_ids.tolist() for name, c in done.items() if c.token_ids is not None}


def acceptance(done: dict[str, Completion]) -> float:
    """Of drafts that could have been accepted: rounds that the limit cut are short ones."""
    stats = [c.stats for c in done.values() if c.stats]
    return sum(s.num_accepted for s in stats) / (K * sum(s.num_rounds for s in stats))


def noisy_requests() -> list[Request]:
    return [request(i, [i, 3, 5], cap=1 + 6 * (K + 1), sampling=SamplingParams(temperature=100.0)) for i in range(8)]


@cache
def noisy_tokens() -> dict[str, list[int]]:
    """Without drafts."""
    return tokens(run(NoDrafter(), noisy_requests()))


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_and_draws_share_their_noise(name: str) -> None:
    """At a temperature where noise decides nearly everything, it decides alike for draft and draw: every position is right."""
    own, plain = run(DRAFTERS[name](), noisy_requests()), run(DRAFTERS[name](), noisy_requests(), coupled=False)
    assert acceptance(own) > 0.85
    assert acceptance(plain) < 0.3
    assert tokens(own) == tokens(plain) == noisy_tokens()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=3), SamplingParams(temperature=1.2, top_p=0.7),
        SamplingParams(temperature=1.5, min_p=0.2),
    ],
    ids=str,
)
def test_a_drafter_that_knows_the_targets_logits_is_always_right(sampling: SamplingParams) -> None:
    """Filters narrow drafts as they narrow draws. Greedy rows beside sampled ones are drafted greedily."""
    requests = [request(i, [i, 9], cap=1 + 3 * (K + 1), sampling=sampling if i % 3 else SamplingParams()) for i in range(10)]
    for drafter in (WindowDrafter(tiny_target(), K, slots=SLOTS, window=None), pard(parallel=False)):
        assert acceptance(run(drafter, requests)) == 1.0
        assert acceptance(run(drafter, requests, coupled=False)) < 0.8


def mixed_tokens(drafter: Drafter) -> dict[str, list[int]]:
    """Of rows with samplings of all kinds, of which rounds verify different numbers of drafts."""
    samplings = [
        SamplingParams(temperature=0.6), SamplingParams(temperature=1.0, top_k=4), SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1), SamplingParams(), SamplingParams(temperature=0.8, repetition_penalty=1.3),
    ]
    requests = [request(i, [i % 7, 2, i % 3], cap=5 + i, sampling=samplings[i % 6]) for i in range(24)]
    engine = make_engine(tiny_target(), drafter, packed(SLOTS, num_verified=drafter.draft_len), device=DEVICE, lengths=2)
    return tokens({done.request_id: done for done in engine.run(iter(requests))})


@cache
def mixed_tokens_without_drafts() -> dict[str, list[int]]:
    return mixed_tokens(NoDrafter())


@pytest.mark.parametrize("name", DRAFTERS)
def test_token_for_token_what_is_drawn_without_drafts(name: str) -> None:
    assert mixed_tokens(DRAFTERS[name]()) == mixed_tokens_without_drafts()


def probabilities(ids: list[int], sampling: SamplingParams) -> Tensor:
    """[V] of the token after `ids`: the target's own, by a sort."""
    probs = torch.softmax(full_logits(tiny_target(), ids).double() / sampling.temperature, 0)
    values, order = probs.sort(descending=True)
    keep = torch.ones(VOCAB, dtype=torch.bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    kept = values * keep
    kept = kept / kept.sum()
    keep &= kept.cumsum(0) - kept < sampling.top_p
    keep &= kept >= sampling.min_p * kept[0]
    out = torch.zeros(VOCAB, dtype=torch.float64)
    out[order[keep]] = kept[keep] / kept[keep].sum()
    return out


@torch.inference_mode()
@pytest.mark.parametrize(("name", "sampling"), covering(["eagle3", "tree"], [
    SamplingParams(temperature=1.3), SamplingParams(temperature=1.0, top_k=6), SamplingParams(temperature=1.4, top_p=0.8),
    SamplingParams(temperature=1.4, min_p=0.1),
]))
def test_drawn_tokens_have_the_targets_distribution(name: str, sampling: SamplingParams) -> None:
    """Chi-square over the second and third token of 400 samples; most of the third ones are accepted drafts."""
    prompt, count = [4, 9, 2], 400
    requests = [replace(request(i, prompt, cap=3, sampling=sampling), seed=10**6 + 7919 * i) for i in range(count)]
    done = run(DRAFTERS[name](), requests, lengths=1)
    assert any(c.stats.num_accepted for c in done.values() if c.stats)
    drawn = np.array(list(tokens(done).values()))
    first = probabilities(prompt, sampling)
    seconds = {t: probabilities([*prompt, t], sampling) for t in range(VOCAB) if first[t] > 0}
    second = sum((first[t] * p for t, p in seconds.items()), torch.zeros(VOCAB, dtype=torch.float64))
    common = int(np.bincount(drawn[:, 0] * VOCAB + drawn[:, 1]).argmax())
    behind = drawn[drawn[:, 0] * VOCAB + drawn[:, 1] == common]
    third = probabilities([*prompt, common // VOCAB, common % VOCAB], sampling)
    for values, exact in ((drawn[:, 1], second), (behind[:, 2], third)):
        chi, limit = chi_square(values, exact.numpy())
        assert chi < limit
