"""How the rows of models with recurrent layers are prefilled, and which of their tokens the layers' states hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchspec.batch.flat_batch import FlatBatch, Tokens
from batchspec.cache.groups import KVGroups
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.cache.page_tables import PagePools
from batchspec.cache.pages import KVCache, prefix_hashes
from batchspec.cache.prefix_states import PrefixStates
from batchspec.engine.loop.refills import chunks, prefill_of, refill_of
from batchspec.engine.slots.prefix_plan import PrefixPlanner
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.step import Segment
from batchspec.kernels.gated_delta.chunk_products import CHUNK
from batchspec.model.layers.attention.kv_layout import KVLayout
from batchspec.model.layers.gated_delta.block import RECURRENT_CHUNK, GatedDeltaSpec
from tests.helpers.engines import packed, request, tiny_spec
from tests.helpers.recurrent import recurrent_spec

LAYOUT = KVLayout(dtype=torch.float32, fp8=False, num_kv_heads=1, head_dim=2, page_size=4, ordered=False)
CPU = torch.device("cpu")


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    max_tokens=st.integers(RECURRENT_CHUNK, 300),
)
def test_prompts_are_cut_at_multiples_and_every_token_is_in_one_pass(lengths: list[int], max_tokens: int) -> None:
    passes = [*chunks([(slot, 0, n) for slot, n in enumerate(lengths)], max_tokens, multiple=RECURRENT_CHUNK)]
    segments = [one for segments in passes for one in segments]
    assert all(sum(one.end - one.begin for one in segments) <= max_tokens for segments in passes)
    assert [(one.slot, at) for one in segments for at in range(one.begin, one.end)] == [
        (slot, at) for slot, n in enumerate(lengths) for at in range(n)
    ]
    assert all(one.begin % RECURRENT_CHUNK == 0 for one in segments)
    assert [one.slot for one in segments if one.last] == list(range(len(lengths)))
    assert all(one.last == (one.end == lengths[one.slot]) for one in segments)


@given(
    rows=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 90)), min_size=1, max_size=5),
    max_tokens=st.integers(RECURRENT_CHUNK, 200),
)
def test_tokens_that_a_row_generated_go_in_passes_of_their_own(rows: list[tuple[int, int]], max_tokens: int) -> None:
    group = []
    for slot, (prompt, output) in enumerate(rows):
        state = RequestState.of(request(slot, [1] * prompt, cap=100), 0)
        state.slot, state.tokens = slot, [2] * output
        group.append(state)
    batch = packed(len(rows), page_size=4, max_len=400, prefill_tokens=max_tokens)
    found = prefill_of(group, [refill_of(state, 4) for state in group], batch, multiple=RECURRENT_CHUNK)
    for segments in found.passes:
        assert len({one.generated for one in segments}) == 1
        assert sum(one.end - one.begin for one in segments) <= max_tokens
    cut = [one for segments in found.passes for one in segments]
    for slot, (prompt, output) in enumerate(rows):
        own = [one for one in cut if one.slot == slot]
        assert [at for one in own for at in range(one.begin, one.end)] == list(range(prompt + output)), "in order, once each"
        assert all(one.begin >= prompt if one.generated else one.end <= prompt for one in own)
        assert [one.last for one in own] == [False] * (len(own) - 1) + [True]


def test_a_model_whose_layers_keep_row_tensors_has_such_passes_wherever_they_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recurrent_spec().prefill_multiple == RECURRENT_CHUNK
    kept = GatedDeltaSpec.kept
    monkeypatch.setattr(GatedDeltaSpec, "kept", lambda spec, run: replace(kept(spec, run), chunk=None))
    assert (recurrent_spec().prefill_multiple, tiny_spec().prefill_multiple) == (1, None)


class Simulated:
    """What states hold while passes are launched: the tokens that were folded into each, of slots and of kept prefixes."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, ...]] = {}
        self.kept: dict[int, tuple[int, ...]] = {}

    def launch(self, passes: Sequence[Sequence[Segment]], rows: dict[int, tuple[int, ...]]) -> None:
        """rows: the known tokens of the row in each slot."""
        for segments in passes:
            assert len({one.slot for one in segments}) == len(segments), "a row is once in a pass"
            for one in segments:
                if one.restores is not None:
                    self.slots[one.slot] = self.kept[one.restores]
                own = self.slots.get(one.slot, ()) if one.begin else ()
                assert own == rows[one.slot][: one.begin], "the state is of other tokens"
            for one in segments:
                self.slots[one.slot] = rows[one.slot][: one.end]
            for one in segments:
                if one.saves is not None:
                    self.kept[one.saves] = self.slots[one.slot]


