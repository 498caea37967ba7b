"""INT4 weights: words, dequantisation, products; the layouts of checkpoints against their packages and against another packer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.kernels.common.four_bit import ROWS, SIZE, dequantise, is_readable
from batchspec.kernels.common.int4 import arrange, bf16_scales, pack, unpack
from batchspec.model.layers.base import GroupedSpec, Projection
from batchspec.model.layers.forward import Product
from batchspec.model.quant.awq import Awq
from batchspec.model.quant.four_bit import FourBitLinear, joined
from batchspec.model.quant.gptq import Gptq
from batchspec.model.quant.int4_format import Int4
from batchspec.model.quant.pack_quantized import PackQuantized
from batchspec.model.spec import read_spec
from batchspec.model.weights import DummyWeights
from tests.helpers.int4_layouts import LAYOUTS, Layout, of_awq, of_compressed_tensors, of_gptq
from tests.helpers.moe_models import tiny_config, tiny_spec
from tests.model.int4_samples import ACT_ORDER, CASES, FILE, ODD

CPU = torch.device("cpu")


class Stored:
    """The tensors of a projection p, or of others by their full names."""

    device = CPU

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self._tensors = {name if "." in name else f"p.{name}": tensor for name, tensor in tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].to(self.dtype)

    def stored(self, name: str) -> Tensor:
        return self._tensors[name]

    def entry(self, name: str, index: int) -> Tensor:
        return self._tensors[name][index]


def format_of(layout: Layout) -> Int4:
    config = tiny_config("llama", hidden_size=64, intermediate_size=128, quantization_config=layout.config)
    found = read_spec(config, "config.json").formats.quantised
    assert isinstance(found, Int4)
    return found


# --- words and numbers


def test_the_low_bits_of_a_word_are_the_lowest_column() -> None:
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # 0x76543210, 0xFEDCBA98
    assert unpack(words).tolist() == [list(range(16))]
    assert torch.equal(pack(unpack(words)), words)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31))
def test_words_hold_any_codes(rows: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 16, (rows, 8 * count), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    words = pack(codes)
    assert (words.dtype, words.shape) == (torch.int32, (rows, count))
    assert torch.equal(unpack(words), codes)
    assert torch.equal(unpack(words.t()), unpack(words.t().contiguous()))


class Numbers:
    """A random weight number by number: codes q uint8 [N, K], zero points z uint8 [N, G], scales s [N, G], and the group of each
    column."""

    def __init__(
        self, rows: int, k: int, group_size: int, *, zeros: bool, order: str, dtype: torch.dtype = torch.float16
    ) -> None:
        count = -(-k // group_size)
        self.q = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
        self.z = torch.randint(0, 16, (rows, count), dtype=torch.uint8) if zeros else torch.full((rows, count), 8)
        self.s = (torch.rand(rows, count) + 0.01).to(dtype)
        in_order = torch.arange(k) // group_size
        self.groups = {"": in_order, "act order": in_order[torch.randperm(k)], "any": torch.randint(0, count, (k,))}[order]
        given = self.groups.int() if order else None
        self.weight = arrange(pack(self.q), self.s, self.z if zeros else None, group_size, given)

    def matrix(self) -> Tensor:
        """fp64 [N, K] by the definition: z * s is rounded to bf16 beside scales in bf16."""
        shifts = self.z.double() * self.s.double()
        shifts = shifts.bfloat16().double() if self.s.dtype is torch.bfloat16 else shifts
        return self.q.double() * self.s.double()[:, self.groups] - shifts[:, self.groups]


@pytest.mark.parametrize("order", ["", "act order", "any"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("rows", "k", "group_size"), [(5, 96, 32), (33, 200, 64), (16, 40, 40), (7, 24, 128), (20, 320, 24)])
def test_each_number_is_that_of_the_definition_rounded_once(
    rows: int, k: int, group_size: int, zeros: bool, order: str
) -> None:
    """Of fp16 and bf16 scales fp32 holds every number exactly; the last group may be short. Slices of rows too."""
    for dtype in (torch.float16, torch.bfloat16):
        numbers = Numbers(rows, k, group_size, zeros=zeros, order=order, dtype=dtype)
        weight, expected = numbers.weight, numbers.matrix()
        assert torch.equal(dequantise(weight, torch.float64), expected)
        assert torch.equal(dequantise(weight, torch.float32).double(), expected)
        assert torch.equal(dequantise(weight, torch.bfloat16), expected.bfloat16())
        for own in (slice(0, rows - 2), slice(ROWS, rows)):
            if own.start < rows:
                assert torch.equal(dequantise(weight.rows(own), torch.float64), expected[own])


def test_the_order_in_memory_is_that_of_the_docstring() -> None:
    """Number by number, for the words of a block and the scales of 16 rows."""
    weight = Numbers(32, 256, 128, zeros=True, order="").weight
    codes = unpack(pack(torch.randint(0, 16, (32, 256), dtype=torch.uint8)))
    words = arrange(pack(codes), weight.scales.t()[:, :2].contiguous(), None, 128).words
    for block, rows, h, thread, i, half in ((0, 0, 0, 0, 0, 0), (1, 1, 1, 17, 2, 1), (0, 1, 0, 31, 3, 0), (1, 0, 1, 5, 1, 1)):
        word = int(words[block, rows, h * 256 + thread * 8 + i * 2 + half]) & 0xFFFF
        row, j = rows * 16 + h * 8 + thread // 4, 2 * (thread % 4) + 8 * i + half
        assert [word >> 4 * part & 15 for part in range(4)] == [int(codes[row, block * 128 + 32 * part + j]) for part in range(4)]
    scales = torch.arange(32.0)[:, None].expand(32, 2).contiguous()
    own = arrange(pack(codes), scales, None, 128)
    assert own.scales[1].tolist() == [16 * block + i + 8 * h for block in (0, 1) for i in range(8) for h in (0, 1)]


def test_which_groups_the_kernels_read() -> None:
    def group(k: int, size: int, order: str = "") -> int | None:
        return Numbers(8, k, size, zeros=False, order=order).weight.kernel_group

    assert [group(256, size) for size in (32, 64, 128, 256, 512)] == [32, 64, 128, 0, 0]
    assert [group(264, size) for size in (16, 24, 96, 264)] == [None, None, None, 0]
    assert group(512, 256) == 256
    assert (group(256, 32, "act order"), group(256, 32, "any")) == (32, None)
    assert [size for size in (8, 16, 32, 48, 64, 96, 128, 256, 320, 384) if is_readable(size)] == [32, 64, 128, 256, 384]


def test_scales_of_a_model_of_bf16() -> None:
    """Rounded to it; the kernels read no exponent outside of a range."""
    found = bf16_scales(torch.tensor([[1 / 3, -0.1, 0.0, 1e-40, 7.97]]))
    assert found.tolist() == [[*torch.tensor([1 / 3, -0.1]).bfloat16().tolist(), 2.0**-100, 2.0**-100, 7.96875]]
    for wrong in (7.99, 8.0, -9.0, torch.inf, torch.nan):
        with pytest.raises(ValueError, match=r"a scale of .*; below 8 is supported"):
            bf16_scales(torch.tensor([[0.1, wrong]]))


def check_product(product: Product, matrix: Tensor, x: Tensor, bias: Tensor) -> None:
    """It multiplies by this matrix, alone, as gate and up, and by its last rows."""
    found = product(x, None)
    assert torch.equal(found, torch.nn.functional.linear(x, matrix, bias))
    assert found.dtype is x.dtype
    gate, up = found.chunk(2, -1)
    torch.testing.assert_close(product.swiglu(x, None), torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(product.rows_from(29)(x, None), found[:, 29:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["", "act order"])
def test_a_product_is_that_of_the_dequantised_rows_of_all_parts(order: str, dtype: torch.dtype) -> None:
    parts = [Numbers(rows, 96, 32, zeros=True, order=order).weight for rows in (32, 16, 40)]
    x, bias = torch.randn(7, 96, dtype=dtype), torch.randn(88, dtype=dtype)
    product = FourBitLinear(parts, bias)
    assert len(product.weights) == (3 if order else 1)  # parts with orders of their own are not one matrix
    check_product(product, torch.cat([dequantise(part, dtype) for part in parts]), x, bias)
    for first in (32, 48, 64):  # without copies
        torch.testing.assert_close(product.rows_from(first)(x, None), product(x)[:, first:])


def test_parts_of_one_division_of_the_columns_are_one_weight() -> None:
    """If the rows of each begin at a multiple of 16."""
    one, other = (Numbers(16, 64, 32, zeros=False, order="act order").weight for _ in range(2))
    same = replace(other, columns=one.columns)
    assert len(joined([one, same])) == 1
    assert len(joined([one, other])) == 2
    plain, short = (Numbers(rows, 64, 32, zeros=False, order="").weight for rows in (16, 8))
    assert len(joined([one, plain])) == 2
    assert len(joined([plain, short])) == 1
    assert len(joined([short, plain])) == 2
    (whole,) = joined([one, same])
    assert torch.equal(dequantise(whole, torch.float64), torch.cat([dequantise(x, torch.float64) for x in (one, same)]))


# --- layouts


def sample_format(name: str) -> Int4:
    kind, _, rest = name.partition(" ")
    case = ACT_ORDER if rest == "in act order" else {**CASES, **ODD}[rest]
    size = None if case.group_size == -1 else case.group_size
    if kind == "pack-quantized":
        return PackQuantized(size, case.symmetric)
    return Awq(size, case.symmetric) if kind == "awq" else Gptq(size, case.symmetric, case.act_order, minus_one=kind == "gptq")


def shapes_of(layout: Int4, part: Projection, stored: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a file must hold for a projection named p, and of those that it may hold and does."""
    tensors = {tensor.name.removeprefix("p."): tensor.shape for tensor in layout.tensors(part)}
    spares = {tensor.name.removeprefix("p."): tensor.shape for tensor in layout.spares(part)}
    return tensors | {name: shape for name, shape in spares.items() if name in stored}


