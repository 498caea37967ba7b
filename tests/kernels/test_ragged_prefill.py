"""ragged_prefill: causal attention of rows of any length over their own keys, with windows and sinks, for large heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchspec.kernels.attention import ragged_prefill as module
from batchspec.kernels.attention.ragged_prefill import ragged_prefill
from tests.kernels.covering import covering

NAN = float("nan")
ROWS = [[(5, 5)], [(3, 9), (1, 1), (17, 40)], [(0, 4), (33, 33), (2, 70)]]
"""(queries, keys) of the rows of a batch."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch, interpret: bool) -> None:
    """In the interpreter rows of several tiles and blocks stay short."""
    if interpret:
        monkeypatch.setattr(module, "TILE", 32)
        monkeypatch.setattr(module, "BLOCK", 16)


def bounds(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, rows: list[tuple[int, int]], scale: float, window: int, sinks: Tensor | None,
    last: Tensor | None = None,
) -> Tensor:
    """In fp64, one query and head at a time."""
    out, place, first, group = torch.zeros(q.shape, dtype=torch.float64), 0, 0, q.shape[1] // k.shape[1]
    for num_q, num_k in rows:
        for i in range(num_q):
            position = num_k - num_q + i
            low = max(0, position - window + 1) if window else 0
            own = slice(first + low, first + (position if last is None else int(last[place + i])) + 1)
            for head in range(q.shape[1]):
                scores = scale * k[own, head // group].double().cpu() @ q[place + i, head].double().cpu()
                extra = torch.empty(0) if sinks is None else sinks[head : head + 1].double().cpu()
                weights = torch.cat((scores, extra.double())).softmax(0)[: len(scores)]
                out[place + i, head] = weights @ v[own, head // group].double().cpu()
        place, first = place + num_q, first + num_k
    return out


@pytest.mark.parametrize(
    ("rows", "heads", "window", "v_parts"), covering(ROWS, [(4, 2, 80), (3, 1, 32), (8, 2, 512)], [0, 7], [1, 2], one_in=2)
)
def test_each_query_attends_to_its_keys(
    rows: list[tuple[int, int]], heads: tuple[int, int, int], window: int, v_parts: int, interpret: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "V_PARTS", v_parts)
    num_heads, kv_heads, dim = heads
    num_q, num_k = (sum(own) for own in zip(*rows, strict=True))
    q, k, v = (
        torch.randn(count, own, dim, device=device).half()
        for count, own in ((num_q, num_heads), (num_k, kv_heads), (num_k, kv_heads))
    )
    sinks = torch.randn(num_heads, device=device) if window else None
    out = torch.full((num_q + 2, num_heads, dim), NAN, dtype=torch.half, device=device)
    padded = torch.cat((q, torch.zeros_like(q[:2])))
    ragged_prefill(
        padded, k, v, *(bounds([row[part] for row in rows], device) for part in (0, 1)), scale=0.3,
        max_q=max(own for own, _ in rows), out=out, window=window, sink_logits=sinks, interpret=interpret,
    )
    expected = by_hand(q, k, v, rows, 0.3, window, sinks)
    torch.testing.assert_close(out[:num_q].double().cpu(), expected, atol=4e-3, rtol=4e-3)
    assert out[num_q:].isnan().all()


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("rows", ROWS)
def test_queries_may_attend_to_later_keys(
    rows: list[tuple[int, int]], window: int, interpret: bool, device: torch.device
) -> None:
    """Those of images do: two runs of queries in each row, one at its end; others attend up to their own position."""
    num_q, num_k = (sum(own) for own in zip(*rows, strict=True))
    q, k, v = (torch.randn(count, own, 64, device=device).half() for count, own in ((num_q, 4), (num_k, 2), (num_k, 2)))
    last = list[int]()
    for own, keys in rows:
        positions = list(range(keys - own, keys))
        for begin, end in ((own // 5, own // 2), (own // 2 + 1, own)):
            positions[begin:end] = [keys - own + end - 1] * max(0, end - begin)
        last += positions
    last_keys = torch.tensor(last, dtype=torch.int32, device=device)
    ends = [bounds([row[part] for row in rows], device) for part in (0, 1)]
    out, checked = (torch.full((num_q, 4, 64), NAN, dtype=torch.half, device=device) for _ in range(2))
    more = {"scale": 0.3, "window": window, "last_keys": last_keys}
    longest = max(own for own, _ in rows)
    ragged_prefill(q, k, v, ends[0], ends[1], max_q=longest, out=out, interpret=interpret, **more)  # type: ignore[arg-type]
    module.ragged_prefill_reference(q, k, v, ends[0], ends[1], out=checked, **more)  # type: ignore[arg-type]
    expected = by_hand(q, k, v, rows, 0.3, window, None, last_keys)
    for found in (out, checked):
        torch.testing.assert_close(found.double().cpu(), expected, atol=4e-3, rtol=4e-3)
    causal = by_hand(q, k, v, rows, 0.3, window, None)
    assert (causal - expected).abs().max() > 0.05


def test_queries_may_be_slices_of_wider_rows(interpret: bool, device: torch.device) -> None:
    wide = torch.randn(9, 6, 32, device=device).half()
    k, v = torch.randn(2, 9, 1, 32, device=device).half()
    found, expected = (torch.empty(9, 2, 32, dtype=torch.half, device=device) for _ in range(2))
    ends = bounds([9], device)
    for q, out in ((wide[:, 1:3], found), (wide[:, 1:3].contiguous(), expected)):
        ragged_prefill(q, k, v, ends, ends, scale=0.1, max_q=9, out=out, interpret=interpret)
    assert torch.equal(found, expected)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    q, k, ends = (torch.zeros(4, n, 32, dtype=torch.half, device=device) for n in (2, 1, 1))
    ends = bounds([4], device)
    for name, bad in (("q", q.float()), ("k", k[:, :, :16]), ("out", q[:3]), ("last_keys", ends)):
        given = {"q": q, "k": k, "v": k, "out": torch.zeros_like(q), name: bad}
        given.setdefault("last_keys", torch.zeros(4, dtype=torch.int32, device=device))
        with pytest.raises(ValueError, match=f"ragged_prefill: {name} is"):
            ragged_prefill(
                given["q"], given["k"], given["v"], ends, ends, scale=1.0, max_q=4, out=given["out"],
                last_keys=given["last_keys"], interpret=True,
            )
