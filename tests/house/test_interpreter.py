"""Each quick function of the interpreter gives what Triton's own gives: results, bits and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton._C.libtriton import ir
from triton.language import core, semantic
from triton.runtime import interpreter

from batchspec.kernels.gemm.ordered import ordered_linear
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.sampling.sample import gumbel, sample
from tests.helpers.interpreter import QUICK

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing is interpreted")

FLOATS = (tl.float8e4nv, tl.float8e5, tl.float16, tl.bfloat16, tl.float32)
SCALARS = (tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.uint64, *FLOATS, tl.float64)
SHAPES: tuple[list[int], ...] = ([1], [4], [1, 4], [2, 1], [2, 4], [1, 1, 4], [])


@pytest.fixture(scope="module", autouse=True)
def patched_language() -> None:
    """As after the first launch."""
    interpreter._patch_lang(gumbel.fn)


def both(owner: Any, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Triton's function, and the quick one, which has remembered nothing yet."""
    (make,) = [make for place, known, make in QUICK if place is owner and known == name]
    slow = inspect.unwrap(getattr(owner, name))
    return slow, make(slow)


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or its error."""
    try:
        return function(*arguments)
    except (AssertionError, AttributeError, OverflowError, TypeError, ValueError, semantic.IncompatibleTypeErrorImpl) as error:
        return type(error), str(error)


WIDTHS = [(one, other) for one, other in product(FLOATS, FLOATS) if one.primitive_bitwidth != other.primitive_bitwidth]


@pytest.mark.parametrize(("source", "target"), WIDTHS, ids=str)
def test_numbers_are_converted_to_the_same_bits(source: Any, target: Any) -> None:
    slow, quick = both(interpreter, "_convert_float")
    width = source.primitive_bitwidth
    rng = np.random.default_rng(0)
    patterns = np.arange(2**width) if width <= 16 else rng.integers(0, 2**32, 4096)
    values = patterns.astype(f"uint{width}")
    parts = values, values.reshape(2, -1)[:, ::2], values[:1].reshape(()), values[:0]
    for some, rounding in product(parts, (None, ir.ROUNDING_MODE.RTNE)):
        found, expected = quick(some, source, target, rounding), slow(some, source, target, rounding)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


ODD = [0, 1, 2**31, 0x007FFFFF, 0x00800000, 0x7F800000, 0xFFC00001, 0x43E80000, 0x43E7FFFF, 0x3A7FFFFF, 0x3A800000, 0xBC0FFFFF]
"""Zeros, subnormals, infinity and NaN of fp32, and the neighbours of e4m3's bounds: largest, smallest, ties."""


@pytest.mark.parametrize("rounding", [None, ir.ROUNDING_MODE.RTNE])
@pytest.mark.parametrize("target", [tl.bfloat16, tl.float8e4nv, tl.float8e5], ids=str)
def test_fp32_is_cut_to_the_same_bf16_and_rounded_to_the_same_fp8(target: Any, rounding: Any) -> None:
    slow, quick = both(interpreter, "_convert_float")

    @given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(ODD)))
    @settings(max_examples=30)
    def check(patterns: list[int]) -> None:
        values = np.array(patterns, np.uint32).view(np.float32)
        expected = slow(values, tl.float32, target, rounding)
        np.testing.assert_array_equal(quick(values, tl.float32, target, rounding), expected)

    check()
    every_bound = np.arange(2**13, dtype=np.uint32)[:, None] << 19  # every number that keeps e4m3's bits and the one after them
    beside = np.concatenate([every_bound, every_bound + 1, every_bound - 1], 1).view(np.float32)
    np.testing.assert_array_equal(quick(beside, tl.float32, target, rounding), slow(beside, tl.float32, target, rounding))


@pytest.mark.parametrize("dtype", [*SCALARS, core.pointer_type(tl.float32)], ids=str)
def test_the_size_of_numbers_is_checked_alike(dtype: Any) -> None:
    slow, quick = both(interpreter.TensorHandle, "__init__")

    def described(make: Callable[..., Any], data: Any, *rest: Any) -> Any:
        handle = object.__new__(interpreter.TensorHandle)
        make(handle, data, dtype, *rest)
        assert handle.data is data
        return handle.dtype, handle.attr

    for width, rest in product(("uint8", "uint16", "uint32", "uint64"), ((), ({"a": 1},))):
        data = np.zeros(3, width)
        assert outcome(described, quick, data, *rest) == outcome(described, slow, data, *rest)
    one, other = (interpreter.TensorHandle(np.zeros(1, "uint8"), tl.int8) for _ in range(2))
    one.set_attr("a", 1)
    assert other.attr == {}


def test_constants_are_unwrapped_alike() -> None:
    slow, quick = both(core, "_unwrap_if_constexpr")
    values = [3, True, 2.5, None, "a", tl.int32, core.constexpr(4), core.constexpr(None), [core.constexpr(1), 2]]
    values += [(core.constexpr(1), 2), core.tuple([core.constexpr(1), 2])]
    for value in values:
        assert (type(quick(value)), repr(quick(value))) == (type(slow(value)), repr(slow(value)))
    tensor = made([4])
    assert quick(tensor) is slow(tensor) is tensor


