"""bidirectional_attention: packed sequences that see all of themselves and nothing of others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.attention.bidirectional import USUAL, Settings, bidirectional_attention, parts_of, tiles_of
from tests.kernels.covering import covering

NAN = float("nan")
SMALL = Settings(tile=32, block=16)
"""In the interpreter sequences of several tiles and blocks stay short."""


def bounds(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def by_hand(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """In fp64, one sequence and head at a time."""
    parts = []
    for own in zip(*(x.double().cpu().split(lengths) for x in (q, k, v)), strict=True):
        query, key, value = (x.transpose(0, 1) for x in own)
        parts.append(((scale * query @ key.mT).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(("lengths", "dim"), covering([[5], [3, 40, 1], [33, 64, 70, 16]], [72, 64, 24, 80, 128, 8], one_in=2))
def test_each_token_attends_to_its_whole_sequence(
    lengths: list[int], dim: int, interpret: bool, device: torch.device
) -> None:
    """q, k and v are slices of one product's output, as a model has them; peaks of every sequence differ by far."""
    heads, count = 2, sum(lengths)
    qkv = torch.randn(count, 3, heads, dim, device=device).half()
    qkv[-lengths[-1] :, :2] *= 3.0
    q, k, v = qkv.unbind(1)
    out = torch.full((count, heads, dim), NAN, dtype=torch.half, device=device)
    settings = SMALL if interpret else USUAL
    tiles = torch.tensor(tiles_of(bounds(lengths), settings), dtype=torch.int32, device=device)
    bidirectional_attention(q, k, v, tiles, scale=dim**-0.5, out=out, settings=settings, interpret=interpret)
    torch.testing.assert_close(out.double().cpu(), by_hand(q, k, v, lengths, dim**-0.5), atol=4e-3, rtol=4e-3)


def test_no_bit_depends_on_other_sequences(interpret: bool, device: torch.device) -> None:
    lengths, dim = [30, 50, 17], 72
    qkv = torch.randn(sum(lengths), 3, 1, dim, device=device).half()

    def attended(qkv: Tensor, lengths: list[int]) -> Tensor:
        out = torch.empty(len(qkv), 1, dim, dtype=torch.half, device=device)
        tiles = torch.tensor(tiles_of(bounds(lengths)), dtype=torch.int32, device=device)
        q, k, v = qkv.unbind(1)
        bidirectional_attention(q, k, v, tiles, scale=0.1, out=out, interpret=interpret)
        return out

    alone = [attended(own.clone(), [len(own)]) for own in qkv.split(lengths)]
    assert torch.equal(attended(qkv, lengths), torch.cat(alone))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_every_query_is_in_one_tile_of_its_sequence(lengths: list[int]) -> None:
    seen: dict[int, tuple[int, int]] = {}
    for first, begin, end in tiles_of(bounds(lengths)):
        assert begin <= first < end
        seen |= {token: (begin, end) for token in range(first, min(end, first + USUAL.tile)) if token not in seen}
    expected = [(begin, begin + length) for begin, length in zip(bounds(lengths), lengths, strict=False) for _ in range(length)]
    assert [seen[token] for token in range(sum(lengths))] == expected


@pytest.mark.parametrize(
    ("dim", "parts"), [(8, (16, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (128, (128, 0))]
)
def test_a_head_is_held_in_powers_of_two(dim: int, parts: tuple[int, int]) -> None:
    assert parts_of(dim) == parts


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    q = torch.zeros(4, 2, 32, dtype=torch.half, device=device)
    tiles = torch.tensor([(0, 0, 4)], dtype=torch.int32, device=device)
    for name, bad in (("q", q.float()), ("out", q[:3]), ("tiles", tiles.long())):
        given = {"q": q, "k": q, "v": q, "tiles": tiles, "out": torch.zeros_like(q), name: bad}
        with pytest.raises(ValueError, match=f"bidirectional_attention: {name} is"):
            bidirectional_attention(given["q"], given["k"], given["v"], given["tiles"], scale=1.0, out=given["out"])
    wide = torch.zeros(4, 2, 160, dtype=torch.half, device=device)
    with pytest.raises(ValueError, match="at most 128 values"):
        bidirectional_attention(wide, wide, wide, tiles, scale=1.0, out=wide)
    with pytest.raises(ValueError, match="must be equal"):
        bidirectional_attention(q, q, q.repeat(1, 2, 1)[:, :2], tiles, scale=1.0, out=q)
