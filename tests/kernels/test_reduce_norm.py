"""reduce_norm: the sum of all ranks' partial results in rank order, the residual sum and the norm, in one shot and in two.

The ranks run one after the other here: what a rank waits for is laid down before. `tests/distributed/test_peer.py` runs them at
once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.distributed.barrier import LOST, PROGRAMS
from batchspec.kernels.distributed.reduce_norm import (
    reduce,
    reduce_norm,
    reduce_norm_fp8,
    reduce_norm_reference,
    reduce_reference,
)
from batchspec.kernels.gemm.fp8_tokens import Fp8Form
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8
from tests.kernels.peers import Peers

NAN = float("nan")
EPS = 1e-5
WAYS = pytest.mark.parametrize("two_shot", [False, True], ids=["one-shot", "two-shot"])

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of one process cannot wait for each other on a GPU")


def lay_down(peers: Peers, number: int, partials: Tensor, sums: Tensor) -> None:
    """What all ranks will have written and sent once they have reached exchange `number`."""
    for rank, partial in enumerate(partials):
        peers.data(rank, number, 0, partial).copy_(partial)
        peers.data(rank, number, 1, partial).copy_(sums)
    peers.expect(number)


def on_all(
    peers: Peers, number: int, partials: Tensor, residual: Tensor, weight: Tensor, two_shot: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual, aux and norm, after a check that all ranks have the same bits."""
    lay_down(peers, number, partials, reduce_reference(partials))
    found = []
    for end, partial in zip(peers.ends, partials, strict=True):
        stream, out, aux = residual.clone(), torch.full_like(residual, NAN), torch.full_like(residual, NAN)
        for stage in (0, 1):  # the rank writes its own part
            peers.data(end.rank, number, stage, partial).fill_(NAN)
        reduce_norm(partial, stream, weight, EPS, end, out=out, out_aux=aux, two_shot=two_shot, interpret=True)
        assert end.lost() is None
        assert (end.epochs == number).all()
        found.append((stream, aux, out))
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.second
@settings(max_examples=25)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    num_tokens=st.integers(1, 4),
    width=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
    wide_weight=st.booleans(),
    seed=st.integers(0, 99),
)
def test_one_shot_and_two_shot_give_the_bits_of_the_sum_in_rank_order_and_of_one_norm(
    ranks: int, num_tokens: int, width: int, dtype: torch.dtype, wide_weight: bool, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    partials = (torch.randn(ranks, num_tokens, width, generator=noise) * 100).to(dtype)
    residual = torch.randn(num_tokens, width, generator=noise).to(dtype)
    weight = torch.randn(width, generator=noise).to(torch.promote_types(dtype, torch.float32) if wide_weight else dtype)
    expected, total = torch.empty_like(residual), residual.clone()
    reduce_norm_reference(partials, total, weight, EPS, out=expected)
    peers = Peers.make(ranks, 1 << 14)
    one, two = (on_all(peers, number, partials, residual, weight, number == 2) for number in (1, 2))
    assert all(same_bits(a, b) for a, b in zip(one, two, strict=True))
    assert same_bits(one[0], total)
    assert same_bits(one[1], total)
    torch.testing.assert_close(one[2], expected)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [Fp8Form(whole=False), Fp8Form(whole=True), Fp8Form(whole=True, scale=0.25)], ids=str)
def test_quantised_it_has_the_bits_of_one_process_that_has_the_sum(form: Fp8Form, dtype: torch.dtype, two_shot: bool) -> None:
    """Widths with a whole last group and with a part of one, more rows than a multiple of 4; NaN makes a scale infinite.

    Sums of whole numbers, because the interpreter does not round to bf16 as a GPU does.
    """
    peers = Peers.make(2, 1 << 14)
    for number, (width, wide_weight) in enumerate(((128, True), (300, False)), 1):
        partials, residual = (torch.randint(-9, 9, shape).to(dtype) for shape in ((2, 5, width), (5, width)))
        partials[1, 2, 7] = NAN
        weight = torch.randn(width).to(torch.float32 if wide_weight else dtype)
        total, aux_of_one = residual.clone(), torch.full_like(residual, NAN)
        expected = norm_fp8(reduce_reference(partials), total, weight, EPS, form, out_aux=aux_of_one, interpret=True)
        lay_down(peers, number, partials, reduce_reference(partials))
        for end in peers.ends:
            wide, stream = torch.full((5, 2 * width), NAN, dtype=dtype), residual.clone()
            own = torch.cat((wide[:, :width], partials[end.rank]), 1)[:, width:]  # rows are slices of wider ones
            aux = wide[:, width:]
            found = reduce_norm_fp8(own, stream, weight, EPS, form, end, out_aux=aux, two_shot=two_shot, interpret=True)
            assert (found.num_tokens, found.rows.values.shape) == (5, expected.rows.values.shape)
            assert same_bits(found.rows.values[:5], expected.rows.values[:5])
            assert same_bits(found.rows.scales[:, :5], expected.rows.scales[:, :5])
            for sums, wanted in ((stream, total), (aux, aux_of_one)):
                torch.testing.assert_close(sums, wanted, rtol=0, atol=0, equal_nan=True)
            assert bool(found.rows.scales[:, 2].isinf().all())
            assert bool(wide[:, :width].isnan().all())


