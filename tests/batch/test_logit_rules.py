"""Rules that mask and bias logits: one reaches the target and every drafter, trees included, and changes no other row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.batch import logits as logits_module
from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logit_rule import LogitRows, LogitRule
from batchspec.batch.logits import adjusts_drafts
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.coupled import later_draws
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.records import Completion, Request, SamplingParams
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, plain_tokens, request, tiny_target
from tests.helpers.replaying import DRAFTERS, SLOTS, head, lookup

TARGET = partial(tiny_target, window=5)
SAMPLINGS = pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_k=9)], ids=["greedy", "sampled"]
)
FEW = 12
"""Tokens at and above this are forbidden by `forbid_most`."""


def parallel(of: Head) -> ParallelDrafter:
    return ParallelDrafter(of, TARGET(), 3, slots=SLOTS)


def pard(*, in_parallel: bool) -> PardDrafter:
    """The target itself drafts."""
    model = PardModel(PardSpec(model=TARGET().spec, mask_token_id=VOCAB - 1), TARGET())
    return PardDrafter(model, TARGET().spec, 3, slots=SLOTS, parallel=in_parallel)


def tree(of: Head, **shape: Any) -> TreeDrafter:
    return TreeDrafter(of, TARGET(), TreeShape(**{"topk": 2, "depth": 3, "nodes": 7} | shape), slots=SLOTS)


def of_heads(of: Callable[[], Head]) -> dict[str, Callable[[], Drafter]]:
    """Every drafter with a head."""
    return {
        "eagle3": lambda: ChainDrafter(of(), TARGET(), 3, slots=SLOTS),
        "eagle3, general": lambda: ChainDrafter(of(), TARGET(), 3, slots=SLOTS, uniform_slots=False, dead_positions=False),
        "parallel": lambda: parallel(of()),
        "tree": lambda: tree(of()),
        "hybrid": lambda: HybridDrafter(ChainDrafter(of(), TARGET(), 2, slots=SLOTS), lookup(), slots=SLOTS, device=DEVICE),
        "hybrid, parallel": lambda: HybridDrafter(parallel(of()), lookup(), slots=SLOTS, device=DEVICE),
    }


OF_MODELS: dict[str, Callable[[], Drafter]] = {
    "window": DRAFTERS["window"],
    "pard": lambda: pard(in_parallel=True),
    "pard chain": lambda: pard(in_parallel=False),
}
ALL = {"none": DRAFTERS["none"], "lookup": lookup, **of_heads(head), **OF_MODELS}


def whole_vocabulary() -> Head:
    """A head that may draft any token."""
    spec = dummy_spec(TARGET().spec, draft_vocab_size=VOCAB, parallel=True)
    return dummy_head(replace(spec, aux_layer_ids=(0, 1, 2)), dtype=torch.float64, device=DEVICE)


def forbid_most(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Forbids tokens in rows that have min_new_tokens."""
    assert at.row_ids.shape == at.positions.shape == logits.shape[:1]
    ids = torch.arange(VOCAB, device=logits.device) if map_ids is None else map_ids
    asked = (rows.min_tokens > rows.prompt_len)[at.row_ids].unsqueeze(1)
    logits.masked_fill_(asked & (ids >= FEW)[: logits.shape[1]], -torch.inf)


def following(token: int, modulus: int) -> int:
    """What the token after this one must be congruent to."""
    return (3 * token + 1) % modulus


