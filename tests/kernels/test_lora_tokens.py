"""The work list of the low-rank products: each token with an adapter is in one tile of this adapter, no other token in any."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.kernels.lora.lora_tokens import BLOCKS, block_of, lora_tokens, max_tiles
from tests.kernels.lora_cases import list_of


@given(
    num_adapters=st.integers(1, 9),
    block=st.sampled_from([None, *BLOCKS]),
    data=st.data(),
)
def test_each_token_with_an_adapter_is_in_one_tile(num_adapters: int, block: int | None, data: st.DataObject) -> None:
    adapters = data.draw(st.lists(st.integers(0, num_adapters), min_size=1, max_size=200))
    tokens = lora_tokens(torch.tensor(adapters, dtype=torch.int32), num_adapters, block)
    assert len(tokens.tiles) == max_tiles(len(adapters), num_adapters, tokens.block)
    found = list_of(tokens)
    assert all(0 < len(own) <= tokens.block for _, own in found)
    by_adapter: dict[int, list[int]] = {}
    for adapter, own in found:
        by_adapter.setdefault(adapter, []).extend(own)
    wanted = {entry: [i for i, own in enumerate(adapters) if own == entry + 1] for entry in range(num_adapters)}
    assert by_adapter == {entry: own for entry, own in wanted.items() if own}  # in the order of the tokens
    counts = [int(count) for _, _, count in tokens.tiles.tolist()]
    assert counts == sorted(counts, key=lambda count: count == 0)  # programs without work come last


def test_a_tile_has_as_many_tokens_as_an_adapter_has_on_average() -> None:
    assert [block_of(num, 16) for num in (1, 256, 512, 513, 1024, 16384)] == [16, 16, 16, 64, 64, 64]
    assert block_of(16, 0) == 16


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="lora_tokens: adapters is int64"):
        lora_tokens(torch.zeros(3, dtype=torch.int64), 2)
