"""What a row may ask for, all at once: its own adapter, schema or grammar, biases, penalties and stops, with every drafter.

Tokens are those of a definition by brute force in float64, whatever batch, drafter, preemption, lost work and restart there was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.automata.lazy_automaton import ANSWER
from batchspec.batch.automata import AutomataCapacity
from batchspec.engine.loop.engine import Engine
from batchspec.engine.slots import expected_pages
from batchspec.records import Request, SamplingParams
from tests.engine.test_lossless import SAMPLINGS
from tests.helpers import automata, grammars
from tests.helpers.automata import EOS, PATTERNS_OF_LETTERS, VOCABULARY, automaton
from tests.helpers.engines import DEVICE, VOCAB, LogitsAfter, _draw, decode, make_engine, packed, request, stops
from tests.helpers.grammars import GRAMMARS, ExpandLate, Grammar, lazy
from tests.helpers.ngrams import forbidden
from tests.helpers.row_lengths import LENGTHS
from tests.model.test_lora_lossless import KINDS, NUM_ADAPTERS, adapted_target, drafter_of, merged_target

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]
BIASED = (
    SamplingParams(temperature=1.0, frequency_penalty=0.8, logit_bias=((1, 4.0), (2, -100.0), (EOS, -3.0))),
    SamplingParams(logit_bias=((EOS, 100.0),)),
    SamplingParams(logit_bias=((EOS, -100.0), (0, 100.0)), presence_penalty=2.0),
    SamplingParams(logit_bias=tuple((token, -100.0) for token in range(VOCAB))),
    SamplingParams(temperature=0.7, top_p=0.3, logit_bias=tuple((token, -100.0) for token in range(VOCAB - 3))),
)
ROOMS = (
    AutomataCapacity(num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14, lazy_words=1 << 14, lazy_masks_bytes=256),
    AutomataCapacity(num_tokens=VOCAB, table_words=700, masks_bytes=64, lazy_words=1500, lazy_masks_bytes=20),
)
"""Room for all automata, and for few at a time."""
MOST_STOPS = 3
"""Runs that are stopped and gone on with, at most."""
Rule = str | Grammar | None
"""A regular expression, a grammar, or nothing that a row must match."""


def text(one: Request, output: list[int]) -> str:
    """In which stop strings are searched for: with a constraint in the bytes that it allows."""
    return decode(output) if one.automaton is None else VOCABULARY.text(output)


def adjusted(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """Biases, penalties, bad words and n-grams by their definitions in jobs/pages/input.md."""
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for *before, last in params.bad_words:
        if output[len(output) - len(before) :] == before:
            logits[last] = -torch.inf
    logits[sorted(forbidden(output, params.no_repeat_ngram))] = -torch.inf
    return logits


def allowed_after(rule: Rule, output: list[int], one: Request) -> set[int]:
    """The tokens that may follow."""
    if rule is None:
        found = set(range(VOCAB))
    elif isinstance(rule, Grammar):
        found = {token for token in range(VOCAB) if grammars.may_follow(rule, output, token)}
    else:
        found = {token for token in range(VOCAB) if automata.may_follow(rule, output, token)}
    not_yet = set(one.stop_ids) if len(output) < one.min_new_tokens else set()
    return found - not_yet or found


@torch.inference_mode()
def defined(one: Request, rule: Rule, guess: list[int]) -> list[int] | None:
    """The row's tokens: alone, one after the other, from logits of a model into which the row's adapter was merged. None: its bad
    words or n-grams forbid every token that its rule allows, which is an error.

    guess  what an engine wrote
    """
    target, prompt = merged_target(one.adapter), one.prompt_ids.tolist()
    logits_after = LogitsAfter(target, prompt, guess)
    output: list[int] = []
    while len(output) < one.max_new_tokens:
        logits = adjusted(logits_after(output), prompt, output, one.sampling)
        logits[sorted(set(range(VOCAB)) - allowed_after(rule, output, one))] = -torch.inf
        if logits.max() == -torch.inf:
            return None
        output.append(_draw(logits, one.sampling, one.seed, len(prompt) + len(output)))
        if output[-1] in one.stop_ids or stops(one, text(one, output), text(one, output[: one.min_new_tokens])):
            break
    return output


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[Request, Rule]]:
    beginning = draw(st.lists(st.integers(0, VOCAB - 1), max_size=10))
    found: list[tuple[Request, Rule]] = []
    for index in range(draw(st.integers(1, 6))):
        own, cap = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)), draw(st.integers(1, 14))
        sampling = draw(st.sampled_from((*SAMPLINGS, *BIASED)))
        one = request(
            index, beginning + own if draw(st.booleans()) else own, cap=cap, sampling=sampling,
            predicted=draw(st.integers(1, cap)), min_new_tokens=draw(st.sampled_from([0, 0, min(3, cap), cap])),
            stop=tuple(draw(st.lists(st.sampled_from(["F", "GH", "K", "b", "cd"]), max_size=1))), stop_ids=(EOS,),
        )
        rule: Rule = draw(st.sampled_from((None, *PATTERNS_OF_LETTERS[:4], *GRAMMARS)))
        if isinstance(rule, Grammar):
            one = replace(one, automaton=lazy(rule), automaton_state=ANSWER)
        elif rule is not None:
            made = automaton(rule)
            one = replace(one, automaton=made, automaton_state=made.answer)
        found.append((replace(one, adapter=draw(st.integers(0, NUM_ADAPTERS))), rule))
    return draw(st.permutations(found))


@dataclass(frozen=True)
class Choices:
    """What one engine is made with. All engines' choices are drawn before the first runs: how many are needed may depend on what
    an earlier example left in caches, and drawing must not."""

    kind: str
    page_size: int
    scarce: bool
    prefill_tokens: int
    run_ahead: int
    late: int
    lost: float
    room: AutomataCapacity
    lengths: int | None
    short_cap: int

    def engine(self, draft_len: int, slots: int, longest: int, logprobs: int | None) -> Engine:
        """longest: tokens of the longest row"""
        drafter = drafter_of(self.kind, draft_len, slots)
        scarce = 2 + -(-(longest + drafter.shape.kv_per_round) // self.page_size)
        batch = packed(
            slots, row_buckets=tuple(size for size in (1, 2, 4, 8) if size <= slots), page_size=self.page_size, max_len=longest,
            num_pages=scarce if self.scarce else 400, num_verified=drafter.draft_len, prefill_tokens=self.prefill_tokens,
            run_ahead=self.run_ahead,
        )
        return make_engine(
            adapted_target(), drafter, batch, device=DEVICE, decode=decode, vocabulary=VOCABULARY,
            expanding=ExpandLate(self.late, lost=self.lost), automata_capacity=self.room, logprobs=logprobs, lengths=self.lengths,
        )


def choices(kinds: st.SearchStrategy[str]) -> st.SearchStrategy[Choices]:
    return st.builds(
        Choices, kind=kinds, page_size=st.sampled_from([2, 4]), scarce=st.booleans(), prefill_tokens=st.sampled_from([1, 7, 64]),
        run_ahead=st.integers(0, 2), late=st.integers(0, 9), lost=st.sampled_from([0.0, 0.2]), room=st.sampled_from(ROOMS),
        lengths=LENGTHS, short_cap=st.sampled_from([0, 512]),
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(job=jobs(), data=st.data())
def test_rows_that_ask_for_all_at_once_get_the_tokens_of_the_definition(
    kind: str, job: list[tuple[Request, Rule]], data: st.DataObject
) -> None:
    slots, draft_len = data.draw(st.sampled_from([1, 4, 8]), label="slots"), data.draw(st.integers(1, 4), label="draft_len")
    longest = max(len(one.prompt_ids) + one.max_new_tokens for one, _ in job)
    stop_after = data.draw(st.sampled_from([None, None, 1, 3, 6]), label="stop_after")
    logprobs = None if stop_after else data.draw(st.sampled_from([None, 0, 2]), label="logprobs")
    others = st.lists(choices(st.sampled_from(KINDS)), min_size=MOST_STOPS, max_size=MOST_STOPS)
    engines = [data.draw(choices(st.just(kind)), label="engine"), *(data.draw(others, label="engines") if stop_after else ())]
    left, found = {one.request_id: one for one, _ in job}, dict[str, list[int] | None]()
    for number, chosen in enumerate(engines):
        engine = chosen.engine(draft_len, slots, longest, logprobs)
        rounds = iter(range(stop_after or 0, 0, -1)) if number < MOST_STOPS else iter(())

        def stop(_: object, engine: Engine = engine, rounds: Iterator[int] = rounds) -> None:
            if next(rounds, 0) == 1:
                engine.stop()

        engine.on_round = stop
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(expected_pages, "SHORT_CAP_TOKENS", chosen.short_cap)
            for done in engine.run(iter(list(left.values()))):
                why = "its bad_words do not forbid" if left[done.request_id].automaton is None else "no token is left"
                assert done.error is None or why in done.error.message, done.error
                found[done.request_id] = None if done.token_ids is None else done.token_ids.tolist()
                del left[done.request_id]
        if not left:
            break
        for snapshot in engine.unfinished():
            row = f"r{snapshot.row_index}"
            left[row] = replace(left[row], resumed=snapshot)
    assert found == {one.request_id: defined(one, rule, found[one.request_id] or []) for one, rule in job}