SAMPLES = sorted({name.partition("/")[0] for name in load_file(FILE)})


@pytest.mark.parametrize("name", SAMPLES)
def test_what_the_packages_packed_is_what_they_dequantise_it_to(name: str) -> None:
    """compressed-tensors 0.20 in bf16 and GPTQModel 7.7 in fp16, to the bit; zero points of 0 and 15 are among them."""
    own = {key.partition("/")[2]: value for key, value in load_file(FILE).items() if key.startswith(f"{name}/")}
    expected, layout = own.pop("expected"), sample_format(name)
    assert {key: tuple(value.shape) for key, value in own.items()} == shapes_of(layout, Projection("p", *expected.shape), own)
    weight = layout.weight(Stored(own), "p")
    assert (weight.columns is not None) == ("act order" in name)
    assert (weight.shifts is None) == layout.symmetric
    assert torch.equal(dequantise(weight, expected.dtype), expected)


@pytest.mark.parametrize(("rows", "k"), [(24, 192), (8, 64), (2104, 320)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_as_it_was_packed(name: str, rows: int, k: int) -> None:
    """Rows of more than one piece of a conversion too."""
    layout = LAYOUTS[name]
    if layout.group_size > k and layout.pack is not LAYOUTS["gptq, rows"].pack:
        pytest.skip("no whole group")
    codes = layout.codes(torch.randn(rows, k, generator=torch.Generator().manual_seed(0)))
    found = format_of(layout)
    stored = layout.stored(codes)
    assert {key: tuple(value.shape) for key, value in stored.items()} == shapes_of(found, Projection("p", rows, k), stored)
    weight = found.weight(Stored(stored), "p")
    assert torch.equal(dequantise(weight, torch.float64), codes.matrix())
    held = weight.words.nbytes + weight.scales.nbytes + (0 if weight.shifts is None else weight.shifts.nbytes)
    assert held == found.nbytes(rows, k, torch.float64) == found.expert_nbytes(rows, k, torch.float64)
    assert weight.words.is_contiguous()
    assert weight.kernel_group == found.kernel_group(k)
    assert weight.scales.dtype is layout.dtype


def test_symmetric_gptq_has_zero_points_of_8_whatever_is_stored() -> None:
    layout = of_gptq(32)
    codes = layout.codes(torch.randn(16, 64))
    stored = layout.stored(codes)
    stored["qzeros"] = torch.randint(-(2**31), 2**31, stored["qzeros"].shape, dtype=torch.int32)
    assert torch.equal(dequantise(format_of(layout).weight(Stored(stored), "p"), torch.float64), codes.matrix())


def test_an_index_of_minus_ones_means_columns_in_order() -> None:
    """What compressed-tensors registers for `actorder: group` before it is calibrated."""
    layout = of_compressed_tensors(32, actorder="group")
    codes = of_compressed_tensors(32).codes(torch.randn(16, 64))
    stored = {**layout.stored(codes), "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    weight = format_of(layout).weight(Stored(stored), "p")
    assert weight.columns is None
    assert torch.equal(dequantise(weight, torch.float64), codes.matrix())


def test_experts_with_scales_of_two_dtypes_are_refused() -> None:
    layout, spec = of_awq(32), GroupedSpec(name="e", parts=("up",), num_experts=2, part_rows=8, k=32)
    stored = {
        f"e.{i}.up.{key}": value
        for i in range(2)
        for key, value in layout.stored(layout.codes(torch.randn(8, 32))).items()
    }
    stored["e.1.up.scales"] = stored["e.1.up.scales"].bfloat16()
    said = r"e\.1\.up: its scales are torch\.bfloat16, and those of other experts torch\.float16"
    with pytest.raises(CheckpointError, match=said):
        format_of(layout).load_grouped(Stored(stored), spec)


@pytest.mark.parametrize("layout", [of_gptq(32, desc_act=True), of_gptq(32), of_awq(32), of_compressed_tensors(32)])
def test_dummy_weights_have_the_usual_size_and_valid_groups(layout: Layout) -> None:
    spec = tiny_spec("llama", hidden_size=64, intermediate_size=96, head_dim=16, quantization_config=layout.config)
    weights = DummyWeights(spec, dtype=torch.bfloat16, device=CPU)
    found = format_of(layout).weight(weights, "model.layers.0.mlp.down_proj")
    assert (found.columns is not None) == layout.act_order
    assert found.kernel_group == 32
    assert 0.01 < float(dequantise(found, torch.float32).std()) < 0.04


@pytest.mark.parametrize(
    "layout",
    [
        of_gptq(32), of_gptq(32, sym=False), of_awq(32), of_compressed_tensors(32), of_compressed_tensors(32, symmetric=False),
    ],
)
def test_the_mean_of_dummy_weights_is_0(layout: Layout) -> None:
    """With another mean all tokens of a random model are alike after a few layers, and a GPU multiplies equal numbers faster."""
    spec = tiny_spec("llama", hidden_size=64, intermediate_size=960, head_dim=16, quantization_config=layout.config)
    weights = DummyWeights(spec, dtype=torch.bfloat16, device=CPU)
    weight = format_of(layout).weight(weights, "model.layers.0.mlp.down_proj")
    wide = dequantise(weight, torch.float32)
    assert abs(float(wide.mean())) < 0.03 * float(wide.std())  # half a code is 0.11 of it
    if weight.shifts is not None:
        filled = weight.scales != 0  # groups past K are padded
        zeros = (-SIZE * weight.shifts[filled].float() / weight.scales[filled].float()).round().unique()
        assert zeros.tolist() == [7.0, 9.0]
