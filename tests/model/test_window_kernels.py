"""Whole runs over layers with sliding windows, with the attention that a GPU uses: the tokens of plain decoding.

On a CPU the kernels run in the interpreter. Memory that nobody has written holds NaN, and so does every page that nobody owns.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchspec.batch.flat_batch import FlatBatch
from batchspec.draft.lookup import LookupDrafter
from batchspec.engine.slots import prefix_groups
from batchspec.model.layers.attention import block
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.plan import AttentionPlan, plan_attention
from batchspec.model.layers.attention.verify import fits_verify, plan_verify
from batchspec.model.target import Target
from batchspec.packing.planner import row_buckets
from batchspec.records import Request
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, plain_tokens, request, tiny_spec
from tests.helpers.freed_pages import poison_freed_pages

pytestmark = pytest.mark.usefixtures("poisoned")
PAGE_SIZE, WINDOW, PREFIX = 2, 5, 8


def windowed_target() -> Target:
    spec = tiny_spec(windows=(None, WINDOW), num_heads=2, num_kv_heads=1)
    return Target.load(Path(), spec, dtype=torch.float32, device=DEVICE, dummy=True)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int | None, bool]]:
    """Rounds attend by the GPU's plan; how many had which window and groups of rows with a common prefix."""
    made: Counter[tuple[int | None, bool]] = Counter()

    def plan(batch: FlatBatch, kv: LayerKV, **options: Any) -> AttentionPlan:
        if batch.host is not None or not fits_verify(batch, kv.layout.dtype):
            return plan_attention(batch, kv, **options)
        made[options["window"], batch.shared is not None] += 1
        return plan_verify(batch, kv, shared=batch.shared, interpret=DEVICE.type == "cpu", **options)

    monkeypatch.setattr(block, "plan_attention", plan)
    monkeypatch.setattr(prefix_groups, "MIN_PAGES", PREFIX // PAGE_SIZE)
    return made


def requests(caps: list[int]) -> list[Request]:
    """One for each cap; all but the first begin alike."""
    rng = np.random.default_rng(3)
    beginning = rng.integers(0, VOCAB, PREFIX + 1).tolist()
    prompts = [(beginning if i else []) + rng.integers(0, VOCAB, max(2, 1 + i)).tolist() for i in range(len(caps))]
    return [request(i, prompt, cap=cap, predicted=1) for i, (prompt, cap) in enumerate(zip(prompts, caps, strict=True))]


@pytest.mark.second
def test_rounds_by_kernels_give_the_tokens_of_plain_decoding(
    plans: Counter[tuple[int | None, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows share pages and end one after the other, so that the batch is compacted."""
    target, asked = windowed_target(), requests([2, 3, 6, 2])
    batch = packed(
        4, row_buckets=row_buckets(4), page_size=PAGE_SIZE, num_pages=200, run_ahead=1, prefill_tokens=20,
        max_len=20, num_verified=2,
    )
    engines = [make_engine(target, LookupDrafter(2, min_ngram=1, max_ngram=2), batch, device=DEVICE)]
    poison_freed_pages(monkeypatch, engines)
    done = {one.request_id: one for one in engines[0].run(iter(asked))}
    found = {name: None if one.token_ids is None else one.token_ids.tolist() for name, one in done.items()}
    assert found == {one.request_id: plain_tokens(target, one) for one in asked}
    assert engines[0].totals.cached_tokens > 0
    assert engines[0].scheduler.num_rows < 4
    assert {window for window, _ in plans} == {None, WINDOW}
    assert plans[None, True] > 0  # the layers that read all keys read a common prefix once
