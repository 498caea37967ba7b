"""eagle_head_input: the normed embedding of each flat token's id, concatenated with its normed hidden state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.drafting.eagle_head_input import eagle_head_input, eagle_head_input_reference

# Three roundings of the dtype; the interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float64: 1e-12}
EPS, NAN, VOCAB = 1e-5, float("nan"), 11


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()


def make(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    hidden = torch.randn(num_tokens, width, device=device).to(dtype)
    shapes = ((VOCAB, width), (width,), (width,))
    embedding, embedding_norm, hidden_norm = (torch.randn(*shape, device=device).to(dtype) for shape in shapes)
    return hidden, (embedding, embedding_norm, hidden_norm)


def assert_halves(out: Tensor, tokens: Tensor, hidden: Tensor, weights: tuple[Tensor, Tensor, Tensor]) -> None:
    embedding, embedding_norm, hidden_norm = weights
    exact = torch.cat((by_hand(embedding[tokens.long()], embedding_norm), by_hand(hidden, hidden_norm)), 1)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance / 8)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 7), (5, 576), (2, 1024)])
def test_an_id_for_each_token(num_tokens: int, width: int, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    hidden, weights = make(num_tokens, width, dtype, device)
    tokens = torch.randint(0, VOCAB, (num_tokens,), dtype=torch.int32, device=device)
    out = torch.full((num_tokens, 2 * width), NAN, dtype=dtype, device=device)
    eagle_head_input(tokens, hidden, *weights, EPS, out=out, interpret=interpret)
    assert_halves(out, tokens, hidden, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_weight_multiplies_before_the_only_rounding(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    if interpret and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bf16")
    torch.manual_seed(0)
    hidden, (embedding, *norms) = make(5, 80, dtype, device)
    first, second = wide = [norm.float() + 2.0**-12 for norm in norms]  # no numbers of the narrower dtype
    tokens = torch.randint(0, VOCAB, (5,), dtype=torch.int32, device=device)
    out = torch.full((5, 160), NAN, dtype=dtype, device=device)
    eagle_head_input(tokens, hidden, embedding, first, second, EPS, out=out, interpret=interpret)
    for half, x, weight in zip(out.split(80, 1), (embedding[tokens.long()], hidden), wide, strict=True):
        normed = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt()
        once, twice = (normed * weight.double()).to(dtype), (normed.to(dtype).double() * weight.double()).to(dtype)
        assert int((half != once).sum()) <= 4  # where fp32 and fp64 lie on two sides of a tie
        assert int((twice != once).sum()) > 40


def test_a_column_of_tokens(interpret: bool, device: torch.device) -> None:
    hidden, weights = make(3, 16, torch.float32, device)
    drafts = torch.tensor([[9, 1, 9], [9, 0, 9], [9, 10, 9]], dtype=torch.int32, device=device)
    out = torch.full((3, 32), NAN, device=device)
    eagle_head_input(drafts[:, 1], hidden, *weights, EPS, out=out, interpret=interpret)
    assert_halves(out, drafts[:, 1], hidden, weights)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_next_token_of_each_position_in_its_row(index_dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    table = torch.randint(0, VOCAB, (3, 6), dtype=torch.int32, device=device)
    row_ids = torch.tensor([2, 0, 0, 1, 2], dtype=index_dtype, device=device)
    positions = torch.tensor([0, 4, 1, 3, 4], device=device)
    hidden, weights = make(5, 20, torch.float32, device)
    out = torch.full((5, 40), NAN, device=device)
    eagle_head_input(table, hidden, *weights, EPS, out=out, row_ids=row_ids, positions=positions, interpret=interpret)
    assert_halves(out, table[row_ids.long(), positions + 1], hidden, weights)


def test_a_position_past_the_last_row_reads_inside_the_table(interpret: bool, device: torch.device) -> None:
    table = torch.randint(0, VOCAB, (2, 4), dtype=torch.int32, device=device)
    hidden, weights = make(2, 8, torch.float32, device)
    out = torch.full((2, 16), NAN, device=device)
    at: dict[str, Any] = {"row_ids": torch.tensor([1, 1], device=device), "positions": torch.tensor([3, 900], device=device)}
    eagle_head_input(table, hidden, *weights, EPS, out=out, interpret=interpret, **at)
    assert bool(out.isfinite().all())


def test_rows_of_wider_tensors_are_read_and_written(interpret: bool, device: torch.device) -> None:
    hidden, weights = make(3, 16, torch.float32, device)
    wide, both = torch.full((3, 40), NAN, device=device), torch.full((3, 50), NAN, device=device)
    wide[:, 8:24] = hidden
    tokens = torch.tensor([1, 0, 10], dtype=torch.int32, device=device)
    eagle_head_input(tokens, wide[:, 8:24], *weights, EPS, out=both[:, 4:36], interpret=interpret)
    assert_halves(both[:, 4:36], tokens, hidden, weights)
    assert bool(both[:, :4].isnan().all() and both[:, 36:].isnan().all())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 6), st.integers(1, 40), st.integers(0, 99))
def test_kernel_and_reference_agree(num_tokens: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden, weights = make(num_tokens, width, torch.float64, device)
    tokens = torch.randint(0, VOCAB, (num_tokens,), dtype=torch.int32, device=device)
    outs = [torch.full((num_tokens, 2 * width), NAN, dtype=torch.float64, device=device) for _ in range(2)]
    eagle_head_input(tokens, hidden, *weights, EPS, out=outs[0], interpret=True)
    eagle_head_input_reference(tokens, hidden, *weights, EPS, out=outs[1])
    torch.testing.assert_close(*outs, atol=1e-12, rtol=1e-12)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    hidden, weights = make(2, 4, torch.float32, device)
    tokens = torch.zeros(2, dtype=torch.int32, device=device)
    out = torch.zeros(2, 8, device=device)
    good: dict[str, Any] = {"token_ids": tokens, "hidden": hidden, "out": out}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"token_ids": tokens.long()}, "token_ids is int64"),
        ({"out": out[:, :4]}, "out is float32"),
        ({"hidden": hidden.double()}, "embedding is float32"),
        ({"positions": tokens.long()}, "row_ids and positions go together"),
        ({"positions": tokens.long(), "row_ids": tokens[:1]}, "row_ids is int32"),
    ]
    good |= dict(zip(("embedding", "embedding_norm", "hidden_norm"), weights, strict=True)) | {"eps": EPS}
    for changes, said in bad:
        with pytest.raises(ValueError, match=said):
            eagle_head_input(**(good | changes))
