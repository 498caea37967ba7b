"""argmax: the lowest id of the largest logit, never an id outside the vocabulary, whatever the logits hold."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.sampling.argmax import BLOCK, CONFIDENCE_BINS, NO_TOKEN, argmax

POISON = -7
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INF, NAN = float("inf"), float("nan")


def choose(
    logits: Tensor, interpret: bool, vocab: int | None = None, map_ids: Tensor | None = None, flag_nonfinite: bool = False
) -> list[int]:
    out_ids = torch.full((len(logits),), POISON, dtype=torch.int32, device=logits.device)
    argmax(logits, out_ids=out_ids, vocab=vocab, map_ids=map_ids, flag_nonfinite=flag_nonfinite, interpret=interpret)
    return [int(i) for i in out_ids]


def by_hand(row: list[float]) -> int:
    values = [-INF if math.isnan(x) else x for x in row]
    return values.index(max(values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 127, 128, 129, 1000, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_largest_logit_of_every_row(width: int, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = torch.randn(3, width, device=device).to(dtype)  # bf16 and fp16 hold many ties at these widths
    assert choose(logits, interpret) == [by_hand(row) for row in logits.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tie_goes_to_the_lowest_id(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = torch.zeros(4, BLOCK + 300, dtype=dtype, device=device)
    for row, ids in enumerate(([5, 6], [130, BLOCK - 1], [700, BLOCK + 1], [BLOCK + 2, BLOCK + 299])):
        logits[row, ids] = 1
    assert choose(logits, interpret) == [5, 130, 700, BLOCK + 2]
    assert choose(torch.zeros_like(logits), interpret) == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_counts_as_minus_infinity(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = torch.full((5, 300), -3.0, dtype=dtype, device=device)
    logits[0, :200] = NAN
    logits[1] = NAN
    logits[2] = -INF
    logits[3, ::2], logits[3, 1::2] = NAN, -INF
    logits[4, 3], logits[4, 4], logits[4, 299] = NAN, INF, NAN
    assert choose(logits, interpret) == [200, 0, 0, 0, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_is_flagged_on_request(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = torch.full((8, BLOCK + 300), -3.0, dtype=dtype, device=device)
    logits[0, 7], logits[0, 200] = 5, -INF
    logits[1, BLOCK + 299] = NAN
    logits[2, 0] = INF
    logits[3, 5], logits[3, 9] = INF, NAN
    logits[4] = -INF
    logits[5] = NAN
    logits[6] = -INF
    logits[6, 130] = -100
    logits[7, BLOCK + 100 :] = NAN  # past the vocabulary
    vocab = BLOCK + 100
    assert choose(logits, interpret, flag_nonfinite=True) == [7, *[NO_TOKEN] * 5, 130, NO_TOKEN]
    assert choose(logits[[0, 1, 6, 7]], interpret, vocab, flag_nonfinite=True) == [7, 0, 130, 0]


@pytest.mark.parametrize("flag", [False, True])
def test_the_largest_logit_itself_is_written_on_request(flag: bool, interpret: bool, device: torch.device) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[1.0, 3.0, 2.0, 9.0], [nan, -2.0, nan, 9.0], [-inf, -inf, -inf, 9.0], [1.0, inf, nan, 9.0]], device=device
    )
    out, top = torch.full((4,), -7, dtype=torch.int32, device=device), torch.full((4,), nan, device=device)
    argmax(logits, out_ids=out, out_top=top, vocab=3, flag_nonfinite=flag, interpret=interpret)
    assert top.tolist() == ([3.0, inf, -inf, inf] if flag else [3.0, -2.0, -inf, inf])


def test_padding_columns_are_never_chosen(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(3, 256, device=device)
    logits[0, 200:], logits[1, 200:], logits[2, :200] = INF, NAN, -INF
    expected = [by_hand(row) for row in logits[:, :200].tolist()]
    assert choose(logits, interpret, vocab=200) == expected
    assert max(choose(torch.full((2, 200), -INF, device=device), interpret, vocab=1)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_wider_tensor_are_read_in_place(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    wide = torch.full((6, 500), INF, dtype=dtype, device=device)
    logits = wide[::2, 100:437]
    logits.copy_(torch.randn(3, 337, device=device))
    assert choose(logits, interpret) == [by_hand(row) for row in logits.tolist()]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_draft_ids_are_mapped_to_target_ids(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = torch.randn(4, 64, device=device)
    map_ids = (torch.arange(64, device=device) * 3 + 1).to(dtype)
    assert choose(logits, interpret, map_ids=map_ids) == [3 * by_hand(row) + 1 for row in logits.tolist()]


def test_a_column_of_a_matrix_is_written_in_place(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(4, 300, device=device)
    ids = torch.full((4, 3), POISON, dtype=torch.int32, device=device)
    argmax(logits, out_ids=ids[:, 1], interpret=interpret)
    assert ids[:, 1].tolist() == [by_hand(row) for row in logits.tolist()]
    assert bool((ids[:, ::2] == POISON).all())


def test_no_rows_is_no_work(interpret: bool, device: torch.device) -> None:
    assert choose(torch.empty(0, 50, device=device), interpret) == []


@settings(max_examples=30)
@given(rows=st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(st.sampled_from([-INF, -1.0, 0.0, 2.0, INF, NAN]), min_size=n,
                                                                  max_size=n), min_size=1, max_size=3)))
def test_equals_a_plain_loop(rows: list[list[float]], interpret: bool, device: torch.device) -> None:
    assert choose(torch.tensor(rows, device=device), interpret) == [by_hand(row) for row in rows]


def test_cpu_tensors_take_the_reference_unless_interpreting_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"
    shapes: list[torch.Size] = []
    monkeypatch.setattr("batchspec.kernels.sampling.argmax.argmax_reference", lambda logits, **_: shapes.append(logits.shape))
    argmax(torch.zeros(1, 4), out_ids=torch.zeros(1, dtype=torch.int32))
    assert shapes == [(1, 4)]


def test_wrong_arguments_are_refused() -> None:
    logits, out_ids = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"argmax: out_ids is int64 \[2\].*must be int32 \[2\]"):
        argmax(logits, out_ids=out_ids.long())
    with pytest.raises(ValueError, match=r"argmax: out_ids is int32 \[3\]"):
        argmax(logits, out_ids=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="argmax: logits is int64"):
        argmax(logits.long(), out_ids=out_ids)
    with pytest.raises(ValueError, match=r"argmax: logits .*last dimension"):
        argmax(torch.zeros(8, 2).t(), out_ids=out_ids)
    with pytest.raises(ValueError, match=r"argmax: vocab is 9; must be 1..8"):
        argmax(logits, out_ids=out_ids, vocab=9)
    with pytest.raises(ValueError, match="argmax: vocab is 0"):
        argmax(logits, out_ids=out_ids, vocab=0)
    with pytest.raises(ValueError, match=r"argmax: map_ids is float32 \[8\]"):
        argmax(logits, out_ids=out_ids, map_ids=torch.zeros(8))
    with pytest.raises(ValueError, match="argmax: map_ids with flag_nonfinite"):
        argmax(logits, out_ids=out_ids, map_ids=torch.arange(8), flag_nonfinite=True)


def confidence(logits: Tensor, interpret: bool, vocab: int | None = None, flag_nonfinite: bool = False) -> list[int]:
    out, ids = torch.full((2, len(logits), 2), POISON, dtype=torch.int32, device=logits.device).unbind()
    argmax(
        logits, out_ids=ids[:, 0], out_confidence=out[:, 1], vocab=vocab, flag_nonfinite=flag_nonfinite, interpret=interpret
    )
    assert out[:, 0].tolist() == [POISON] * len(logits)
    return [int(i) for i in out[:, 1]]


@pytest.mark.parametrize("probability", [0.03, 0.07, 0.2, 0.45, 0.51, 0.9, 0.99, 0.9999])
def test_confidence_is_the_log_odds_of_the_choice_in_quarters(probability: float, interpret: bool, device: torch.device) -> None:
    """One token has the probability, the others share the rest."""
    width = 2 * BLOCK + 77
    rest = (1 - probability) / (width - 1)
    logits = torch.full((3, width), math.log(rest), device=device)
    for row, token in enumerate((0, BLOCK, width - 1)):
        logits[row, token] = math.log(probability)
    odds = math.log(probability / (1 - probability))
    expected = min(max(math.floor(4 * (odds + 3) + 1e-3), 0), CONFIDENCE_BINS - 1)
    assert confidence(logits + 5, interpret) == [expected] * 3, "a constant changes no probability"


@pytest.mark.parametrize("dtype", DTYPES)
def test_confidence_of_any_logits(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    logits = (4 * torch.randn(40, BLOCK + 9, device=device)).to(dtype)
    logits[:, BLOCK + 3 :] = 100  # padding
    logits[3, ::2] = -INF
    logits[4, 1::2] = NAN
    tokens = logits[:, : BLOCK + 3].nan_to_num(nan=-INF, neginf=-INF).double()
    share = tokens.softmax(1).amax(1)
    expected = (4 * ((share / (1 - share)).log() + 3)).clamp(0, CONFIDENCE_BINS - 0.5)
    found = torch.tensor(confidence(logits, interpret, vocab=BLOCK + 3), device=device)
    assert ((found <= expected + 0.01) & (found >= expected - 1.01)).all()
    assert len(set(found.tolist())) > 5


def test_a_choice_among_no_finite_logits_has_no_confidence(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[-INF, NAN], [INF, 1.0], [NAN, NAN], [0.0, -INF]], device=device)
    assert confidence(logits, interpret) == [0, 0, 0, CONFIDENCE_BINS - 1]


def test_a_flagged_choice_has_no_confidence(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[1.0, NAN, 0.0], [INF, 1.0, 0.0], [-INF, -INF, -INF], [9.0, -INF, 9.0]], device=device)
    assert confidence(logits, interpret, flag_nonfinite=True) == [0, 0, 0, confidence(logits[3:], interpret)[0]]
    assert confidence(logits[:1], interpret) != [0], "unflagged, NaN counts as -inf"
