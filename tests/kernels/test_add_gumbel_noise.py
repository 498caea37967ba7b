"""add_gumbel_noise: draft logits get the noise of the target's draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchspec.kernels.sampling.add_gumbel_noise import BLOCK, add_gumbel_noise
from batchspec.kernels.sampling.sample import gumbel_reference, sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [5, BLOCK, BLOCK + 3])
def test_logits_over_temperature_plus_noise(vocab: int, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(vocab)
    wide = torch.randn(4, vocab + 2, generator=rng, dtype=dtype).to(device)
    logits = wide[:, 1:-1]
    row_ids = torch.tensor([2, 0, 1, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([7, 8, 9, 2**40], device=device)
    keys, temp = torch.tensor([5, -(2**60), 77], device=device), torch.tensor([0.5, 0.0, 2.0], device=device)
    low = torch.tensor([-torch.inf, 0.1, 0.1, 0.0], dtype=dtype, device=device)
    noise = gumbel_reference(keys[row_ids], positions, vocab).to(dtype)
    scaled = torch.where(logits >= low[:, None], logits, -torch.inf) / temp[row_ids, None].to(dtype)
    expected = torch.where(temp[row_ids, None] > 0, scaled + noise, logits)
    edges = wide[:, [0, -1]].clone()
    add_gumbel_noise(logits, row_ids, positions, keys, temp, low, interpret=interpret)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=3e-6)
    assert torch.equal(wide[:, [0, -1]], edges)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_draft_vocabulary_has_the_noise_of_its_tokens(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    """The argmax is then the token that the target draws, if the draft vocabulary contains it."""
    vocab, count = 40, 60
    map_ids = torch.arange(3, vocab, 2, device=device)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)).to(device)
    ids, keys = torch.arange(count, dtype=torch.int32, device=device), torch.arange(count, device=device)
    rest = (ids, keys + 9, keys, torch.ones(count, device=device), torch.full((count,), -torch.inf, device=device))
    own = logits[:, map_ids].contiguous()
    add_gumbel_noise(own, *rest, map_ids.to(dtype), interpret=interpret)
    drawn, logits_of_known = torch.empty_like(ids), torch.full_like(logits, -torch.inf)
    logits_of_known[:, map_ids] = logits[:, map_ids]
    sample(logits_of_known, *rest, out_ids=drawn, interpret=interpret)
    assert map_ids[own.argmax(1)].tolist() == drawn.tolist()


def test_nan_and_logits_below_the_cutoff_never_win(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[torch.nan, 3.0, 2.0, 1.0]], device=device)
    row, key = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    cutoff = torch.full((1,), 2.0, device=device)
    add_gumbel_noise(logits, row, key, key, torch.ones(1, device=device), cutoff, interpret=interpret)
    assert logits.isneginf().tolist() == [[True, False, False, True]]


def test_wrong_arguments_are_refused() -> None:
    ints, longs = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    good: dict[str, Any] = {
        "logits": torch.zeros(2, 3), "row_ids": ints, "positions": longs, "keys": longs, "temperature": torch.ones(2),
        "cutoff": torch.zeros(2), "map_ids": torch.arange(3),
    }
    add_gumbel_noise(**good)
    for name in good:
        with pytest.raises(ValueError, match=f"add_gumbel_noise: {name} is"):
            add_gumbel_noise(**{**good, name: good[name].to(torch.int16)})
    with pytest.raises(ValueError, match="add_gumbel_noise: map_ids is int64"):
        add_gumbel_noise(**{**good, "map_ids": torch.arange(4)})
