"""rope_write: rotated queries in the layout of attention, rotated keys and unchanged values in their slots, nothing elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.norm_rope import rope_write as module
from batchspec.kernels.norm_rope.rope_write import rope_write, rotate_queries
from tests.kernels.covering import covering, pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Roundings of cos, sin, a product and the sum; the interpreter cuts bf16 off instead of rounding it.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float64: 2e-6}
SHAPES = [(1, 1, 2), (9, 3, 64), (32, 8, 128), (4, 2, 24), (3, 1, 96), (6, 2, 80), (0, 8, 128), (0, 3, 64)]
"""(NH, KVH, D); without query heads only K and V are written."""
POISON = 77.0
PAGE_SIZE = 4
EPS = 1e-6


@dataclass
class Case:
    """Inputs and poisoned outputs of one call."""

    qkv: Tensor
    positions: Tensor
    freqs: Tensor
    kv: Tensor
    slot_mapping: Tensor
    out_q: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    axes: Tensor | None = None
    attention_factor: float = 1.0
    interleaved: bool = False
    v_norm: bool = False
    shared_v: bool = False

    @classmethod
    def make(
        cls, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device,
        norms: bool, rotary_dim: int | None = None,
    ) -> Case:
        rotary_dim = rotary_dim or head_dim

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        num_pages = num_tokens // PAGE_SIZE + 2
        return cls(
            qkv=noise(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim),
            positions=torch.randint(0, 9000, (num_tokens,), device=device),
            freqs=10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim),
            kv=torch.full((2, num_pages, PAGE_SIZE, num_kv_heads, head_dim), POISON, dtype=dtype, device=device),
            slot_mapping=PAGE_SIZE + torch.randperm(num_tokens, device=device),
            out_q=torch.full((num_tokens, num_heads, head_dim), POISON, dtype=dtype, device=device),
            q_norm=noise(head_dim) if norms else None,
            k_norm=noise(head_dim) if norms else None,
        )

    def run(self, interpret: bool) -> None:
        rope_write(
            self.qkv,
            self.positions,
            self.freqs,
            self.kv,
            self.slot_mapping,
            attention_factor=self.attention_factor,
            out_q=self.out_q,
            axes=self.axes,
            interleaved=self.interleaved,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=EPS,
            v_norm=self.v_norm,
            shared_v=self.shared_v,
            interpret=interpret,
        )

    def without_rows_of_v(self) -> Case:
        """The same case whose V is what K is in the product."""
        num_kv_heads, head_dim = self.kv.shape[3:]
        return replace(self, qkv=self.qkv[:, : -num_kv_heads * head_dim].contiguous(), shared_v=True)

    def by_hand(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v float64 [T, heads, D]; the angle is the fp32 product that the formula names."""
        num_heads, head_dim = self.out_q.shape[1:]
        num_kv_heads = self.kv.shape[3]
        heads = self.qkv.double().unflatten(1, (-1, head_dim))
        q, k, *own = heads.split((num_heads, *[num_kv_heads] * (1 if self.shared_v else 2)), 1)
        v = k if self.shared_v else own[0]
        if self.v_norm:
            v = v / (v.square().mean(2, keepdim=True) + EPS).sqrt()
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (
                x / (x.square().mean(2, keepdim=True) + EPS).sqrt() * weight.double()
                for x, weight in ((q, self.q_norm), (k, self.k_norm))
            )
        positions = self.positions[:, None] if self.axes is None else self.positions[self.axes].T
        angle = (positions.float() * self.freqs).double()
        rotation = torch.polar(torch.full_like(angle, self.attention_factor), angle)[:, None]

        def rotated(x: Tensor) -> Tensor:
            turning, passing = x[..., : 2 * len(self.freqs)], x[..., 2 * len(self.freqs) :]
            low_high = (turning[..., ::2], turning[..., 1::2]) if self.interleaved else turning.chunk(2, 2)
            y = torch.complex(*low_high) * rotation
            turned = torch.view_as_real(y).flatten(2) if self.interleaved else torch.cat((y.real, y.imag), 2)
            return torch.cat((turned, passing), 2)

        return rotated(q), rotated(k), v

    def assert_written(self) -> None:
        q, k, v = self.by_hand()
        near = TOLERANCE[self.qkv.dtype]
        scale = 4 * float(max(x.abs().max() for x in (q, k) if x.numel())) if len(q) else 1.0
        torch.testing.assert_close(self.out_q.double(), q, rtol=0, atol=near * scale)
        cells = self.kv.flatten(1, 2)
        torch.testing.assert_close(cells[0, self.slot_mapping].double(), k, rtol=0, atol=near * scale)
        torch.testing.assert_close(cells[1, self.slot_mapping].double(), v, rtol=near if self.v_norm else 0, atol=0)
        untouched = torch.ones(cells.shape[1], dtype=torch.bool, device=cells.device)
        untouched[self.slot_mapping] = False
        assert bool((cells[:, untouched] == POISON).all())


