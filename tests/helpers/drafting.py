"""What the tests of heads share: the target, requests, a run through the engine, and what a drafter proposed in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.draft.base import Drafter, DrafterBase
from batchspec.draft.head import Head
from batchspec.draft.weights import load_head
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.slots import expected_pages
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams
from tests.helpers.eagle_reference import Design
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, plain_rows, request, tiny_target
from tests.helpers.heads import Tensors, write_head

TARGET = partial(tiny_target, window=5)
Proposals = list[tuple[tuple[int, ...], list[int]]]
"""The committed tokens of a row, and its drafts as far as they may count."""


def proposals(rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor) -> Proposals:
    """What a drafter that fills every round proposed for the live rows."""
    assert draft_len.tolist() == [draft_ids.shape[1] if alive else 0 for alive in rows.live.tolist()]
    found = []
    for slot in rows.live.nonzero().flatten().tolist():
        count, limit = int(rows.num_tokens[slot]), int(rows.limit[slot])
        found.append((tuple(rows.tokens[slot, :count].tolist()), draft_ids[slot, : max(0, limit - count - 1)].tolist()))
    return found


Reference = Callable[..., list[int]]
"""design, tensors, target, prefix, count, window=, sink= -> drafts (`tests/helpers/eagle_reference.py`)"""
_EXPECTED: dict[tuple[Reference, int, tuple[int, ...], int | None, int], tuple[Tensors, list[int]]] = {}
"""By the identity of a head's tensors, which are kept so that no others get it, and what follows the prefix: as far as asked."""


def check_proposals(
    seen: Proposals, reference: Reference, design: Design, tensors: Tensors, *, window: int | None = None, sink: int = 0
) -> None:
    """Every draft that may count is what a row computed by itself, without cache or batch, has there."""
    assert len(seen) > 5
    for prefix, drafts in seen:
        key, count = (reference, id(tensors), prefix, window, sink), len(drafts)
        _, found = _EXPECTED.get(key, (tensors, []))
        if len(found) < count:
            found = reference(design, tensors, TARGET(), prefix, count, window=window, sink=sink)
            _EXPECTED[key] = tensors, found
        assert drafts == found[:count]


class Recording(DrafterBase):
    """Keeps what a drafter proposed: `class Recorded(Recording, ChainDrafter)`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: Proposals = []

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        super().propose(rows, draft_ids, draft_len, cache)  # type: ignore[misc]
        self.seen += proposals(rows, draft_ids, draft_len)


def written_head(folder: Path, design: Design, tensors: Tensors, *, layout: str = "flat") -> Head:
    """The head of a checkpoint with these tensors, for TARGET."""
    write_head(folder, design, tensors, layout=layout)
    target = TARGET()
    return load_head(folder, target.spec, dtype=target.dtype, device=DEVICE, aux_layers="input")


def run(
    requests: Sequence[Request],
    batch: PackedBatch,
    drafter: Drafter,
    *,
    short_cap: int = 512,
    **options: Any,
) -> tuple[dict[str, list[int]], dict[str, Completion], Engine]:
    """Tokens and completions by request, and the engine, whose pages all came back; options are those of Engine."""
    engine = make_engine(TARGET(), drafter, batch, device=DEVICE, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", short_cap)
        done = {completion.request_id: completion for completion in engine.run(iter(requests))}
    assert len(done) == len(requests)
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    return {name: c.token_ids.tolist() for name, c in done.items() if c.token_ids is not None}, done, engine


def expected_tokens(requests: Sequence[Request], guesses: Mapping[str, Sequence[int]] | None = None) -> dict[str, list[int]]:
    """Of plain decoding, one row at a time."""
    return plain_rows(TARGET(), requests, guesses)


def mixed_requests(count: int = 5, cap: int = 14, sampling: SamplingParams | None = None, *, first: int = 0) -> list[Request]:
    """Prompts of several lengths, some with a common beginning; the same ones as rows `first` and on."""
    rng = np.random.default_rng(0)
    beginning = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    prompts = [(beginning if i % 2 else []) + rng.integers(0, VOCAB, 1 + 3 * i).tolist() for i in range(count)]
    return [request(first + i, prompt, cap=cap - i, sampling=sampling, predicted=2) for i, prompt in enumerate(prompts)]


def known_requests() -> list[Request]:
    """Those whose outputs a head may have learnt by heart."""
    return [request(10 + i, [i, i + 1, 3], cap=24) for i in range(3)]


def synthetic(draft_len: int) -> RoundOptions:
    """About half of the drafts are accepted, so that rounds accept 0 .. K of them and rows differ from what the head drafts."""
    return RoundOptions(synthetic=(tuple(0.8 ** (j + 1) for j in range(draft_len)),))


def drawn_batch(
    data: st.DataObject, requests: Sequence[Request], slots: int, *, draft_len: int, num_lookahead_slots: int = 0
) -> PackedBatch:
    """Any page size, pages scarce or plenty, prefill passes and run-ahead; rows take pages `num_lookahead_slots` their end
    too."""
    page_size = data.draw(st.sampled_from([2, 4]), label="page_size")
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    scarce = 3 + -(-(longest + num_lookahead_slots) // page_size)
    return packed(
        slots,
        row_buckets=tuple(b for b in (1, 2, 4) if b <= slots),
        page_size=page_size,
        num_pages=data.draw(st.sampled_from([scarce, 300]), label="pages"),
        max_len=longest,
        num_verified=draft_len,
        prefill_tokens=data.draw(st.sampled_from([1, 5, 64]), label="prefill_tokens"),
        run_ahead=data.draw(st.integers(0, 2), label="run_ahead"),
    )
