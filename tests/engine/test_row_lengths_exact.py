"""Which drafts are verified changes no token that is drawn, whoever decides it and by what: exactly, for very many noise keys.

The target is a Markov chain of three tokens. Rounds are told which drafts to verify by rules that look at what lossless decoding
must not depend on: the drafts, the noise, and what the target will choose. Of each key the tokens are those of rounds without
drafts, and over all keys they have the probabilities of the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from batchspec.automata.token_automaton import OTHER, TokenAutomaton, TokenSymbols
from batchspec.batch.automata import Automata, AutomataCapacity, AutomatonUpload, ConstraintOffsets, place_of
from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.groups import KVGroups
from batchspec.cache.pages import KVCache
from batchspec.draft.base import NoFeatures
from batchspec.engine.rounds.records import RoundOptions, RoundResult
from batchspec.engine.rounds.round import Round
from batchspec.kernels.sampling.counter_rng import uniform_reference
from batchspec.records import Request, SamplingParams
from batchspec.structured.dfa import dfa_of
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import Repeat, text
from batchspec.structured.token_masks import over_tokens
from tests.helpers.chi_square import chi_square
from tests.helpers.engines import DEVICE, packed, request, tiny_spec

VOCAB, K, NUM_TOKENS, NUM_ROWS = 3, 3, 4, 6000
PROMPT = (0,)
A, B, EOS = range(VOCAB)
VOCABULARY = TokenSymbols.of([b"a", b"b", OTHER])
LOGITS = torch.tensor([[0.2, 1.1, -0.4], [0.9, -0.2, 0.6], [-0.3, 0.5, 1.2]], dtype=torch.float64, device=DEVICE)
"""Of the next token, after each token."""


def pairs_of_b() -> TokenAutomaton:
    """(a|bb)*: after one b there must be another, which is drafted; otherwise all may come, and the text may end."""
    present = np.isin(np.arange(256), [ord("a"), ord("b")])
    dfa = dfa_of(regex_node("(a|bb)*"), Repeat(text("\n"), 0, 1), present)
    made = over_tokens(dfa, VOCABULARY, (EOS,), thinks=False, may_begin=False)
    assert isinstance(made, TokenAutomaton)
    return made


def allowed_by_pairs(output: tuple[int, ...]) -> set[int]:
    """By the definition of (a|bb)*."""
    newest = list(output)
    while newest and newest[-1] == B:
        newest.pop()
    return {B} if (len(output) - len(newest)) % 2 else {A, B, EOS}


PAIRS = pairs_of_b()
PATTERN: dict[str, Any] = {"stop_ids": (EOS,), "automaton": PAIRS, "automaton_state": PAIRS.answer}
ASKED: dict[str, Request] = {
    name: replace(request(0, PROMPT, cap=NUM_TOKENS), **options)
    for name, options in dict[str, dict[str, Any]](
        {
            "greedy": {},
            "temperature": {"sampling": SamplingParams(temperature=1.3)},
            "top-p": {"sampling": SamplingParams(temperature=1.0, top_p=0.75)},
            "penalties": {"sampling": SamplingParams(temperature=1.0, frequency_penalty=0.8, repetition_penalty=1.4)},
            "bad words": {"sampling": SamplingParams(temperature=1.0, bad_words=((0, 1), (2, 2), (1, 0, 2)))},
            "a stop id after two tokens": {
                "sampling": SamplingParams(temperature=1.0), "stop_ids": (2,), "min_new_tokens": 2,
            },
            "a pattern": {"sampling": SamplingParams(temperature=1.0), **PATTERN},
            "a pattern, greedy": PATTERN,
            "a pattern, penalties and top-p": {
                "sampling": SamplingParams(temperature=1.2, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.3), **PATTERN,
            },
        }
    ).items()
}


class MarkovTarget:
    """Keeps nothing of a row."""

    ranks = None

    def forward(self, batch: FlatBatch, *_: Any) -> tuple[Tensor, None]:
        return one_hot(batch.token_ids.long(), VOCAB).double(), None

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ LOGITS

    def greedy_sample(self, hidden: Tensor, **_: Any) -> Tensor:
        return self.logits(hidden).argmax(1).int()

    def masks_in_product(self, hidden: Tensor) -> bool:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a rule may look at, of R rows and a round with K drafts: more than any drafter knows."""

    rows: DeviceBatch
    drafts: Tensor
    """int [R, K]"""
    choices: Tensor
    """int [R, K+1] what the target chooses next"""
    round: Round


