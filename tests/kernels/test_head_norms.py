"""head_norms: q and k normed over the heads of all ranks. The ranks run one after the other here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.distributed.head_norms import head_norms, head_norms_reference, mean_squares
from batchspec.kernels.norm_rope.norm import rms_norm_reference
from tests.kernels.peers import Peers

EPS = 1e-5

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of one process cannot wait for each other on a GPU")


def run(peers: Peers, number: int, parts: list[Tensor], q_norm: Tensor, k_norm: Tensor, size: int) -> list[Tensor]:
    """Exchange `number` on every rank; rank r has parts[r] and the r-th part of the weights."""
    q, k = len(q_norm) // len(parts), len(k_norm) // len(parts)
    means = [mean_squares(part, q, k) for part in parts]
    found = []
    for end, part in zip(peers.ends, parts, strict=True):
        for rank, own in enumerate(means):
            peers.data(rank, number, 0, own).copy_(own if rank != end.rank else torch.full_like(own, torch.nan))
        peers.expect(number)
        wide = torch.full((len(part), part.shape[1] + size), torch.nan, dtype=part.dtype)
        wide[:, : part.shape[1]] = part
        weights = q_norm[end.rank * q :][:q], k_norm[end.rank * k :][:k]
        head_norms(wide[:, : part.shape[1]], *weights, EPS, end, interpret=True)
        assert wide[:, part.shape[1] :].isnan().all()
        assert end.lost() is None
        found.append(wide[:, : part.shape[1]])
    return found


@pytest.mark.second
@settings(max_examples=12)
@given(
    ranks=st.sampled_from([2, 4]), rows=st.integers(1, 9), q=st.sampled_from([8, 24, 40]), k=st.sampled_from([8, 16]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), wide_weights=st.booleans(), seed=st.integers(0, 99),
)
def test_ranks_norm_their_heads_as_one_process_does_all(
    ranks: int, rows: int, q: int, k: int, dtype: torch.dtype, wide_weights: bool, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(rows, q + 2 * k, generator=noise, dtype=torch.float64) * 3).to(dtype) for _ in range(ranks)]
    of_weights = torch.promote_types(dtype, torch.float32) if wide_weights else dtype
    q_norm, k_norm = (torch.randn(ranks * size, generator=noise, dtype=torch.float64).to(of_weights) for size in (q, k))
    found = run(Peers.make(ranks, 1 << 13), 1, parts, q_norm, k_norm, size=3)
    for begin, size, weight in ((0, q, q_norm), (q, k, k_norm)):
        whole = torch.cat([part[:, begin : begin + size] for part in parts], 1)
        rms_norm_reference(whole, weight, EPS, out=whole)
        own = torch.cat([part[:, begin : begin + size] for part in found], 1)
        rtol, atol = (2**-6, 2**-7) if dtype is torch.bfloat16 else (1e-5, 1e-6)
        torch.testing.assert_close(own, whole, rtol=rtol, atol=atol)
    for part, normed in zip(parts, found, strict=True):
        assert torch.equal(part[:, q + k :], normed[:, q + k :]), "v changed"


@pytest.mark.second
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_reference_of_a_rank_is_the_kernel(dtype: torch.dtype) -> None:
    """Of more rows than programs too. It rounds at the same places: in fp16 hardly a bit differs."""
    parts = [torch.randn(130, 40, dtype=torch.float64).to(dtype) for _ in range(2)]
    q_norm, k_norm = torch.randn(48).to(dtype), torch.randn(16).to(dtype)
    found = run(Peers.make(2, 1 << 12), 1, parts, q_norm, k_norm, size=0)
    means = torch.stack([mean_squares(part, 24, 8) for part in parts]).mean(0)
    for rank, part in enumerate(parts):
        expected = part.clone()
        head_norms_reference(expected, q_norm[24 * rank :][:24], k_norm[8 * rank :][:8], EPS, means)
        if dtype is torch.float16:
            assert (found[rank] != expected).double().mean() < 0.005
        else:
            torch.testing.assert_close(found[rank], expected)


def test_a_missing_rank_is_recorded_and_rows_stay_unchanged() -> None:
    end, qkv = Peers.make(2, 1 << 10).ends[1], torch.randn(3, 40)
    before = qkv.clone()
    head_norms(qkv, torch.ones(24), torch.ones(8), EPS, end, interpret=True)
    assert end.lost() == 0
    assert torch.equal(qkv, before)


def test_what_does_not_fit_is_refused() -> None:
    end = Peers.make(2, 1 << 10).ends[0]
    with pytest.raises(ValueError, match="head_norms: 2 numbers of 200 rows are more than the 1024 bytes of an exchange"):
        head_norms(torch.zeros(200, 40), torch.ones(24), torch.ones(8), EPS, end, interpret=True)
    with pytest.raises(ValueError, match=r"head_norms: qkv"):
        head_norms(torch.zeros(2, 41), torch.ones(24), torch.ones(8), EPS, end, interpret=True)
    with pytest.raises(ValueError, match="head_norms: tensors on the CPU have no peer memory"):
        head_norms(torch.zeros(2, 40), torch.ones(24), torch.ones(8), EPS, end)
    head_norms(torch.zeros(0, 40), torch.ones(24), torch.ones(8), EPS, end, interpret=True)
    assert (end.epochs == 0).all()
