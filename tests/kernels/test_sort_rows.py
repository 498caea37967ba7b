"""Rows are copied in the order of the list of pairs, whatever their dtype and strides."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.moe.sort_rows import sort_rows, sort_rows_reference
from tests.kernels.moe_cases import SPREADS, routing_of


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_copied_in_the_order_of_the_list(spread: str, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    routing = routing_of(11, 5, 3, spread, 16, device)
    x = torch.randn(11, 600, device=device).to(dtype)[:, 300:]
    found = sort_rows(x, routing, interpret=interpret)
    assert found.is_contiguous()
    assert torch.equal(found, torch.stack([x[pair // 3] for pair in routing.pairs.tolist()]))
    assert torch.equal(found, sort_rows_reference(x, routing))


def test_no_tokens_is_no_work(interpret: bool, device: torch.device) -> None:
    routing = routing_of(0, 4, 2, SPREADS[0], 16, device)
    assert sort_rows(torch.zeros(0, 32, device=device), routing, interpret=interpret).shape == (0, 32)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    routing = routing_of(8, 4, 2, SPREADS[0], 16, device)
    with pytest.raises(ValueError, match="sort_rows: expert_ids"):
        sort_rows(torch.zeros(16, 32, device=device), routing)
    with pytest.raises(ValueError, match="sort_rows: x is"):
        sort_rows(torch.zeros(8, 32, 2, device=device)[..., 0], routing)