Rule = Callable[[Known], Tensor]
"""int [R] number of drafts to verify of each row; what is too many is cut."""


def before(stops: Tensor) -> Tensor:
    """int [R] number of drafts before the first one of which this is true, bool [R, K]."""
    return (~stops).int().cumprod(1).sum(1)


def where_noise_is_high(known: Known) -> Tensor:
    positions = known.rows.num_tokens[:, None] + torch.arange(known.drafts.shape[1], device=DEVICE)
    return before(uniform_reference(known.rows.keys[:, None], positions) < 0.4)


RULES: dict[str, Rule] = {
    "drafts before the first of token 0": lambda known: before(known.drafts == 0),
    "drafts where the noise is high": where_noise_is_high,
    "right drafts": lambda known: before(known.drafts != known.choices[:, :-1]),
    "drafts of rows whose first is wrong": lambda known: K * (known.drafts[:, 0] != known.choices[:, 0]),
    "drafts before the target chooses token 2": lambda known: before(known.choices[:, :-1] == 2),
    "drafts of rows whose last choice will be token 1": lambda known: K * (known.choices[:, -1] == 1),
}


class Prophet(NoFeatures):
    """Drafts what the target will choose, or in three of ten places anything."""

    name, fixed_len, draft_len = "prophet", False, K

    def __init__(self, truth: Tensor | None) -> None:
        """truth: int [R, tokens] of each row; None: it only knows token 0."""
        self._truth, self._noise = truth, torch.Generator(DEVICE).manual_seed(0)

    def choices(self, rows: DeviceBatch, count: int) -> Tensor:
        """int [R, count] the next tokens, 0 after the last one."""
        at = (rows.num_tokens - rows.prompt_len)[:, None] + torch.arange(count, device=DEVICE)
        if self._truth is None:
            return torch.zeros_like(at)
        found = self._truth.gather(1, at.clamp(max=NUM_TOKENS - 1))
        return torch.where(at < NUM_TOKENS, found.clamp(min=0), 0)

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        anything = torch.randint(0, VOCAB, draft_ids.shape, generator=self._noise, device=DEVICE)
        is_right = torch.rand(draft_ids.shape, generator=self._noise, device=DEVICE) < 0.7
        draft_ids.copy_(torch.where(is_right, self.choices(rows, draft_ids.shape[1]), anything))
        draft_len.copy_(draft_ids.shape[1] * rows.live)


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    tokens: Tensor
    """int32 [rows, NUM_TOKENS], -1 after the last one"""
    verified: int
    accepted: int


