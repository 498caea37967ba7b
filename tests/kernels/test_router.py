"""The router's product, and the whole of a mixture of experts from the kernels against one token at a time."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.moe import router
from batchspec.kernels.moe.combine import combine
from batchspec.kernels.moe.experts_plain import experts_plain_down, experts_plain_up
from batchspec.kernels.moe.gate import SWIGLU
from batchspec.kernels.moe.route import route
from batchspec.kernels.moe.router import FEW_TILES, router_logits
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import ExpertTile
from tests.kernels.moe_cases import assert_near, noise


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(1, 5, 128), (21, 40, 200), (3, 17, 1100), (FEW_TILES * 16 // 5 + 3, 70, 136)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_those_of_a_product_in_fp32(
    tokens: int, experts: int, k: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    x = noise(tokens, 2 * k, dtype=torch.bfloat16, device=device)[:, k:]
    weight, bias = noise(experts, k, dtype=dtype, device=device), noise(experts, dtype=dtype, device=device)
    found = router_logits(x, weight, bias, interpret=interpret)
    assert found.dtype == torch.float32
    assert_near(found, x.double() @ weight.double().T + bias.double(), tolerance=1e-6)
    assert_near(router_logits(x, weight, interpret=interpret), x.double() @ weight.double().T, tolerance=1e-6)


@pytest.mark.parametrize("k", [512, 1000, 2880])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_the_number_of_tokens(
    k: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large number absorbs every 1 that is added to it alone, but not their sums, so another order gives other bits."""
    x, weight = torch.zeros(3, k, dtype=torch.bfloat16, device=device), torch.ones(2, k, dtype=dtype, device=device)
    x[:, ::16] = 1.0
    x[:, 16] = 2.0**25
    few = router_logits(x, weight, interpret=True)
    monkeypatch.setattr(router, "FEW_TILES", 0)
    assert torch.equal(router_logits(x, weight, interpret=True), few)
    monkeypatch.setattr(router, "ONE_WAVE", 0)
    assert torch.equal(router_logits(x, weight, interpret=True), few)
    assert not torch.equal(few.double(), x.double() @ weight.double().T)


def test_no_tokens_is_no_work(interpret: bool, device: torch.device) -> None:
    logits = router_logits(torch.zeros(0, 32, device=device), torch.zeros(4, 32, device=device), interpret=interpret)
    routing = route(logits, 2, norm_topk=True, unit_pairs=16, interpret=interpret)
    assert [tuple(part.shape) for part in routing[:6]] == [(0, 2), (0, 2), (0,), (0,), (5,), (0, 4)]
    assert routing.offsets.tolist() == [0] * 5


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="router_logits: weight"):
        router_logits(torch.zeros(3, 32), torch.zeros(4, 31))
    with pytest.raises(ValueError, match="router_logits: x is float64"):
        router_logits(torch.zeros(3, 32).double(), torch.zeros(4, 32), interpret=True)


def test_all_kernels_together(interpret: bool, device: torch.device) -> None:
    tokens, experts, top_k, hidden, width = 23, 6, 3, 48, 32
    tile = ExpertTile(16, 32, 32, 2, 4)
    x = noise(tokens, hidden, dtype=torch.float32, device=device)
    matrix = noise(experts, hidden, dtype=torch.float32, device=device)
    gate_up = noise(experts, 2 * width, hidden, dtype=torch.float32, device=device, scale=hidden**-0.5)
    down = noise(experts, hidden, width, dtype=torch.float32, device=device, scale=width**-0.5)
    routing = route(router_logits(x, matrix, interpret=interpret), top_k, norm_topk=True, unit_pairs=16, interpret=interpret)
    h = experts_plain_up(sort_rows(x, routing, interpret=interpret), gate_up, None, routing, tile=tile, interpret=interpret)
    y = experts_plain_down(h, down, None, routing, tile=tile, interpret=interpret)
    out = torch.full_like(x, torch.nan)
    combine(y, routing.weights, out=out, interpret=interpret)
    for token in range(tokens):
        top = (matrix.double() @ x[token].double()).topk(top_k)
        wanted = torch.zeros(hidden, dtype=torch.float64, device=device)
        for weight, expert in zip(top.values.softmax(0), top.indices.tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            wanted += weight * (down[expert].double() @ SWIGLU(gate, up))
        assert_near(out[token], wanted, tolerance=1e-5)
