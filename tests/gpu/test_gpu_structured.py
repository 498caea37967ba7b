"""Structured output on a GPU: captured rounds give the tokens of the CPU in fp32, and the product that masks by itself those of
masked logits in bf16."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchspec.automata.token_automaton import OTHER, TokenAutomaton, TokenSymbols
from batchspec.batch.automata import AutomataCapacity
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.kernels.gemm.lm_head import TILE
from batchspec.model.target import Target
from batchspec.records import Request, SamplingParams
from batchspec.structured.dfa import dfa_of
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import EMPTY
from batchspec.structured.token_masks import over_tokens
from batchspec.tuning.policy import gemm_tile
from tests.gpu.test_gpu_engine import MAX_LEN, TREE, VOCAB, eagle, run, shape, target, tokens, windowed_target
from tests.helpers.engines import packed, request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EOS = 0
LETTERS = "abcdefghij"
WORDS = [*LETTERS, *(a + b for a in LETTERS for b in LETTERS)]
VOCABULARY = TokenSymbols.of([OTHER, *(word.encode() for word in WORDS[: VOCAB - 1])])
PATTERNS = ("(ab|c)*d", "[a-j]{5,60}", "(ac|bd|ae)+", "abcdefghij{3,9}", "[ab]{1,40}(c|d)", "(a|b|cc){20,30}")
ROOM = AutomataCapacity(num_tokens=VOCAB, table_words=1 << 14, masks_bytes=1 << 13)


@cache
def automaton(pattern: str) -> TokenAutomaton:
    present = np.zeros(256, bool)
    present[[ord(letter) for letter in LETTERS]] = True
    return over_tokens(dfa_of(regex_node(pattern), EMPTY, present), VOCABULARY, (EOS,), thinks=False, may_begin=False)


def asked(samplings: tuple[SamplingParams, ...], *, least: int = 0) -> list[Request]:
    rng, found = np.random.default_rng(3), list[Request]()
    for i in range(40):
        one = request(
            i, rng.integers(1, VOCAB, rng.integers(1, 50)).tolist(), cap=int(rng.integers(3, 80)), stop_ids=(EOS,),
            sampling=samplings[i % len(samplings)], min_new_tokens=least if i % 3 == 0 else 0,
        )
        made = automaton(PATTERNS[i % len(PATTERNS)])
        found.append(one if i % 7 == 6 else replace(one, automaton=made, automaton_state=made.answer))
    return found


def follow(found: dict[str, list[int]], requests: list[Request]) -> None:
    """Each output is a text of its pattern, or the beginning of one."""
    for one in requests:
        if one.automaton is None:
            continue
        assert isinstance(one.automaton, TokenAutomaton)
        out = found[one.request_id]
        assert one.automaton.walk(one.automaton_state, out[:-1] if out[-1] == EOS else out), (one.request_id, out)
        if out[-1] == EOS:
            text = "".join(WORDS[token - 1] for token in out[:-1])
            assert re.fullmatch(PATTERNS[one.row_index % len(PATTERNS)], text)


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "tree"])
@pytest.mark.parametrize("least", [0, 12])
def test_captured_rounds_follow_automata_as_one_row_at_a_time_on_the_cpu(name: str, least: int, tmp_path: Path) -> None:
    samplings = (SamplingParams(), SamplingParams(temperature=0.9), SamplingParams(temperature=0.8, top_k=12, top_p=0.9))
    requests, options = asked(samplings, least=least), {"vocabulary": VOCABULARY, "automata_capacity": ROOM}
    drafters: dict[str, Any] = {
        "none": NoDrafter, "lookup": lambda: LookupDrafter(4, min_ngram=1, max_ngram=3),
        "eagle3": lambda: eagle(tmp_path, "cuda", 3, 8), "tree": lambda: eagle(tmp_path, "cuda", 3, 8, tree=TREE),
    }
    engine, done = run(target("cuda"), drafters[name](), shape(8), requests, **options)
    assert engine.executor.graphs.num_captured > 0
    found = tokens(done)
    follow(found, requests)
    alone = packed(1, page_size=16, max_len=MAX_LEN, num_pages=40)
    assert found == tokens(run(target("cpu"), NoDrafter(), alone, requests, **options)[1])


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_a_masked_product_chooses_what_masked_logits_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 and greedy, where lm_head writes no logits. Sums in another order may resolve a tie the other way."""
    own = windowed_target("cuda", (None, None), torch.bfloat16)
    requests = asked((SamplingParams(),))
    found_tile = "batchspec.model.output_head.gemm_tile"
    monkeypatch.setattr(found_tile, lambda op, *sizes: TILE if op == "lm_head" else gemm_tile(op, *sizes))

    def decoded() -> dict[str, list[int]]:
        drafter: Drafter = NoDrafter() if name == "none" else eagle(tmp_path, "cuda", 3, 8, own=own)
        return tokens(run(own, drafter, shape(8), requests, vocabulary=VOCABULARY, automata_capacity=ROOM)[1])

    masked, told = Target.greedy_sample, [0]

    def counted(self: Target, *args: Any, **keys: Any) -> torch.Tensor:
        told[0] += keys.get("allowed") is not None
        return masked(self, *args, **keys)

    monkeypatch.setattr(Target, "greedy_sample", counted)
    found = decoded()
    assert told[0] > 0
    follow(found, requests)
    monkeypatch.setattr(Target, "masks_in_product", lambda *_: False)
    expected = decoded()
    assert sum(found[key] == expected[key] for key in expected) >= 38
