"""prefix_attention: queries that read the first keys of their row, and its gradients, of the output and of lse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.train import prefix_attention as module
from batchspec.kernels.train.prefix_attention import prefix_attention, prefix_attention_backward, tile_of
from tests.kernels.architectures import card_for

SCALE = 0.3
NAN = float("nan")
Case = tuple[int, int, int, int, list[list[int]]]
"""L, H, KVH, D, and the limits of each row's queries"""

CASES: list[Case] = [
    (1, 1, 1, 4, [[1]]),
    (5, 2, 1, 8, [[0, 0, 2, 5], [], [3]]),
    (70, 6, 2, 12, [[0, 1, 1, 64, 65, 70], [69]]),
    (130, 3, 3, 16, [sorted((7 * i) % 131 for i in range(150)), [], [63, 64, 128]]),
    (70, 2, 1, 80, [[0, 1, 31, 32, 33, 65, 70], sorted(i % 71 for i in range(70))]),
    (40, 2, 1, 130, [[0, 1, 31, 32, 33, 40], sorted(i % 41 for i in range(40))]),
]


def drawn(case: Case, device: torch.device) -> dict[str, Any]:
    length, heads, key_heads, size, limits = case
    rng, count = torch.Generator().manual_seed(1), sum(map(len, limits))
    q, grad = torch.randn(2, count, heads, size, generator=rng)
    k, v = torch.randn(2, len(limits), length, key_heads, size, generator=rng)
    starts = torch.tensor([0, *map(len, limits)]).cumsum(0).int()
    flat = torch.tensor([x for row in limits for x in row], dtype=torch.int32)
    found = {"q": q, "k": k, "v": v, "grad": grad, "starts": starts, "limits": flat}
    return {name: tensor.to(device) for name, tensor in found.items()}


def by_definition(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, one query at a time."""
    outs, sums = [], []
    rows = torch.repeat_interleave(torch.arange(len(k)), starts.diff().cpu())
    for one, row, limit in zip(q, rows.tolist(), limits.tolist(), strict=True):
        key, value = (x[row, :limit].repeat_interleave(q.shape[1] // k.shape[2], 1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", one, key) * SCALE
        outs.append(torch.einsum("hk,khd->hd", scores.softmax(1), value))
        sums.append(scores.logsumexp(1) if limit else scores.new_full((len(one),), -torch.inf))
    return torch.stack(outs), torch.stack(sums)


def most(case: Case) -> int:
    return max(map(len, case[4]))


@pytest.mark.parametrize("small", [False, True], ids=["", "small tiles"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[:4]))
def test_output_and_gradients_are_those_of_the_definition(
    case: Case, small: bool, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        monkeypatch.setattr(module, "LARGE_BYTES", 1 << 31)
    given = drawn(case, device)
    grad, (q, k, v) = given.pop("grad"), (given[name] for name in "qkv")
    out, lse = torch.full_like(q, NAN), torch.full(q.shape[:2], NAN, device=device)
    options: dict[str, Any] = {"scale": SCALE, "most": most(case), "interpret": interpret}
    prefix_attention(**given, **options, out=out, out_lse=lse)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = by_definition(exact[0], exact[1], exact[2], given["starts"], given["limits"])
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), rtol=1e-5, atol=1e-5)

    read, grad_lse = given["limits"] > 0, torch.randn(lse.shape, generator=torch.Generator().manual_seed(2)).to(device)
    loss = (expected * grad.double()).sum() + (expected_lse * grad_lse.double())[read].sum()
    loss.backward()
    delta = (grad * out).sum(-1) - grad_lse * read.unsqueeze(1)
    grads = [torch.full_like(x, NAN) for x in (q, k, v)]
    outs: dict[str, Any] = dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))
    prefix_attention_backward(**given, **options, grad=grad, lse=lse, delta=delta, **outs)
    for found, one in zip(grads, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(found.double(), one.grad, rtol=1e-4, atol=1e-5)


def test_a_key_beyond_the_limits_has_no_part_in_anything(interpret: bool, device: torch.device) -> None:
    """Nor one of the padding of a shorter row, whatever it holds."""
    given = drawn((9, 2, 1, 8, [[2, 4], [9]]), device)
    grad = given.pop("grad")
    for name in "kv":
        given[name][0, 4:] = 1e4
    found = []
    for value in (1e4, -1e4):
        given["v"][0, 4:] = value
        out, lse = torch.empty_like(given["q"]), torch.empty(3, 2, device=device)
        grads: dict[str, Any] = {f"grad_{name}": torch.full_like(given[name], NAN) for name in "qkv"}
        options: dict[str, Any] = {"scale": SCALE, "most": 2, "interpret": interpret}
        prefix_attention(**given, **options, out=out, out_lse=lse)
        delta = (grad * out).sum(-1)
        prefix_attention_backward(**given, **options, grad=grad, lse=lse, delta=delta, **grads)
        assert not grads["grad_k"][0, 4:].any()
        assert not grads["grad_v"][0, 4:].any()
        found.append([out, *grads.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_arguments_that_do_not_fit_are_refused(device: torch.device) -> None:
    given = drawn((9, 4, 2, 8, [[2, 4], [9]]), device)
    given.pop("grad")
    outs: dict[str, Any] = {"out": given["q"].clone(), "out_lse": torch.zeros(3, 4, device=device), "scale": 1.0, "most": 2}
    for name, wrong, said in (
        ("k", given["k"][:, :, :, :7], r"prefix_attention: k is .*must be float32 \[2, 9, 2, 8\]"),
        ("k", given["k"].repeat(1, 1, 2, 1)[:, :, :3], r"must be \[B, L, KVH, D\] with KVH a divisor of 4 heads"),
        ("starts", given["starts"][:2], r"prefix_attention: starts is int32 \[2\]"),
        ("limits", given["limits"].long(), r"prefix_attention: limits is int64"),
        ("out_lse", torch.zeros(3, 4, dtype=torch.float64, device=device), r"prefix_attention: lse is float64"),
    ):
        with pytest.raises(ValueError, match=said):
            prefix_attention(**(given | outs | {name: wrong}))


def test_tiles_are_smaller_for_wider_heads_and_there_is_none_for_the_widest() -> None:
    """What is compiled for each is in tests/kernels/compile_cases/train.py."""
    large, small = card_for(90), card_for(89)
    assert [tile_of(size, 2, large) for size in (64, 128, 256, 512)] == [(64, 64, 3), (64, 64, 3), (64, 32, 2), (32, 32, 1)]
    assert [tile_of(size, 4, large) for size in (64, 80, 256)] == [(64, 64, 3), (64, 32, 2), (32, 32, 1)]
    assert [tile_of(size, 2, small) for size in (64, 256, 512)] == [(64, 64, 2), (32, 32, 2), (16, 16, 1)]
    with pytest.raises(ValueError, match=r"head_dim 257 of 4 bytes a value does not fit .*; supported are at most 1024"):
        tile_of(257, 4, large)