@pytest.mark.second
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_row_takes_over_the_state_of_just_its_own_prefix(data: st.DataObject) -> None:
    """Groups of requests, one after another, whose prompts have beginnings in common; few states are kept."""
    page_size, count = data.draw(st.sampled_from([16, 32])), data.draw(st.integers(1, 4), label="states")
    slots = 6
    states = PrefixStates(range(slots, slots + count), page_size=page_size, multiple=RECURRENT_CHUNK)
    pools = PagePools(KVGroups.single(1), (data.draw(st.sampled_from([60, 400]), label="pages"),), page_size, states=states)
    planner, simulated = PrefixPlanner(pools, states), Simulated()
    batch = packed(slots, page_size=page_size, max_len=700, prefill_tokens=data.draw(st.sampled_from([64, 200, 4096])))
    num_taken = 0
    for _ in range(data.draw(st.integers(1, 4), label="groups")):
        planner.begin_group()
        group = []
        for slot in range(data.draw(st.integers(1, slots))):
            blocks = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5), label="blocks of 70 tokens")
            prompt = [token for block in blocks for token in [block] * 70]
            state = RequestState.of(request(slot, prompt, cap=40), 0)
            hashes = prefix_hashes(state.request.prompt_ids, page_size)
            columns = -(-len(prompt) // page_size)
            if columns > pools.num_free[0]:
                break
            state.pages, state.prefix_plan = planner.plan(hashes)
            if data.draw(st.integers(0, 5)) == 0:
                break  # it did not get its pages: nothing of its plan is carried out, and no later one is of the group
            planner.admit(state.prefix_plan, hashes)
            state.num_shared_pages, state.slot = state.pages.num_columns, slot
            pools.admit(state.pages, columns, hashes)
            state.tokens = [7] * data.draw(st.sampled_from([0, 0, 9]))
            num_taken += state.prefix_plan.restores is not None
            group.append(state)
        found = prefill_of(group, [refill_of(state, page_size) for state in group], batch, multiple=RECURRENT_CHUNK)
        rows = {state.slot: (*state.request.prompt_ids.tolist(), *state.tokens) for state in group}
        simulated.launch(found.passes, rows)
        assert {state.slot: simulated.slots[state.slot] for state in group} == rows
        for state in group:
            pools.release(state.pages)
    event(f"{min(num_taken, 3)} states were taken over")


def test_prompts_are_cut_where_chunks_of_the_kernel_end() -> None:
    assert RECURRENT_CHUNK % CHUNK.value == 0


def test_samples_of_a_prompt_compute_it_once() -> None:
    """The first of a group leaves its state after two chunks; the others compute what follows alone."""
    states = PrefixStates(range(4, 6), page_size=16, multiple=RECURRENT_CHUNK)
    pools = PagePools(KVGroups.single(1), (200,), 16, states=states)
    planner = PrefixPlanner(pools, states)
    group = []
    for slot in range(4):
        state = RequestState.of(request(slot, [3] * 140, cap=10), 0)
        hashes = prefix_hashes(state.request.prompt_ids, 16)
        state.pages, state.prefix_plan = planner.plan(hashes[:8])
        planner.admit(state.prefix_plan, hashes[:8])
        state.num_shared_pages, state.slot = state.pages.num_columns, slot
        pools.admit(state.pages, 9, hashes)
        group.append(state)
    found = prefill_of(group, [refill_of(state, 16) for state in group], packed(4, page_size=16), multiple=RECURRENT_CHUNK)
    segments = [one for passes in found.passes for one in passes]
    assert [(one.slot, one.begin, one.end, one.restores, one.saves) for one in segments] == [
        (0, 0, 64, None, None), (0, 64, 128, None, 4),
        (0, 128, 140, None, None), (1, 128, 140, 4, None), (2, 128, 140, 4, None), (3, 128, 140, 4, None),
    ]


def test_a_request_that_gets_no_pages_promises_no_state() -> None:
    """The first one has computed the prefix and left no state. The second would leave it, but has to wait; so the third finds
    none."""
    states = PrefixStates(range(4, 6), page_size=16, multiple=RECURRENT_CHUNK)
    pools = PagePools(KVGroups.single(1), (200,), 16, states=states)
    planner, hashes = PrefixPlanner(pools, states), prefix_hashes(np.full(140, 3, np.int32), 16)
    planner.begin_group()
    pages, plan = planner.plan(hashes)
    planner.admit(plan, hashes)
    pools.admit(pages, 9, hashes)
    assert (plan.restores, plan.saves) == (None, {})
    planner.begin_group()
    planner.plan(hashes)
    planner.begin_group()
    _, plan = planner.plan(hashes)
    assert plan.restores is None
    planner.admit(plan, hashes)
    assert plan.saves == {8: 4}
    planner.begin_group()
    _, plan = planner.plan(hashes)
    assert plan.restores == 4


def flat(known: Tokens, kv_len: list[int], q_len: list[int], slots: list[int] | None) -> FlatBatch:
    """Rows with their last q_len tokens; a dead row, whose kv_len is 0, has as many at position 0."""
    positions = [at for end, count in zip(kv_len, q_len, strict=True) for at in (range(end - count, end) if end else [0] * count)]
    starts = np.concatenate(([0], np.cumsum(q_len)))
    return FlatBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32), positions=torch.tensor(positions),
        row_ids=torch.tensor(np.repeat(np.arange(len(q_len)), q_len), dtype=torch.int32),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64), cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor(kv_len, dtype=torch.int32), page_table=torch.zeros(len(q_len), 4, dtype=torch.int32),
        max_q=max(q_len), max_kv=max(kv_len), tokens=known,
        slots=None if slots is None else torch.tensor(slots),
    )


