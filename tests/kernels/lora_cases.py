"""Adapters and tokens that the tests of the low-rank products share."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.kernels.lora.lora_tokens import LoraTokens

PRODUCTS: dict[str, tuple[tuple[int, ...], int]] = {
    "qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "gate_up": ((14336, 14336), 4096), "down": ((4096,), 14336),
    "tiny": ((32, 16), 64),
}
"""Products of an 8B, and small ones: rows of their parts, and K."""
SPREADS = ["mixed", "one adapter", "few tokens have one", "none has one"]


def adapters_of(num_tokens: int, num_adapters: int, spread: str, device: torch.device) -> Tensor:
    """int32 [T]: the adapter of each token, spread as named; adapter 2 has no tokens where there are more than two."""
    noise = torch.Generator().manual_seed(num_tokens)
    found = torch.randint(0, num_adapters + 1, (num_tokens,), generator=noise)
    if num_adapters > 2:
        found[found == 2] = num_adapters
    if spread == "one adapter":
        found.fill_(num_adapters)
    elif spread == "few tokens have one":
        found[torch.rand(num_tokens, generator=noise) < 0.9] = 0
    elif spread == "none has one":
        found.zero_()
    return found.int().to(device)


def list_of(tokens: LoraTokens) -> list[tuple[int, list[int]]]:
    """(adapter, its tokens) of each tile that has any."""
    order = tokens.order.tolist()
    return [(adapter, order[first : first + count]) for adapter, first, count in tokens.tiles.tolist() if count]
