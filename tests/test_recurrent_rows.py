"""How the rows of models with recurrent layers are prefilled, and which of their tokens the layers' states hold."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.batch.flat_batch import FlatBatch, Recurrence
from batchspec.cache.groups import KVGroups
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.cache.layout import KVLayout
from batchspec.cache.pages import KVCache
from batchspec.engine.loop.refills import prefill_of, refill_of
from batchspec.engine.prefill.passes import chunks
from batchspec.engine.slots.request_state import RequestState
from batchspec.packed_batch import RECURRENT_CHUNK
from tests.engines import packed, request

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


def flat(recurrence: Recurrence, kv_len: list[int], q_len: list[int], slots: list[int] | None) -> FlatBatch:
    """Rows with their last q_len tokens; a dead row, whose kv_len is 0, has as many at position 0."""
    positions = [at for end, count in zip(kv_len, q_len, strict=True) for at in (range(end - count, end) if end else [0] * count)]
    starts = np.concatenate(([0], np.cumsum(q_len)))
    return FlatBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32), positions=torch.tensor(positions),
        row_ids=torch.tensor(np.repeat(np.arange(len(q_len)), q_len), dtype=torch.int32),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64), cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor(kv_len, dtype=torch.int32), page_table=torch.zeros(len(q_len), 4, dtype=torch.int32),
        max_q=max(q_len), max_kv=max(kv_len), recurrence=recurrence,
        slots=None if slots is None else torch.tensor(slots, dtype=torch.int32),
    )


def cache() -> KVCache:
    layers = (LayerState(LAYOUT), LayerState(None, row=(RowTensor((3,), torch.float32),)))
    return KVCache.allocate(layers, groups=KVGroups.single(1), num_pages=(5,), num_slots=6, device=CPU)


def test_a_prefill_pass_folds_all_of_its_rows_tokens_and_a_round_those_before_its_own() -> None:
    kept = cache()
    assert kept.num_folded is not None
    kept.num_folded.copy_(torch.tensor([50, 51, 52, 53, 54, 55]))
    kept.fold(flat("chunks", [7, 9], [7, 2], [4, 1]))
    assert kept.num_folded.tolist() == [50, 9, 52, 53, 7, 55]
    kept.fold(flat("steps", [8], [1], [4]))
    assert kept.num_folded.tolist() == [50, 9, 52, 53, 8, 55]
    kept.fold(flat("drafts", [0, 12, 0, 60], [3, 3, 3, 3], None))
    assert kept.num_folded.tolist() == [50, 9, 52, 57, 8, 55], "rows 0 and 2 are dead, row 1 is at 9, row 3 at 57"
    kept.fold(flat("drafts", [0, 13], [0, 1], None))  # ragged: a dead row has no token
    assert kept.num_folded.tolist() == [50, 12, 52, 57, 8, 55]


def test_compaction_moves_all_that_layers_keep_and_a_model_without_recurrence_keeps_no_count() -> None:
    kept = cache()
    assert [tuple(tensor.shape) for tensor in kept.row_tensors] == [(6, 3), (6, 1)]
    plain = KVCache.allocate((LayerState(LAYOUT),), groups=KVGroups.single(1), num_pages=(5,), device=CPU)
    assert plain.row_tensors == ()
    plain.fold(flat("chunks", [7], [7], [0]))
    assert plain.num_folded is None
