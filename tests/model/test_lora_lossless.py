"""A row with an adapter has the tokens of a model with it merged, whatever the adapters of the other rows and the drafter.

The reference merges each adapter into weights of its own and decodes each request by itself (tests/helpers/engines.py), in
float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.cache.pages import prefix_hashes
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.engine.slots import expected_pages
from batchspec.model.lora_products import DummyAdapters, LoraStacks
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from batchspec.packing.order import order_requests
from batchspec.packing.survey import PREFIX_TOKENS, Survey
from batchspec.records import Request
from tests.engine.test_lossless import SAMPLINGS, block_head, lookup, parallel_head, pard_model, requests_of_a_job
from tests.helpers.engines import DEVICE, VOCAB, decode, make_engine, packed, plain_tokens, request, tiny_spec
from tests.helpers.row_lengths import LENGTHS

pytestmark = pytest.mark.usefixtures("poisoned")
NUM_ADAPTERS, RANK = 3, 5


@dataclass(frozen=True, slots=True)
class StrongAdapters(DummyAdapters):
    """Large enough to change most tokens; the second one lacks the first part of every product."""

    def load(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> LoraStacks:
        made = DummyAdapters.load(self, spec, dtype=dtype, device=device)
        for weights in made._weights.values():
            weights.b.mul_(20)
            weights.scales.copy_(torch.arange(1, NUM_ADAPTERS + 1)[:, None] * 0.5)
            if len(weights.part_rows) > 1:
                weights.scales[1, 0] = 0
        return made


class Merged(DummyWeights):
    """The noise of DummyWeights with an adapter added."""

    def __init__(self, spec: ModelSpec, stacks: LoraStacks, number: int) -> None:
        super().__init__(spec, dtype=torch.float64, device=DEVICE)
        self._deltas: dict[str, Tensor] = {}
        for prefix, block in spec.blocks():
            for product in block.products:
                weights, first = stacks._weights[prefix + product.parts[0].name], 0
                for place, part in enumerate(product.parts):
                    b = weights.b[number - 1, first : first + part.rows]
                    delta = float(weights.scales[number - 1, place]) * (b @ weights.a[number - 1, place])
                    self._deltas[f"{prefix}{part.name}.weight"] = delta
                    first += part.rows

    def tensor(self, name: str) -> Tensor:
        plain = super().tensor(name)
        return plain + self._deltas[name] if name in self._deltas else plain


@cache
def adapted_target() -> Target:
    spec = tiny_spec(window=5)
    adapters = StrongAdapters.of(spec, NUM_ADAPTERS, RANK)
    return Target.load(Path(), spec.with_lora(adapters.shape), dtype=torch.float64, device=DEVICE, dummy=True, adapters=adapters)


@cache
def merged_target(number: int) -> Target:
    spec = tiny_spec(window=5)
    if not number:
        return Target.load(Path(), spec, dtype=torch.float64, device=DEVICE, dummy=True)
    stacks = StrongAdapters.of(spec, NUM_ADAPTERS, RANK).load(spec, dtype=torch.float64, device=DEVICE)
    return Target(spec, Merged(spec, stacks, number), DEVICE)


def expected_tokens(requests: list[Request], found: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """found: what an engine wrote, as guesses"""
    return {r.request_id: plain_tokens(merged_target(r.adapter), r, found.get(r.request_id, ())) for r in requests}


def drafter_of(kind: str, draft_len: int, slots: int) -> Drafter:
    target, head = adapted_target(), parallel_head()
    match kind:
        case "none":
            return NoDrafter()
        case "lookup":
            return lookup(draft_len, 3, 50)
        case "window":
            return WindowDrafter(target, draft_len, slots=slots, window=3, sink=1)
        case "pard":
            return PardDrafter(pard_model(), target.spec, draft_len, slots=slots, parallel=True)
        case "chain":
            return ChainDrafter(head, target, draft_len, slots=slots)
        case "parallel":
            return ParallelDrafter(head, target, draft_len, slots=slots)
        case "block":
            return BlockDrafter(block_head(), target, draft_len, slots=slots)
        case "hybrid":
            return HybridDrafter(ChainDrafter(head, target, draft_len, slots=slots), lookup(draft_len, 3, 0), slots=slots,
                                 device=DEVICE)
        case _:
            return TreeDrafter(
                head, target, TreeShape(topk=2, depth=draft_len, nodes=min(7, 2 + (draft_len - 1) * 4)), slots=slots
            )


KINDS = ("none", "lookup", "window", "pard", "chain", "parallel", "block", "hybrid", "tree")


def check(requests: list[Request], kind: str, data: st.DataObject) -> None:
    slots = data.draw(st.sampled_from([1, 4, 8]), label="slots")
    drafter = drafter_of(kind, data.draw(st.integers(1, 4), label="K"), slots)
    page_size = data.draw(st.sampled_from([2, 4]), label="page_size")
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    lookahead = drafter.shape.kv_per_round if isinstance(drafter, TreeDrafter) else 0
    scarce = 2 + -(-(longest + lookahead) // page_size)
    batch = packed(
        slots,
        row_buckets=tuple(b for b in (1, 2, 4, 8) if b <= slots),
        page_size=page_size,
        num_pages=data.draw(st.sampled_from([scarce, 400]), label="pages"),
        max_len=longest,
        num_verified=drafter.draft_len,
        prefill_tokens=data.draw(st.sampled_from([1, 7, 64]), label="prefill_tokens"),
        run_ahead=data.draw(st.integers(0, 2), label="run_ahead"),
    )
    lengths = data.draw(LENGTHS, label="lengths")
    engine = make_engine(adapted_target(), drafter, batch, device=DEVICE, decode=decode, lengths=lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", data.draw(st.sampled_from([2, 512]), label="short_cap"))
        done = list(engine.run(iter(requests)))
    found = {c.request_id: c.token_ids.tolist() for c in done if c.token_ids is not None}
    assert found == expected_tokens(requests, found)


@pytest.mark.second
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=requests_of_a_job(), data=st.data())
def test_rows_of_several_adapters_have_the_tokens_of_the_merged_models(
    kind: str, requests: list[Request], data: st.DataObject
) -> None:
    requests = [replace(r, adapter=data.draw(st.integers(0, NUM_ADAPTERS), label="adapter")) for r in requests]
    check(requests, kind, data)


def test_the_adapters_of_these_tests_change_the_tokens() -> None:
    """Else the comparison would say nothing."""
    tokens = [plain_tokens(merged_target(number), request(0, [3, 1, 4, 1, 5], cap=20)) for number in range(NUM_ADAPTERS + 1)]
    assert len({tuple(found) for found in tokens}) == NUM_ADAPTERS + 1


def test_the_same_prompt_shares_pages_with_rows_of_its_adapter_alone() -> None:
    prompt = np.random.default_rng(0).integers(0, VOCAB, 21).tolist()
    requests = [replace(request(i, prompt, cap=9), adapter=i % 4, sampling=SAMPLINGS[0]) for i in range(8)]
    batch = packed(8, row_buckets=(1, 2, 4, 8), page_size=4)
    engine = make_engine(adapted_target(), NoDrafter(), batch, device=DEVICE, decode=decode)
    done = {c.request_id: c for c in engine.run(iter(requests))}
    found = {name: c.token_ids.tolist() for name, c in done.items() if c.token_ids is not None}
    assert found == expected_tokens(requests, found)
    assert [done[f"r{i}"].cached_tokens for i in range(8)] == [0] * 4 + [20] * 4


def test_a_model_that_drafts_for_itself_drafts_with_the_adapter_of_the_row() -> None:
    """Reading all keys, it proposes what it then verifies: every draft is accepted."""
    requests = [replace(request(i, [3, 1 + i, 4, 1, 5], cap=21), adapter=i % 4) for i in range(4)]
    drafter = WindowDrafter(adapted_target(), 4, slots=4, window=None)
    engine = make_engine(adapted_target(), drafter, packed(4, num_verified=4), device=DEVICE, decode=decode)
    stats = [c.stats for c in engine.run(iter(requests)) if c.stats is not None]
    assert [own.num_accepted for own in stats] == [own.num_drafted for own in stats] == [16] * 4


def test_prefixes_of_different_adapters_have_different_hashes() -> None:
    ids = np.arange(20, dtype=np.int32)
    keys = [replace(request(0, [1], cap=1), adapter=number).prefix_key for number in range(4)]
    by_adapter = [prefix_hashes(ids, 4, key=key) for key in keys]
    assert len({found for hashes in by_adapter for found in hashes}) == sum(map(len, by_adapter))
    assert prefix_hashes(ids, 4, key=b"") == prefix_hashes(ids, 4)


def test_rows_of_one_adapter_and_prefix_are_decoded_together_and_only_they_count_as_shared() -> None:
    prompt = [*range(16), 7]
    requests = [replace(request(i, prompt, cap=9), adapter=i % 2) for i in range(6)]
    assert [r.row_index for r in order_requests(requests, page_size=16)] == [0, 2, 4, 1, 3, 5]
    long = [5] * PREFIX_TOKENS
    for adapters, shares in (((1, 2), False), ((1, 1), True)):
        survey = Survey()
        survey.add(2, [replace(request(i, long, cap=3), adapter=adapter) for i, adapter in enumerate(adapters)])
        assert survey.shares_prefix is shares


def test_a_pass_without_adapter_ids_is_an_error_and_does_not_run_the_base_model() -> None:
    from tests.helpers.engines import full_logits

    with pytest.raises(AssertionError, match="must say which rows have which"):
        full_logits(adapted_target(), [1, 2, 3])