@torch.inference_mode()
def decoded(asked: Request, *, truth: Tensor | None = None, rule: Rule | None = None, by_chances: bool = False) -> Decoded:
    """Rows of NUM_ROWS keys, in rounds of 3, 1, 2, 3, ... drafts.

    truth       as `Prophet` takes it; None: rounds without drafts
    rule        which drafts are verified; None: all
    by_chances  one draft of each row on average, those that are most likely to be accepted
    """
    batch = packed(NUM_ROWS, row_buckets=(NUM_ROWS,), max_len=len(PROMPT) + NUM_TOKENS, num_verified=K)
    rows = DeviceBatch.allocate(batch, vocab_size=VOCAB, device=DEVICE)
    if asked.automaton is not None:
        rows.automata = Automata(VOCABULARY, AutomataCapacity(num_tokens=VOCAB, table_words=1 << 10, masks_bytes=1 << 8), DEVICE)
    rows.begin(range(NUM_ROWS), [replace(asked, seed=10**6 + 7919 * i) for i in range(NUM_ROWS)], [()] * NUM_ROWS)
    if rows.automata is not None:
        place = 1
        rows.automata.upload([AutomatonUpload.of(PAIRS, place, np.arange(len(PAIRS.masks), dtype=np.int32))])
        begin = ConstraintOffsets(place, place_of(PAIRS, asked.automaton_state, place))
        rows.constrain([(row, begin) for row in range(NUM_ROWS)])
    rows.live.fill_(1)
    target: Any = MarkovTarget()
    drafter, spec = Prophet(truth), tiny_spec()
    layers = spec.layer_states(torch.float64, batch.page_size, draft_len=0)
    cache = KVCache.allocate(
        layers, groups=KVGroups.single(len(layers)), page_size=batch.page_size, num_pages=(2,), device=DEVICE
    )
    one = Round(target, drafter, cache, batch, RoundOptions(row_lengths=True), DEVICE)
    if rule is not None:
        follow(one, rows, rule)
    mode = SamplingMode.of(asked.sampling, asked.min_new_tokens, constrained=asked.automaton is not None)
    results = list[RoundResult]()
    for draft_len in widths(truth is not None):
        if not rows.live.any():
            break
        num_positions = 2 * NUM_ROWS if by_chances else NUM_ROWS * (draft_len + 1)
        results.append(one.run(rows, mode, draft_len, num_positions=num_positions if draft_len else None))
    places = torch.arange(NUM_TOKENS, device=DEVICE)
    emitted = (rows.num_tokens - rows.prompt_len)[:, None]
    tokens = torch.where(places < emitted, rows.tokens[:, len(PROMPT) :], -1)
    accepted, verified = (sum(int(result.log[:, column].clamp(min=0).sum()) for result in results) for column in (0, 1))
    return Decoded(tokens, verified, accepted)


def widths(drafts: bool) -> Iterator[int]:
    return cycle((3, 1, 2) if drafts else (0,))


def follow(one: Round, rows: DeviceBatch, rule: Rule) -> None:
    """From now on this round verifies the drafts that the rule says."""
    assert one.chances is not None
    chances, drafter = one.chances, one.drafter
    allocate = chances.allocate
    assert isinstance(drafter, Prophet)

    def ruled(live: Tensor, draft_len: Tensor, *, width: int, num_positions: int | None) -> Tensor:
        levels = allocate(live, draft_len, width=width, num_positions=num_positions)
        known = Known(rows, one.inputs.ids(len(live), width)[:, 1:], drafter.choices(rows, width + 1), one)
        draft_len.copy_(torch.minimum(draft_len, rule(known)))
        return levels

    chances.allocate = ruled  # type: ignore[method-assign]


# --- the definition


def probabilities(asked: Request, output: tuple[int, ...]) -> Tensor:
    """[VOCAB] of the token after an output, by a sort."""
    params, ids = asked.sampling, (*PROMPT, *output)
    logits = LOGITS[ids[-1]].cpu().clone()
    for token in set(ids):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for *earlier, last in params.bad_words:
        if len(earlier) <= len(output) and list(output[len(output) - len(earlier) :]) == earlier:
            logits[last] = -torch.inf
    if asked.automaton is not None:
        logits[list(set(range(VOCAB)) - allowed_by_pairs(output))] = -torch.inf
    if len(output) < asked.min_new_tokens:
        logits[list(asked.stop_ids)] = -torch.inf
    if params.temperature == 0:
        return one_hot(logits.argmax(), VOCAB).double()
    values, order = torch.softmax(logits / params.temperature, 0).sort(descending=True)
    values[values.cumsum(0) - values >= params.top_p] = 0
    found = torch.zeros(VOCAB, dtype=torch.float64)
    found[order] = values / values.sum()
    return found


def exact_of_outputs(asked: Request) -> dict[tuple[int, ...], float]:
    """The probability of each output."""
    ended, growing = dict[tuple[int, ...], float](), dict[tuple[int, ...], float]({(): 1.0})
    while growing:
        output, chance = growing.popitem()
        if len(output) == NUM_TOKENS or (output and output[-1] in asked.stop_ids):
            ended[output] = chance
            continue
        for token, own in enumerate(probabilities(asked, output).tolist()):
            if own:
                growing[(*output, token)] = chance * own
    return ended