def forbid_by_the_token_before(
    logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None, *, modulus: int
) -> None:
    """In rows with min_new_tokens the token after t is congruent to following(t): like an automaton that walks along drafts."""
    ids = torch.arange(VOCAB, device=logits.device) if map_ids is None else map_ids
    newest = rows.tokens.gather(1, (rows.num_tokens.long() - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    before, num_drafted = newest[at.row_ids].long(), torch.zeros_like(at.positions)
    for token, counts in at.drafts_before():
        before, num_drafted = torch.where(counts, token, before), num_drafted + counts
    live = rows.live[at.row_ids] != 0
    assert torch.equal((rows.num_tokens[at.row_ids] + num_drafted)[live], at.positions[live])  # no draft is missing
    asked = (rows.min_tokens > rows.prompt_len)[at.row_ids].unsqueeze(1)
    wrong = ids[: logits.shape[1]] % modulus != following(before.unsqueeze(1), modulus)  # type: ignore[arg-type]
    logits.masked_fill_(asked & wrong, -torch.inf)


def register(monkeypatch: pytest.MonkeyPatch, apply: Callable[..., None], *, reads_drafts: bool = False) -> None:
    rule = LogitRule(lambda mode: mode.min_tokens, apply, of_drafters=True, reads_drafts=reads_drafts)
    monkeypatch.setattr(logits_module, "RULES", [*logits_module.RULES, rule])


def run(drafter: Drafter, requests: Sequence[Request]) -> dict[int, Completion]:
    engine = make_engine(TARGET(), drafter, packed(SLOTS, num_verified=drafter.draft_len), device=DEVICE)
    return {done.row_index: done for done in engine.run(iter(requests))}


def tokens(done: dict[int, Completion]) -> dict[int, list[int]]:
    return {row: c.token_ids.tolist() for row, c in done.items() if c.token_ids is not None}


def note_drafts(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(token before, draft) of every draft that logits propose for live rows with min_new_tokens; a lookup has no logits."""
    found = list[tuple[int, int]]()
    proposer = drafter.head if isinstance(drafter, HybridDrafter) else drafter
    propose = proposer.propose

    def noted(rows: DeviceBatch, draft_ids: Tensor, *rest: Any) -> Any:
        parents = propose(rows, draft_ids, *rest)
        for row in ((rows.min_tokens > rows.prompt_len) & (rows.live != 0)).nonzero().flatten().tolist():
            line = [int(rows.tokens[row, rows.num_tokens[row] - 1]), *draft_ids[row].tolist()]
            above = range(-1, len(line) - 1) if parents is None else parents[row].tolist()
            found.extend((line[parent], line[node]) for node, parent in enumerate(above) if node)
        return parents

    monkeypatch.setattr(proposer, "propose", noted)
    return [] if drafter.name in ("none", "lookup") else found


def four_requests(sampling: SamplingParams) -> list[Request]:
    """Rows 1 and 2 ask for the rule."""
    requests = [request(i, [i, 5, 30], cap=20, sampling=sampling) for i in range(4)]
    return [replace(one, min_new_tokens=int(one.row_index in (1, 2))) for one in requests]


@SAMPLINGS
@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "tree", "window"])
def test_a_rule_holds_for_targets_and_drafters(name: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ask for it emit and draft allowed tokens only, the others as ever, whatever drafts."""
    register(monkeypatch, forbid_most)
    plain, drafter = tokens(run(DRAFTERS["none"](), four_requests(sampling))), ALL[name]()
    drafted = note_drafts(drafter, monkeypatch)
    found = tokens(run(drafter, four_requests(sampling)))
    assert found == plain
    assert all(token < FEW for row in (1, 2) for token in found[row])
    assert any(token >= FEW for row in (0, 3) for token in found[row])
    assert bool(drafted) == (name not in ("none", "lookup"))
    assert all(token < FEW for _, token in drafted)


@SAMPLINGS
@pytest.mark.parametrize("name", ALL)
def test_a_rule_that_reads_drafts_holds_along_them(name: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft is allowed after the draft before it, in a chain, in parallel and on every path of a tree."""
    modulus = 4
    register(monkeypatch, partial(forbid_by_the_token_before, modulus=modulus), reads_drafts=True)
    plain, drafter = tokens(run(DRAFTERS["none"](), four_requests(sampling))), ALL[name]()
    drafted = note_drafts(drafter, monkeypatch)
    found = tokens(run(drafter, four_requests(sampling)))
    assert found == plain

    def follow(row: int) -> list[bool]:
        return [b % modulus == following(a, modulus) for a, b in zip([30, *found[row]], found[row], strict=False)]

    assert all(follow(1))
    assert all(follow(2))
    assert not all(follow(0))
    assert not all(follow(3))
    assert bool(drafted) == (name not in ("none", "lookup"))
    assert all(token % modulus == following(before, modulus) for before, token in drafted)


COUNTED = SamplingParams(frequency_penalty=1.5, presence_penalty=0.5)
BIASED = SamplingParams(logit_bias=((30, -100.0), (4, 2.5), (9, 1.5)))
EXTRA = (COUNTED, BIASED, replace(COUNTED, logit_bias=BIASED.logit_bias))


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "extra", "temperature"),
    [(name, EXTRA[(i + j) % 3], 0.9 * ((i // 3 + j) % 2)) for i, name in enumerate(ALL) for j in range(2)],
)
def test_counts_and_biases_of_rows_are_those_of_plain_decoding(name: str, extra: SamplingParams, temperature: float) -> None:
    """Beside rows that have none; verified positions count the drafts before them (definition: tests/helpers/engines.py)."""
    usual = SamplingParams(temperature=temperature)
    own = replace(extra, temperature=temperature)
    requests = [request(i, [i, 5, 30], cap=20, sampling=own if i in (1, 2) else usual) for i in range(6)]
    found = tokens(run(ALL[name](), requests))
    assert found == {each.row_index: plain_tokens(TARGET(), each) for each in requests}
    assert found != {row: plain_tokens(TARGET(), replace(requests[row], sampling=usual)) for row in found}


@pytest.mark.parametrize("name", ["eagle3", "parallel", "tree", "window", "pard"])
def test_drafters_with_logits_draft_no_token_that_a_bias_bans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    banned = {2, 7, 11, 12, 19, 23, 30}
    sampling = SamplingParams(logit_bias=tuple((token, -100.0) for token in banned))
    drafter, requests = ALL[name](), [request(i, [i, 5, 30], cap=20, sampling=sampling, min_new_tokens=1) for i in range(3)]
    drafted = note_drafts(drafter, monkeypatch)
    assert not banned & {token for line in tokens(run(drafter, requests)).values() for token in line}
    assert drafted
    assert not banned & {token for _, token in drafted}


FORCED = {**of_heads(whole_vocabulary), **OF_MODELS}


@SAMPLINGS
@pytest.mark.parametrize("name", FORCED)
def test_where_a_rule_leaves_one_token_every_draft_is_accepted(
    name: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tree one path is; its other nodes are forbidden tokens, since a round has a fixed number of nodes."""
    register(monkeypatch, partial(forbid_by_the_token_before, modulus=VOCAB), reads_drafts=True)
    drafter, rounds = FORCED[name](), 3
    # The prefill emits the first token, each round its drafts and the bonus token.
    cap = 1 + rounds * (drafter.draft_len + 1)
    requests = [request(i, [i, 5, 2 + i], cap=cap, sampling=sampling, min_new_tokens=1) for i in range(3)]
    done = run(drafter, requests)
    for row, found in tokens(done).items():
        expected = [2 + row]
        for _ in range(cap):
            expected.append(following(expected[-1], VOCAB))
        assert found == expected[1:]
    if "hybrid" not in name:  # its rounds may take the drafts of the lookup
        assert {c.stats.num_rounds for c in done.values() if c.stats} == {rounds}


@pytest.mark.parametrize("name", ["eagle3", "parallel", "tree"])
def test_a_head_without_an_allowed_token_drafts_a_forbidden_one_that_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draft vocabulary lacks the one token that the rule leaves."""
    sampling = SamplingParams(temperature=1.0)
    register(monkeypatch, partial(forbid_by_the_token_before, modulus=VOCAB), reads_drafts=True)
    drafter = of_heads(head)[name]()
    drafted = note_drafts(drafter, monkeypatch)
    found = tokens(run(drafter, four_requests(sampling)))
    assert found == tokens(run(DRAFTERS["none"](), four_requests(sampling)))
    assert any(token != following(before, VOCAB) for before, token in drafted)


def test_drafts_are_given_to_rules_only_if_one_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing is computed for them."""
    rows = DeviceBatch.allocate(packed(SLOTS), vocab_size=VOCAB, device=DEVICE)
    row_ids, positions = (
        torch.full((SLOTS,), x, dtype=dtype, device=DEVICE) for x, dtype in ((0, torch.int32), (7, torch.int64))
    )

    def given(**flags: Any) -> LogitRows:
        draws = later_draws(SamplingMode(**flags), rows, row_ids, positions, ahead=2, drafts=rows.tokens[:, :3])
        assert draws is not None
        assert draws.at.positions.tolist() == [9] * SLOTS
        return draws.at

    everything = {"random": True, "filters": True, "penalties": True, "min_tokens": True}
    assert given(**everything).drafts is given(**everything).num_drafted is None
    register(monkeypatch, forbid_most)
    assert given(**everything).drafts is given(**everything).num_drafted is None
    register(monkeypatch, forbid_by_the_token_before, reads_drafts=True)
    assert given(random=True).drafts is None
    assert given(min_tokens=True).drafts is not None


def test_drafters_follow_automata_biases_and_ngrams_alone() -> None:
    """Penalties and min_tokens are the target's alone: drafts of greedy rows without schema or bias stay plain argmaxes."""
    assert not adjusts_drafts(SamplingMode(random=True, filters=True, penalties=True, min_tokens=True))
    assert adjusts_drafts(SamplingMode(constrained=True))
    for option in ("logit_bias", "no_repeat_ngram"):
        assert adjusts_drafts(SamplingMode(options=frozenset({option})))
    assert not adjusts_drafts(SamplingMode(options=frozenset({"bad_words"})))
