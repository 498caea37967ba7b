"""kv_write: a forward's keys and values, bit for bit, at their cache locations and nowhere else."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.kv_cache.kv_write import kv_write

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POISON = 77.0


def make_cache(
    num_pages: int, page_size: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.full((2, num_pages, page_size, num_heads, head_dim), POISON, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 1), (3, 64), (8, 128), (5, 7), (2, 80)])
def test_every_token_lands_at_its_slot(
    num_heads: int, head_dim: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    kv = make_cache(4, 5, num_heads, head_dim, dtype, device)
    slot_mapping = torch.tensor([7, 19, 5, 12], device=device)
    k, v = torch.randn(2, 4, num_heads, head_dim, device=device).to(dtype)
    expected = kv.clone()
    for t, slot in enumerate(slot_mapping.tolist()):
        expected[0, slot // 5, slot % 5], expected[1, slot // 5, slot % 5] = k[t], v[t]
    kv_write(k, v, kv, slot_mapping, interpret=interpret)
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_a_fused_product_are_read_in_place(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    fused = torch.randn(6, (9 + 3 + 3) * 16, device=device).to(dtype)
    k, v = fused[:, 9 * 16 : 12 * 16].view(6, 3, 16), fused[:, 12 * 16 :].view(6, 3, 16)
    kv = make_cache(3, 4, 3, 16, dtype, device)
    slot_mapping = torch.tensor([4, 5, 6, 7, 8, 9], device=device)
    kv_write(k, v, kv, slot_mapping, interpret=interpret)
    assert torch.equal(kv[:, 1:].flatten(1, 2)[:, :6], torch.stack([k, v]))
    assert bool((kv[:, 0] == POISON).all())
    assert bool((kv[:, 2, 2:] == POISON).all())


def test_heads_may_be_strided_in_any_order(interpret: bool, device: torch.device) -> None:
    k = torch.randn(3, 5, 8, device=device).transpose(0, 1)  # [5, 3, 8], heads outermost in memory
    kv = make_cache(2, 5, 3, 8, torch.float32, device)
    kv_write(k, k * 2, kv, torch.arange(5, 10, device=device), interpret=interpret)
    assert torch.equal(kv[:, 1], torch.stack([k, k * 2]))


def test_one_layer_of_a_larger_cache_is_written(interpret: bool, device: torch.device) -> None:
    cache = torch.full((3, 2, 4, 2, 1, 8), POISON, device=device)
    k, v = torch.randn(2, 2, 1, 8, device=device)
    kv_write(k, v, cache[1], torch.tensor([3, 6], device=device), interpret=interpret)
    assert torch.equal(cache[1, :, 1, 1], torch.stack([k, v])[:, 0])
    assert torch.equal(cache[1, :, 3, 0], torch.stack([k, v])[:, 1])
    assert int((cache != POISON).sum()) == 2 * 2 * 8


def test_keys_and_values_of_separate_tensors(interpret: bool, device: torch.device) -> None:
    apart = make_cache(7, 2, 1, 4, torch.float32, device)[:, 1:4]  # the first stride is not the product of the others
    k, v = torch.randn(2, 1, 1, 4, device=device)
    kv_write(k, v, apart, torch.tensor([5], device=device), interpret=interpret)
    assert torch.equal(apart[:, 2, 1], torch.stack([k, v])[:, 0])


def test_dead_rows_share_the_scratch_page(interpret: bool, device: torch.device) -> None:
    kv = make_cache(3, 4, 2, 8, torch.float32, device)
    k, v = torch.randn(2, 5, 2, 8, device=device)
    kv_write(k, v, kv, torch.tensor([0, 0, 8, 0, 0], device=device), interpret=interpret)
    assert torch.equal(kv[:, 2, 0], torch.stack([k, v])[:, 2])
    assert bool((kv[:, 1] == POISON).all())
    assert int((kv != POISON).flatten(3).any(3).sum()) == 4  # slot 0 and slot 8, of keys and of values


def test_no_tokens_is_no_work(interpret: bool, device: torch.device) -> None:
    kv = make_cache(2, 4, 1, 4, torch.float32, device)
    empty = torch.empty(0, 1, 4, device=device)
    kv_write(empty, empty, kv, torch.empty(0, dtype=torch.int64, device=device), interpret=interpret)
    assert bool((kv == POISON).all())


def test_wrong_arguments_are_refused() -> None:
    k, kv, slot_mapping = torch.zeros(3, 2, 8), torch.zeros(2, 4, 4, 2, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="kv_write: k is int32"):
        kv_write(k.int(), k, kv, slot_mapping)
    with pytest.raises(ValueError, match=r"kv_write: v is float32 \[3, 1, 8\]"):
        kv_write(k, k[:, :1], kv, slot_mapping)
    with pytest.raises(ValueError, match=r"kv_write: v is float64"):
        kv_write(k, k.double(), kv, slot_mapping)
    with pytest.raises(ValueError, match=r"kv_write: kv\[0\] is bfloat16"):
        kv_write(k, k, kv.bfloat16(), slot_mapping)
    with pytest.raises(ValueError, match=r"kv_write: kv\[0\] .* must be float32 \[4, 4, 2, 8\], contiguous"):
        kv_write(k, k, torch.zeros(2, 4, 2, 4, 8).transpose(2, 3), slot_mapping)
    with pytest.raises(ValueError, match="kv_write: slot_mapping is int32"):
        kv_write(k, k, kv, slot_mapping.int())
    with pytest.raises(ValueError, match=r"kv_write: k .*contiguous in its last dimension"):
        kv_write(torch.zeros(3, 8, 2).transpose(1, 2), k, kv, slot_mapping)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("fault", [0, 1], ids=["K", "V"])
def test_one_number_of_k_or_v_is_enough(fault: int, value: float, interpret: bool, device: torch.device) -> None:
    both = torch.randn(2, 2, 3, 8, device=device)
    both[fault, 1, 2, 7] = value
    kv = make_cache(2, 5, 3, 8, torch.float32, device)
    k, v = both
    kv_write(k, v, kv, torch.arange(5, 7, device=device), interpret=interpret)
    assert kv[0, 1, :2].isnan().all(-1).tolist() == [[False] * 3, [False, False, True]]
    assert bool(kv[1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_is_not_finite_is_marked_in_k_and_mended_in_v(
    dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    """Whoever sees it gets NaN by its score, and whoever does not adds 0 times a finite number."""
    k, v = torch.randn(2, 5, 3, 7, device=device).to(dtype)
    k[0, 1, 6], k[1, 0, 0], v[2, 2, 3], v[3, 1, 0] = float("nan"), float("-inf"), float("inf"), float("nan")
    kv = make_cache(2, 5, 3, 7, dtype, device)
    kv_write(k, v, kv, torch.arange(5, 10, device=device), interpret=interpret)
    marked = torch.zeros(5, 3, dtype=torch.bool, device=device)
    marked[[0, 1, 2, 3], [1, 0, 2, 1]] = True
    assert bool(kv[0, 1][marked].isnan().all())
    assert torch.equal(kv[0, 1][~marked], k[~marked])
    assert torch.equal(kv[1, 1], torch.where(v.isfinite(), v, 0.0))