def test_a_quantised_norm_refuses_what_it_cannot_write() -> None:
    end, x = Peers.make(2, 1 << 10).ends[0], torch.zeros(4, 16)
    form: Any = Fp8Form(whole=False, scale=0.5)
    with pytest.raises(ValueError, match=r"reduce_norm_fp8: scale=0\.5 applies to whole rows"):
        reduce_norm_fp8(x, x, x[0], EPS, form, end, interpret=True)
    with pytest.raises(ValueError, match=r"reduce_norm_fp8: partial is float64 \[4, 16\]"):
        reduce_norm_fp8(x.double(), x.double(), x[0], EPS, Fp8Form(whole=False), end, interpret=True)
    none = reduce_norm_fp8(x[:0], x[:0], x[0], EPS, Fp8Form(whole=False), end, interpret=True)
    assert (len(none.rows.values), none.num_tokens, int(end.epochs.max())) == (0, 0, 0)


@WAYS
def test_bf16_is_summed_in_fp32_and_rounded_once(two_shot: bool) -> None:
    partials = torch.tensor([256.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16).view(4, 1, 1).repeat(1, 3, 16)  # 256 + 1 is 256 in bf16
    peers = Peers.make(4, 1 << 10)
    residual, ones = torch.zeros(3, 16, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    found, _, normed = on_all(peers, 1, partials, residual, ones, two_shot)
    assert found.tolist() == [[258.0] * 16] * 3
    assert normed.tolist() == [[1.0] * 16] * 3


@WAYS
def test_the_order_is_that_of_the_ranks(two_shot: bool) -> None:
    partials = torch.tensor([1e8, 1.0, -1e8, 1.0]).view(4, 1, 1).repeat(1, 2, 40)
    peers = Peers.make(4, 1 << 10)
    lay_down(peers, 1, partials, reduce_reference(partials))
    out = torch.full((2, 40), NAN)
    for end in peers.ends:
        reduce(partials[end.rank], end, out=out, two_shot=two_shot, interpret=True)
        assert out.tolist() == [[1.0] * 40] * 2


@WAYS
def test_zeros_keep_their_sign_and_infinities_their_kind(two_shot: bool) -> None:
    row = torch.tensor([-0.0, 0.0, float("inf"), float("inf"), NAN])
    other = torch.tensor([-0.0, -0.0, 1.0, float("-inf"), 1.0])
    partials = torch.stack((row, other)).unsqueeze(1).repeat(1, 1, 8)
    peers = Peers.make(2, 1 << 10)
    lay_down(peers, 1, partials, reduce_reference(partials))
    for end in peers.ends:
        out = torch.full((1, 40), 7.0)
        reduce(partials[end.rank], end, out=out, two_shot=two_shot, interpret=True)
        assert str(out[0, :5].tolist()) == "[-0.0, 0.0, inf, nan, nan]"


@pytest.mark.second
@WAYS
def test_rows_do_not_depend_on_the_other_rows(two_shot: bool) -> None:
    """More rows than programs, and the same rows in another batch."""
    num_tokens, width = PROGRAMS + 3, 24
    partials, residual, weight = torch.randn(2, num_tokens, width), torch.randn(num_tokens, width), torch.randn(width)
    peers = Peers.make(2, 1 << 14)
    whole = on_all(peers, 1, partials, residual, weight, two_shot)
    few = on_all(peers, 2, partials[:, 100:].contiguous(), residual[100:], weight, two_shot)
    for all_rows, some in zip(whole, few, strict=True):
        assert same_bits(all_rows[100:], some)


@WAYS
def test_rows_of_wider_tensors_are_read_and_written_in_place(two_shot: bool) -> None:
    wide, total = torch.full((3, 4, 60), NAN), torch.randn(3, 32)
    partial, residual, out, aux = (wide[:, place, 8:40] for place in range(4))
    partial.copy_(torch.randn(3, 32))
    residual.copy_(total)
    other, weight, expected = torch.randn(3, 32), torch.randn(32), torch.empty(3, 32)
    partials = torch.stack((other, partial))
    reduce_norm_reference(partials, total, weight, EPS, out=expected)
    peers = Peers.make(2, 1 << 10)
    lay_down(peers, 1, partials, reduce_reference(partials))
    reduce_norm(partial, residual, weight, EPS, peers.ends[1], out=out, out_aux=aux, two_shot=two_shot, interpret=True)
    assert torch.equal(residual, total)
    assert torch.equal(aux, total)
    torch.testing.assert_close(out, expected)
    assert bool(wide[:, :, :8].isnan().all() and wide[:, :, 40:].isnan().all())


@WAYS
def test_an_exchange_leaves_what_the_one_before_it_may_still_read(two_shot: bool) -> None:
    partials, peers = torch.randn(2, 3, 16), Peers.make(2, 1 << 10)
    for number in (1, 2, 3):
        lay_down(peers, number, partials * number, reduce_reference(partials * number))
        out = torch.full((3, 16), NAN)
        reduce(partials[0] * number, peers.ends[0], out=out, two_shot=two_shot, interpret=True)
        assert torch.equal(out, reduce_reference(partials * number))
        if number > 1:
            assert torch.equal(peers.data(0, number - 1, 0, out), partials[0] * (number - 1))


@WAYS
def test_a_missing_rank_is_recorded_and_there_are_no_results(two_shot: bool) -> None:
    x, peers = torch.randn(3, 16), Peers.make(4, 1 << 10)
    end = peers.ends[0]
    for rank in (0, 1, 3):
        peers.flags(0)[:, :, rank] = 1
    out = torch.full((3, 16), NAN)
    reduce(x, end, out=out, two_shot=two_shot, interpret=True)
    assert end.lost() == 2
    assert bool(out.isnan().all())
    sent = peers.flags(1)[:, 0, 0].tolist()
    assert sent == [1, LOST if two_shot else 0], "what it gave first may be read"


@pytest.mark.parametrize(("flags", "named"), [((1, 1, LOST, 0), 3), ((1, LOST, 1, 1), 1), ((1, 0, LOST, LOST), 1)])
def test_the_rank_that_others_miss_is_named_and_not_who_tells_of_it(flags: tuple[int, ...], named: int) -> None:
    x, peers = torch.randn(1, 16), Peers.make(4, 1 << 10)
    peers.flags(0)[:] = torch.tensor(flags)
    reduce(x, peers.ends[0], out=x, interpret=True)
    assert peers.ends[0].lost() == named


@WAYS
def test_after_a_loss_nothing_is_written_that_others_may_read_and_they_give_up_at_once(two_shot: bool) -> None:
    x, peers = torch.randn(3, 16), Peers.make(2, 1 << 10, limit_s=3600)
    lost, other = peers.ends
    lost.failed.fill_(1 + 1)
    peers.data(0, 1, 0, x).fill_(5.0)
    out = torch.full((3, 16), NAN)
    reduce(x, lost, out=out, two_shot=two_shot, interpret=True)  # does not wait
    assert bool((peers.data(0, 1, 0, x) == 5.0).all())
    assert (peers.flags(1)[0, :3, 0] == LOST).all()
    assert (lost.epochs == 1).all()
    reduce(x, other, out=out, two_shot=two_shot, interpret=True)  # an hour's limit
    assert other.lost() == 0
    assert bool(out.isnan().all())


def test_no_rows_are_no_exchange() -> None:
    end = Peers.make(2, 1 << 10).ends[0]
    reduce(torch.empty(0, 16), end, out=torch.empty(0, 16), interpret=True)
    assert (end.epochs == 0).all()


def test_wrong_arguments_are_refused() -> None:
    end, x = Peers.make(2, 1 << 10).ends[0], torch.zeros(4, 16)
    with pytest.raises(ValueError, match=r"reduce: partial \[100, 16\] is larger than the 1024 bytes of an exchange"):
        reduce(torch.zeros(100, 16), end, out=torch.zeros(100, 16), interpret=True)
    with pytest.raises(ValueError, match="reduce: tensors on the CPU have no peer memory"):
        reduce(x, end, out=x)
    with pytest.raises(ValueError, match=r"reduce_norm: residual is float64 \[4, 16\]"):
        reduce_norm(x, x.double(), x[0], EPS, end, out=x, interpret=True)
    with pytest.raises(ValueError, match=r"reduce_norm: weight is float32 \[4\]"):
        reduce_norm(x, x, torch.zeros(4), EPS, end, out=x, interpret=True)
    with pytest.raises(ValueError, match=r"between 2, 4, 8 \.\. ranks, not 3"):
        Peers.make(3, 1 << 10)
    with pytest.raises(ValueError, match="num_bytes 1000 must be a multiple of 16"):
        Peers.make(2, 1000)