def test_types_have_the_same_numpy_types() -> None:
    slow, quick = both(interpreter, "_get_np_dtype")
    pointers = [core.pointer_type(dtype) for dtype in SCALARS]
    for dtype in [*SCALARS, *pointers, *(core.block_type(dtype, [4]) for dtype in (*SCALARS, *pointers))]:
        assert quick(dtype) == quick(dtype) == slow(dtype)


def described(make: Callable[..., Any], shape: Any, dtype: Any) -> Any:
    block = object.__new__(core.block_type)
    make(block, dtype, shape)
    return block.element_ty, block.shape.values, block.numel, block.name


@pytest.mark.parametrize(
    "shape", [*SHAPES, [3], [0], [-2], [2**10, 2**11], [4.0], ["4"], (4,), [np.int64(4)], [True], None], ids=repr
)
def test_shapes_are_checked_and_spelt_alike(shape: Any) -> None:
    slow, quick = both(core.block_type, "__init__")
    for dtype in (tl.float32, tl.int1, core.pointer_type(tl.float32)):
        outcome(described, quick, [4], dtype)  # wrong shapes that equal a remembered one are wrong all the same
        for spelling in (shape, [core.constexpr(size) for size in shape]) if isinstance(shape, list) else (shape,):
            expected = outcome(described, slow, spelling, dtype)
            assert [outcome(described, quick, spelling, dtype) for _ in range(2)] == [expected, expected]


def test_a_shape_has_the_same_type_with_another_element_and_in_the_interpreter() -> None:
    slow, quick = both(core.block_type, "with_element_ty")
    slow_ir, quick_ir = both(core.block_type, "to_ir")
    pointers = core.pointer_type(tl.int8), core.pointer_type(tl.int8, const=True)
    for shape, one, other in product([[4], [2, 4]], SCALARS, (*SCALARS, *pointers)):
        block = core.block_type(one, shape)
        for made in (quick(block, other), quick(block, other)):
            assert made == slow(block, other)
            assert quick_ir(made, interpreter.interpreter_builder) == slow_ir(made, interpreter.interpreter_builder)


def test_two_types_are_added_in_the_same_type() -> None:
    slow, quick = both(semantic.TritonSemantic, "computation_type_impl")
    self, flags = interpreter.interpreter_semantic, (False, True)
    for a, a_is_scalar, b, b_is_scalar, div_or_mod in product(SCALARS, flags, SCALARS, flags, flags):
        expected = outcome(slow, self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        for _ in range(2):
            assert outcome(quick, self, a, a_is_scalar, b, b_is_scalar, div_or_mod) == expected


def test_types_are_compared_alike() -> None:
    slow, quick = both(core.dtype, "__eq__")
    others = (*SCALARS, tl.dtype("fp32"), core.constexpr(tl.int8), core.pointer_type(tl.int8), "fp32", None)
    for one, other in product(SCALARS, others):
        assert quick(one, other) == slow(one, other)


SIZES = st.lists(st.sampled_from([1, 2, 4]) | st.sampled_from([1, 2]).map(core.constexpr) | st.just([1]), max_size=3)


@given(SIZES, SIZES)
def test_shapes_are_compared_alike(sizes: list[Any], others: list[Any]) -> None:
    slow, quick = both(core.tuple, "__eq__")
    shape = core.tuple([1, 2, 4][: len(sizes)])
    for other in (sizes, others, list(shape.values), core.tuple(list(shape.values)), core.constexpr([1]), 4):
        assert repr(outcome(quick, shape, other)) == repr(outcome(slow, shape, other))


def test_items_are_found_alike() -> None:
    slow, quick = both(core.tuple, "__getitem__")
    shape = core.tuple([core.constexpr(size) for size in (1, 2, 4)])
    for index in (0, 2, -1, core.constexpr(1)):
        assert quick(shape, index) is slow(shape, index)
    assert quick(shape, slice(1, 3)).values == slow(shape, slice(1, 3)).values
    for index in (3, -4):
        with pytest.raises(IndexError):
            quick(shape, index)


def made(shape: list[int], dtype: Any = tl.float32) -> Any:
    data = np.arange(max(1, int(np.prod(shape)))).reshape(shape or [1])
    handle = interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(dtype)), dtype)
    return core.tensor(handle, core.block_type(dtype, shape) if shape else dtype)


def told(tensor: Any) -> Any:
    """All that there is to say about a tensor."""
    data = tensor.handle.data
    sizes = [size.value for size in tensor.shape]
    return str(tensor.type), sizes, tensor.numel.value, data.dtype, data.shape, data.tobytes(), tensor.handle.dtype


