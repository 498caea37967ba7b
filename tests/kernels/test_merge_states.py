"""merge_states: attention over pieces of the keys, merged, is attention over all of them."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.attention.merge_states import PARTS, merge_states


@pytest.mark.parametrize("num_parts", [2, PARTS, 2 * PARTS + 3])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((9, 3), 96), ((3, 3), 8), ((2, 1), 300)], ids=str)
def test_merged_pieces_are_the_whole(
    num_parts: int, heads: tuple[int, int], head_dim: int, interpret: bool, device: torch.device
) -> None:
    num_q, (num_heads, kv_heads) = 3, heads
    group = num_heads // kv_heads
    scores = torch.randn(num_q, num_heads, num_parts, 5, device=device) * 9
    scores[1, :, 0] = float("-inf")  # a part of which the second query sees nothing
    values = torch.randn(kv_heads, num_parts, 5, head_dim, device=device)
    wide = values.repeat_interleave(group, 0)
    expected = torch.einsum("qhx,hxd->qhd", scores.flatten(2).softmax(2), wide.flatten(1, 2))

    def lines(x: torch.Tensor) -> torch.Tensor:
        """[q, NH, parts, ...] -> [parts * q * group, KVH, ...], after two lines that are another row's."""
        split = x.unflatten(1, (kv_heads, group)).movedim(3, 0).movedim(2, 3)
        return torch.cat([torch.full_like(split[0].flatten(0, 1)[:2], 7.0), split.flatten(0, 2)])

    part_out = torch.einsum("qhpx,hpxd->qhpd", scores.softmax(3).nan_to_num(0.0), wide)
    part_lse = (torch.logsumexp(scores, 3) * 1.4426950408889634).clamp(min=-1e30)
    row_parts = torch.tensor([[0, 0], [2, num_parts], [0, 0]], dtype=torch.int32, device=device)
    cu_seqlens_q = torch.tensor([0, 2, 2 + num_q, 2 + num_q], dtype=torch.int32, device=device)
    out = torch.full((6, num_heads, head_dim), 77.0, device=device)
    merge_states(
        lines(part_out).contiguous(),
        lines(part_lse).contiguous(),
        row_parts,
        cu_seqlens_q,
        max_q=num_q,
        out=out,
        interpret=interpret,
    )
    torch.testing.assert_close(out[2 : 2 + num_q], expected, atol=1e-5, rtol=0)
    assert bool((out[:2] == 77).all())  # rows that come whole are left alone, and so is padding
    assert bool((out[5:] == 77).all())


def test_a_query_that_no_part_saw_gets_finite_values(interpret: bool, device: torch.device) -> None:
    part_out = torch.zeros(2, 1, 16, device=device)
    part_lse = torch.full((2, 1), -1e30, device=device)
    out = torch.full((1, 1, 16), float("nan"), dtype=torch.bfloat16, device=device)
    ints = torch.tensor([[0, 2]], dtype=torch.int32, device=device)
    merge_states(
        part_out, part_lse, ints, torch.tensor([0, 1], dtype=torch.int32, device=device), max_q=1, out=out, interpret=interpret
    )
    assert not out.any()


def test_in_order_parts_without_keys_change_no_bit(device: torch.device) -> None:
    """Before, between and after parts with keys: another row's parts, or another batch's, decide how many there are."""
    part_out, part_lse = torch.randn(7, 1, 64, device=device), torch.randn(7, 1, device=device) * 3

    def merged(places: list[int], num_parts: int, *, in_order: bool) -> torch.Tensor:
        values, lse = torch.zeros(num_parts, 1, 64, device=device), torch.full((num_parts, 1), -1e30, device=device)
        values[places], lse[places] = part_out, part_lse
        out = torch.full((1, 1, 64), float("nan"), device=device)
        ints = torch.tensor([[0, num_parts]], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        merge_states(values, lse, ints, starts, max_q=1, out=out, in_order=in_order, interpret=True)
        return out.view(torch.int32)

    wanted = merged([*range(7)], 7, in_order=True)
    for places, num_parts in (([*range(1, 8)], 8), ([*range(7)], 9), ([0, 1, 3, 4, 6, 8, 10], 12)):
        assert torch.equal(merged(places, num_parts, in_order=True), wanted)
    assert not torch.equal(merged([*range(1, 8)], 8, in_order=False), merged([*range(7)], 7, in_order=False))


def test_wrong_arguments_are_refused() -> None:
    part_out, part_lse, out = torch.zeros(2, 1, 16), torch.zeros(2, 1), torch.zeros(1, 1, 16)
    row_parts, cu_seqlens_q = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="merge_states: part_lse is float64"):
        merge_states(part_out, part_lse.double(), row_parts, cu_seqlens_q, max_q=1, out=out)
    with pytest.raises(ValueError, match=r"merge_states: row_parts is int32 \[2\]"):
        merge_states(part_out, part_lse, cu_seqlens_q, cu_seqlens_q, max_q=1, out=out)
