"""exchange: gather, sum and best token of few values of all ranks. The ranks run one after the other here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.distributed.exchange import BLOCK, best_of_ranks, best_of_ranks_reference, gather, sum_of_ranks
from batchspec.kernels.distributed.reduce_norm import reduce_reference
from batchspec.kernels.sampling.argmax import NO_TOKEN
from tests.kernels.peers import Peers

INF = float("inf")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of one process cannot wait for each other on a GPU")


def lay_down(peers: Peers, number: int, *stages: Tensor) -> None:
    """What all ranks will have written and sent once they have reached exchange `number`; each stage [ranks, ...]."""
    for stage, values in enumerate(stages):
        for rank, value in enumerate(values):
            peers.data(rank, number, stage, value).copy_(value)
    peers.expect(number)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2 * BLOCK + 5,)])
def test_gather_gives_every_rank_the_values_of_all(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = (torch.randn(4, *shape) * 10).to(dtype)
    peers = Peers.make(4, 1 << 16)
    lay_down(peers, 1, given)
    for end in peers.ends:
        peers.data(end.rank, 1, 0, given[0]).zero_()  # the rank writes its own
        out = torch.zeros_like(given)
        gather(given[end.rank], end, out=out, interpret=True)
        assert torch.equal(out, given)
        assert end.lost() is None


@settings(max_examples=20)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
    seed=st.integers(0, 99),
)
def test_sums_have_the_order_of_the_ranks(ranks: int, shape: list[int], dtype: torch.dtype, seed: int) -> None:
    given = (torch.randn(ranks, *shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)
    peers = Peers.make(ranks, 1 << 14)
    lay_down(peers, 1, given)
    for end in peers.ends:
        out = given[end.rank].clone()
        sum_of_ranks(out, end, out=out, interpret=True)  # in place
        assert torch.equal(out, reduce_reference(given))


@settings(max_examples=25)
@given(
    ranks=st.sampled_from([2, 4]),
    rows=st.lists(st.lists(st.sampled_from([-INF, -1.0, 0.0, 2.0, INF]), min_size=4, max_size=4), min_size=1, max_size=20),
    flag=st.booleans(),
)
def test_the_best_token_is_the_lowest_of_equals_on_every_rank(ranks: int, rows: list[list[float]], flag: bool) -> None:
    scores = torch.tensor(rows).T[:ranks].contiguous()
    ids = torch.stack([torch.randint(1000 * rank, 1000 * rank + 3, (len(rows),)) for rank in range(ranks)]).int()
    peers = Peers.make(ranks, 1 << 10)
    lay_down(peers, 1, scores, ids)
    expected = best_of_ranks_reference(scores, ids, flag_nonfinite=flag)
    for end in peers.ends:
        for stage, own in enumerate((scores[end.rank], ids[end.rank])):
            peers.data(end.rank, 1, stage, own).zero_()  # the rank writes its own
        out = torch.full((len(rows),), -7, dtype=torch.int32)
        best_of_ranks(scores[end.rank], ids[end.rank], end, out_ids=out, flag_nonfinite=flag, interpret=True)
        assert torch.equal(out, expected)
    assert flag or NO_TOKEN not in expected.tolist()


def test_kinds_of_exchanges_share_the_buffers() -> None:
    peers, x, ids = Peers.make(2, 1 << 10), torch.randn(2, 9), torch.arange(18, dtype=torch.int32).view(2, 9)
    end, out, out_ids = peers.ends[1], torch.empty(2, 9), torch.empty(9, dtype=torch.int32)
    for number in (1, 4):
        lay_down(peers, number, x)
        gather(x[1], end, out=out, interpret=True)
        lay_down(peers, number + 1, x, ids)
        best_of_ranks(x[1], ids[1], end, out_ids=out_ids, interpret=True)
        lay_down(peers, number + 2, 2 * x)
        sum_of_ranks(2 * x[1], end, out=out[0], interpret=True)
        assert torch.equal(out[0], reduce_reference(2 * x))
        assert torch.equal(out[1], x[1])
        assert torch.equal(out_ids, best_of_ranks_reference(x, ids))
    assert (end.epochs == 6).all()


def test_a_missing_rank_is_recorded() -> None:
    end, x = Peers.make(2, 1 << 10).ends[1], torch.zeros(3)
    calls: list[Callable[[], None]] = [
        lambda: gather(x, end, out=torch.zeros(2, 3), interpret=True),
        lambda: sum_of_ranks(x, end, out=x, interpret=True),
        lambda: best_of_ranks(x, x.int(), end, out_ids=x.int(), interpret=True),
    ]
    for call in calls:
        end.report.zero_()
        end.failed.zero_()
        call()
        assert end.lost() == 0


def test_a_rank_that_lost_another_writes_no_data() -> None:
    peers, x = Peers.make(2, 1 << 10), torch.ones(3)
    end = peers.ends[1]
    end.failed.fill_(1)
    gather(x, end, out=torch.zeros(2, 3), interpret=True)
    best_of_ranks(x, x.int(), end, out_ids=x.int(), interpret=True)
    for number in (1, 2):
        assert not peers.data(1, number, 0, x).any()
        assert not peers.data(1, number, 1, x.int()).any()


def test_wrong_arguments_are_refused() -> None:
    end, x = Peers.make(2, 1 << 10).ends[0], torch.zeros(300)
    with pytest.raises(ValueError, match="gather: 1200 bytes are more than the 1024 of an exchange"):
        gather(x, end, out=torch.zeros(2, 300), interpret=True)
    with pytest.raises(ValueError, match="sum_of_ranks: tensors on the CPU have no peer memory"):
        sum_of_ranks(x[:9], end, out=x[:9])
    with pytest.raises(ValueError, match=r"best_of_ranks: ids is int64 \[9\]"):
        best_of_ranks(x[:9], torch.zeros(9, dtype=torch.int64), end, out_ids=torch.zeros(9, dtype=torch.int32), interpret=True)
    with pytest.raises(ValueError, match=r"gather: out is float32 \[3, 9\]"):
        gather(x[:9], end, out=torch.zeros(3, 9), interpret=True)
