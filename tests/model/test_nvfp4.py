"""NVFP4 weights: numbers, products; the layouts of checkpoints against their packages and against another packer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.kernels.common import four_bit as form
from batchspec.kernels.common.fp4 import scales_of, stored_scales
from batchspec.kernels.common.nvfp4 import Nvfp4Weight, arranged, dequantise, joined
from batchspec.kernels.moe.mxfp4 import PLACES, words_of
from batchspec.kernels.moe.route import lists_reference
from batchspec.model.layers.base import GroupedSpec, Projection
from batchspec.model.quant import dequantised
from batchspec.model.quant.four_bit import joined as form_joined
from batchspec.model.quant.nvfp4 import Nvfp4Linear
from batchspec.model.quant.nvfp4_format import COMPRESSED, MODELOPT, Nvfp4
from batchspec.model.weights import DummyWeights
from tests.helpers import nvfp4_layouts
from tests.helpers.moe_models import tiny_spec
from tests.helpers.nvfp4_layouts import E2M1, quantise, tensors_of
from tests.model.nvfp4_samples import FILE
from tests.model.test_int4 import CPU, Stored, check_product

LAYOUTS = {"modelopt": MODELOPT, "compressed-tensors": COMPRESSED}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def random_weight(rows: int, k: int, *, divides: bool = False) -> Nvfp4Weight:
    """Any codes and scales, from the smallest to the largest of e4m3, and another global scale for each row."""
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Nvfp4Weight(codes, scales, torch.rand(rows) * 3 + 1e-3, divides)


def numbers_of(weight: Nvfp4Weight) -> Tensor:
    """fp64 [N, K], by the definition."""
    rows, k = weight.num_rows, 2 * weight.codes.shape[1]
    found = torch.empty(rows, k, dtype=torch.float64)
    for n in range(rows):
        for i in range(k):
            q = int(weight.codes[n, i // 2]) >> 4 * (i % 2) & 15
            number = (-1) ** (q // 8) * E2M1[q % 8] * float(weight.scales[n, i // 16])
            g = float(weight.row_scales[n])
            found[n, i] = number / g if weight.divides else number * g
    return found


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(5, 16), (3, 112), (16, 48)])
def test_each_number_is_that_of_the_definition_rounded_once(rows: int, k: int, divides: bool) -> None:
    """To fp32, from which bf16 is rounded."""
    weight = random_weight(rows, k, divides=divides)
    expected = numbers_of(weight)
    assert torch.equal(dequantise(weight, torch.float64), expected)
    assert torch.equal(dequantise(weight, torch.float32), expected.float())
    assert torch.equal(dequantise(weight, torch.bfloat16), expected.float().bfloat16())


def test_without_the_global_scale_every_number_is_exact_in_bf16() -> None:
    """All codes with all scales."""
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16).expand(0x7F, 16)
    scales = torch.arange(0x7F, dtype=torch.uint8).view(-1, 1).view(torch.float8_e4m3fn)
    weight = Nvfp4Weight(codes[:, 0::2] | codes[:, 1::2] << 4, scales, torch.ones(0x7F), False)
    assert torch.equal(dequantise(weight, torch.bfloat16).double(), dequantise(weight, torch.float64))


def test_the_words_of_mxfp4_hold_these_codes_and_each_16_words_of_a_value_are_a_group() -> None:
    """What the module says to those who write kernels: a masked word as bf16, times s 2^118, is e2m1 s 2^-8 without rounding."""
    weight = random_weight(6, 256)
    words = words_of(weight.codes.view(6, 2, 64))
    expected = dequantise(Nvfp4Weight(weight.codes, weight.scales, torch.ones(6), False), torch.float64).view(6, 2, 4, 32)
    scales = (weight.scales.double() * 2.0**118).bfloat16()
    assert torch.equal(scales.double(), weight.scales.double() * 2.0**118)
    for part, places in enumerate(PLACES):
        code = sum((words >> place & 1) << bit for place, bit in zip(places, PLACES[0], strict=True))
        scale = scales.view(6, 2, 4, 2)[:, :, part].repeat_interleave(16, 2)
        value = torch.as_tensor(code).to(torch.int16).view(torch.bfloat16).double() * scale.double()
        assert torch.equal(value * 2.0**8, expected[:, :, part])


@pytest.mark.parametrize(("rows", "k"), [(5, 16), (3, 112), (16, 48), (40, 400)])
def test_in_the_form_that_kernels_read_numbers_are_the_same(rows: int, k: int) -> None:
    """Every scale of e4m3 but 0, and codes of groups whose scale is 0. Where files divide, by the rounded inverse."""
    weight = random_weight(rows, k)
    weight.scales.view(torch.uint8)[0, 0] = 0
    own = arranged(weight)
    assert (own.num_rows, own.k, own.kernel_group) == (rows, k, 16)
    for dtype in DTYPES:
        assert torch.equal(form.dequantise(own, dtype), dequantise(weight, dtype))
    held = own.words.nbytes + own.scales.nbytes + sum(part.nbytes for part in (own.row_scales,) if part is not None)
    assert held == MODELOPT.for_kernels().nbytes(rows, k, torch.bfloat16)
    divided = form.dequantise(arranged(replace(weight, divides=True)), torch.float64)
    torch.testing.assert_close(divided, dequantise(replace(weight, divides=True), torch.float64), rtol=2.0**-23, atol=0.0)


def test_every_number_of_e4m3_has_a_stored_scale_of_its_own() -> None:
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    stored = stored_scales(scales)
    assert len(stored.unique()) == 0x7E
    pairs = stored.view(1, 0x7E).repeat_interleave(2, 0).t().contiguous().view(torch.int16).t()
    assert torch.equal(scales_of(pairs, torch.float64), scales.double().expand(2, -1))


def test_parts_of_ranks_are_those_of_the_weight() -> None:
    """Its columns are cut between groups of 16, its blocks of 128 anywhere."""
    weight, cuts = random_weight(24, 304), (0, 112, 240, 304)
    parts = [
        replace(weight, codes=weight.codes[:, low // 2 : high // 2], scales=weight.scales[:, low // 16 : high // 16])
        for low, high in itertools.pairwise(cuts)
    ]
    found = torch.cat([form.dequantise(arranged(part), torch.float64) for part in parts], 1)
    assert torch.equal(found, dequantise(weight, torch.float64))


def test_slices_of_rows_and_joined_parts_keep_their_row_scales() -> None:
    parts = [random_weight(rows, 96) for rows in (32, 16, 40)]
    (whole,) = form_joined([arranged(part) for part in parts])
    expected = torch.cat([dequantise(part, torch.float64) for part in parts])
    assert torch.equal(form.dequantise(whole, torch.float64), expected)
    assert torch.equal(form.dequantise(whole.rows(slice(16, 70)), torch.float64), expected[16:70])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divides", [False, True])
def test_a_product_is_that_of_the_dequantised_rows_of_all_parts(divides: bool, dtype: torch.dtype) -> None:
    parts = [random_weight(rows, 96, divides=divides) for rows in (24, 8, 40)]
    x, bias = torch.randn(7, 96, dtype=dtype), torch.randn(72, dtype=dtype)
    product = Nvfp4Linear(parts, bias)
    check_product(product, torch.cat([dequantise(part, dtype) for part in parts]), x, bias)


def test_large_matrices_are_dequantised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 16 rows divide the parts, and their biases."""
    x, bias = torch.randn(3, 96, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    product = Nvfp4Linear([random_weight(rows, 96) for rows in (24, 8)], bias)
    expected = product(x)
    monkeypatch.setattr(dequantised, "PIECE", 96 * 16)
    torch.testing.assert_close(product(x), expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


# --- layouts


SAMPLES = sorted({name.partition("/")[0] for name in load_file(FILE)})


@pytest.mark.parametrize("name", SAMPLES)
def test_what_the_packages_packed_is_what_they_dequantise_it_to(name: str) -> None:
    """compressed-tensors 0.20 and ModelOpt 0.47, in bf16, to the bit."""
    own = {key.partition("/")[2]: value for key, value in load_file(FILE).items() if key.startswith(f"{name}/")}
    expected, layout = own.pop("expected"), LAYOUTS[name.partition(" ")[0]]
    specs = {tensor.name.removeprefix("p."): tensor for tensor in layout.tensors(Projection("p", *expected.shape))}
    assert own.keys() == specs.keys()
    assert all(tuple(value.shape) in (specs[key].shape, *specs[key].others) for key, value in own.items())
    assert torch.equal(dequantise(layout.weight(Stored(own), "p"), torch.bfloat16), expected)


@pytest.mark.parametrize("scalars", [(1,), ()])
@pytest.mark.parametrize(("rows", "k"), [(24, 192), (1, 16), (333, 80)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_read_as_it_was_packed(layout: Nvfp4, rows: int, k: int, scalars: tuple[int, ...]) -> None:
    numbers = quantise(torch.randn(rows, k, generator=torch.Generator().manual_seed(0)), divides=layout.divides)
    stored = tensors_of(numbers, scalars=scalars)
    part = Projection("p", rows, k)
    specs = {tensor.name.removeprefix("p."): tensor for tensor in (*layout.tensors(part), *layout.spares(part))}
    assert stored.keys() == specs.keys()
    assert all(tuple(stored[key].shape) in (spec.shape, *spec.others) for key, spec in specs.items())
    weight = layout.weight(Stored(stored), "p")
    assert torch.equal(dequantise(weight, torch.float64), numbers.matrix())
    held = weight.codes.nbytes + weight.scales.nbytes + weight.row_scales.nbytes
    assert held == layout.nbytes(rows, k, torch.bfloat16) == layout.expert_nbytes(rows, k, torch.bfloat16)


def stored_parts(layout: Nvfp4, sizes: dict[str, float], *, rows: int = 8) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of projections [rows, 32] whose numbers have these sizes, and so other global scales; and their matrices in fp64.
    """
    numbers = {name: quantise(torch.randn(rows, 32) * size, divides=layout.divides) for name, size in sizes.items()}
    assert len({own.g for own in numbers.values()}) == len(sizes)
    stored = {f"{name}.{key}": value for name, own in numbers.items() for key, value in tensors_of(own).items()}
    return stored, {name: own.matrix() for name, own in numbers.items()}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_projections_of_one_product_keep_their_own_global_scales(layout: Nvfp4) -> None:
    stored, matrices = stored_parts(layout, {"a.q": 1.0, "a.k": 0.01, "a.v": 30.0})
    found = layout.load(Stored(stored), list(matrices), bias=False)
    x = torch.randn(5, 32, dtype=torch.float64)
    assert torch.equal(found(x, None), torch.nn.functional.linear(x, torch.cat(list(matrices.values()))))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_so_do_gate_and_up_of_each_expert(layout: Nvfp4) -> None:
    spec = GroupedSpec(name="e", parts=("w1", "w3"), num_experts=3, part_rows=8, k=32)
    names = [f"e.{expert}.{part}" for expert in range(3) for part in ("w1", "w3")]
    stored, matrices = stored_parts(layout, {name: 3.0**i / 30 for i, name in enumerate(names)})
    loaded = layout.load_grouped(Stored(stored), spec)
    x, ids = torch.randn(5, 32, dtype=torch.float64), torch.tensor([[2, 0], [0, 1], [1, 0], [0, 2], [2, 1]])
    routing = lists_reference(ids, torch.ones(5, 2), 3, 16)
    found = loaded.up(x, routing, "silu", quantise=False)
    gate, up = (torch.stack([matrices[f"e.{expert}.{part}"] for expert in range(3)]) for part in ("w1", "w3"))
    rows = x.repeat_interleave(2, 0).unsqueeze(2)
    expected = torch.nn.functional.silu(gate[ids.flatten()] @ rows) * (up[ids.flatten()] @ rows)
    torch.testing.assert_close(found, expected.squeeze(2)[routing.pairs.long()])


def test_weights_of_two_layouts_are_never_joined() -> None:
    with pytest.raises(AssertionError):
        joined([random_weight(8, 16), random_weight(8, 16, divides=True)])


def with_byte(scales: Tensor, byte: int) -> Tensor:
    changed = scales.clone()
    changed.view(torch.uint8)[-1, -1] = byte
    return changed


NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, Any, str]] = [
    ("weight_scale", 0x7F, "weight_scale holds NaN or negative numbers, and scales must be finite and not negative"),
    ("weight_scale", 0xFF, "weight_scale holds NaN or negative numbers"),
    ("weight_scale", 0xB8, "weight_scale holds NaN or negative numbers"),
    ("global", 0.0, "is 0, and it must be positive and finite"),
    ("global", -1.0, "is -1, and it must be positive and finite"),
    ("global", INF, "is inf, and it must be positive and finite"),
    ("global", NAN, "is nan, and it must be positive and finite"),
]


@pytest.mark.parametrize(("key", "value", "said"), BAD)
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), MODELOPT.for_kernels()], ids=[*LAYOUTS, "for kernels"])
def test_scales_that_are_no_scales_are_refused_by_name(layout: Nvfp4, key: str, value: Any, said: str) -> None:
    """Of a projection and of one projection of one expert."""
    stored, _ = stored_parts(layout, {"e.0.up": 1.0, "e.1.up": 2.0})
    name = f"e.1.up.{layout.global_scale if key == 'global' else key}"
    stored[name] = torch.tensor([value]) if key == "global" else with_byte(stored[name], value)
    spec = GroupedSpec(name="e", parts=("up",), num_experts=2, part_rows=8, k=32)
    for load in (lambda: layout.load(Stored(stored), ["e.0.up", "e.1.up"], bias=False),
                 lambda: layout.load_grouped(Stored(stored), spec),
                 lambda: layout.matrix(Stored(stored), "e.1.up")):
        with pytest.raises(CheckpointError) as caught:
            load()
        assert str(caught.value).startswith(name)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_groups_of_zeros_are_zeros_whatever_their_scale_is() -> None:
    """A scale of zero too, which some tools write for them."""
    weight = random_weight(2, 32)
    weight.codes[0, :8], weight.scales.view(torch.uint8)[0, 0] = 0x80, 0
    assert not dequantise(weight, torch.float32)[0, :16].any()


@pytest.mark.parametrize("config", [nvfp4_layouts.MODELOPT, nvfp4_layouts.of_compressed_tensors()], ids=LAYOUTS)
def test_dummy_weights_have_the_usual_size(config: dict[str, Any]) -> None:
    spec = tiny_spec("llama", hidden_size=64, intermediate_size=96, head_dim=16, quantization_config=config)
    layout = spec.formats.quantised
    assert isinstance(layout, Nvfp4)
    weights = DummyWeights(spec, dtype=torch.bfloat16, device=CPU)
    found = layout.matrix(weights, "model.layers.0.mlp.down_proj")
    assert 0.018 < float(found.float().std()) < 0.022
