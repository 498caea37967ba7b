"""verify_latents: however a batch is split, every query gets softmax attention over exactly the latents it may attend to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.work_list import AttentionWork, WorkShape
from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.latent.settings import latent_config, latent_shape, latent_tile
from batchspec.kernels.latent.verify_latents import verify_latents
from batchspec.tuning.cards import known_card
from tests.kernels.attention_cases import PAGE_SIZE, SMALL
from tests.kernels.covering import covering

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
RAGGED = [(1, 40), (4, 100), (2, 0), (3, 17), (0, 0), (1, 1)]
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of (queries, keys) laid end to end; a row with no key is dead."""

    q_latent: Tensor
    q_rope: Tensor
    latents: Tensor
    page_table: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    kv_len: Tensor
    shape: WorkShape
    scale: float = 0.3

    @classmethod
    def of(
        cls, rows: list[tuple[int, int]], *, heads: int = 5, sizes: tuple[int, int] = (24, 6), dtype: torch.dtype = torch.float32,
        padding: int = 0, device: torch.device, **shape: Any,
    ) -> Case:
        """Small items, so that short rows come in parts too. Queries are slices of wider products, heads outermost as `bmm`
        leaves them. What no row has written is NaN."""
        q_len, kv_len = [num for num, _ in rows], [keys for _, keys in rows]
        (latent, rope), total, per_row = sizes, sum(q_len) + padding, max(kv_len) // PAGE_SIZE + 2
        pages = (torch.randperm(len(rows) * per_row) + 1).int().view(len(rows), per_row)
        latents = torch.full((len(rows) * per_row + 1, PAGE_SIZE, latent + rope), NAN)
        for row, keys in enumerate(kv_len):
            at = torch.arange(keys)
            latents[pages[row, at // PAGE_SIZE].long(), at % PAGE_SIZE] = torch.randn(keys, latent + rope)
        ranges = [torch.arange(max(keys - num, 0), max(keys - num, 0) + num) for num, keys in rows]
        tile = latent_tile(max(q_len) * heads, dtype, INTERPRETER)
        return cls(
            q_latent=torch.randn(heads, total, latent).to(device, dtype).transpose(0, 1),
            q_rope=torch.randn(total, heads, rope + 7).to(device, dtype)[..., 7:], latents=latents.to(device, dtype),
            page_table=pages.to(device), positions=torch.cat([*ranges, torch.zeros(padding, dtype=torch.int64)]).to(device),
            cu_seqlens_q=torch.tensor([0, *q_len]).cumsum(0).int().to(device),
            kv_len=torch.tensor(kv_len, dtype=torch.int32, device=device),
            shape=WorkShape(
                max_q=max(q_len), max_kv=max(kv_len), kv_heads=1, heads_per_kv=heads, page_size=PAGE_SIZE,
                **SMALL | {"tile": tile, "programs": 16, "group_programs": 16} | shape,
            ),
        )

    def work(self, *, interpret: bool, programs: int) -> AttentionWork:
        shape = replace(self.shape, programs=programs)
        return split_kv_schedule(self.cu_seqlens_q, self.kv_len, self.positions, shape=shape, interpret=interpret)

    def run(self, *, interpret: bool, programs: int, positions: Tensor | None = None) -> Tensor:
        work = self.work(interpret=interpret, programs=programs)
        out = torch.full_like(self.q_latent, NAN, memory_format=torch.contiguous_format)
        partials = partials_of(work, out.shape[2])
        partials.out.fill_(NAN)
        partials.lse.fill_(NAN)
        positions = self.positions if positions is None else positions
        verify_latents(
            self.q_latent, self.q_rope, self.latents, self.page_table, positions, work, partials, scale=self.scale, out=out,
            interpret=interpret,
        )
        return out


def by_hand(case: Case) -> Tensor:
    """One query and head at a time, in fp64, from the definition."""
    shape, size = case.shape, case.q_latent.shape[2]
    out = torch.zeros(case.q_latent.shape, dtype=torch.float64)
    for row, length in enumerate(case.kv_len.tolist()):
        for t in range(int(case.cu_seqlens_q[row]), int(case.cu_seqlens_q[row + 1]) if length else 0):
            last = int(case.positions[t])
            seen = [k for k in range(last + 1) if not shape.window or k > last - shape.window or k < shape.sink]
            own = case.latents[case.page_table[row, [k // PAGE_SIZE for k in seen]].long(), [k % PAGE_SIZE for k in seen]]
            own = own.double().cpu()
            for head in range(out.shape[1]):
                query = torch.cat((case.q_latent[t, head], case.q_rope[t, head])).double().cpu()
                scores = own @ query
                out[t, head] = (scores * case.scale).softmax(0) @ own[:, :size]
    return out


def check(case: Case, interpret: bool, programs: tuple[int, ...] = (1, 40)) -> None:
    """With rows whole and with rows in parts."""
    expected = by_hand(case)
    for number in programs:
        out = case.run(interpret=interpret, programs=number)
        torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCE[out.dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # on Hopper keys are the second and the first axis of scores
@pytest.mark.parametrize(("window", "sink"), [(0, 0), (20, 5), pytest.param(1, 0, marks=pytest.mark.slow)])
def test_ragged_rows_dead_rows_and_padding(
    window: int, sink: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    case = Case.of(RAGGED, padding=3, window=window, sink=sink, dtype=dtype, block=32, device=device)
    check(case, interpret)
    out = case.run(interpret=interpret, programs=40)
    assert not out[5:7].any()  # the dead row
    assert not out[11:].any()  # the padding


@pytest.mark.parametrize(
    ("heads", "dtype", "sizes"), covering([1, 4, 20], [*TOLERANCE], [(512, 64), (16, 8), (40, 6), (160, 6)], one_in=3)
)
def test_heads_sizes_and_dtypes(
    heads: int, dtype: torch.dtype, sizes: tuple[int, int], interpret: bool, device: torch.device
) -> None:
    check(Case.of([(2, 33), (1, 5)], heads=heads, dtype=dtype, sizes=sizes, device=device), interpret, (4,))


@pytest.mark.parametrize("num_q", [1, 13, pytest.param(64, marks=pytest.mark.slow)])
def test_rows_of_several_tiles(num_q: int, interpret: bool, device: torch.device) -> None:
    case = Case.of([(num_q, 90), (1, 20), (num_q, num_q)], heads=6, device=device, block=32)
    check(case, interpret, (8,))
    check(replace(case, shape=replace(case.shape, tile=64)), interpret, (1,))


def test_bounds_of_pages_blocks_and_parts(interpret: bool, device: torch.device) -> None:
    rows = [(1, keys) for keys in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65)]
    check(Case.of(rows, heads=2, device=device, block=32), interpret, (1, 100))


def test_later_positions_than_the_list_was_made_for(interpret: bool, device: torch.device) -> None:
    case = Case.of([(1, 50), (1, 21)], device=device)
    earlier = replace(case, positions=case.positions - 5)
    out = earlier.run(interpret=interpret, programs=40, positions=case.positions)
    torch.testing.assert_close(out.double().cpu(), by_hand(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_draft_that_is_not_finite_reaches_the_queries_that_see_it_and_no_others(
    dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    """It is stored as zeros and a rotated part of NaN."""
    case = Case.of([(4, 100), (1, 40), (2, 30)], dtype=dtype, device=device)
    expected = by_hand(case)
    for row, position in ((0, 98), (2, 29)):
        own = case.latents[int(case.page_table[row, position // PAGE_SIZE]), position % PAGE_SIZE]
        own[:24], own[24:] = 0.0, NAN
    lost = torch.tensor([2, 3, 6])
    kept = torch.tensor([0, 1, 4, 5])
    for programs in (1, 40):
        out = case.run(interpret=interpret, programs=programs).double().cpu()
        assert bool(out[lost].isnan().all())
        torch.testing.assert_close(out[kept], expected[kept], atol=TOLERANCE[dtype], rtol=0)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = Case.of([(2, 9)], device=device)
    for wrong in (
        replace(case, q_rope=case.q_rope[:, :2]), replace(case, latents=case.latents[:, :, 1:]),
        replace(case, page_table=case.page_table.long()), replace(case, shape=replace(case.shape, kv_heads=5, heads_per_kv=1)),
    ):
        with pytest.raises(ValueError, match="verify_latents"):
            wrong.run(interpret=True, programs=1)


def test_settings_fit_the_cards_and_depend_on_them() -> None:
    sizes: dict[str, Any] = {"num_rows": 64, "max_kv": 8192, "num_heads": 20, "page_size": 16, "dtype": torch.bfloat16}
    hopper, ada = (known_card(name).card for name in ("H200", "L40S"))
    tiles = [[latent_shape(**sizes, max_q=q, latent_dim=512, card=card).tile for q in (1, 3)] for card in (hopper, ada)]
    assert tiles == [[32, 64], [32, 32]]
    for card in (hopper, ada):
        for dim in (256, 512):
            for tile in (latent_tile(lines, torch.bfloat16, card) for lines in (16, 20, 60)):
                config = latent_config(dim, tile, torch.bfloat16, card)
                assert config.num_stages > 1 or not card.has_wgmma
                used = 2 * ((config.num_stages - (not card.has_wgmma)) * config.block + tile) * (dim + 64)
                assert used <= card.sm_shared_bytes // config.per_sm - 1024
