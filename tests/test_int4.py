"""INT4 weights: words, dequantisation, products; the layouts of checkpoints against their packages and against another packer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.kernels.common.int4 import Int4Weight, dequantise, pack, unpack
from batchspec.model.blocks.base import GroupedSpec, Projection
from batchspec.model.quant.awq import Awq
from batchspec.model.quant.gptq import Gptq
from batchspec.model.quant.int4 import Int4Linear, joined, rows_of
from batchspec.model.quant.int4_format import Int4
from batchspec.model.quant.pack_quantized import PackQuantized
from batchspec.model.spec import read_spec
from batchspec.model.weights import DummyWeights
from tests.int4_layouts import LAYOUTS, Layout, of_awq, of_compressed_tensors, of_gptq
from tests.int4_samples import CASES, FILE
from tests.moe_models import tiny_config, tiny_spec

CPU = torch.device("cpu")


class Stored:
    """The tensors of a projection p, or of others by their full names."""

    dtype, device = torch.float64, CPU

    def __init__(self, tensors: dict[str, Tensor]) -> None:
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


def random_weight(
    rows: int, k: int, group_size: int, *, zeros: bool, groups: bool, dtype: torch.dtype = torch.float16
) -> Int4Weight:
    count = -(-k // group_size)
    index = torch.randint(0, count, (k,), dtype=torch.int32) if groups else None
    z = torch.randint(0, 16, (rows, count), dtype=torch.uint8) if zeros else None
    words = pack(torch.randint(0, 16, (rows, k), dtype=torch.uint8))
    return Int4Weight(words, (torch.rand(rows, count) + 0.01).to(dtype), z, group_size, index)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "group_size"), [(96, 32), (200, 64), (40, 40), (24, 128)])
def test_each_number_is_that_of_the_definition_rounded_once(k: int, group_size: int, zeros: bool, groups: bool) -> None:
    """Of fp16 and bf16 scales fp32 holds every number exactly; the last group may be short."""
    for dtype in (torch.float16, torch.bfloat16):
        weight = random_weight(5, k, group_size, zeros=zeros, groups=groups, dtype=dtype)
        codes, expected = unpack(weight.words), torch.empty(5, k, dtype=torch.float64)
        for n in range(5):
            for i in range(k):
                g = i // group_size if weight.groups is None else int(weight.groups[i])
                z = 8 if weight.zeros is None else int(weight.zeros[n, g])
                expected[n, i] = (int(codes[n, i]) - z) * float(weight.scales[n, g])
        assert torch.equal(dequantise(weight, torch.float64), expected)
        assert torch.equal(dequantise(weight, torch.float32).double(), expected)
        assert torch.equal(dequantise(weight, torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [False, True])
def test_a_product_is_that_of_the_dequantised_rows_of_all_parts(groups: bool, dtype: torch.dtype) -> None:
    parts = [random_weight(rows, 96, 32, zeros=True, groups=groups) for rows in (24, 8, 40)]
    x, bias = torch.randn(7, 96, dtype=dtype), torch.randn(72, dtype=dtype)
    product = Int4Linear(parts, bias)
    assert len(product.weights) == (3 if groups else 1)  # parts with groups of their own are not one matrix
    matrix = torch.cat([dequantise(part, dtype) for part in parts])
    assert torch.equal(product(x), torch.nn.functional.linear(x, matrix, bias))
    assert product(x).dtype is dtype
    gate, up = product(x).chunk(2, -1)
    torch.testing.assert_close(product.swiglu(x, None), torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(product.rows_from(29)(x, None), product(x)[:, 29:])


def test_parts_of_one_division_of_the_columns_are_one_weight() -> None:
    one, other = (random_weight(8, 64, 32, zeros=False, groups=True) for _ in range(2))
    same = Int4Weight(other.words, other.scales, None, 32, one.groups)
    assert len(joined([one, same])) == 1
    assert len(joined([one, other])) == 2
    assert len(joined([one, random_weight(8, 64, 32, zeros=False, groups=False)])) == 2
    (whole,) = joined([one, same])
    assert [part.num_rows for part in rows_of([whole, other], slice(5, 20))] == [11, 4]
    assert torch.equal(dequantise(whole, torch.float64), torch.cat([dequantise(x, torch.float64) for x in (one, same)]))


# --- layouts


def sample_format(name: str) -> Int4:
    kind, _, rest = name.partition(" ")
    group_size, symmetric = CASES.get(rest, (32, False))
    own_size, act_order = None if group_size == -1 else group_size, rest == "in act order"
    if kind == "pack-quantized":
        return PackQuantized(own_size, symmetric)
    return Awq(own_size, symmetric) if kind == "awq" else Gptq(own_size, symmetric, act_order, minus_one=kind == "gptq")


SAMPLES = sorted({name.partition("/")[0] for name in load_file(FILE)})


@pytest.mark.parametrize("name", SAMPLES)
def test_what_the_packages_packed_is_what_they_dequantise_it_to(name: str) -> None:
    """compressed-tensors 0.20 in bf16 and GPTQModel 7.7 in fp16, to the bit; zero points of 0 and 15 are among them."""
    own = {key.partition("/")[2]: value for key, value in load_file(FILE).items() if key.startswith(f"{name}/")}
    expected, layout = own.pop("expected"), sample_format(name)
    specs = {tensor.name.removeprefix("p."): tensor for tensor in layout.tensors(Projection("p", *expected.shape))}
    assert {key: tuple(value.shape) for key, value in own.items()} == {key: tensor.shape for key, tensor in specs.items()}
    weight = layout.weight(Stored(own), "p")
    assert (weight.groups is not None) == ("act order" in name)
    assert (weight.zeros is None) == layout.symmetric
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
    shapes = {tensor.name.removeprefix("p."): tensor.shape for tensor in found.tensors(Projection("p", rows, k))}
    assert {key: tuple(value.shape) for key, value in stored.items()} == shapes
    weight = found.weight(Stored(stored), "p")
    assert torch.equal(dequantise(weight, torch.float64), codes.matrix())
    held = weight.words.nbytes + weight.scales.nbytes + (0 if weight.zeros is None else weight.zeros.nbytes)
    assert held == found.nbytes(rows, k, torch.bfloat16) == found.expert_nbytes(rows, k, torch.bfloat16)
    assert weight.words.is_contiguous()
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
    assert weight.groups is None
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
    assert (found.groups is not None) == layout.act_order
    assert 0.01 < float(dequantise(found, torch.float32).std()) < 0.04


# --- quantization_config


def formats(config: dict[str, Any]) -> Any:
    return read_spec(tiny_config("llama", quantization_config=config), "config.json").formats


NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj")


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (of_gptq(32, dynamic=None).config, ()),
        (of_gptq(32, dynamic={"-:.*attn.*": {}, "lm_head": {}}).config, NAMES[:2]),
        (of_gptq(32, dynamic={r"+:.*layers\.0\..*": {"bits": 4}, "-:.*attn.*": {}}).config, NAMES[1:2]),
        (of_gptq(32, dynamic={"-:.*attn.*": {}, r"model\.layers\.1": {}, "-:.*": None}).config, (*NAMES[:1], NAMES[1])),
        (of_gptq(32, dynamic={r"-:model\.language_model\.layers\.1\.": {}}).config, NAMES[1:]),
        (of_gptq(32, dynamic={r"layers\.1": {}, r"-:model\.layers\.1": {}}).config, NAMES[1:]),
        (of_gptq(32, dynamic=None, modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]).config, NAMES[2:]),
        (of_gptq(32, dynamic=None, modules_in_block_to_quantize=["mlp.down_proj", "proj"]).config, NAMES[:2]),
        (
            of_gptq(32, dynamic=None, modules_in_block_to_quantize=["model.language_model.layers.1.mlp.down_proj"]).config,
            NAMES[:2],
        ),
        (of_awq(32, modules_to_not_convert=None).config, ()),
        (of_awq(32, modules_to_not_convert=["model.layers.1.", "gate"]).config, NAMES[1:]),
        (of_awq(32, modules_to_not_convert=["model.language_model.layers.1.mlp"]).config, NAMES[2:]),
        (of_awq(32, modules_to_not_convert=["q"], dynamic={"-:.*down.*": {}}).config, NAMES[2:]),
        (of_compressed_tensors(32, ignore=["re:.*attn.*", "lm_head"]).config, NAMES[:2]),
    ],
)
def test_modules_that_are_not_quantised(config: dict[str, Any], plain: tuple[str, ...]) -> None:
    """The first pattern of `dynamic` that matches the beginning of a name decides."""
    own = formats(config)
    assert tuple(name for name in NAMES if not isinstance(own.of(name), Int4)) == plain


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (of_gptq(128, v1=False, sym=False, desc_act=True).config, Gptq(128, False, True)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "format": "gptq_v2"}, Gptq(64, True)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, Gptq(64, True, minus_one=True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"}, Awq(128, False)),
        ({"quant_method": "awq", "bits": 4, "group_size": -1, "format": "gemm", "zero_point": False}, Awq(None, True)),
        (of_compressed_tensors(128, actorder="static").config, PackQuantized(128, True)),
        (of_compressed_tensors(128, actorder="dynamic", symmetric=False).config, PackQuantized(128, False, True)),
        (of_compressed_tensors(-1).config, PackQuantized(None, True)),
    ],
)
def test_what_a_config_says(config: dict[str, Any], found: Int4) -> None:
    assert formats(config).quantised == found


def ct_weights(**changes: Any) -> dict[str, Any]:
    layout = of_compressed_tensors(32)
    group = layout.config["config_groups"]["group_0"]
    return {**layout.config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def ct_group(**changes: Any) -> dict[str, Any]:
    layout = of_compressed_tensors(32)
    return {**layout.config, "config_groups": {"group_0": {**layout.config["config_groups"]["group_0"], **changes}}}


INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (of_gptq(32, bits=8).config, "gptq with quantization_config.bits=8"),
        (of_gptq(12).config, "gptq with quantization_config.group_size=12"),
        (of_gptq(0).config, "gptq with quantization_config.group_size=0"),
        (of_gptq(32, checkpoint_format="marlin").config, 'gptq with quantization_config.checkpoint_format="marlin"'),
        (of_gptq(32, is_marlin_format=True).config, "is_marlin_format=true"),
        (of_gptq(32, lm_head=True).config, "gptq with quantization_config.lm_head=true"),
        (of_gptq(32, pack_dtype="int16").config, 'pack_dtype="int16"'),
        (of_gptq(32, rotation="hadamard").config, 'rotation="hadamard"'),
        (of_gptq(32, activation={"mode": "w4afp8"}).config, "activation={"),
        (of_gptq(32, adapter={"name": "lora"}).config, "adapter={"),
        (of_gptq(32, dynamic={"+:.*down.*": {"bits": 8}}).config, "gptq with dynamic '+:.*down.*' with bits=8"),
        (of_gptq(32, dynamic={".*down.*": {"group_size": 64}}).config, "gptq with dynamic '.*down.*' with group_size=64"),
        (of_awq(32, bits=8).config, "awq with quantization_config.bits=8"),
        (of_awq(32, version="gemv").config, 'awq with quantization_config.version="gemv"'),
        (of_awq(32, backend="llm-awq").config, 'awq with quantization_config.backend="llm-awq"'),
        (of_awq(32, desc_act=True).config, "awq with quantization_config.desc_act=true"),
        (of_awq(32, lm_head=True).config, "awq with quantization_config.lm_head=true"),
        (ct_weights(num_bits=8), "weights of num_bits=8"),
        (ct_weights(type="float"), 'type="float"'),
        (ct_weights(strategy="tensor", group_size=None), 'strategy="tensor"'),
        (ct_weights(group_size=12), "group_size=12"),
        (ct_weights(strategy="channel"), 'strategy="channel", group_size=32'),
        (ct_weights(dynamic=True), "dynamic=true"),
        (ct_weights(actorder="other"), 'actorder="other"'),
        (ct_group(input_activations=INT8), "compressed-tensors pack-quantized with "),
        (ct_group(output_activations=INT8), "output_activations="),
        (ct_group(format="int-quantized"), 'format="int-quantized"'),
        (ct_group(targets=["Linear", "Embedding"]), "targets="),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        formats(config)
    message = str(caught.value)
    assert "\n" not in message
    assert named in message
    assert "INT4 (compressed-tensors pack-quantized, GPTQ, AWQ gemm)" in message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (of_gptq(32, dynamic={"-:(": {}}).config, "'(' is not a regular expression"),
        (of_gptq(32, dynamic={"a": {}, "-:(?i)b": {}}).config, "is not a regular expression"),
        (of_gptq(32, dynamic={"+:a": 5}).config, "quantization_config.dynamic.+:a is 5; it must be an object"),
        (of_gptq(32, modules_in_block_to_quantize=[["a"], "b"]).config, "it must be a list of strings, or of lists of strings"),
        ({**of_gptq(32).config, "sym": 1}, "quantization_config.sym is 1; it must be true or false"),
        (of_awq(32, modules_to_not_convert="lm_head").config, "it must be a list of strings"),
        ({"quant_method": "gptq", "group_size": 32}, "quantization_config.bits is null; it must be an integer in 1 .. 64"),
        ({"quant_method": "awq", "bits": 4}, "quantization_config.group_size is null"),
        (ct_weights(actorder=True), "actorder is true; it must be a string"),
    ],
)
def test_malformed_values_are_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        formats(config)
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)
