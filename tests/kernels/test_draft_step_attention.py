"""draft_step_attention: causal attention merged with the keys of later draft steps, and the gradients of these keys."""

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
)

NAN = float("nan")
SCALE = 0.3
Shape = tuple[int, int, int, int, int, int]
"""B, L, H, KVH, D, J"""


def noise(shape: Shape, seed: int) -> tuple[Tensor, ...]:
    """q, grad [B, L, H, D], k, v [B, L, KVH, D] of the first step, step_kv [2, J, B, L, KVH, D]."""
    rows, length, heads, key_heads, size, steps = shape
    generator = torch.Generator().manual_seed(seed)
    q, grad = torch.randn(2, rows, length, heads, size, generator=generator)
    k, v = torch.randn(2, rows, length, key_heads, size, generator=generator)
    return q, grad, k, v, torch.randn(2, steps, rows, length, key_heads, size, generator=generator)


def by_definition(q: Tensor, k: Tensor, v: Tensor, step_kv: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over all causal keys and the step keys of the position: the output, and its log-sum-exp [B, H, L]."""
    length, repeats = q.shape[1], q.shape[2] // k.shape[2]
    k, v, step_kv = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2), step_kv.repeat_interleave(repeats, 4)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    scores = torch.einsum("blhd,bmhd->bhlm", q, k).masked_fill(later, -torch.inf)
    scores = torch.cat([scores, torch.einsum("blhd,jblhd->bhlj", q, step_kv[0])], -1) * SCALE
    weights = scores.softmax(-1)
    out = torch.einsum("bhlm,bmhd->blhd", weights[..., :length], v)
    out = out + torch.einsum("bhlj,jblhd->blhd", weights[..., length:], step_kv[1])
    return out.contiguous(), scores.logsumexp(-1)


SHAPES: list[Shape] = [(1, 1, 1, 1, 4, 1), (2, 5, 6, 2, 8, 3), (1, 33, 3, 3, 12, 2), (3, 7, 4, 1, 16, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merged_attention_and_its_gradients_are_those_of_one_softmax(shape: Shape, interpret: bool, device: torch.device) -> None:
    q, grad, k, v, step_kv = (x.to(device) for x in noise(shape, 1))
    causal, causal_lse = by_definition(q, k, v, step_kv[:, :0])
    out, lse = torch.full_like(q, NAN), torch.full_like(causal_lse, NAN)
    draft_step_attention(q, causal, causal_lse, step_kv, scale=SCALE, out=out, out_lse=lse, interpret=interpret)
    exact = [x.double().requires_grad_() for x in (q, step_kv)]
    expected, expected_lse = by_definition(exact[0], k.double(), v.double(), exact[1])
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), rtol=1e-5, atol=1e-5)

    expected.backward(grad.double())
    assert exact[0].grad is not None
    assert exact[1].grad is not None
    # The causal part's gradient of q: the whole gradient without the part of the step keys.
    part = torch.einsum("blh,jblh,jblhd->blhd", *_step_scores(q, grad, out, lse, step_kv, q.shape[2] // k.shape[2]))
    grad_q = (exact[0].grad - part.double()).float()
    grad_step_kv = torch.full_like(step_kv, NAN)
    outs = {"grad_q": grad_q, "grad_step_kv": grad_step_kv}
    draft_step_attention_backward(q, grad, out, lse, step_kv, scale=SCALE, **outs, interpret=interpret)
    torch.testing.assert_close(grad_q.double(), exact[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_step_kv.double(), exact[1].grad, rtol=1e-4, atol=1e-5)


def _step_scores(
    q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, step_kv: Tensor, repeats: int
) -> tuple[Tensor, Tensor, Tensor]:
    step_kv = step_kv.repeat_interleave(repeats, 4)
    weights = (torch.einsum("blhd,jblhd->jblh", q, step_kv[0]) * SCALE - lse.transpose(1, 2)).exp()
    delta = torch.einsum("blhd,jblhd->jblh", grad, step_kv[1]) - (grad * out).sum(-1)
    return torch.full_like(lse.transpose(1, 2), SCALE), weights * delta, step_kv[0]


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.sampled_from([(1, 1), (6, 2), (4, 4)]), st.integers(1, 20)),
    steps=st.integers(0, 4), spare=st.integers(0, 2), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_kernel_and_reference_agree(
    shape: tuple[int, int, tuple[int, int], int], steps: int, spare: int, dtype: torch.dtype, seed: int, interpret: bool,
    device: torch.device,
) -> None:
    """Also if the steps are a slice of a longer buffer."""
    rows, length, (heads, key_heads), size = shape
    q, grad, _, _, buffer = (x.to(device, dtype) for x in noise((rows, length, heads, key_heads, size, steps + spare), seed))
    step_kv, lse = buffer[:, :steps], torch.randn(rows, heads, length, generator=torch.Generator().manual_seed(seed)).to(device)
    found, wanted = (
        [torch.full_like(q, NAN), torch.full_like(lse, NAN), grad.clone(), torch.full_like(buffer, NAN)] for _ in "ab"
    )
    draft_step_attention(q, grad, lse, step_kv, scale=SCALE, out=found[0], out_lse=found[1], interpret=interpret)
    draft_step_attention_reference(q, grad, lse, step_kv, scale=SCALE, out=wanted[0], out_lse=wanted[1])
    given_ = (q, grad, wanted[0], wanted[1], step_kv)
    draft_step_attention_backward(*given_, scale=SCALE, grad_q=found[2], grad_step_kv=found[3][:, :steps], interpret=interpret)
    draft_step_attention_backward_reference(*given_, scale=SCALE, grad_q=wanted[2], grad_step_kv=wanted[3][:, :steps])
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2**-5, 2**-4)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)  # the rest of the buffer stays NaN


def test_wrong_arguments_are_refused() -> None:
    q, _, _, _, step_kv = noise((1, 3, 4, 2, 8, 2), 0)
    lse = torch.zeros(1, 4, 3)
    with pytest.raises(ValueError, match="draft_step_attention: causal is float64"):
        draft_step_attention(q, q.double(), lse, step_kv, scale=1.0, out=q, out_lse=lse)
    with pytest.raises(ValueError, match="KVH a divisor of 4 heads"):
        draft_step_attention(q, q, lse, step_kv[0], scale=1.0, out=q, out_lse=lse)
    with pytest.raises(ValueError, match=r"grad_step_kv is .* must be like step_kv"):
        draft_step_attention_backward(q, q, q, lse, step_kv, scale=1.0, grad_q=q, grad_step_kv=step_kv[:, :1])
