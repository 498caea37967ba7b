"""Which tokens of a pass go through which LoRA adapter: the work list of the low-rank products, the same for all layers.

`order` lists the T tokens sorted by adapter, those without one first. A tile is a run of up to `block` tokens of one adapter in
this list, and each program of a product works on one tile. Only the device knows how many tiles there are; the host launches for
an upper bound (`max_tiles`). No tile has a token without an adapter. Nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from batchspec.kernels.common.checks import check

FIELDS = 3
"""Numbers that describe a tile: adapter, first index in `order`, number of tokens (0: nothing to do)."""
BLOCKS = (16, 64)
"""Tokens of a tile: a tensor core product has at least 16 rows. Only two sizes, because each is a kernel to compile."""


class LoraTokens(NamedTuple):
    """See the module's docstring."""

    order: Tensor
    """int32 [T]"""
    tiles: Tensor
    """int32 [max_tiles, 3], sorted by adapter, then by first index; tiles without tokens come last"""
    num_adapters: int
    block: int
    """Maximum number of tokens of a tile."""


def block_of(num_tokens: int, num_adapters: int) -> int:
    """Tokens of a tile, chosen by the mean number of tokens per adapter if every token has one."""
    return BLOCKS[0] if num_tokens <= 2 * BLOCKS[0] * max(1, num_adapters) else BLOCKS[1]


def max_tiles(num_tokens: int, num_adapters: int, block: int) -> int:
    """An upper bound of the number of tiles, whatever adapters the tokens have."""
    return min(num_adapters, num_tokens) + num_tokens // block


def lora_tokens(adapters: Tensor, num_adapters: int, block: int | None = None) -> LoraTokens:
    """The work list of tokens with these adapters.

    adapters  int32 [T] 1 .. num_adapters, or 0 for none: the weights of adapter i are entry i - 1 of a stack
    block     one of BLOCKS; None: `block_of`

    About a dozen small launches, once a pass. Does not synchronise.
    """
    (num_tokens,), device = adapters.shape, adapters.device
    check("lora_tokens: adapters", adapters, (num_tokens,), torch.int32)
    block = block_of(num_tokens, num_adapters) if block is None else block
    by_adapter, order = adapters.sort(stable=True)
    starts = torch.searchsorted(by_adapter, torch.arange(1, num_adapters + 2, dtype=torch.int32, device=device))
    counts = starts.diff()
    num_tiles = (counts + (block - 1)) // block
    ends = num_tiles.cumsum(0)
    index = torch.arange(max_tiles(num_tokens, num_adapters, block), device=device)
    own = torch.searchsorted(ends, index, right=True).clamp_(max=num_adapters - 1)  # the last one's beyond the last tile
    done = (index - (ends - num_tiles)[own]) * block
    tiles = torch.stack((own, starts[own] + done, (counts[own] - done).clamp_(0, block)), 1)
    return LoraTokens(order.int(), tiles.int(), num_adapters, block)


def check_tokens(kernel: str, tokens: LoraTokens, num_tokens: int, num_adapters: int) -> None:
    """`check` the work list of a launch over `num_tokens` tokens. Raises ValueError."""
    if tokens.num_adapters != num_adapters or tokens.block not in BLOCKS:
        raise ValueError(
            f"{kernel}: a work list for {tokens.num_adapters} adapters in tiles of {tokens.block} tokens, and the weights are "
            f"of {num_adapters}; tiles have {', '.join(map(str, BLOCKS))}"
        )
    check(f"{kernel}: order", tokens.order, (num_tokens,), torch.int32)
    check(f"{kernel}: tiles", tokens.tiles, (max_tiles(num_tokens, num_adapters, tokens.block), FIELDS), torch.int32)


def tokens_by_adapter(tokens: LoraTokens) -> Iterator[tuple[int, slice]]:
    """(entry of the stack, its places in `order`) for each tile with tokens. The host reads their number, which synchronises."""
    for adapter, first, count in tokens.tiles.tolist():
        if count:
            yield adapter, slice(first, first + count)
