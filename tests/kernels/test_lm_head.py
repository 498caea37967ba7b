"""lm_head: the id that argmax finds in the fp32 logits, without the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.gemm import lm_head as lm_head_module
from batchspec.kernels.gemm.lm_head import BLOCK, lm_head, lm_head_reference
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.sampling.argmax import NO_TOKEN, argmax

POISON = -7
INF, NAN = float("inf"), float("nan")
TILE = Tile(16, 16, 32, 2, 4, False)


def choose(
    hidden: Tensor, weight: Tensor, interpret: bool, vocab: int | None = None, map_ids: Tensor | None = None, tile: Tile = TILE,
    flag_nonfinite: bool = False, masks: Tensor | None = None, mask_rows: Tensor | None = None,
) -> list[int]:
    out_ids = torch.full((len(hidden),), POISON, dtype=torch.int32, device=hidden.device)
    lm_head(
        hidden, weight, out_ids=out_ids, vocab=vocab, map_ids=map_ids, tile=tile, flag_nonfinite=flag_nonfinite,
        masks=masks, mask_rows=mask_rows, interpret=interpret,
    )
    return [int(i) for i in out_ids]


def selector(rows: list[list[float]], device: torch.device) -> tuple[Tensor, Tensor]:
    """hidden and weight whose logits are exactly `rows`: one-hot hidden states against the values as weights."""
    num_rows = len(rows)
    return torch.eye(num_rows, device=device), torch.tensor(rows, device=device).t().contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("tokens", "width", "k"), [(1, 5, 8), (21, 130, 64), (40, 77, 136)])
def test_largest_logit_of_every_row(
    tokens: int, width: int, k: int, tma: bool, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    hidden, weight = torch.randn(tokens, k, device=device).to(dtype), torch.randn(width, k, device=device).to(dtype)
    logits = hidden.double() @ weight.double().t()
    ids = choose(hidden, weight, interpret, tile=TILE._replace(tma=tma))
    best = logits.amax(1)
    chosen = logits[torch.arange(tokens), ids]
    torch.testing.assert_close(chosen, best, atol=1e-4, rtol=0)  # logits that are never rounded to bf16


def test_more_tiles_than_one_block_of_the_second_kernel(
    interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = BLOCK if device.type == "cuda" else 64  # the interpreter takes a second for forty tiles
    monkeypatch.setattr(lm_head_module, "BLOCK", block)
    width = 16 * (block + 3)
    weight = torch.zeros(width, 16, device=device)
    weight[width - 2, 0] = weight[width - 1, 0] = 1  # a tie in the last tile
    weight[7, 1] = weight[16 * block + 1, 1] = 1  # a tie between blocks
    assert choose(torch.eye(3, 16, device=device), weight, interpret) == [width - 2, 7, 0]


def test_tie_goes_to_the_lowest_id_inside_and_between_tiles(interpret: bool, device: torch.device) -> None:
    rows = [[0.0] * 70 for _ in range(4)]
    for row, ids in enumerate(([5, 6], [15, 16], [17, 40, 69], [])):
        for i in ids:
            rows[row][i] = 1
    assert choose(*selector(rows, device), interpret) == [5, 15, 17, 0]


def test_a_column_of_a_matrix_is_written_in_place(interpret: bool, device: torch.device) -> None:
    hidden, weight = selector([[0.0, 1, 0], [3, 1, 0], [0, 1, 2]], device)
    ids = torch.full((3, 4), POISON, dtype=torch.int32, device=device)
    lm_head(hidden, weight, out_ids=ids[:, 2], tile=TILE, interpret=interpret)
    assert ids.tolist() == [[POISON, POISON, best, POISON] for best in (1, 0, 2)]


def test_nan_counts_as_minus_infinity(interpret: bool, device: torch.device) -> None:
    weight = torch.full((40, 1), -3.0, device=device)
    weight[:20] = NAN
    assert choose(torch.ones(2, 1, device=device), weight, interpret) == [20, 20]
    assert choose(torch.ones(2, 1, device=device), torch.full_like(weight, NAN), interpret) == [0, 0]
    weight[:30] = -INF
    assert choose(torch.ones(1, 1, device=device), weight, interpret) == [30]
    assert choose(torch.full((1, 1), NAN, device=device), weight, interpret) == [0]
    weight[33] = INF
    assert choose(torch.ones(1, 1, device=device), weight, interpret) == [33]
    assert choose(torch.ones(1, 1, device=device), torch.full_like(weight, -INF), interpret) == [0]


def test_a_row_that_is_not_finite_is_flagged_where_it_is_asked_for(interpret: bool, device: torch.device) -> None:
    hidden, weight = torch.randn(7, 16, device=device), torch.randn(40, 16, device=device)
    healthy = choose(hidden, weight, interpret)
    hidden[1, 3], hidden[4] = NAN, INF
    hidden[6, 5] = -INF
    found = choose(hidden, weight, interpret, flag_nonfinite=True)
    assert found == [healthy[0], NO_TOKEN, *healthy[2:4], NO_TOKEN, healthy[5], NO_TOKEN]
    ones, logits = torch.ones(1, 1, device=device), torch.zeros(40, 1, device=device)
    for value, at in ((INF, 39), (NAN, 17)):
        assert choose(ones, logits.index_fill(0, torch.tensor([at], device=device), value), interpret, flag_nonfinite=True) == [
            NO_TOKEN
        ]
    assert choose(ones, torch.full_like(logits, -INF), interpret, flag_nonfinite=True) == [NO_TOKEN]
    logits[:30], logits[37:] = -INF, NAN  # legitimate, and past the vocabulary
    assert choose(ones, logits, interpret, vocab=37, flag_nonfinite=True) == [30]
    with pytest.raises(ValueError, match="lm_head: map_ids with flag_nonfinite"):
        choose(hidden, weight, interpret, map_ids=torch.arange(40, device=device), flag_nonfinite=True)


def test_columns_after_the_vocabulary_are_never_chosen(interpret: bool, device: torch.device) -> None:
    weight = torch.randn(50, 1, device=device)
    weight[37:] = INF
    hidden = torch.ones(2, 1, device=device)
    assert choose(hidden, weight, interpret, vocab=37) == [int(weight[:37, 0].argmax())] * 2
    assert choose(hidden, torch.full_like(weight, -INF), interpret, vocab=1) == [0, 0]
    weight[:37] = -INF
    assert choose(hidden, weight, interpret, vocab=37) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_draft_ids_are_mapped_to_target_ids(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    hidden, weight = torch.randn(9, 16, device=device), torch.randn(40, 16, device=device)
    map_ids = (torch.arange(40, device=device) * 3 + 1).to(dtype)
    plain = choose(hidden, weight, interpret)
    assert choose(hidden, weight, interpret, map_ids=map_ids) == [3 * i + 1 for i in plain]


def test_rows_of_a_wider_tensor_are_read_in_place(interpret: bool, device: torch.device) -> None:
    hidden, weight = torch.randn(6, 16, device=device), torch.randn(40, 16, device=device)
    wide = torch.full((12, 48), NAN, device=device)
    wide[::2, 16:32] = hidden
    assert choose(wide[::2, 16:32], weight, interpret) == choose(hidden, weight, interpret)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 4), width=st.integers(1, 40))
def test_equals_argmax_of_the_same_logits(
    data: st.DataObject, num_rows: int, width: int, interpret: bool, device: torch.device
) -> None:
    values = st.lists(st.sampled_from([-INF, -1.0, 0.0, 2.0]), min_size=width, max_size=width)
    rows = data.draw(st.lists(values, min_size=num_rows, max_size=num_rows))
    hidden, weight = selector(rows, device)
    wanted = torch.full((num_rows,), POISON, dtype=torch.int32, device=device)
    lm_head_reference(hidden, weight, out_ids=wanted)  # 0 * -inf is NaN, in both
    assert choose(hidden, weight, interpret) == wanted.tolist()


def test_no_rows_is_no_work(interpret: bool, device: torch.device) -> None:
    assert choose(torch.empty(0, 16, device=device), torch.ones(5, 16, device=device), interpret) == []


def test_wrong_arguments_are_refused() -> None:
    hidden, weight, out_ids = torch.zeros(2, 16), torch.zeros(8, 16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lm_head: out_ids is int64 \[2\].*must be int32 \[2\]"):
        lm_head(hidden, weight, out_ids=out_ids.long())
    with pytest.raises(ValueError, match=r"lm_head: weight is float32 \[8, 16\].*must be float32 \[8, 12\]"):
        lm_head(hidden[:, :12], weight, out_ids=out_ids)
    with pytest.raises(ValueError, match=r"lm_head: vocab is 9; must be 1..8"):
        lm_head(hidden, weight, out_ids=out_ids, vocab=9)
    with pytest.raises(ValueError, match=r"lm_head: map_ids is float32 \[8\]"):
        lm_head(hidden, weight, out_ids=out_ids, map_ids=torch.zeros(8))
    with pytest.raises(ValueError, match="splits H"):
        lm_head(hidden, weight, out_ids=out_ids, tile=TILE._replace(split=2))


def bits_of(allowed: Tensor) -> Tensor:
    """int32 [M, ceil(V / 32)] of bool [M, V]; bits after V are set, which must not matter."""
    padded = torch.nn.functional.pad(allowed.cpu(), (0, -allowed.shape[1] % 32), value=True).numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy()).to(allowed.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width", "vocab"), [(1, 70, 64), (21, 130, 130), (40, 77, 75)])
@pytest.mark.parametrize("columns", [16, 32, 128])
def test_rows_choose_among_the_tokens_that_their_masks_allow(
    columns: int, tokens: int, width: int, vocab: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    """Bit for bit the choice among the same logits with -inf where a mask forbids. A tile has half a word, one, or several."""
    tile = TILE._replace(block_n=columns)
    noise = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(n, 32, generator=noise).to(device, dtype) for n in (tokens, width))
    allowed = torch.rand(7, vocab, generator=noise) < torch.tensor([0.0, 0.02, 0.1, 0.5, 0.9, 1.0, 0.5])[:, None]
    allowed[6] = torch.arange(vocab) == vocab - 1
    allowed = allowed.to(device)
    lines = (torch.arange(tokens) % 8 - 1).int().to(device)
    everywhere = torch.ones(tokens, vocab, dtype=torch.bool, device=device)
    free = choose(hidden, weight, interpret, vocab=vocab, tile=tile)
    masks = {"masks": bits_of(allowed), "mask_rows": lines}
    found = choose(hidden, weight, interpret, vocab=vocab, tile=tile, flag_nonfinite=True, **masks)
    chosen = torch.where((lines >= 0)[:, None], allowed[lines.clamp(min=0).long()], everywhere)
    logits = hidden.float() @ weight[:vocab].float().t()
    best = logits.masked_fill(~chosen, -INF)
    for row, token in enumerate(found):
        if not chosen[row].any():
            assert token == NO_TOKEN
        else:
            assert chosen[row, token]
            assert float(best[row, token]) == pytest.approx(float(best[row].max()), abs=1e-4)
        if lines[row] < 0 or chosen[row, free[row]]:
            assert token == free[row]


def test_what_a_mask_forbids_may_be_nan(interpret: bool, device: torch.device) -> None:
    weight = torch.tensor([[NAN], [3.0], [2.0], [INF]], device=device)
    allowed = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 1, 0]], device=device) > 0
    lines = torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32, device=device)
    masks: dict[str, Any] = {"masks": bits_of(allowed), "mask_rows": lines}
    found = choose(torch.ones(5, 1, device=device), weight, interpret, flag_nonfinite=True, **masks)
    assert found == [1, NO_TOKEN, NO_TOKEN, 2, NO_TOKEN]
    with pytest.raises(ValueError, match="come together"):
        choose(torch.ones(5, 1, device=device), weight, interpret, masks=bits_of(allowed))
    with pytest.raises(ValueError, match="32 bits, and there are 40 tokens"):
        choose(torch.ones(5, 1, device=device), torch.ones(40, 1, device=device), interpret, **masks)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "width", "vocab"), [(1, 5, 5), (21, 130, 127), (40, 77, 77)])
def test_confidence_is_that_of_the_argmax_of_the_same_logits(
    tokens: int, width: int, vocab: int, masked: bool, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of tiles are joined across blocks of the second kernel, and masked or missing tokens count nothing."""
    monkeypatch.setattr(lm_head_module, "BLOCK", 4)
    noise = torch.Generator().manual_seed(tokens)
    rows = 4 * torch.randn(tokens, width, generator=noise)
    rows[0, vocab // 2] = 30  # all but certain
    allowed = torch.rand(tokens, vocab, generator=noise) < 0.3
    allowed[:, vocab - 1] = True
    allowed[tokens // 2] = False
    hidden, weight = selector(rows.tolist(), device)
    masks, mask_rows = bits_of(allowed.to(device)), torch.arange(tokens, dtype=torch.int32, device=device)
    given: dict[str, Any] = {"masks": masks, "mask_rows": mask_rows} if masked else {}
    found, wanted = torch.full((2, tokens, 2), POISON, dtype=torch.int32, device=device).unbind()
    ids = torch.full((tokens, 3), POISON, dtype=torch.int32, device=device)  # another stride
    lm_head(hidden, weight, out_ids=ids[:, 0], vocab=vocab, out_confidence=found[:, 1], tile=TILE, interpret=interpret, **given)
    logits = rows[:, :vocab].masked_fill(~allowed, -INF) if masked else rows[:, :vocab]
    argmax(logits.to(device), out_ids=ids[:, 1], out_confidence=wanted[:, 1])
    assert ids[:, 0].equal(ids[:, 1])
    assert (found - wanted).abs().max() <= 1, "a sum in another order may fall on the other side of a border"
    assert (found == wanted).float().mean() > 0.95
    assert found[:, 0].eq(POISON).all()
    if masked:
        assert found[tokens // 2, 1] == 0, "no token is allowed"


def test_a_choice_that_is_not_finite_has_no_confidence(interpret: bool, device: torch.device) -> None:
    weight = torch.tensor([[1.0], [NAN], [-INF], [2.0]], device=device)
    hidden = torch.tensor([[1.0], [NAN], [INF]], device=device)
    found, ids = torch.full((2, 3), POISON, dtype=torch.int32, device=device).unbind()
    lm_head(hidden, weight, out_ids=ids, out_confidence=found, tile=TILE, interpret=interpret)
    assert found.tolist() == [16, 0, 0]  # ln of the odds of e^2 against e^1 is 1
    assert ids.tolist() == [3, 0, 0]