def cache(*, lags: bool = True) -> KVCache:
    layers = (LayerState(LAYOUT), LayerState(None, row=(RowTensor((3,), torch.float32),), lags=lags))
    return KVCache.allocate(layers, groups=KVGroups.single(1), page_size=4, num_pages=(5,), num_slots=6, device=CPU)


def test_a_prefill_pass_folds_all_of_its_rows_tokens_and_a_round_those_before_its_own() -> None:
    kept = cache()
    assert kept.num_folded is not None
    kept.num_folded.copy_(torch.tensor([50, 51, 52, 53, 54, 55]))
    kept.fold(flat("prompt", [7, 9], [7, 2], [4, 1]))
    assert kept.num_folded.tolist() == [50, 9, 52, 53, 7, 55]
    kept.fold(flat("outputs", [8], [1], [4]))
    assert kept.num_folded.tolist() == [50, 9, 52, 53, 8, 55]
    kept.fold(flat("drafts", [0, 12, 0, 60], [3, 3, 3, 3], None))
    assert kept.num_folded.tolist() == [50, 9, 52, 57, 8, 55], "rows 0 and 2 are dead, row 1 is at 9, row 3 at 57"
    kept.fold(flat("drafts", [0, 13], [0, 1], None))  # ragged: a dead row has no token
    assert kept.num_folded.tolist() == [50, 12, 52, 57, 8, 55]


def test_compaction_moves_all_that_layers_keep_and_a_model_whose_layers_do_not_lag_keeps_no_count() -> None:
    kept = cache()
    assert [tuple(tensor.shape) for tensor in kept.row_tensors] == [(6, 64), (6, 1)], "all layers' in one tensor, aligned"
    prompt = cache(lags=False)
    assert (prompt.num_folded, [tuple(tensor.shape) for tensor in prompt.row_tensors]) == (None, [(6, 64)])
    plain = KVCache.allocate(
        (LayerState(LAYOUT),), groups=KVGroups.single(1), page_size=4, num_pages=(5,), device=CPU
    )
    assert plain.row_tensors == ()
    plain.fold(flat("prompt", [7], [7], [0]))
    assert plain.num_folded is None
