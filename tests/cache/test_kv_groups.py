"""K/V groups: layers with a sliding window keep no page that their window has passed, and no token changes for it.

A page that its last owner gave back is filled with NaN at once: whoever reads it anyway emits no token, or drafts something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.groups import KVGroups
from batchspec.cache.page_tables import PagePools, RowPages
from batchspec.cache.pages import SCRATCH_PAGE, KVCache, prefix_hashes
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import load_head
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.records import RoundOptions
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.records import Request, SamplingParams
from tests.helpers.attentions import windows
from tests.helpers.block_heads import tiny_block
from tests.helpers.drafting import synthetic
from tests.helpers.engines import (
    DEVICE,
    VOCAB,
    in_e4m3,
    make_engine,
    packed,
    plain_tokens,
    request,
    tiny_spec,
    tiny_target,
    uneven_target,
)
from tests.helpers.freed_pages import poison_freed_pages
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.kernels.covering import covering

pytestmark = pytest.mark.second

WINDOW, LONG = 7, 200
SLIDING, MIXED, TWO_WINDOWS = (WINDOW, WINDOW), (None, WINDOW), (WINDOW, 3)


@cache
def windowed_target(windows: tuple[int | None, ...], fp8_kv: bool = False) -> Target:
    """The tiny target with these windows, one a layer."""
    target = Target.load(Path(), tiny_spec(windows=windows), dtype=torch.float64, device=DEVICE, dummy=True)
    return in_e4m3(target) if fp8_kv else target


def long_requests(count: int = 5, *, sampling: SamplingParams | None = None, samples: int = 1) -> list[Request]:
    """Rows of several windows' length; every other one begins like its neighbours, and `samples` are of the same prompt."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, VOCAB, 22).tolist()
    prompts = [(beginning if i % 2 else []) + rng.integers(0, VOCAB, 3 + 5 * i).tolist() for i in range(count)]
    return [
        request(10 * i + sample, prompt, cap=31 - 3 * i, sampling=sampling, predicted=4)
        for i, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


class Recorded:
    """Keeps what a drafter proposed for each live row, with the tokens that the row had then."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> Any:
        parents = super().propose(rows, draft_ids, draft_len, cache)  # type: ignore[misc]
        is_tree = draft_ids.shape[1] > self.draft_len  # type: ignore[attr-defined]
        for slot in rows.live.nonzero().flatten().tolist():
            tokens, drafts = rows.tokens[slot, : int(rows.num_tokens[slot])].tolist(), draft_ids[slot].tolist()
            self.seen.append((tokens, drafts if is_tree else drafts[: int(draft_len[slot])]))
        return parents


class _Chain(Recorded, ChainDrafter):
    pass


class _Parallel(Recorded, ParallelDrafter):
    pass


class _Block(Recorded, BlockDrafter):
    pass


class _Lookup(Recorded, LookupDrafter):
    pass


class _Window(Recorded, WindowDrafter):
    pass


class _Tree(Recorded, TreeDrafter):
    pass


def make_drafter(name: str, target: Target, folder: Path, slots: int) -> Drafter:
    """A drafter of up to four tokens; heads are random and read all keys, or the newest few ("... with a window")."""
    if name == "none":
        return NoDrafter()
    if name == "lookup":
        return _Lookup(4, min_ngram=2, max_ngram=6)
    if name == "window":
        return _Window(target, 3, slots=slots, window=5, sink=2)
    narrow = {"window": 5} if "with a window" in name else {}
    if "block" in name:  # of its layers one is causal
        kind: dict[str, Any] = {"windows": (9, 10), "windows_at_anchor": "speculators" in name}
        return _Block(tiny_block(target.spec, **kind if "own windows" in name else {}), target, 4, slots=slots, **narrow)
    design = tiny_design(target.spec, draft_vocab=VOCAB, **({"mask_id": 3} if "parallel" in name else {}))
    write_head(folder, design, random_tensors(design, seed=5))
    head = load_head(folder, target.spec, dtype=target.dtype, device=DEVICE, aux_layers="input")
    if "tree" in name:
        return _Tree(head, target, TreeShape(topk=3, depth=3, nodes=8), slots=slots, **narrow)
    drafter: Drafter = (_Parallel if "parallel" in name else _Chain)(head, target, 4, slots=slots, **narrow)
    return drafter


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Put an engine in the list: see `poison_freed_pages`."""
    engines: list[Engine] = []
    poison_freed_pages(monkeypatch, engines)
    return engines


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    done = {done.request_id: done for done in engine.run(iter(requests))}
    assert [name for name, one in done.items() if one.error is not None] == []
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    return {name: one.token_ids.tolist() for name, one in done.items() if one.token_ids is not None}


@cache
def _expected(
    windows: tuple[int | None, ...], fp8_kv: bool, seed: int, cap: int, sampling: SamplingParams, prompt: tuple[int, ...]
) -> list[int]:
    return plain_tokens(windowed_target(windows, fp8_kv), request(seed - 1000, prompt, cap=cap, sampling=sampling))


def expected(target: Target, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Of plain decoding, one row at a time; computed once for all tests."""
    own, fp8_kv = windows(target.spec), target.spec.fp8_kv
    return {
        one.request_id: _expected(own, fp8_kv, one.seed, one.max_new_tokens, one.sampling, tuple(one.prompt_ids.tolist()))
        for one in requests
    }


def batch_of(slots: int = 3, **changes: Any) -> PackedBatch:
    return packed(slots, max_len=80, num_pages=200, prefill_tokens=24, **changes)


@pytest.mark.parametrize(("paging", "windows"), covering([(2, 1), (4, 0), (4, 2), (16, 1)], [SLIDING, MIXED, TWO_WINDOWS]))
def test_tokens_are_those_of_plain_decoding(
    paging: tuple[int, int], windows: tuple[int | None, ...], poisoned: list[Engine]
) -> None:
    page_size, run_ahead = paging
    requests = long_requests(sampling=SamplingParams(temperature=0.8) if run_ahead == 2 else None)
    batch = batch_of(page_size=page_size, run_ahead=run_ahead)
    poisoned.append(make_engine(windowed_target(windows), NoDrafter(), batch, device=DEVICE))
    assert run(poisoned[0], requests) == expected(windowed_target(windows), requests)


@pytest.mark.parametrize("name", ["chain", "tree", "parallel", "window"])
def test_e4m3_keys_give_the_tokens_of_plain_decoding_over_e4m3_keys(
    name: str, poisoned: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows, shared prefixes, preempted rows and drafts, whose own K/V are not e4m3."""
    monkeypatch.setattr("batchspec.engine.slots.expected_pages.SHORT_CAP_TOKENS", 0)
    target, requests = windowed_target(MIXED, fp8_kv=True), long_requests(8, sampling=SamplingParams(temperature=1.0))
    batch = replace(batch_of(6, page_size=2, num_verified=8, run_ahead=1), num_pages=1 + 39)
    engine = make_engine(target, make_drafter(name, target, tmp_path, 6), batch, device=DEVICE)
    poisoned.append(engine)
    assert run(engine, requests) == expected(target, requests)
    assert engine.totals.preempted > 0
    assert engine.totals.cached_tokens > 0
    num_drafts = len(engine.drafter.layer_states(4))
    assert [LayerKV.of(layer).layout.fp8 for layer in engine.executor.cache.layers] == [True, True] + [False] * num_drafts


DRAFTERS = [
    "lookup", "window", "chain", "chain with a window", "parallel", "tree", "tree with a window", "block", "block with a window",
    "block with own windows", "block with own windows of speculators",
]


@pytest.mark.parametrize(("name", "windows"), covering(DRAFTERS, [SLIDING, MIXED]))
def test_drafts_and_tokens_are_those_of_an_engine_that_keeps_every_page(
    name: str, windows: tuple[int | None, ...], poisoned: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens would be right with wrong drafts too."""
    target, requests = windowed_target(windows), long_requests()
    batch = batch_of(num_verified=8, page_size=2 if "tree" in name else 4, run_ahead=len(name) % 3)
    real = make_drafter(name, target, tmp_path / "real", 3)
    poisoned.append(make_engine(target, real, batch, device=DEVICE))
    assert run(poisoned[0], requests) == expected(target, requests)
    found, seen = [], []
    for keeps_all in (False, True):
        drafter: Any = make_drafter(name, target, tmp_path / str(keeps_all), 3)
        if keeps_all:
            monkeypatch.setattr(KVGroups, "of", lambda windows, drafts, max_len: KVGroups.single(len(windows)))
        poisoned[:] = [make_engine(target, drafter, batch, device=DEVICE, options=synthetic(drafter.draft_len))]
        found.append(run(poisoned[0], requests))
        seen.append(drafter.seen)
        assert keeps_all == (poisoned[0].executor.cache.groups.windows == (None,))
    assert found[0] == found[1]
    assert len(seen[0]) > 20
    assert seen[0] == seen[1]


def held(engine: Engine) -> list[tuple[int, ...]]:
    """Pages in use by group, whenever the engine has read a result."""
    samples: list[tuple[int, ...]] = []
    engine.on_round = lambda _: samples.append(
        tuple(pool.num_pages - 1 - pool.num_free for pool in engine.pools.pools)
    )
    return samples


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_row_holds_the_pages_of_its_window_and_passed_ones_are_used_again(run_ahead: int, poisoned: list[Engine]) -> None:
    """Two rows of 70 tokens in turn, pages of 2: 35 each without a window, of which at most nine are held while it decodes."""
    target = windowed_target(SLIDING)
    requests = [request(i, [i, 2, 3], cap=67) for i in range(4)]
    batch = replace(batch_of(2, page_size=2, run_ahead=run_ahead), num_pages=1 + 36)
    poisoned.append(make_engine(target, NoDrafter(), batch, device=DEVICE))
    samples = held(poisoned[0])
    assert run(poisoned[0], requests) == expected(target, requests)
    most = poisoned[0].pools.groups.max_columns(0, 70, 2, lookahead=run_ahead + 1)
    assert most <= 8
    assert max(total for (total,) in samples) <= 2 * (most + 3)  # pages are granted up to four at once
    assert poisoned[0].totals.preempted == 0


def test_of_a_mixed_model_the_full_layers_keep_all_pages_and_the_others_those_of_their_window(poisoned: list[Engine]) -> None:
    target, requests = windowed_target(MIXED), [request(0, [1, 2, 3], cap=67)]
    batch = replace(batch_of(1, page_size=2), num_pages=1 + 36, more_pages=(1 + 36,))
    poisoned.append(make_engine(target, NoDrafter(), batch, device=DEVICE))
    samples = held(poisoned[0])
    run(poisoned[0], requests)
    assert max(full for full, _ in samples) >= 34
    assert max(sliding for _, sliding in samples) <= 8


@pytest.mark.parametrize(("name", "windows"), covering(["chain", "tree"], [SLIDING, MIXED]))
def test_preempted_rows_resume_with_the_same_tokens(
    name: str, windows: tuple[int | None, ...], poisoned: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages for the longest row alone: six slots preempt each other."""
    monkeypatch.setattr("batchspec.engine.slots.expected_pages.SHORT_CAP_TOKENS", 0)
    target, requests = windowed_target(windows), long_requests(8)
    drafter = make_drafter(name, target, tmp_path, 6)
    batch = replace(batch_of(6, page_size=2, num_verified=8, run_ahead=1), num_pages=1 + 39)
    poisoned.append(make_engine(target, drafter, batch, device=DEVICE))
    assert run(poisoned[0], requests) == expected(target, requests)
    assert poisoned[0].totals.preempted > 0


@pytest.mark.parametrize(("name", "windows"), covering(["none", "chain"], [SLIDING, MIXED, TWO_WINDOWS]))
def test_samples_of_a_prompt_and_rows_with_a_common_prefix_share_its_pages(
    name: str, windows: tuple[int | None, ...], poisoned: list[Engine], tmp_path: Path
) -> None:
    target, requests = windowed_target(windows), long_requests(4, sampling=SamplingParams(temperature=0.9), samples=3)
    drafter = make_drafter(name, target, tmp_path, 4)
    poisoned.append(make_engine(target, drafter, batch_of(4, page_size=4, num_verified=4, run_ahead=1), device=DEVICE))
    assert run(poisoned[0], requests) == expected(target, requests)
    assert poisoned[0].totals.cached_tokens > 100


def test_rows_move_with_their_pages_when_the_batch_is_compacted(poisoned: list[Engine], tmp_path: Path) -> None:
    target = windowed_target(MIXED)
    requests = [request(i, [i, 1, 2], cap=60 if i == 3 else 12 + i) for i in range(4)]
    batch = replace(batch_of(4, page_size=2, num_verified=4), row_buckets=(1, 2, 4))
    poisoned.append(make_engine(target, make_drafter("chain", target, tmp_path, 4), batch, device=DEVICE))
    assert run(poisoned[0], requests) == expected(target, requests)
    assert poisoned[0].scheduler.num_rows == 1


@cache
def expected_of_uneven(window: int, fp8_kv: bool) -> dict[str, list[int]]:
    target = uneven_target(window, fp8_kv)
    return {one.request_id: plain_tokens(target, one) for one in long_requests(sampling=SamplingParams(temperature=0.6))}


@pytest.mark.parametrize(
    ("name", "window", "fp8_kv"),
    covering(["none", "chain", "tree", "parallel", "window", "lookup"], [WINDOW, LONG], [False, True]),
)
def test_layers_may_differ_in_the_shape_of_their_keys(
    name: str, window: int, fp8_kv: bool, poisoned: list[Engine], tmp_path: Path
) -> None:
    """In groups of their own, and in one group where no row outgrows the window."""
    target, requests = uneven_target(window, fp8_kv), long_requests(sampling=SamplingParams(temperature=0.6))
    batch = batch_of(num_verified=0 if name == "none" else 8, page_size=2, run_ahead=1)
    engine = make_engine(target, make_drafter(name, target, tmp_path, 3), batch, device=DEVICE)
    poisoned.append(engine)
    assert run(engine, requests) == expected_of_uneven(window, fp8_kv)
    cache = engine.executor.cache
    assert [(kv.pages.shape[3:], LayerKV.of(kv).layout.head_dim) for kv in cache.layers[:2]] == [((2, 4), 4), ((1, 6), 6)]
    assert [group for group, _ in cache.target_pages] == [1 if window == WINDOW else 0, 0]


def test_a_window_that_no_row_outgrows_is_none() -> None:
    assert KVGroups.of((80, None, 200), (), 80) == KVGroups((None,), (0, 0, 0), 0)


@pytest.mark.parametrize(
    ("windows", "drafts", "groups"),
    [
        ((None, None), (), ((None,), (0, 0), 0)),
        ((9, 9), (), ((9,), (0, 0), 0)),
        ((None, 9, 4), (), ((None, 9, 4), (0, 1, 2), 2)),
        ((9, 9), (None,), ((None, 9), (1, 1), 0)),  # a full head on a sliding target has a group of its own
        ((9, 9), (12,), ((12, 9), (1, 1), 0)),
        ((None, 9), (5,), ((None, 9), (0, 1), 1)),  # a narrow one uses the narrowest group that reaches far enough
        ((None, 9), (5, 20), ((None, 9), (0, 1), 0)),
        ((None, None), (5,), ((None,), (0, 0), 0)),
    ],
)
def test_groups_are_of_layers_with_one_window(
    windows: tuple[int | None, ...], drafts: tuple[int | None, ...], groups: tuple[Any, ...]
) -> None:
    assert KVGroups.of(windows, drafts, 80) == KVGroups(*groups)


def admitted(pools: PagePools, ids: Sequence[int]) -> RowPages:
    hashes = prefix_hashes(np.array(ids, np.int32), pools.page_size)
    pages = pools.match(hashes)
    pools.admit(pages, -(-len(ids) // pools.page_size), hashes)
    return pages


def test_a_prefix_is_shared_as_far_as_every_group_has_what_its_window_reads() -> None:
    """Pages of 2, a window of 5: after n columns of a prefix the keys from 2 n - 4 on are read, in n - 2 and later columns."""
    pools = PagePools(KVGroups((None, 5), (0, 1), 0), (40, 40), 2)
    first = admitted(pools, range(17))
    pools.free_passed(first, 16)
    assert first.first == [0, 5]
    second = pools.match(prefix_hashes(np.arange(20, dtype=np.int32), 2))
    assert second.num_columns == 8  # the pages that the first row gave back are there still
    assert second.tables[1] == [SCRATCH_PAGE] * 6 + first.tables[1][6:8]
    taken = pools.pools[1].take(pools.pools[1].num_free)  # now they hold something else
    third = pools.match(prefix_hashes(np.arange(20, dtype=np.int32), 2))
    assert third.num_columns == 8
    assert third.tables == second.tables
    pools.pools[1].release(taken)
    pools.release(first)
    pools.pools[1].take(pools.pools[1].num_free)
    assert pools.match(prefix_hashes(np.arange(20, dtype=np.int32), 2)).num_columns == 0
    assert len(pools.pools[0].match(prefix_hashes(np.arange(17, dtype=np.int32), 2))) == 8


def test_a_prefix_ends_before_a_missing_page_that_the_window_reads() -> None:
    pools = PagePools(KVGroups((3,), (0,), 0), (40,), 2)
    row = admitted(pools, range(17))
    pools.pools[0].release([row.tables[0][5]])  # as if this page alone had been taken for something else
    while row.tables[0][5] in pools.pools[0]._idle:
        pools.pools[0].take(1)
    match = pools.match(prefix_hashes(np.arange(17, dtype=np.int32), 2))
    assert match.num_columns == 8
    assert match.tables[0][:7] == [SCRATCH_PAGE] * 7
    assert pools.match(prefix_hashes(np.arange(12, dtype=np.int32), 2)).num_columns == 5


def test_models_without_windows_map_slots_once() -> None:
    """One group: a batch has no further page tables, and its own is handed on as it is."""
    engine = make_engine(tiny_target(), NoDrafter(), batch_of(), device=DEVICE, options=RoundOptions())
    assert engine.executor.cache.groups == KVGroups((None,), (0, 0), 0)
    assert len(engine.executor.rows.page_tables) == 1
    batch = engine.executor.round.inputs.uniform(engine.executor.rows, 0)
    assert batch.more_groups == ()
    assert batch.of_group(0) is batch
