"""Whole runs whose rows share beginnings, with the attention that a GPU uses: the tokens of rows that share nothing.

On a CPU the kernels run in the interpreter. Memory is hostile: what nobody has written yet holds NaN, and so do the keys of every
page that comes to a new owner.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.pages import PagePool
from batchspec.draft.none import NoDrafter
from batchspec.engine.slots import prefix_groups as groups_module
from batchspec.model.layers.attention import block
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.plan import AttentionPlan, plan_attention
from batchspec.model.layers.attention.verify import fits_verify, plan_verify
from batchspec.model.target import Target
from batchspec.packing.planner import row_buckets
from batchspec.records import Request
from tests.helpers.engines import DEVICE, VOCAB, in_e4m3, make_engine, packed, request, tiny_spec

pytestmark = pytest.mark.usefixtures("poisoned")
PREFIX = 8
"""Tokens: two pages, which is a group here."""


@cache
def narrow_target(fp8_kv: bool = False) -> Target:
    """Two heads that share one K/V head: few programs for the interpreter."""
    spec = tiny_spec(num_heads=2, num_kv_heads=1)
    target = Target.load(Path(), spec, dtype=torch.float32, device=DEVICE, dummy=True)
    return in_e4m3(target) if fp8_kv else target


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds attend by the GPU's plan; the row buckets of those that read shared beginnings."""
    seen: list[int] = []

    def plan(batch: FlatBatch, kv: LayerKV, **options: Any) -> AttentionPlan:
        if batch.host is not None or not fits_verify(batch, kv.layout.dtype):
            return plan_attention(batch, kv, **options)
        if batch.shared is not None:
            seen.append(len(batch.kv_len))
        return plan_verify(batch, kv, shared=batch.shared, interpret=DEVICE.type == "cpu", **options)

    monkeypatch.setattr(block, "plan_attention", plan)
    monkeypatch.setattr(groups_module, "MIN_PAGES", PREFIX // 4)
    return seen


def family(first: int, beginning: int, caps: list[int], stops: tuple[str, ...] = ()) -> list[Request]:
    """Requests with a beginning in common, one for each cap; they end when the cap says so."""
    ids = np.random.default_rng(beginning).integers(0, VOCAB, PREFIX).tolist()
    return [request(first + i, [*ids, beginning, i], cap=cap, stop=stops, predicted=4) for i, cap in enumerate(caps)]


def tokens(
    requests: list[Request], slots: int, run_ahead: int, patch: pytest.MonkeyPatch, *, fp8_kv: bool = False
) -> dict[str, list[int]]:
    batch = packed(slots, row_buckets=row_buckets(slots), run_ahead=run_ahead, prefill_tokens=200)
    engine = make_engine(narrow_target(fp8_kv), NoDrafter(), batch, device=DEVICE)
    take = PagePool.take

    def poison(pool: PagePool, count: int) -> list[int]:
        pages = take(pool, count)
        ((_, kv),) = engine.executor.cache.target_pages
        kv[:, 0, pages], kv[:, 1, pages] = float("nan"), min(1e4, torch.finfo(kv.dtype).max)  # what a row that failed leaves
        return pages

    patch.setattr(PagePool, "take", poison)
    return {c.request_id: c.token_ids.tolist() for c in engine.run(iter(requests)) if c.token_ids is not None}


def alone(requests: list[Request], *, fp8_kv: bool = False) -> dict[str, list[int]]:
    """The same rows one at a time, without kernels and without sharing."""
    engine = make_engine(narrow_target(fp8_kv), NoDrafter(), packed(1), device=DEVICE)
    done: dict[str, list[int]] = {}
    for one in requests:
        engine.pools.forget()
        done |= {c.request_id: c.token_ids.tolist() for c in engine.run(iter([one])) if c.token_ids is not None}
    return done


@pytest.mark.second
@pytest.mark.parametrize(
    ("caps", "run_ahead"),
    [
        pytest.param([[5, 2], [5, 2]], 2, id="the last rows of two groups die"),
        pytest.param([[5, 5, 2, 2]], 0, id="members beyond the bucket die"),
        pytest.param([[2, 6, 6, 3]], 0, id="rows move", marks=pytest.mark.slow),
        pytest.param([[2, 6, 6, 3]], 2, id="rows move between launched rounds"),
    ],
)
def test_a_batch_that_shrinks_keeps_the_tokens(
    caps: list[list[int]], run_ahead: int, kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests enter by slot: of two families in turn, so that the first of each stay and the bucket shrinks without a move."""
    families = [family(10 * i, i, caps_of) for i, caps_of in enumerate(caps)]
    requests = [one for ranks in zip(*families, strict=True) for one in ranks]
    expected = alone(requests)
    with monkeypatch.context() as patch:
        assert tokens(requests, 4, run_ahead, patch) == expected
    assert 4 in kernels
    if len(caps) == 1:
        assert 2 in kernels  # the survivors still share


@pytest.mark.second
def test_rows_that_share_e4m3_keys_keep_the_tokens(kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = family(0, 1, [4, 6, 6, 3])
    expected = alone(requests, fp8_kv=True)
    with monkeypatch.context() as patch:
        assert tokens(requests, 4, 1, patch, fp8_kv=True) == expected
    assert 4 in kernels