def misfit(asked: Request, tokens: Tensor) -> float:
    """The chi-square of the outputs over the bound that it keeps if they have the probabilities of the definition; infinite if
    one of them has none."""
    exact = exact_of_outputs(asked)
    assert sum(exact.values()) == pytest.approx(1.0)
    number = {output: place for place, output in enumerate(exact)}
    outputs = [tuple(token for token in row if token >= 0) for row in tokens.tolist()]
    if not number.keys() >= set(outputs):
        return np.inf
    chi, limit = chi_square(np.array([number[output] for output in outputs]), np.array(list(exact.values())))
    return chi / limit


# --- tests


@pytest.mark.second
@pytest.mark.parametrize("name", ASKED)
def test_each_noise_key_has_its_tokens_whatever_is_verified(name: str) -> None:
    asked = ASKED[name]
    plain = decoded(asked)
    assert plain.verified == 0
    assert misfit(asked, plain.tokens) < 1, "rows without drafts"
    whole = decoded(asked, truth=plain.tokens)
    assert torch.equal(whole.tokens, plain.tokens)
    assert 0.3 * whole.verified < whole.accepted < whole.verified
    found = {what: decoded(asked, truth=plain.tokens, rule=rule) for what, rule in RULES.items()}
    found["by chances"] = decoded(asked, truth=plain.tokens, by_chances=True)
    for what, one in found.items():
        assert torch.equal(one.tokens, plain.tokens), what
        assert 0 < one.verified < whole.verified or "greedy" in name, what


def redrawn(known: Known) -> Tensor:
    """A row whose next choice is token 2 verifies nothing and draws with another key."""
    unwanted = known.choices[:, 0] == 2
    known.rows.keys.copy_(torch.where(unwanted, known.rows.keys + 1, known.rows.keys))
    return torch.where(unwanted, 0, K)


def unverified(known: Known) -> Tensor:
    """The last draft of each row is not verified, and its row still counts it as verified: it is compared with what follows in
    the flat batch."""
    inputs, verified = known.round.inputs, torch.full_like(known.rows.live, K - 1)
    ragged = inputs.ragged

    def longer(rows: DeviceBatch, draft_len: int, num_positions: int | None = None) -> FlatBatch:
        batch, lengths = ragged(rows, draft_len, num_positions), inputs.lengths(len(rows.live))
        lengths.add_(((lengths == K - 1) & (draft_len == K)).int())
        return batch

    inputs.ragged = longer  # type: ignore[method-assign]
    return verified


def shifted(known: Known) -> Tensor:
    """Noise is counted from the number of drafts that the row verifies, which depends on its next choices."""
    verified = RULES["right drafts"](known)

    def choose_shifted(
        hidden: Tensor, logit_rows: LogitRows | None, rows: DeviceBatch, mode: SamplingMode
    ) -> tuple[Tensor, Tensor | None]:
        assert logit_rows is not None
        later = logit_rows.positions + 100 * known.round.inputs.lengths(len(rows.live))[logit_rows.row_ids.long()]
        return Round.choose(known.round, hidden, replace(logit_rows, positions=later), rows, mode)

    known.round.choose = choose_shifted  # type: ignore[method-assign]
    return verified


@pytest.mark.parametrize("name", ["temperature", "a pattern, penalties and top-p"])
@pytest.mark.parametrize(("fault", "biased"), [(redrawn, True), (unverified, True), (shifted, False)])
def test_a_fault_in_what_is_verified_changes_tokens(name: str, fault: Rule, biased: bool) -> None:
    """And their distribution too, if whether a token is verified depends on the draw of that token."""
    asked = ASKED[name]
    plain = decoded(asked)
    faulty = decoded(asked, truth=plain.tokens, rule=fault)
    assert not torch.equal(faulty.tokens, plain.tokens)
    assert (misfit(asked, faulty.tokens) > 1) == biased
