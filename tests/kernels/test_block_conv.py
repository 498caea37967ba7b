"""block_conv: a causal convolution over each block, with taps of each query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.drafting.block_conv import block_conv

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def drawn(rows: int, block: int, channels: int, groups: int, taps: int, dtype: torch.dtype, *, seed: int = 0) -> dict[str, Any]:
    """delta is the middle of wider rows."""
    rng, width = torch.Generator().manual_seed(seed), taps * groups
    wide = torch.randn(rows * block, 2 * width + 3, generator=rng).to(dtype)
    return {
        "x": torch.randn(rows * block, channels, generator=rng).to(dtype), "delta": wide[:, 3 : 3 + width],
        "base": torch.randn(taps, channels, generator=rng).to(dtype), "block": block,
    }


def moved(found: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in found.items()}


def by_hand(x: Tensor, delta: Tensor, base: Tensor, block: int) -> Tensor:
    """The formula, one value after another, in fp64."""
    (tokens, channels), taps = x.shape, len(base)
    groups = delta.shape[1] // taps
    out = torch.zeros(tokens, channels, dtype=torch.float64)
    for t in range(tokens):
        for c in range(channels):
            for tap in range(min(taps, t % block + 1)):
                own = float(base[tap, c]) + float(delta[t, tap * groups + c * groups // channels])
                out[t, c] += own * float(x[t - tap, c])
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "block", "channels", "groups", "taps"),
    [(3, 4, 12, 3, 2), (2, 1, 6, 6, 2), (1, 5, 10, 1, 3), (5, 3, 7, 7, 1), (2, 2, 8, 4, 4)],
)
def test_values_are_those_of_the_formula(
    rows: int, block: int, channels: int, groups: int, taps: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    found = drawn(rows, block, channels, groups, taps, dtype)
    on = moved(found, device)
    out = block_conv(**on, interpret=interpret)
    assert out.dtype is dtype
    torch.testing.assert_close(out.cpu().double(), by_hand(**found), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_kernel_and_reference_agree_over_several_programs() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = drawn(7, 3, 1100, 275, 2, torch.float32)
    on = moved(found, device)
    torch.testing.assert_close(block_conv(**on, interpret=True).cpu(), block_conv(**found))


def test_no_query_reads_another_row_or_a_later_one(interpret: bool, device: torch.device) -> None:
    """Not even a value that is not finite; so a block may be cut."""
    found = drawn(3, 4, 8, 2, 3, torch.float32)
    on = moved(found, device)
    plain = block_conv(**on, interpret=interpret)
    on["x"][6] = float("nan")
    after = block_conv(**on, interpret=interpret)
    assert (after.isnan().any(1)).tolist() == [6 <= t <= 7 for t in range(12)]
    others = [t for t in range(12) if t not in (6, 7)]
    assert torch.equal(after[others], plain[others])
    cut = {name: value.unflatten(0, (3, 4))[:, :2].flatten(0, 1) for name, value in on.items() if name in ("x", "delta")}
    shorter = block_conv(**(on | cut | {"block": 2}), interpret=interpret)
    assert torch.equal(shorter, plain.unflatten(0, (3, 4))[:, :2].flatten(0, 1))


def test_no_queries_are_no_launch(interpret: bool, device: torch.device) -> None:
    found = drawn(0, 4, 8, 2, 2, torch.float32)
    assert block_conv(**found, interpret=interpret).shape == (0, 8)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    good = drawn(2, 3, 8, 2, 2, torch.float32)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"block": 4}, "6 queries are no whole blocks of 4"), ({"block": 0}, "6 queries are no whole blocks of 0"),
        ({"delta": good["delta"][:, :3]}, "delta has 3 columns; must be 2 times a divisor of 8"),
        ({"delta": torch.zeros(6, 6)}, "delta has 6 columns; must be 2 times a divisor of 8"),
        ({"delta": good["delta"].double()}, "block_conv: delta is float64"),
        ({"base": torch.zeros(17, 8)}, "17 taps; must be 1..16"), ({"base": torch.zeros(2, 9)}, "block_conv: base is float32"),
        ({"x": torch.zeros(8, 6).t()}, "block_conv: x is float32"),
    ]
    for changes, said in bad:
        with pytest.raises(ValueError, match=said):
            block_conv(**(good | changes))