@pytest.mark.parametrize("source", SCALARS, ids=str)
def test_tensors_are_cast_alike(source: Any) -> None:
    slow, quick = both(semantic.TritonSemantic, "cast")
    pointers = core.pointer_type(tl.int8), core.pointer_type(tl.float32)
    for shape, target, *rounding in product(([], [2, 4]), (*SCALARS, *pointers), (None, "rtne", "rtz")):
        given = made(shape, source)

        def of(function: Callable[..., Any], given: Any = given, target: Any = target, rest: Any = rounding) -> Any:
            found = function(interpreter.interpreter_semantic, given, target, *rest)
            return found is given, told(found)

        expected = outcome(of, slow)
        assert [outcome(of, quick) for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_get_one_more_dimension_alike(shape: list[int]) -> None:
    slow, quick = both(semantic.TritonSemantic, "expand_dims")
    for axis, dtype in product(range(-1, 5), (tl.float32, tl.int1)):

        def of(function: Callable[..., Any], axis: int = axis, dtype: Any = dtype) -> Any:
            return told(function(interpreter.interpreter_semantic, made(shape, dtype), axis))

        expected = outcome(of, slow)
        assert [outcome(of, quick) for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize(("left", "right"), [*product((*SHAPES, [4, 2]), repeat=2)], ids=str)
def test_tensors_are_broadcast_alike(left: list[int], right: list[int]) -> None:
    def of(function: Callable[..., Any]) -> Any:
        pair = function(interpreter.interpreter_semantic, made(left), made(right))
        return [(str(one.type), [size.value for size in one.shape], one.numel.value, one.handle.data.tolist()) for one in pair]

    slow, quick = both(semantic.TritonSemantic, "broadcast_impl_value")
    assert [outcome(of, quick) for _ in range(2)] == [outcome(of, slow)] * 2


OPERANDS = [0, 1, -1, 255, 2**31, -(2**63), 2**64, True, False, 0.0, -0.0, 0.1, 1e-40, float("nan"), float("inf")]


def test_operands_are_made_alike() -> None:
    slow, quick = both(semantic.TritonSemantic, "binary_op_type_checking_impl")
    self, pointer = interpreter.interpreter_semantic, core.pointer_type(tl.int32)

    def tensor(dtype: Any, shape: list[int]) -> Any:
        numpy = np.uint64 if dtype is pointer else interpreter._get_np_dtype(dtype)
        handle = interpreter.TensorHandle(np.ones(shape or [1], numpy), dtype)
        return core.tensor(handle, core.block_type(dtype, shape) if shape else dtype)

    def of(function: Callable[..., Any], left: Any, right: Any, *rest: bool) -> Any:
        found = function(self, left, right, *rest)
        given = {id(left): "left", id(right): "right"}
        return [
            (given.get(id(one)), str(one.type), [size.value for size in one.shape], one.handle.data.tobytes(), one.handle.dtype)
            for one in found
        ]

    kinds = (tl.int32, tl.uint8, tl.bfloat16, tl.float32, pointer)
    tensors = [tensor(dtype, shape) for dtype, shape in product(kinds, ([], [4], [1, 4], [2, 1]))]
    flags = [(True, True, True, False), (False, False, True, True), (False, False, False, False)]
    for one, other, rest in product(tensors, [*tensors, *OPERANDS], flags):
        for pair in ((one, other), (other, one)):
            expected = repr(outcome(of, slow, *pair, *rest))
            assert [repr(outcome(of, quick, *pair, *rest)) for _ in range(2)] == [expected, expected]


def test_a_number_that_is_spread_once_cannot_be_changed() -> None:
    _, quick = both(semantic.TritonSemantic, "binary_op_type_checking_impl")
    first, second = (quick(interpreter.interpreter_semantic, made([4]), 2.0)[1] for _ in range(2))
    assert first is second
    with pytest.raises(ValueError, match="read-only"):
        first.handle.data[0] = 3.0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_are_described_alike(shape: list[int]) -> None:
    slow, quick = both(core.tensor, "__init__")
    tensor = made(shape)
    for _ in range(2):
        one, other = object.__new__(core.tensor), object.__new__(core.tensor)
        slow(one, tensor.handle, tensor.type)
        quick(other, tensor.handle, tensor.type)
        assert vars(one).keys() == vars(other).keys()
        assert (one.handle, one.type, one.dtype) == (other.handle, other.type, other.dtype)
        assert (one.numel.value, [size.value for size in one.shape]) == (other.numel.value, [size.value for size in other.shape])


def drawn() -> torch.Tensor:
    rows = torch.arange(3, dtype=torch.int32)
    out = torch.full((3,), -7, dtype=torch.int32)
    scale, low = torch.full((3,), 0.7), torch.full((3,), -1.5)
    sample(torch.randn(3, 1030).bfloat16(), rows, rows.long(), rows.long(), scale, low, out_ids=out, interpret=True)
    return out


def multiplied() -> torch.Tensor:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(20, 64).bfloat16()
    return ordered_linear(x, weight, torch.randn(20).bfloat16(), segments=2, tile=Tile(64, 32, 32, 2, 4, False), interpret=True)


@pytest.mark.parametrize("kernel", [drawn, multiplied])
def test_kernels_write_the_same_bits(kernel: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = kernel()
    for owner, name, _ in QUICK:
        if not name.startswith("_patch"):  # the language stays as it is patched
            monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
    torch.manual_seed(0)
    slow = kernel()
    assert slow.view(torch.int8).tolist() == quick.view(torch.int8).tolist()
