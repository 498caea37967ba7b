"""own_keys: what later draft steps see of their own place, merged with causal attention, and the gradients of that part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.train.draft_step_attention import (
    draft_step_attention,
    draft_step_attention_backward,
    draft_step_attention_backward_reference,
    draft_step_attention_reference,
)  # fmt: skip

NAN = float("nan")
SCALE = 0.3
Shape = tuple[int, int, int, int, int, int]
"""B, L, H, KVH, D, J"""


def noise(shape: Shape, seed: int) -> tuple[Tensor, ...]:
    """q, grad [B, L, H, D], k, v [B, L, KVH, D] of the first step, own [2, J, B, L, KVH, D]."""
    rows, length, heads, key_heads, size, steps = shape
    generator = torch.Generator().manual_seed(seed)
    q, grad = torch.randn(2, rows, length, heads, size, generator=generator)
    k, v = torch.randn(2, rows, length, key_heads, size, generator=generator)
    return q, grad, k, v, torch.randn(2, steps, rows, length, key_heads, size, generator=generator)


def by_definition(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over all keys up to the place and the place's own: the output, and its log-sum-exp [B, H, L]."""
    length, repeats = q.shape[1], q.shape[2] // k.shape[2]
    k, v, own = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2), own.repeat_interleave(repeats, 4)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    scores = torch.einsum("blhd,bmhd->bhlm", q, k).masked_fill(later, -torch.inf)
    scores = torch.cat([scores, torch.einsum("blhd,jblhd->bhlj", q, own[0])], -1) * SCALE
    weights = scores.softmax(-1)
    out = torch.einsum("bhlm,bmhd->blhd", weights[..., :length], v)
    out = out + torch.einsum("bhlj,jblhd->blhd", weights[..., length:], own[1])
    return out.contiguous(), scores.logsumexp(-1)


SHAPES: list[Shape] = [(1, 1, 1, 1, 4, 1), (2, 5, 6, 2, 8, 3), (1, 33, 3, 3, 12, 2), (3, 7, 4, 1, 16, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merged_attention_and_its_gradients_are_those_of_one_softmax(shape: Shape, interpret: bool, device: torch.device) -> None:
    q, grad, k, v, own = (x.to(device) for x in noise(shape, 1))
    causal, causal_lse = by_definition(q, k, v, own[:, :0])
    out, lse = torch.full_like(q, NAN), torch.full_like(causal_lse, NAN)
    draft_step_attention(q, causal, causal_lse, own, scale=SCALE, out=out, out_lse=lse, interpret=interpret)
    exact = [x.double().requires_grad_() for x in (q, own)]
    expected, expected_lse = by_definition(exact[0], k.double(), v.double(), exact[1])
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), rtol=1e-5, atol=1e-5)

    expected.backward(grad.double())
    assert exact[0].grad is not None
    assert exact[1].grad is not None
    # What the causal part gives q, by the same softmax: all of it without the single keys'.
    part = torch.einsum("blh,jblh,jblhd->blhd", *_own_scores(q, grad, out, lse, own, q.shape[2] // k.shape[2]))
    grad_q = (exact[0].grad - part.double()).float()
    out_own = torch.full_like(own, NAN)
    draft_step_attention_backward(q, grad, out, lse, own, scale=SCALE, grad_q=grad_q, out_own=out_own, interpret=interpret)
    torch.testing.assert_close(grad_q.double(), exact[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out_own.double(), exact[1].grad, rtol=1e-4, atol=1e-5)


def _own_scores(q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, own: Tensor, repeats: int) -> tuple[Tensor, Tensor, Tensor]:
    own = own.repeat_interleave(repeats, 4)
    weights = (torch.einsum("blhd,jblhd->jblh", q, own[0]) * SCALE - lse.transpose(1, 2)).exp()
    drift = torch.einsum("blhd,jblhd->jblh", grad, own[1]) - (grad * out).sum(-1)
    return torch.full_like(lse.transpose(1, 2), SCALE), weights * drift, own[0]


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.sampled_from([(1, 1), (6, 2), (4, 4)]), st.integers(1, 20)),
    steps=st.integers(0, 4), spare=st.integers(0, 2), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_kernel_and_reference_agree(
    shape: tuple[int, int, tuple[int, int], int], steps: int, spare: int, dtype: torch.dtype, seed: int, interpret: bool,
    device: torch.device,
) -> None:  # fmt: skip
    """Also where the steps lie in a longer buffer."""
    rows, length, (heads, key_heads), size = shape
    q, grad, _, _, buffer = (x.to(device, dtype) for x in noise((rows, length, heads, key_heads, size, steps + spare), seed))
    own, lse = buffer[:, :steps], torch.randn(rows, heads, length, generator=torch.Generator().manual_seed(seed)).to(device)
    found, wanted = (
        [torch.full_like(q, NAN), torch.full_like(lse, NAN), grad.clone(), torch.full_like(buffer, NAN)] for _ in "ab"
    )
    draft_step_attention(q, grad, lse, own, scale=SCALE, out=found[0], out_lse=found[1], interpret=interpret)
    draft_step_attention_reference(q, grad, lse, own, scale=SCALE, out=wanted[0], out_lse=wanted[1])
    given_ = (q, grad, wanted[0], wanted[1], own)
    draft_step_attention_backward(*given_, scale=SCALE, grad_q=found[2], out_own=found[3][:, :steps], interpret=interpret)
    draft_step_attention_backward_reference(*given_, scale=SCALE, grad_q=wanted[2], out_own=wanted[3][:, :steps])
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2**-5, 2**-4)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)  # what lies behind the steps stays NaN


def test_wrong_arguments_are_refused() -> None:
    q, _, _, _, own = noise((1, 3, 4, 2, 8, 2), 0)
    lse = torch.zeros(1, 4, 3)
    with pytest.raises(ValueError, match="draft_step_attention: causal is float64"):
        draft_step_attention(q, q.double(), lse, own, scale=1.0, out=q, out_lse=lse)
    with pytest.raises(ValueError, match="KVH a divisor of 4 heads"):
        draft_step_attention(q, q, lse, own[0], scale=1.0, out=q, out_lse=lse)
    with pytest.raises(ValueError, match=r"out_own is .* must be like own"):
        draft_step_attention_backward(q, q, q, lse, own, scale=1.0, grad_q=q, out_own=own[:, :1])
