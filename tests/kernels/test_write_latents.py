"""write_latents: norm, RoPE of keys and queries, and what pages hold of tokens that are not finite."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from batchspec.kernels.latent.write_latents import write_latents
from tests.kernels.covering import covering

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
EPS, NAN = 1e-6, float("nan")
SLOTS = torch.tensor([17, 3, 30, 0, 41])


@dataclass(frozen=True, kw_only=True)
class Case:
    """Five tokens of 3 pages of 16; rows are slices of wider products. heads: their number, and N, of each beside its P."""

    rows: Tensor
    q: Tensor
    freqs: Tensor
    weight: Tensor
    positions: Tensor
    interleaved: bool
    factor: float = 1.0

    @classmethod
    def of(
        cls, device: torch.device, *, sizes: tuple[int, int] = (24, 6), heads: tuple[int, int] = (5, 5),
        dtype: torch.dtype = torch.float32, wide_weight: bool = False, interleaved: bool = True, factor: float = 1.0,
    ) -> Case:
        latent, rope = sizes
        return cls(
            rows=torch.randn(5, 9 + latent + rope).to(device, dtype)[:, 9:],
            q=torch.randn(5, heads[0], heads[1] + rope).to(device, dtype), freqs=(0.5 ** torch.arange(rope // 2)).to(device),
            weight=torch.rand(latent).add(0.5).to(device, torch.float32 if wide_weight else dtype),
            positions=torch.tensor([0, 1, 2, 77, 1000], device=device), interleaved=interleaved, factor=factor,
        )

    def run(self, *, interpret: bool) -> tuple[Tensor, Tensor]:
        """Pages and queries."""
        pages = torch.full((3, 16, self.rows.shape[1]), 7.0, dtype=self.rows.dtype, device=self.rows.device)
        q = self.q.clone()
        write_latents(
            self.rows, q, self.positions, self.freqs, self.weight, pages, SLOTS.to(pages.device), eps=EPS,
            attention_factor=self.factor, interleaved=self.interleaved, interpret=interpret,
        )
        return pages.flatten(0, 1).cpu(), q.cpu()

    def turned(self, heads: Tensor) -> Tensor:
        """heads [5, N, P] by complex numbers, in fp64."""
        angles = self.positions.double()[:, None, None] * self.freqs.double()
        pairs = heads.double().unflatten(-1, (-1, 2)) if self.interleaved else torch.stack(heads.double().chunk(2, -1), -1)
        found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(angles * 0 + self.factor, angles))
        return found.flatten(-2) if self.interleaved else torch.cat(found.unbind(-1), -1)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The vectors of the tokens, and their queries, in fp64."""
        rope = 2 * len(self.freqs)
        x, keys = self.rows.double()[:, :-rope], self.rows[:, None, -rope:]
        c = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * self.weight.double()
        q = torch.cat((self.q.double()[..., :-rope], self.turned(self.q[..., -rope:])), -1)
        return torch.cat((c, self.turned(keys)[:, 0]), 1).cpu(), q.cpu()


@pytest.mark.parametrize(
    ("dtype", "sizes", "heads"),
    covering([*TOLERANCE], [(24, 6), (512, 64), (7, 2)], [(5, 5), (20, 192), (1, 0), (33, 64)], one_in=3),
)
@pytest.mark.parametrize("interleaved", [True, False])
def test_latents_and_queries(
    dtype: torch.dtype, sizes: tuple[int, int], heads: tuple[int, int], interleaved: bool, interpret: bool, device: torch.device
) -> None:
    case = Case.of(device, dtype=dtype, sizes=sizes, heads=heads, interleaved=interleaved)
    (pages, q), (vectors, queries) = case.run(interpret=interpret), case.expected()
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(pages[SLOTS].double(), vectors, atol=limit, rtol=limit)
    torch.testing.assert_close(q.double(), queries, atol=limit, rtol=limit)
    untouched = torch.ones(len(pages), dtype=torch.bool).index_fill(0, SLOTS, False)
    assert bool((pages[untouched] == 7).all())


def test_a_weight_in_fp32_and_a_factor_of_the_angles(interpret: bool, device: torch.device) -> None:
    case = Case.of(device, dtype=torch.bfloat16, wide_weight=True, factor=1.3)
    (pages, q), (vectors, queries) = case.run(interpret=interpret), case.expected()
    torch.testing.assert_close(pages[SLOTS].double(), vectors, atol=2**-5, rtol=2**-5)
    torch.testing.assert_close(q.double(), queries, atol=2**-5, rtol=2**-5)


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("place", [3, 25])
def test_a_token_that_is_not_finite_has_finite_latents_and_keys_of_nan(
    value: float, place: int, interpret: bool, device: torch.device
) -> None:
    case = Case.of(device)
    expected = case.run(interpret=interpret)[0]
    case.rows[2, place] = value
    pages = case.run(interpret=interpret)[0]
    token = int(SLOTS[2])
    assert bool(pages[token, :24].isfinite().all())
    assert bool(pages[token, 24:].isnan().all())
    pages[token], expected[token] = 0, 0
    torch.testing.assert_close(pages, expected, atol=0, rtol=0)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = Case.of(device)
    for wrong in (
        replace(case, q=case.q.half()), replace(case, weight=case.weight[1:]), replace(case, positions=case.positions.int()),
        replace(case, freqs=case.freqs.double()), replace(case, rows=case.rows[1:]),
    ):
        with pytest.raises(ValueError, match="write_latents"):
            wrong.run(interpret=True)
