"""What the tests of heads share: the target, requests, a run through the engine, and what a drafter proposed in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from torch import Tensor

from batchspec.decode import scheduler
from batchspec.decode.engine import Engine
from batchspec.decode.round import RoundOptions
from batchspec.decode.rows import Rows
from batchspec.draft.base import Drafter
from batchspec.records import Completion, PackedBatch, Request
from tests.engines import DEVICE, VOCAB, plain_tokens, request, tiny_target

TARGET = partial(tiny_target, window=5)
Proposals = list[tuple[tuple[int, ...], list[int]]]
"""The committed tokens of a row, and its drafts as far as they may count."""


def proposals(rows: Rows, draft_ids: Tensor, draft_len: Tensor) -> Proposals:
    """What a drafter that fills every round proposed for the live rows."""
    assert draft_len.tolist() == [draft_ids.shape[1] if alive else 0 for alive in rows.live.tolist()]
    found = []
    for slot in rows.live.nonzero().flatten().tolist():
        count, limit = int(rows.num_tokens[slot]), int(rows.limit[slot])
        found.append((tuple(rows.tokens[slot, :count].tolist()), draft_ids[slot, : max(0, limit - count - 1)].tolist()))
    return found


def run(
    requests: Sequence[Request],
    batch: PackedBatch,
    drafter: Drafter,
    *,
    short_cap: int = 512,
    options: RoundOptions | None = None,
) -> tuple[dict[str, list[int]], dict[str, Completion], Engine]:
    """Tokens and completions by request, and the engine, whose pages all came back."""
    engine = Engine(TARGET(), drafter, batch, device=DEVICE, options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "SHORT_CAP_TOKENS", short_cap)
        done = {completion.request_id: completion for completion in engine.run(iter(requests))}
    assert len(done) == len(requests)
    assert engine.pool.num_free == engine.pool.num_pages - 1
    return {name: c.token_ids.tolist() for name, c in done.items() if c.token_ids is not None}, done, engine


def expected_tokens(requests: Sequence[Request]) -> dict[str, list[int]]:
    """Of plain decoding, one row at a time."""
    return {r.request_id: plain_tokens(TARGET(), r) for r in requests}


def mixed_requests(count: int = 5, cap: int = 14) -> list[Request]:
    """Prompts of several lengths, some with a common beginning."""
    rng = np.random.default_rng(0)
    beginning = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    return [
        request(i, (beginning if i % 2 else []) + rng.integers(0, VOCAB, 1 + 3 * i).tolist(), cap=cap - i, predicted=2)
        for i in range(count)
    ]


def known_requests() -> list[Request]:
    """Those whose outputs a head may have learnt by heart."""
    return [request(10 + i, [i, i + 1, 3], cap=24) for i in range(3)]


def synthetic(max_len: int) -> RoundOptions:
    """Drafts stand as often as not, so that rounds accept 0 .. K of them and the rows run over what the head says itself."""
    return RoundOptions(synthetic=tuple(0.8 ** (j + 1) for j in range(max_len)))
