"""x A' of each token's own adapter, whatever the adapters of the other tokens, the split of K, and the ranks."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.lora.lora_shrink import PROGRAMS, RANKS, lora_shrink, num_splits, padded_rank
from batchspec.kernels.lora.lora_tokens import lora_tokens
from tests.kernels.lora_cases import SPREADS, adapters_of
from tests.kernels.moe_cases import assert_near, noise

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(
    ("spread", "parts", "rank", "k", "splits", "block", "dtype"),
    [
        ("mixed", 3, 16, 40, 1, 16, torch.float32),
        ("mixed", 2, 32, 200, 2, 64, torch.bfloat16),
        ("one adapter", 1, 64, 384, 4, 16, torch.float32),
        ("few tokens have one", 3, 16, 256, None, 64, torch.bfloat16),
    ],
)
def test_each_token_has_the_product_of_its_own_adapter(
    spread: str, parts: int, rank: int, k: int, splits: int | None, block: int, dtype: torch.dtype, interpret: bool,
    device: torch.device,
) -> None:
    num_tokens, num_adapters = 37, 3
    adapters = adapters_of(num_tokens, num_adapters, spread, device)
    tokens = lora_tokens(adapters, num_adapters, block)
    x = noise(num_tokens, k + 8, dtype=dtype, device=device)[:, 8:]
    a = noise(num_adapters, parts, rank, k, dtype=dtype, device=device, scale=k**-0.5)
    scales = torch.ones(num_adapters, parts, device=device)
    h = lora_shrink(x, a, scales, tokens, splits=splits, interpret=interpret)
    assert h.shape[1:] == (num_tokens, parts, rank)
    found = h.sum(0)
    for place, token in enumerate(tokens.order.tolist()):
        if adapter := int(adapters[token]):
            assert_near(found[place], a[adapter - 1].double() @ x[token].double(), tolerance=TOLERANCE[dtype])


def test_tokens_without_an_adapter_cost_nothing_and_parts_that_an_adapter_lacks_neither(device: torch.device) -> None:
    """Nothing of them is read: x and A are NaN there."""
    adapters = adapters_of(21, 3, SPREADS[0], device)
    tokens = lora_tokens(adapters, 3, 16)
    x, a = noise(21, 64, dtype=torch.float32, device=device), noise(3, 2, 16, 64, dtype=torch.float32, device=device)
    scales = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]], device=device)
    x[adapters == 0] = torch.nan
    a[0, 1] = torch.nan
    h = lora_shrink(x, a, scales, tokens, interpret=True).sum(0)
    for place, token in enumerate(tokens.order.tolist()):
        if adapter := int(adapters[token]):
            assert h[place, 0].isfinite().all()
            assert adapter == 1 or h[place, 1].isfinite().all()


def test_a_token_alone_has_the_bits_of_a_token_among_many(device: torch.device) -> None:
    adapters = adapters_of(40, 4, SPREADS[0], device)
    adapters[7] = 3
    x, a = noise(40, 130, dtype=torch.float32, device=device), noise(4, 2, 16, 130, dtype=torch.float32, device=device)
    scales = torch.ones(4, 2, device=device)
    many, alone = lora_tokens(adapters, 4, 64), lora_tokens(adapters[7:8], 4, 16)
    every = lora_shrink(x, a, scales, many, splits=2, interpret=True)
    one = lora_shrink(x[7:8], a, scales, alone, splits=2, interpret=True)
    assert torch.equal(one[:, 0], every[:, many.order.tolist().index(7)])


def test_no_tokens_is_no_work(interpret: bool, device: torch.device) -> None:
    tokens = lora_tokens(torch.zeros(0, dtype=torch.int32, device=device), 2)
    x, a, scales = torch.zeros(0, 32, device=device), torch.zeros(2, 1, 16, 32, device=device), torch.ones(2, 1, device=device)
    assert lora_shrink(x, a, scales, tokens, interpret=interpret).shape[1:] == (0, 1, 16)


def test_ranks_are_padded_to_what_a_tensor_core_product_takes() -> None:
    assert [padded_rank(rank) for rank in (1, 8, 16, 17, 33, 64, 65)] == [16, 16, 16, 32, 64, 64, None]
    assert all(padded_rank(rank) == rank for rank in RANKS)


def test_k_is_split_until_the_gpu_is_full() -> None:
    assert num_splits(4096, 48, 128) == 8
    assert num_splits(14336, 16, 128) == 16
    assert num_splits(4096, PROGRAMS, 128) == 1
    assert num_splits(100, 1, 128) == 1
    assert num_splits(640, 1, 128) == 2  # two blocks each, and the last has one


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    tokens = lora_tokens(torch.ones(4, dtype=torch.int32, device=device), 2)
    x, a, scales = torch.zeros(4, 32, device=device), torch.zeros(2, 1, 16, 32, device=device), torch.ones(2, 1, device=device)
    with pytest.raises(ValueError, match="lora_shrink: a is bfloat16"):
        lora_shrink(x, a.bfloat16(), scales, tokens, interpret=True)
    with pytest.raises(ValueError, match="lora_shrink: order"):
        lora_shrink(x[:3], a, scales, tokens, interpret=True)
    with pytest.raises(ValueError, match="a work list for 2 adapters in tiles of 16 tokens, and the weights are of 1"):
        lora_shrink(x, a[:1], scales[:1], tokens, interpret=True)
    with pytest.raises(ValueError, match="3 splits; must be one of 1, 2, 4, 8, 16"):
        lora_shrink(x, a, scales, tokens, splits=3, interpret=True)
    with pytest.raises(ValueError, match="rank 24; must be padded to one of 16, 32, 64"):
        lora_shrink(x, torch.zeros(2, 1, 24, 32, device=device), scales, tokens, interpret=True)
