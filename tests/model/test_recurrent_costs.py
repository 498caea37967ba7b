"""Costs of recurrent layers: states in rounds and in memory, chunks in prefill, and the batch that fits them (35B-A3B, H200)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from batchspec.config.schema import PackingConfig
from batchspec.errors import CapacityError
from batchspec.kernels.gated_delta.chunk_products import CHUNK
from batchspec.model.layers.base import Shard
from batchspec.model.layers.gated_delta.block import PREFILL_SLOWDOWN, GatedDeltaSpec
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.packed_batch import PackedBatch
from batchspec.packing.cost import prefill_seconds, round_seconds
from batchspec.packing.kv_memory import KVMemory, kv_bytes, row_tensor_bytes
from batchspec.packing.planner import MORE_ROWS, Demand, choose_batch, forecast, held_back_bytes
from tests.helpers.stand_ins import H200
from tests.model.test_recurrent_families import TEXT_35B
from tests.packing.test_planner import always

GPU, BF16 = torch.device("cuda"), torch.bfloat16
SPEC = read_spec(TEXT_35B, "config.json")
DELTAS = [mixer for _, mixer in SPEC.mixers if isinstance(mixer, GatedDeltaSpec)]
STATE = 30 * 32 * 128 * 128
"""Numbers in the states of a row."""
FREE = 139 * 10**9 - SPEC.weight_bytes(BF16)


def round_s(spec: ModelSpec, rows: int, tokens: int = 1) -> float:
    return round_seconds(spec, H200, dtype=BF16, rows=rows, context_tokens=1000, tokens_per_row=tokens)


@pytest.mark.second
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_round_reads_and_writes_the_states_of_its_rows_once(tokens: int) -> None:
    """However many tokens it verifies."""
    halved = SPEC.with_state_dtype(BF16)
    assert round_s(SPEC, 256, tokens) - round_s(halved, 256, tokens) == pytest.approx(256 * STATE * 2 * 2 / 4.3e12)
    for spec, numbers in ((SPEC, STATE), (SPEC.sharded(Shard(1, 2)), STATE / 2)):
        made = batch(spec, 500, 500, tokens - 1)
        ahead = forecast(made, spec, H200, demand(500, 500), always(tokens - 1), dtype=BF16)
        assert ahead.state_bytes == made.num_slots * numbers * 4 * 2


def test_a_prompts_token_takes_the_products_of_its_chunk() -> None:
    """Counted product by product: (m, n, k) of each that `chunk_products.py` and `delta_chunks.py` compute for a chunk."""
    size, key_dim, value_dim = CHUNK.value, 128, 128
    pairs = [(size, size, key_dim)] * 2 + [(size, size, size)] * 4
    states = [(size, value_dim, key_dim)] * 2 + [(key_dim, value_dim, size)] + [(size, value_dim, size)] * 2
    of_chunk = 32 * sum(2 * m * n * k for m, n, k in pairs + states)
    assert [own.prefill_flop * size for own in DELTAS] == [of_chunk] * 30


def test_prefill_of_recurrent_layers_grows_with_the_prompt_and_not_with_its_square() -> None:
    def own_s(tokens: int) -> float:
        chunks_s = tokens * sum(PREFILL_SLOWDOWN * one.prefill_flop for one in DELTAS) / H200.flop_s(8192)
        attention_s = 4 * 10 * 16 * 256 * tokens * tokens / 2 / H200.flop_s(8192)
        return chunks_s + attention_s

    short, long = (prefill_seconds(SPEC, H200, dtype=BF16, prompt_tokens=n, pass_tokens=8192) for n in (8192, 65536))
    assert long - 8 * short == pytest.approx(own_s(65536) - 8 * own_s(8192), rel=0.01)


# --- the batch


def demand(prompt: int, output: int) -> Demand:
    return Demand(num_completions=20_000, prompt_tokens=prompt, output_tokens=output, max_tokens=prompt + 2 * output)


def batch(
    spec: ModelSpec, prompt: int, output: int, draft_len: int = 3, free_bytes: int = FREE, packing: PackingConfig | None = None
) -> PackedBatch:
    return choose_batch(
        packing or PackingConfig(), spec, H200, demand(prompt, output), device=GPU, dtype=BF16, drafts=always(draft_len),
        free_bytes=free_bytes,
    )


@pytest.mark.second
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("draft_len", [0, 3])
def test_states_and_pages_share_the_memory(draft_len: int, dtype: torch.dtype) -> None:
    """Short rows get many slots and few pages, long ones the other way round; nearly all rows have their pages at their end."""
    spec, found = SPEC.with_state_dtype(dtype), []
    for prompt, output in ((500, 500), (1000, 2000), (2000, 8000), (8000, 8000), (30_000, 2000)):
        made = batch(spec, prompt, output, draft_len)
        states, pages = row_tensor_bytes(made, spec, BF16), kv_bytes(made, spec, BF16)
        assert states >= made.num_slots * STATE * dtype.itemsize
        assert states + pages + held_back_bytes(made, spec, BF16, demand(prompt, output)) <= FREE
        assert made.num_pages * 16 >= made.num_slots * (prompt + output) / (1 + MORE_ROWS)
        assert made.num_slots < 1024 or dtype is BF16
        found.append((made.num_slots, states, pages))
    for (slots, states, pages), (fewer, less, more) in pairwise(found):
        assert (slots, states) > (fewer, less)
        assert pages < more
    assert found[0][1] > found[0][2]
    assert found[-1][1] < found[-1][2] / 5


def test_states_in_bf16_make_room_for_more_short_rows() -> None:
    plain, halved = (batch(one, 500, 500, 0).num_slots for one in (SPEC, SPEC.with_state_dtype(BF16)))
    assert halved > 1.3 * plain


def test_slots_beyond_the_rows_that_fit_take_memory_from_their_pages() -> None:
    """So fewer are worth it than of a model whose slots take none."""
    memory = KVMemory.of(
        SPEC, BF16, (), page_size=16, max_len=4096, max_tokens=4096, lookahead=4, pass_tokens=1024, num_verified=0
    )
    rows = memory.rows(60 * 10**9, 1000)
    slots = memory.slots(rows, 1000, 0.05)
    pages = (60 * 10**9 - memory.prefix_bytes - slots * memory.slot_bytes) / memory.page_bytes[0]
    of_row = (memory.row_bytes(1000) - memory.slot_bytes) / memory.page_bytes[0]
    assert 1.04 < slots * of_row / pages <= 1.05
    assert rows < slots < 1.02 * rows
    assert replace(memory, slot_bytes=0).slots(200, 1000, 0.05) == 210


def test_slots_that_the_memory_does_not_hold_are_refused() -> None:
    need = r"1,024 slots and 8 snapshots of prefixes need 7\d\.\d\d GB, "
    said = rf"{need}.*; raise packing\.memory_gb to 7\d\.\d\d or more, or lower packing\.max_num_seqs"
    with pytest.raises(CapacityError, match=said):
        batch(SPEC, 500, 500, packing=PackingConfig(max_num_seqs=1024))
    said = r"^packing.memory_gb=0.1 gives 0.10 GB; 1 slot .* raise packing.memory_gb to 0.69 or more"
    with pytest.raises(CapacityError, match=said):
        batch(SPEC, 500, 1000, packing=PackingConfig(memory_gb=0.1))
    assert batch(SPEC, 500, 500, packing=PackingConfig(max_num_seqs=512)).num_slots == 512


def test_a_given_number_of_pages_leaves_the_rest_to_states() -> None:
    made = batch(SPEC, 500, 500, packing=PackingConfig(pages=100_000))
    assert made.num_pages == 100_000
    together = row_tensor_bytes(made, SPEC, BF16) + kv_bytes(made, SPEC, BF16)
    assert 0.8 * FREE < together + held_back_bytes(made, SPEC, BF16, demand(500, 500)) <= FREE
