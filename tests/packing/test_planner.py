"""The shape fits the memory and the job, explicit values are kept, and requests come in a good order."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.layer_state import LayerState
from batchspec.config.schema import PackingConfig
from batchspec.draft.shapes import candidates
from batchspec.errors import CapacityError
from batchspec.model.spec import ModelSpec
from batchspec.packed_batch import PackedBatch
from batchspec.packing import device_memory
from batchspec.packing.cost import kv_read_bytes
from batchspec.packing.device_memory import free_memory
from batchspec.packing.expected_drafts import ExpectedDrafts
from batchspec.packing.kv_memory import KVMemory, kv_bytes
from batchspec.packing.memory import MOST_LENGTHS, reserve_bytes
from batchspec.packing.order import order_requests
from batchspec.packing.planner import Demand, choose_batch, forecast, row_buckets
from batchspec.packing.rates import Rates
from batchspec.packing.survey import Survey
from batchspec.process import cgroup
from batchspec.records import Request, SamplingParams
from tests.helpers.engines import uneven_target
from tests.helpers.stand_ins import H200, LLAMA_8B, small_spec

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MOST_RESERVE = 20 * 10**9
SLOW = Rates(name="slow", bytes_s=1e9, gemm=((1, 1e9), (256, 1e11)), overhead_s=1e-3)
REASONING = Demand(num_completions=10_000, prompt_tokens=8192, output_tokens=1500, max_tokens=11_264)
LLAMA_PAGE = LLAMA_8B.num_layers * LLAMA_8B.page_formats(torch.bfloat16, 16)[0].page_bytes


def always(draft_len: int, accepted: float = 0.0) -> ExpectedDrafts:
    """Rounds that all verify as many drafts."""
    return ExpectedDrafts((draft_len,), accepted)


def on_gpu(
    demand: Demand = REASONING,
    free_bytes: int = 120 * 10**9,
    draft_len: int = 3,
    draft_layers: Sequence[LayerState] = (),
    spec: ModelSpec = LLAMA_8B,
    **packing: Any,
) -> PackedBatch:
    return choose_batch(
        PackingConfig(**packing), spec, H200, demand, device=GPU, dtype=torch.bfloat16, drafts=always(draft_len),
        draft_layers=draft_layers, free_bytes=free_bytes,
    )


def test_passes_have_room_for_what_may_not_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a batch was made smaller than the key says, because memory ran out."""
    assert on_gpu(max_num_batched_tokens=64).prefill_tokens == 64
    monkeypatch.setattr(ModelSpec, "least_pass", property(lambda _: 16_384))
    found = on_gpu(max_num_batched_tokens=64)
    assert (found.prefill_tokens, found.num_pages) == (16_384, on_gpu(max_num_batched_tokens=16_384).num_pages)  # memory is kept
    demand, free_bytes = replace(REASONING, max_tokens=8400), 10 * 10**9  # a small GPU, where passes are shortened
    small, given = on_gpu(demand, free_bytes), on_gpu(demand, free_bytes, max_num_batched_tokens=16_384)
    assert (small.prefill_tokens, small.num_pages) == (16_384, given.num_pages)


def test_memory_is_kept_for_the_graphs_of_every_draft_length_that_is_tried() -> None:
    """A tree of 60 nodes does not have 61 of them."""
    assert max(len(candidates(max_len)) for max_len in range(1, 65)) == MOST_LENGTHS
    kinds = [
        reserve_bytes(LLAMA_8B, dtype=torch.bfloat16, slots=0, num_buckets=2, num_verified=k, prefill_tokens=0, max_len=0)
        for k in (3, 12, 60)
    ]
    assert [kind - kinds[0] for kind in kinds] == [0, 9 * 2 * 16 * 10**6, 9 * 2 * 16 * 10**6]


