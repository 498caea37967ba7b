"""Layers with a sliding window on a GPU: captured rounds over their own page tables, and every implementation of prefill.

A page that nobody owns is NaN at once: a row that reads one fails. In fp32 the tokens are those of one row at a time on the CPU;
in bf16, which FlashInfer and torch's prefill need, those of an engine that keeps every page and does the same otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.groups import KVGroups
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.slots import expected_pages
from batchspec.model.layers.attention import block, flash
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.plan import AttentionPlan, plan_attention
from batchspec.model.layers.attention.verify import fits_verify
from batchspec.packed_batch import PackedBatch
from batchspec.records import Request
from tests.gpu.test_gpu_engine import TREE, VOCAB, alone, eagle, requests, shape, tokens, windowed_target
from tests.helpers.engines import decode, make_engine, request, share_always
from tests.helpers.freed_pages import poison_freed_pages

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
SLIDING, MIXED, TWO_WINDOWS = (21, 21), (None, 21), (40, 9)
Windows = tuple[int | None, ...]


def make_drafter(name: str, windows: Windows, folder: Path, slots: int) -> Drafter:
    own = windowed_target("cuda", windows)
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "lookup": partial(LookupDrafter, 4, min_ngram=1, max_ngram=3),
        "window": partial(WindowDrafter, own, 3, slots=slots, window=12, sink=0),
        "eagle3": partial(eagle, folder, "cuda", 3, slots, own=own),
        "eagle3 with a window": partial(eagle, folder, "cuda", 3, slots, own=own, window=5),
        "tree": partial(eagle, folder, "cuda", 3, slots, own=own, tree=TREE),
    }
    return drafters[name]()


def run(
    windows: Windows, drafter: Drafter, batch: PackedBatch, asked: list[Request], *, dtype: torch.dtype = torch.float32,
) -> tuple[Engine, dict[str, list[int]]]:
    """Tokens by request, with poisoned pages; all pages come back."""
    own = windowed_target("cuda", windows, dtype)
    engine = make_engine(own, drafter, batch, device=GPU, decode=decode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", 4)
        poison_freed_pages(patch, [engine])
        done = list(engine.run(iter(asked)))
    assert [one.error for one in done if one.error is not None] == []
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    return engine, tokens(done)


@pytest.mark.parametrize("windows", [SLIDING, MIXED, TWO_WINDOWS], ids=str)
@pytest.mark.parametrize("name", ["none", "lookup", "window", "eagle3", "eagle3 with a window", "tree"])
def test_graphs_give_the_tokens_of_one_row_at_a_time_on_the_cpu(name: str, windows: Windows, tmp_path: Path) -> None:
    asked = requests(24)
    engine, found = run(windows, make_drafter(name, windows, tmp_path, 8), shape(8), asked)
    assert engine.executor.graphs.num_captured > 0
    assert found == alone(asked, windowed_target("cpu", windows))


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("windows", [SLIDING, MIXED], ids=str)
def test_rows_that_preempt_each_other_keep_their_tokens(windows: Windows, run_ahead: int, tmp_path: Path) -> None:
    """Pages for little more than the longest row, and admission that takes in too many."""
    asked = [replace(one, predicted_tokens=1) for one in requests(100, seed=run_ahead, longest=150)]
    batch = shape(16, num_pages=20, run_ahead=run_ahead)
    drafter = make_drafter("eagle3", windows, tmp_path, 16)
    engine, found = run(windows, drafter, batch, asked)
    assert engine.totals.preempted > 0
    assert found == alone(asked, windowed_target("cpu", windows))


def test_rows_with_a_common_beginning_read_it_once_in_the_layers_that_read_all_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    beginnings = [rng.integers(0, VOCAB, 132).tolist() for _ in range(3)]
    asked = [
        request(i, beginnings[i % 3] + rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(), cap=int(rng.integers(1, 50)))
        for i in range(40)
    ]
    share_always(monkeypatch)
    shared: list[bool] = []
    own, drafter = windowed_target("cuda", MIXED), make_drafter("eagle3", MIXED, tmp_path, 8)
    engine = make_engine(own, drafter, shape(8), device=GPU)
    engine.on_round = lambda totals: shared.append(engine.scheduler.prefix_groups.any)
    poison_freed_pages(monkeypatch, [engine])
    assert tokens(list(engine.run(iter(asked)))) == alone(asked, windowed_target("cpu", MIXED))
    assert any(shared)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> set[type]:
    """The classes that planned the attention of prefill passes."""
    found: set[type] = set()

    def plan(batch: FlatBatch, kv: LayerKV, **options: Any) -> AttentionPlan:
        made = plan_attention(batch, kv, **options)
        if batch.host is not None and not fits_verify(batch, kv.layout.dtype):
            found.add(type(made))
        return made

    monkeypatch.setattr(block, "plan_attention", plan)
    return found


@pytest.mark.parametrize("windows", [(100, 100), (None, 100), (700, 30)], ids=str)
@pytest.mark.parametrize("way", ["flashinfer", "torch", "torch alone"])
def test_prefill_in_bf16_gives_the_tokens_of_an_engine_that_keeps_every_page(
    way: str, windows: Windows, prefills: set[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows enter at once, in passes that cut them: both engines launch the same rounds.

    way  flashinfer: rows of more keys than torch's attention is for; torch: fewer; torch alone: long rows without FlashInfer
    """
    if way == "torch alone":
        monkeypatch.setattr(flash, "_flashinfer_compiles", lambda *_: False)  # it keeps what earlier tests found
    elif way == "flashinfer":
        pytest.importorskip("flashinfer")
    longest = 1500 if way == "torch" else flash.SHORT + 300
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, VOCAB, 1000).tolist()
    lengths = [longest, 3, longest - 200, 600, 90, longest - 100]
    prompts = [
        (beginning if count > 1000 else []) + rng.integers(0, VOCAB, count - 1000 * (count > 1000)).tolist() for count in lengths
    ]
    asked = [request(i, prompt, cap=40) for i, prompt in enumerate(prompts)]
    batch = shape(len(asked), max_len=longest + 50, num_pages=1 + 6 * -(-(longest + 50) // 16), prefill_tokens=900)
    expected = None
    for keeps_all in (True, False):
        with monkeypatch.context() as patch:
            if keeps_all:
                patch.setattr(KVGroups, "of", lambda windows, drafts, max_len: KVGroups.single(len(windows)))
            engine, found = run(windows, NoDrafter(), batch, asked, dtype=torch.bfloat16)
        assert (engine.executor.cache.groups.windows == (None,)) == keeps_all
        expected = expected or found
        assert found == expected
        assert engine.totals.cached_tokens > 0
    assert prefills == ({flash.FlashPlan, flash.VarlenPlan} if way == "flashinfer" else {flash.VarlenPlan})
