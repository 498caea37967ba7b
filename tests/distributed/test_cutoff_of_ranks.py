"""The cutoff that ranks search for together keeps what top-k, top-p and min-p say, over the tokens of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.engine.rounds.cutoff_of_ranks import searched_cutoffs
from tests.batch.test_sampling import make_rows
from tests.helpers.ranks import Table, on_ranks

VOCAB = 61
INF = float("inf")
SLACK = 1e-4
"""Of masses that are added up in fp32."""


def of_ranks(logits: Tensor, rows: Any, count: int, table: Table | None = None) -> Tensor:
    """[T], after a check that all ranks have the same bits."""
    row_ids, vocab = torch.arange(len(logits)), logits.shape[1]

    def own(rank: int) -> Tensor:
        return logits[:, rank * vocab // count : (rank + 1) * vocab // count]

    found = on_ranks(count, lambda ranks: searched_cutoffs(own(ranks.rank), row_ids, rows, vocab, ranks), table)
    assert all(torch.equal(found[0].view(torch.int32), other.view(torch.int32)) for other in found)  # a row of -inf has NaN
    return found[0]


def check_kept(row: Tensor, cut: float, k: int, p: float, p_floor: float, temperature: float) -> None:
    """Against the definitions, in fp64, of one row without NaN and +inf."""
    row = row.double()
    if temperature == 0:
        assert cut == -INF
        return
    kth = float(row.sort(descending=True).values[k - 1]) if 0 < k < len(row) else -INF
    floor = float(row.max()) + temperature * torch.tensor(p_floor).log().item() if p_floor > 0 else -INF
    if p >= 1:
        assert cut == pytest.approx(max(kth, floor), rel=1e-6)
        return
    mass = torch.where(row >= kth, ((row - row.max()) / temperature).exp(), 0)
    total = float(mass.sum())
    assert cut >= max(kth, floor) - 1e-6 * abs(floor if floor > kth else 0.0)
    if cut > floor + SLACK:  # top-p decides
        assert float(mass[row >= cut].sum()) >= p * total * (1 - SLACK)
        assert float(mass[row > cut].sum()) <= p * total * (1 + SLACK)
        assert cut in row.tolist()


@pytest.mark.second
@settings(max_examples=40)
@given(
    count=st.sampled_from([2, 3, 4]),
    scale=st.sampled_from([0.1, 3.0, 100.0]),
    rounded=st.booleans(),
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    k=st.sampled_from([0, 1, 2, 30, VOCAB - 1, VOCAB, 100]),
    p=st.sampled_from([1.0, 0.95, 0.3, 1e-4]),
    p_floor=st.sampled_from([0.0, 0.2]),
    missing=st.integers(0, VOCAB),
    seed=st.integers(0, 10**6),
)
def test_what_is_kept_is_what_the_definitions_say(
    count: int, scale: float, rounded: bool, temperature: float, k: int, p: float, p_floor: float, missing: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, VOCAB, generator=noise) * scale
    logits = logits.round() if rounded else logits
    logits[0, torch.randperm(VOCAB, generator=noise)[:missing]] = -INF
    rows = make_rows(2, vocab=VOCAB)
    for name, value in (("temperature", temperature), ("top_k", k), ("top_p", p), ("min_p", p_floor)):
        getattr(rows, name).fill_(value)
    found = of_ranks(logits, rows, count)
    for row, cut in zip(logits, found.tolist(), strict=True):
        if row.isfinite().any():
            check_kept(row, cut, k, p, p_floor, temperature)


def test_rows_have_settings_of_their_own() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0]).repeat(5, 1)
    rows = make_rows(5, vocab=4)
    rows.temperature[:] = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    rows.top_k[:] = torch.tensor([1, 2, 0, 0, 3])
    rows.top_p[:] = torch.tensor([0.1, 1.0, 0.5, 1.0, 1.0])
    rows.min_p[:] = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0])
    found = of_ranks(logits, rows, 2)
    floor = 3 + torch.tensor(0.5).log().item()
    assert found.tolist() == pytest.approx([-INF, 2.0, 3.0, floor, 1.0])


def test_a_cutoff_takes_seventeen_small_exchanges() -> None:
    rows, table = make_rows(3, vocab=4000), Table(2)
    rows.top_k.fill_(50)
    of_ranks(torch.randn(3, 4000), rows, 2, table)
    assert len(table.bytes_exchanged) == 18
    assert sum(table.bytes_exchanged) == 3 * 4 * (1 + 17 * 16)