def test_what_one_h200_holds_back_is_the_sum_of_its_parts() -> None:
    """Those of the example in `packing/memory.py`: 92 rows of up to 11,264 tokens, K = 3, passes of 16,384 tokens."""
    held = reserve_bytes(
        LLAMA_8B, dtype=torch.bfloat16, slots=92, num_buckets=11, num_verified=3, prefill_tokens=16_384, max_len=11_264
    )
    a_pass, a_round, logits, attention, state, graphs, fixed = 4.530e9, 0.102e9, 0.566e9, 0.132e9, 0.052e9, 1.072e9, 2e9
    assert held == pytest.approx(a_pass + a_round + logits + attention + state + graphs + fixed, abs=2e6)


def test_nothing_is_held_back_for_rounds_where_nothing_is_decoded() -> None:
    """Neither activations, graphs, penalties nor logits of each slot: those of 512 tokens, none without an output matrix."""
    shape: dict[str, Any] = {
        "dtype": torch.bfloat16, "num_buckets": 11, "num_verified": 0, "prefill_tokens": 16_384, "max_len": 1024,
        "decodes": False,
    }
    held = {slots: reserve_bytes(LLAMA_8B, slots=slots, **shape) for slots in (16, 1024)}
    assert held[1024] - held[16] == pytest.approx(5 * (1024 - 16) * 1024, abs=2e8), "token buffers, and partial results"
    without = reserve_bytes(LLAMA_8B.without_output(), slots=16, **shape)
    assert held[16] - without == 12 * 512 * LLAMA_8B.vocab_size
    a_round, penalties, graphs = (1024 * 1.5 * 2 * (12 * 4096 + 3 * 14336), 1024 * 4 * 128256, 22 * 16e6)
    more = reserve_bytes(LLAMA_8B, slots=1024, **shape | {"decodes": True}) - held[1024]
    assert more == pytest.approx(a_round + penalties + graphs + 12 * (1024 - 512) * 128256, abs=2e6)


def test_a_batch_that_decodes_nothing_has_the_memory_of_rounds_for_pages() -> None:
    """Unless each slot can have a row of maximum length anyway."""
    demand, free_bytes = Demand(num_completions=9999, prompt_tokens=60, output_tokens=0, max_tokens=8192), 20 * 10**9
    pages = [
        choose_batch(
            PackingConfig(max_num_seqs=1024), LLAMA_8B, H200, demand, device=GPU, dtype=torch.bfloat16, drafts=always(0),
            free_bytes=free_bytes, decodes=decodes,
        ).num_pages
        for decodes in (True, False)
    ]
    assert pages[1] > 1.1 * pages[0]