@pytest.mark.parametrize(("shape", "norms", "dtype"), covering(SHAPES, [False, True], DTYPES, one_in=4))
def test_every_head_is_written_to_its_slot(
    shape: tuple[int, int, int], norms: bool, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    case = Case.make(3, *shape, dtype, device, norms)
    case.run(interpret)
    case.assert_written()


@pytest.mark.parametrize("norms", [False, True])
def test_all_heads_of_a_token_in_one_program_give_the_same(
    norms: bool, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(5, 9, 3, 64, torch.float32, device, norms)
    case.run(interpret)
    few = case.out_q.clone(), case.kv.clone()
    case.out_q.fill_(POISON)
    case.kv.fill_(POISON)
    monkeypatch.setattr(module, "MANY_TOKENS", 5)
    case.run(interpret)
    torch.testing.assert_close((case.out_q, case.kv), few, rtol=1e-6, atol=1e-6)
    case.assert_written()


@pytest.mark.parametrize(
    ("dims", "interleaved", "dtype"),
    covering([(128, 64), (96, 72), (24, 2), (10, 6), (64, 64)], [False, True], [torch.float32, torch.bfloat16]),
)
def test_a_part_of_each_head_is_rotated_and_the_rest_passes(
    dims: tuple[int, int], interleaved: bool, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    head_dim, rotary_dim = dims
    for norms in (False, True):
        case = Case.make(3, 4, 2, head_dim, dtype, device, norms, rotary_dim)
        case.attention_factor, case.interleaved = 1.25, interleaved
        case.run(interpret)
        case.assert_written()
        if not norms:
            heads = case.qkv.view(3, 8, head_dim)[..., rotary_dim:]
            assert torch.equal(case.out_q[..., rotary_dim:], heads[:, :4])
            assert torch.equal(case.kv.flatten(1, 2)[0, case.slot_mapping][..., rotary_dim:], heads[:, 4:6])


@pytest.mark.parametrize(
    ("interleaved", "many", "dtype"), covering([False, True], [False, True], [torch.float32, torch.bfloat16])
)
def test_each_frequency_reads_its_axis_and_equal_positions_have_the_bits_of_one(
    interleaved: bool, many: bool, dtype: torch.dtype, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in prefill and in the rounds after it."""
    monkeypatch.setattr(module, "MANY_TOKENS", 1 if many else 1000)
    one = Case.make(5, 4, 2, 24, dtype, device, norms=True, rotary_dim=20)
    one.interleaved = interleaved
    one.run(interpret)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 2, 0, 0, 1], device=device)
    positions = torch.randint(0, 9000, (3, 5), device=device)
    positions[:, 2:] = one.positions[2:]
    case = replace(one, positions=positions, axes=axes, out_q=one.out_q.clone().fill_(POISON), kv=one.kv.clone().fill_(POISON))
    case.run(interpret)
    case.assert_written()
    assert torch.equal(case.out_q[2:], one.out_q[2:])
    cells = case.slot_mapping[2:]
    assert torch.equal(case.kv.flatten(1, 2)[:, cells], one.kv.flatten(1, 2)[:, cells])
    queries = torch.empty_like(case.out_q)
    rotate_queries(
        case.qkv[:, : 4 * 24], positions, case.freqs, attention_factor=1.0, out_q=queries, axes=axes, interleaved=interleaved,
        q_norm=case.q_norm, eps=EPS, interpret=interpret,
    )
    assert torch.equal(queries, case.out_q)


@pytest.mark.parametrize(
    ("shape", "norms", "many", "dtype"),
    pairwise([(4, 2, 24), (9, 3, 64), (8, 8, 16), (2, 1, 512)], [False, True], [False, True], DTYPES),
)
def test_v_is_normed_without_a_weight_and_may_be_what_k_is_before_its_own_norm(
    shape: tuple[int, int, int], norms: bool, many: bool, dtype: torch.dtype, interpret: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MANY_TOKENS", 1 if many else 1000)
    case = replace(Case.make(3, *shape, dtype, device, norms), v_norm=True)
    case.run(interpret)
    case.assert_written()
    for v_norm in (False, True):
        shared = replace(case.without_rows_of_v(), v_norm=v_norm)
        shared.out_q.fill_(POISON)
        shared.kv.fill_(POISON)
        shared.run(interpret)
        shared.assert_written()


@pytest.mark.parametrize("shared_v", [False, True])
def test_a_key_whose_own_value_is_not_finite_is_nan_and_no_other(shared_v: bool, interpret: bool, device: torch.device) -> None:
    case = replace(Case.make(4, 2, 2, 8, torch.float32, device, norms=True), v_norm=True)
    case = case.without_rows_of_v() if shared_v else case
    case.qkv[1, -3] = float("inf")  # of the last head of V, or of what V is computed from
    case.run(interpret)
    k, v = case.kv.flatten(1, 2)[:, case.slot_mapping]
    assert k.isnan().all(2).tolist() == [[False, False], [False, True], [False, False], [False, False]]
    assert v.isfinite().all()


@pytest.mark.parametrize(("norms", "dtype"), covering([False, True], DTYPES))
def test_queries_alone_are_those_that_are_written_beside_keys(
    norms: bool, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    for rotary_dim, interleaved in ((24, False), (10, True)):
        case = Case.make(3, 9, 3, 24, dtype, device, norms, rotary_dim)
        case.interleaved = interleaved
        case.run(interpret)
        found = torch.full_like(case.out_q, POISON)
        rotate_queries(
            case.qkv[:, : 9 * 24], case.positions, case.freqs, attention_factor=1.0, out_q=found, interleaved=interleaved,
            q_norm=case.q_norm, eps=EPS, interpret=interpret,
        )
        assert torch.equal(found, case.out_q)
    with pytest.raises(ValueError, match="rotate_queries: q is"):
        rotate_queries(case.qkv, case.positions, case.freqs, attention_factor=1.0, out_q=found)


def test_norm_weights_in_fp32_are_rounded_with_the_product(interpret: bool, device: torch.device) -> None:
    case = Case.make(3, 4, 2, 64, torch.bfloat16, device, norms=False)
    case.q_norm, case.k_norm = torch.randn(2, 64, device=device).unbind()
    case.run(interpret)
    case.assert_written()


def test_angles_are_exact_at_long_positions(interpret: bool, device: torch.device) -> None:
    case = Case.make(6, 2, 1, 64, torch.float32, device, norms=False)
    case.positions = torch.tensor([0, 1, 105614, 131071, 1048575, 16777215], device=device)
    case.run(interpret)
    case.assert_written()


def test_position_zero_leaves_heads_as_they_are_and_the_factor_scales_them(interpret: bool, device: torch.device) -> None:
    case = Case.make(2, 2, 1, 8, torch.float32, device, norms=False)
    case.positions.zero_()
    case.attention_factor = 1.25
    case.run(interpret)
    heads = case.qkv.view(2, 4, 8)
    assert torch.equal(case.out_q, heads[:, :2] * 1.25)
    assert torch.equal(case.kv.flatten(1, 2)[0, case.slot_mapping], heads[:, 2:3] * 1.25)
    case.assert_written()


def test_slices_of_wider_rows_and_a_layer_of_a_cache_are_used_in_place(interpret: bool, device: torch.device) -> None:
    case = Case.make(3, 2, 1, 16, torch.float32, device, norms=False)
    wide = torch.full((3, 100), float("nan"), device=device)
    wide[:, 16:80] = case.qkv
    layers = torch.full((2, 3, *case.kv.shape[1:]), POISON, device=device)
    case.qkv, case.kv = wide[:, 16:80], layers[:, 1]
    case.run(interpret)
    case.assert_written()
    assert bool((layers[:, [0, 2]] == POISON).all())


@settings(max_examples=10)
@given(
    num_tokens=st.integers(0, 6), num_kv_heads=st.integers(1, 4), group=st.integers(1, 4), half=st.integers(1, 20),
    norms=st.booleans(), factor=st.sampled_from([1.0, 1.3]),
)
def test_any_shape(
    num_tokens: int, num_kv_heads: int, group: int, half: int, norms: bool, factor: float, interpret: bool, device: torch.device
) -> None:
    case = Case.make(num_tokens, group * num_kv_heads, num_kv_heads, 2 * half, torch.float32, device, norms)
    case.attention_factor = factor
    case.run(interpret)
    case.assert_written()


def test_wrong_arguments_are_refused() -> None:
    case = Case.make(2, 2, 1, 8, torch.float32, torch.device("cpu"), norms=True)
    good: dict[str, Any] = {
        "qkv": case.qkv, "positions": case.positions, "freqs": case.freqs, "kv": case.kv, "slot_mapping": case.slot_mapping,
        "attention_factor": 1.0, "out_q": case.out_q, "q_norm": case.q_norm, "k_norm": case.k_norm, "eps": EPS,
    }
    rope_write(**good)
    for name, bad in (
        ("qkv", torch.zeros(2, 40)),
        ("positions", case.positions.int()),
        ("freqs", case.freqs.double()),
        ("freqs", torch.zeros(5)),
        ("freqs", torch.zeros(0)),
        ("axes", torch.zeros(4, dtype=torch.int32)),
        ("slot_mapping", torch.zeros(3, dtype=torch.int64)),
        ("out_q", case.out_q.double()),
        ("q_norm", torch.zeros(4)),
        ("k_norm", torch.zeros(8, dtype=torch.float64)),
    ):
        with pytest.raises(ValueError, match=f"rope_write: {name} is "):
            rope_write(**{**good, name: bad})
    with pytest.raises(ValueError, match="rope_write: positions is "):
        rope_write(**{**good, "axes": torch.zeros(4, dtype=torch.int64), "positions": torch.zeros(3, 3, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"rope_write: kv\[0\] is float64"):
        rope_write(**{**good, "kv": case.kv.double()})
    with pytest.raises(ValueError, match="one of q_norm and k_norm is None"):
        rope_write(**{**good, "q_norm": None})


@pytest.mark.parametrize(("many", "norms", "dtype"), covering([False, True], [False, True], DTYPES))
def test_a_key_that_is_not_finite_is_nan_in_k_and_zero_in_v(
    many: bool, norms: bool, dtype: torch.dtype, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether K or V was not finite, and however heads are split over programs; the other keys do not change."""
    case = Case.make(4, 9, 3, 24, dtype, device, norms)
    monkeypatch.setattr(module, "MANY_TOKENS", 1 if many else 1000)
    case.run(interpret)
    healthy = case.kv.flatten(1, 2)[:, case.slot_mapping].clone()
    heads = case.qkv.view(4, 15, 24)
    heads[0, 9 + 1, 3], heads[1, 12 + 0, 23], heads[2, 12 + 2, 0] = float("nan"), float("inf"), float("nan")
    case.run(interpret)
    k, v = case.kv.flatten(1, 2)[:, case.slot_mapping]
    marked = torch.zeros(4, 3, dtype=torch.bool, device=device)
    marked[[0, 1, 2], [1, 0, 2]] = True
    assert bool(k[marked].isnan().all())
    assert torch.equal(k[~marked], healthy[0][~marked])
    expected_v = healthy[1].clone()
    expected_v[1, 0, 23] = expected_v[2, 2, 0] = 0
    assert torch.equal(v, expected_v)


@pytest.mark.parametrize("half", [0, 1], ids=["low", "high"])
def test_a_key_that_overflows_only_in_the_rotation_is_marked_too(half: int, interpret: bool, device: torch.device) -> None:
    """The largest fp16 is 65,504: a rotation of two numbers near it may exceed it."""
    case = Case.make(1, 1, 1, 8, torch.float16, device, norms=False)
    case.positions.fill_(1)
    case.freqs.fill_(0.8)
    heads = case.qkv.view(3, 8)
    heads[1] = 0
    heads[1, 1], heads[1, 5] = (60000, -60000) if half == 0 else (60000, 60000)
    case.run(interpret)
    k, v = case.kv.flatten(1, 2)[:, case.slot_mapping]
    assert bool(k.isnan().all())
    assert torch.equal(v[0], heads[2:])