@pytest.mark.parametrize(("prompt", "shares", "completions", "slots"), [
    (128, False, 200_000, 1024), (128, True, 200_000, 2048), (64, False, 200_000, 2048), (2, False, 200_000, 4096),
    (1024, False, 8000, 128), (1024, False, 40, 40), (20_000, False, 8000, 8),
])
def test_rows_that_end_with_their_prefill_have_slots_for_the_passes_in_flight(
    prompt: int, shares: bool, completions: int, slots: int
) -> None:
    """Twice those of two that wait for the device, one that is read and one that is prepared, of 16,384 tokens each. A CPU waits
    for each."""
    demand = Demand(
        num_completions=completions, prompt_tokens=prompt, output_tokens=0, max_tokens=32_768, shares_prefix=shares
    )
    of: Any = partial(
        choose_batch, PackingConfig(), LLAMA_8B, H200, demand, dtype=torch.bfloat16, drafts=always(0), free_bytes=120 * 10**9,
        decodes=False,
    )
    assert of(device=GPU).num_slots == slots
    assert of(device=CPU).num_slots == min(completions, (4 if shares else 2) * 2 * -(-1024 // prompt), 4096)


def test_the_buffers_of_rows_fit_the_memory_reserved_for_them() -> None:
    sizes = []
    for max_len in (16, 512):
        batch = PackedBatch(
            num_slots=8, row_buckets=(8,), num_pages=2, page_size=16, max_len=max_len, num_verified=3, prefill_tokens=8,
            run_ahead=0,
        )
        rows = DeviceBatch.allocate(batch, vocab_size=300, device=CPU)
        rows.provide(SamplingMode(penalties=True))
        held = reserve_bytes(
            small_spec(), dtype=torch.float32, slots=8, num_buckets=1, num_verified=3, prefill_tokens=8, max_len=max_len
        )
        no_tensors = ("page_tables", "automata", "images", "options", "vocab_size", "max_kv")
        tensors = [getattr(rows, field.name) for field in fields(rows) if field.name not in no_tensors]
        tensors += rows.options.values()
        sizes.append((sum(tensor.nbytes for tensor in (*tensors, *rows.page_tables)), held))
    needed, held = (more - less for less, more in zip(*sizes, strict=True))
    assert needed <= held <= 1.3 * needed


def test_places_after_the_end_of_rows_have_pages_too() -> None:
    """A tree of 60 nodes needs 59 places after a row's last token: four pages more a row, and one row must have them."""
    demand = Demand(num_completions=4, prompt_tokens=90, output_tokens=30, max_tokens=128)
    sizes = [_small(demand, num_lookahead_slots).num_pages for num_lookahead_slots in (0, 59)]
    assert sizes == [4 * 8 + 1, 4 * 12 + 1]
    assert _small(demand, 59).max_len == 128
    with pytest.raises(CapacityError, match=r"one row of 187 tokens needs 13"):
        _small(demand, 59, pages=12)


def test_following_the_advice_of_a_refusal_is_enough() -> None:
    demand = Demand(num_completions=4, prompt_tokens=9000, output_tokens=3000, max_tokens=12_800)
    with pytest.raises(CapacityError, match=r"raise packing.pages to 801 or more"):
        _small(demand, 0, pages=12)
    assert _small(demand, 0, pages=801).max_len == 12_800
    with pytest.raises(CapacityError, match=r"raise packing.memory_gb to (\S+) or more") as refusal:
        _small(demand, 0, memory_gb=1e-5)
    (enough_gb,) = re.findall(r"memory_gb to (\S+) or", str(refusal.value))
    assert _small(demand, 0, memory_gb=float(enough_gb)).max_len == 12_800


def _small(demand: Demand, num_lookahead_slots: int, **packing: Any) -> PackedBatch:
    return choose_batch(
        PackingConfig(**packing),
        small_spec(),
        SLOW,
        demand,
        device=CPU,
        dtype=torch.float32,
        drafts=always(60),
        num_lookahead_slots=num_lookahead_slots,
        free_bytes=10**9,
    )


def on_cpu(demand: Demand, **packing: Any) -> PackedBatch:
    return choose_batch(
        PackingConfig(**packing), small_spec(), SLOW, demand, device=CPU, dtype=torch.float32, drafts=always(4),
        free_bytes=10**9,
    )


def reserve(batch: PackedBatch, spec: ModelSpec = LLAMA_8B) -> int:
    return reserve_bytes(
        spec, dtype=torch.bfloat16, slots=batch.num_slots, num_buckets=len(batch.row_buckets), num_verified=batch.num_verified,
        prefill_tokens=batch.prefill_tokens, max_len=batch.max_len,
    )


def test_long_prompts_on_one_gpu_take_as_many_rows_as_the_memory_holds() -> None:
    batch = on_gpu(draft_len=0)
    assert batch.num_slots == batch.row_buckets[-1] == 88
    assert batch.num_pages * LLAMA_PAGE <= 120e9 - reserve(batch)


def test_rows_fill_the_tiles_of_products() -> None:
    """256 places take two tiles of 128: rows for a third one come only where they nearly fill it."""
    batch = on_gpu()
    assert batch.num_slots == batch.row_buckets[-1] == 64
    assert on_gpu(free_bytes=135 * 10**9).num_slots == 96
    assert batch.num_pages * LLAMA_PAGE <= 120e9 - reserve(batch)
    assert (batch.page_size, batch.max_len, batch.num_verified) == (16, 11_264, 3)
    assert (batch.prefill_tokens, batch.run_ahead) == (16_384, 2)


def test_one_h200_holds_75_rows_of_llama_8b_at_their_full_length() -> None:
    free = 143_771 * 2**20 - 18_500_000_000  # what the card has, less weights, a one-layer head and the driver's own
    for output in (1063, 1536):
        job = Demand(num_completions=192, prompt_tokens=8192, output_tokens=output, max_tokens=11_264)
        batch = on_gpu(job, free_bytes=free, draft_layers=(LayerState(LLAMA_8B.page_formats(torch.bfloat16, 16)[0]),))
        assert batch.num_pages >= 75 * 704 + 1
        assert batch.num_slots in (88, 96)


def test_a_small_card_prefills_in_shorter_passes() -> None:
    tight = on_gpu(free_bytes=6 * 10**9)
    assert tight.prefill_tokens == 1024
    assert tight.num_pages * LLAMA_PAGE + reserve(tight) <= 6e9
    assert on_gpu(free_bytes=6 * 10**9, pages=800, max_num_batched_tokens=4096).prefill_tokens == 4096


def test_passes_that_take_little_memory_stay_long_however_much_the_rounds_of_long_rows_need() -> None:
    """With one order of sums every 2,048 keys of a row have a partial result."""
    long = Demand(num_completions=768, prompt_tokens=1000, output_tokens=512, max_tokens=262_144)
    batch = on_gpu(long, free_bytes=80 * 10**9, spec=LLAMA_8B.in_one_order(), max_num_seqs=768)
    assert reserve(batch, LLAMA_8B.in_one_order()) > 80e9 / 4
    assert batch.prefill_tokens == 16_384


def test_rows_that_may_become_long_hold_back_little_more_than_short_ones() -> None:
    """A GPU splits only as many rows at a time as its programs compute."""
    short, long = (
        reserve_bytes(
            LLAMA_8B, dtype=torch.bfloat16, slots=384, num_buckets=1, num_verified=3, prefill_tokens=16_384, max_len=max_len
        )
        for max_len in (2048, 262_144)
    )
    token_buffers = 384 * 5 * (262_144 - 2048)
    assert long - short == token_buffers


def test_a_short_job_holds_back_what_its_own_passes_need() -> None:
    own = reserve_bytes(
        LLAMA_8B, dtype=torch.bfloat16, slots=1, num_buckets=1, num_verified=3, prefill_tokens=40, max_len=40
    )
    one = Demand(num_completions=1, prompt_tokens=30, output_tokens=10, max_tokens=40)
    assert on_gpu(one, free_bytes=own + 4 * LLAMA_PAGE).num_pages == 4


def test_a_prefill_pass_is_most_of_the_reserved_memory() -> None:
    batch = on_gpu()
    gate_up = 16_384 * 28_672 * 2
    assert 4 * gate_up < reserve(batch) < 10 * gate_up
    assert reserve(batch) - reserve(on_gpu(max_num_batched_tokens=1024)) > 3 * gate_up


def test_a_small_model_runs_a_thousand_short_rows_beside_its_logits() -> None:
    smol = small_spec(
        hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536, vocab_size=49_152,
        windows=(None,) * 30, max_len=8192,
    )
    gsm8k = Demand(num_completions=1319, prompt_tokens=150, output_tokens=128, max_tokens=700)
    batch = choose_batch(
        PackingConfig(), smol, H200, gsm8k, device=GPU, dtype=torch.bfloat16, drafts=ExpectedDrafts((0, 1, 2, 3), 1.5),
        draft_layers=(LayerState(smol.page_formats(torch.bfloat16, 16)[0]),), free_bytes=140 * 10**9,
    )
    assert batch.num_slots > 1000
    assert batch.num_pages == batch.num_slots * 44 + 1
    logits = batch.num_slots * 4 * 49_152 * 4
    assert reserve(batch, smol) > 3 * logits


def test_short_rows_take_the_smallest_batch_near_the_best_speed() -> None:
    demand = Demand(num_completions=10**6, prompt_tokens=200, output_tokens=200, max_tokens=512)
    # 582 TFLOP/s is the best that products reach, at 512 tokens: more rows take as much longer as they bring.
    assert on_gpu(demand, draft_len=3).num_slots == 128
    assert on_gpu(demand, draft_len=0).num_slots == 512


def test_a_cpu_runs_at_most_sixteen_rows_one_round_at_a_time() -> None:
    batch = on_cpu(Demand(num_completions=1000, prompt_tokens=50, output_tokens=50, max_tokens=300))
    assert batch.num_slots <= 16
    assert batch.run_ahead == 0


def test_a_cpu_leaves_part_of_its_memory_to_others() -> None:
    batch = on_cpu(Demand(num_completions=10**6, prompt_tokens=4000, output_tokens=4000, max_tokens=500_000))
    taken = batch.num_pages * 2 * small_spec().page_formats(torch.float32, 16)[0].page_bytes
    assert 0.59e9 < taken <= 0.6e9


@pytest.mark.parametrize("place", ["", "pod", "pod/container"])
def test_a_control_group_s_limit_counts_if_it_is_below_the_machine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Of the process's own group, and of each one around it."""
    monkeypatch.setattr(device_memory, "Path", lambda path: tmp_path / path.lstrip("/"))
    found = partial(cgroup.free_memory_of_cgroups, tmp_path / "sys/fs/cgroup", tmp_path / "proc/self")
    monkeypatch.setattr(device_memory, "free_memory_of_cgroups", found)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 5000000 kB\n")
    assert free_memory(CPU) == 5_000_000 * 1024
    (tmp_path / "proc/self").write_text("0::/pod/container\n")
    group = tmp_path / "sys/fs/cgroup" / place
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000000000\n")
    for limit, free in (("3000000000", 2 * 10**9), ("90000000000", 5_000_000 * 1024), ("max", 5_000_000 * 1024)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert free_memory(CPU) == free


@pytest.mark.parametrize(("limit", "free"), [("3000000000", 2 * 10**9), (f"{2**63 - 4096}", 2**63 - 4096 - 10**9), ("", None)])
def test_a_control_group_of_version_1_limits_memory_too(tmp_path: Path, limit: str, free: int | None) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(limit)
    (tmp_path / "memory/memory.usage_in_bytes").write_text("1000000000\n")
    assert cgroup.free_memory_of_cgroups(tmp_path, tmp_path / "none") == free


def survey(*rows: tuple[int, int]) -> Survey:
    """The demand of rows with these numbers of prompt tokens and caps."""
    seen = Survey()
    seen.add(len(rows), [replace(request(row, [1] * prompt), max_new_tokens=cap) for row, (prompt, cap) in enumerate(rows)])
    return seen


def test_the_longest_row_is_known_only_if_every_row_was_surveyed() -> None:
    """The longest prompt and the largest cap belong to different rows."""
    seen = survey((30, 6), (4, 20), (10, 5))
    assert seen.demand(3, 512).max_tokens == 36
    assert seen.demand(4, 512).max_tokens == 512


def test_prefill_is_prepared_for_the_longest_prompt_that_was_seen() -> None:
    demand = survey((30, 6), (4, 200), (10, 5)).demand(1000, 512)
    assert demand.longest_prompt == 30
    assert on_cpu(demand).longest_prompt == 30


def test_rounds_are_prepared_for_the_longest_row_that_was_seen() -> None:
    demand = survey((30, 6), (4, 20), (10, 5)).demand(1000, 512)
    assert demand.longest_row == 36
    assert on_cpu(demand).longest_row == 36


def test_a_small_job_gets_no_more_slots_or_pages_than_it_can_use() -> None:
    batch = on_cpu(Demand(num_completions=3, prompt_tokens=10, output_tokens=10, max_tokens=40))
    assert batch.num_slots <= 3
    assert batch.num_pages == batch.num_slots * 3 + 1
    assert batch.max_len == 40


def test_what_the_job_sets_is_kept() -> None:
    batch = on_gpu(max_num_seqs=24, pages=5000, max_num_batched_tokens=777, run_ahead=5)
    assert (batch.num_slots, batch.num_pages, batch.prefill_tokens, batch.run_ahead) == (24, 5000, 777, 5)
    assert batch.row_buckets == (1, 2, 4, 8, 12, 16, 24)
    assert on_gpu(memory_gb=10.0).num_pages == int(10e9) // LLAMA_PAGE


def test_one_row_must_fit() -> None:
    assert on_gpu(pages=705).num_pages == 705
    with pytest.raises(CapacityError, match=r"packing.pages=704 gives 704 K/V pages .* needs 705; raise .*pages to 705 or"):
        on_gpu(pages=704)
    with pytest.raises(CapacityError, match=r"packing.memory_gb=1.0 gives 476 K/V pages .* raise .*memory_gb to 1.48 or"):
        on_gpu(memory_gb=1.0)
    with pytest.raises(CapacityError, match=r"the GPU's free 0.00 GB less 2.\d\d GB for passes, rounds and graphs gives 0"):
        on_gpu(free_bytes=0)


lengths = st.integers(1, 4000)


@pytest.mark.second
@given(st.integers(1, 10**6), lengths, lengths, lengths, st.integers(0, 8), st.integers(10**9, 10**11))
def test_every_chosen_shape_can_run(completions: int, prompt: int, output: int, extra: int, draft_len: int, free: int) -> None:
    demand = Demand(num_completions=completions, prompt_tokens=prompt, output_tokens=output, max_tokens=prompt + output + extra)
    try:
        batch = on_gpu(demand, free_bytes=free, draft_len=draft_len)
    except CapacityError:
        assert (-(-demand.max_tokens // 16) + 2) * LLAMA_PAGE > free - MOST_RESERVE
        return
    assert 1 <= batch.num_slots <= max(1, completions)
    assert batch.num_pages - 1 >= -(-demand.max_tokens // 16)
    assert batch.num_pages * LLAMA_PAGE <= free - 2 * 10**9
    assert batch.prefill_tokens >= 1


@given(st.integers(1, 4096))
def test_row_buckets_ascend_to_the_slots(slots: int) -> None:
    buckets = row_buckets(slots)
    assert buckets[-1] == slots
    assert list(buckets) == sorted(set(buckets))
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(buckets))


def test_a_forecast_counts_full_rounds_and_the_tail() -> None:
    batch = on_gpu(max_num_seqs=64, draft_len=0)
    plain = forecast(batch, LLAMA_8B, H200, REASONING, always(0), dtype=torch.bfloat16)
    drafted = forecast(batch, LLAMA_8B, H200, REASONING, always(3, accepted=1.0), dtype=torch.bfloat16)
    assert plain.rounds == pytest.approx(10_000 * 1500 / 64, rel=0.01)
    assert drafted.rounds == pytest.approx(plain.rounds / 2, abs=1)
    assert (plain.num_drafts, drafted.num_drafts) == (0, 3)
    assert drafted.accepted == pytest.approx(1.0)
    assert 0.99 * plain.rounds * plain.round_s < plain.decode_s < plain.rounds * plain.round_s  # the last rounds have fewer rows
    assert plain.prefill_s > 0


def test_free_memory_leaves_room_for_the_weights() -> None:
    free = free_memory(CPU)
    assert free > 10**8
    assert free_memory(CPU, weights=free * 2) == 0


def request(row: int, prompt: list[int], predicted: int = 10, sample: int = 0) -> Request:
    return Request(
        request_id=f"r{row}", row_index=row, sample_index=sample, shard=0, prompt_ids=np.array(prompt, np.int32),
        max_new_tokens=100, min_new_tokens=0, sampling=SamplingParams(), stop_ids=(), stop=(), seed=0, predicted_tokens=predicted,
    )


def order(*requests: Request) -> list[tuple[int, int]]:
    return [(item.row_index, item.sample_index) for item in order_requests(requests, page_size=2)]


def test_a_prompt_of_whole_pages_belongs_with_others_that_begin_like_it() -> None:
    """Its last page counts too: row 2 shares both of its pages with row 0, and one with row 1."""
    rows = [
        request(0, [1, 2, 3, 4], predicted=30),
        request(1, [1, 2, 9, 9, 9], predicted=20),
        request(2, [1, 2, 3, 4], predicted=1),
    ]
    assert order(*rows) == [(0, 0), (2, 0), (1, 0)]


def test_the_longest_predicted_row_goes_first_and_ties_keep_their_order() -> None:
    rows = [request(0, [1], 5), request(1, [2], 9), request(2, [3], 9), request(3, [4, 5], 20)]
    assert order(*reversed(rows)) == [(3, 0), (1, 0), (2, 0), (0, 0)]


def test_prompts_are_not_sorted_by_length() -> None:
    """Else the passes of refills would differ in size, and each size needs a CUDA graph of its own."""
    assert order(request(0, [1], 5), request(1, [2, 3, 4], 5), request(2, [5, 6], 5)) == [(0, 0), (1, 0), (2, 0)]


def test_rows_with_a_common_prefix_are_neighbours_in_the_place_of_their_longest() -> None:
    shared = [request(0, [7, 8, 1], 5), request(4, [7, 8, 2], 50)]
    others = [request(1, [1, 1, 1], 40), request(2, [2, 2, 2], 60), request(3, [3], 1)]
    assert order(*shared, *others) == [(2, 0), (4, 0), (0, 0), (1, 0), (3, 0)]


def test_a_deeper_common_prefix_counts_more_than_one_that_all_rows_have() -> None:
    rows = [
        request(0, [9, 9, 1, 1], 30), request(1, [9, 9, 5, 5, 1], 20),
        request(2, [9, 9, 2, 2], 25), request(3, [9, 9, 5, 5, 2], 10),
    ]
    assert order(*rows) == [(0, 0), (2, 0), (1, 0), (3, 0)]


def test_the_samples_of_a_row_are_neighbours() -> None:
    rows = [request(row, [row], 10, sample) for sample in range(3) for row in range(2)]
    assert order(*rows) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(1, 50)), max_size=12))
def test_ordering_loses_nothing_and_does_not_depend_on_how_rows_arrive(rows: list[tuple[list[int], int]]) -> None:
    window = [request(row, prompt, predicted) for row, (prompt, predicted) in enumerate(rows)]
    made = order(*window)
    assert sorted(made) == [(row, 0) for row in range(len(rows))]
    assert made == order(*reversed(window))


def test_slots_refilled_in_this_order_come_close_to_the_ideal_even_when_only_the_cap_is_known() -> None:
    rng = np.random.default_rng(0)
    outputs = np.minimum(8192, np.ceil(rng.lognormal(np.log(1493), 0.85, 20_000))).astype(int)
    window = [request(row, [row], predicted=8192) for row in range(512)]
    assert order(*window) == [(row, 0) for row in range(512)]
    ends = [0] * 128
    for output in outputs:  # a slot that is free first takes the next row
        heapq.heapreplace(ends, ends[0] + int(output))
    assert max(ends) <= 1.05 * outputs.sum() / 128


def windowed(*windows: int | None) -> ModelSpec:
    return small_spec(windows=windows)


def memory_of(spec: ModelSpec, *, max_tokens: int, lookahead: int = 4, drafts: Sequence[LayerState] = ()) -> KVMemory:
    return KVMemory.of(
        spec, torch.float32, drafts, page_size=16, max_len=max_tokens, max_tokens=max_tokens, lookahead=lookahead, pass_tokens=1,
        num_verified=3,
    )


def test_a_row_needs_the_pages_of_its_window_and_all_of_them_where_layers_read_all_keys() -> None:
    """1,000 tokens are 63 pages; a window of 100 spans at most 8 with what is not committed yet, wherever in a page it begins."""
    full, sliding, mixed = (windowed(*windows) for windows in ((None, None), (100, 100), (None, 100)))
    layer = full.page_formats(torch.float32, 16)[0].page_bytes
    found = [memory_of(spec, max_tokens=1000).row_bytes(1000) for spec in (full, sliding, mixed)]
    assert found == [2 * 63 * layer, 2 * 8 * layer, (63 + 8) * layer]
    assert memory_of(sliding, max_tokens=1000).row_bytes(40) == 2 * 3 * layer


def test_each_layer_takes_the_bytes_of_its_own_keys() -> None:
    """A page of 16 tokens in fp32: of a layer with a window 2 * 2 heads of 4, of the others 2 * 1 head of 6."""
    spec = uneven_target(100).spec
    assert memory_of(spec, max_tokens=1000).page_bytes == (2 * 16 * 2 * 6 * 4, 2 * 16 * 2 * 2 * 4 * 4)
    assert memory_of(spec, max_tokens=100).page_bytes == (2 * 16 * 4 * (2 * 6 + 2 * 2 * 4),)
    read = kv_read_bytes(spec, dtype=torch.float32, rows=3, context_tokens=500, tokens_per_row=1)
    assert read == 3 * 2 * (500 * 2 * 6 + 100 * 2 * 2 * 4) * 4


def test_rows_fit_next_to_the_scratch_pages_and_a_prefill_pass() -> None:
    """A row in prefill holds 63 pages of a windowed group, of which it gives 55 back before it decodes."""
    memory = memory_of(windowed(None, 100), max_tokens=1000)
    layer = memory.page_bytes[0]
    row, reserved = (63 + 8) * layer, (1 + 1 + 63 - 8) * layer
    for count in (2, 10):
        assert memory.rows(reserved + count * row, 1000) == count
        assert memory.rows(reserved + count * row - 1, 1000) == count - 1
    assert memory.rows(0, 1000) == 1


def test_pools_hold_what_all_slots_need_or_share_out_the_memory_that_there_is() -> None:
    """While a row is prefilled it needs all its pages in every group."""
    memory = memory_of(windowed(None, 100, 100), max_tokens=1000)
    layer = memory.page_bytes[0]
    assert memory.page_bytes == (layer, 2 * layer)
    assert memory.num_pages(10**12, 10) == (1 + 10 * 63, 1 + 10 * 8 + 63 - 8)
    assert memory.num_pages(10**12, 1) == (64, 64)
    for budget in range(3 * 64 * layer, 1000 * layer, 37 * layer):
        pages = memory.num_pages(budget, 10)
        assert all(64 <= count <= most for count, most in zip(pages, (631, 136), strict=True))
        used = sum(count * size for count, size in zip(pages, memory.page_bytes, strict=True))
        assert used <= budget
        assert used > budget - 3 * layer or pages == (631, 136)


def test_a_sliding_window_lets_more_rows_into_the_same_memory() -> None:
    demand = Demand(num_completions=400, prompt_tokens=900, output_tokens=90, max_tokens=1000)
    batches = [
        choose_batch(
            PackingConfig(memory_gb=0.01), spec, H200, demand, device=GPU, dtype=torch.bfloat16, drafts=always(0),
            free_bytes=10**11,
        )
        for spec in (windowed(None, None), windowed(100, 100), windowed(None, 100))
    ]
    assert batches[0].num_slots < batches[2].num_slots < batches[1].num_slots
    assert [len(batch.more_pages) for batch in batches] == [0, 0, 1]
    for batch, spec in zip(batches, (windowed(None, None), windowed(100, 100), windowed(None, 100)), strict=True):
        assert kv_bytes(batch, spec, torch.bfloat16) <= 10**7
