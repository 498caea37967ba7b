"""Triton's interpreter without the work that it repeats: the same results in half of its time.

A test's tiles hold a few numbers, so that NumPy computes them quickly. Most of the time goes to Triton, which makes types, shapes
and tables again for each operation. Here they are made once. Unusual arguments go to Triton's own function, wrong ones too;
test_interpreter.py compares both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

Function = Callable[..., Any]


class _Kept:
    """What a launch takes back when it ends: the patch that the next launch needs again."""

    def restore(self) -> None:
        """Leave it."""


def make_interpreter_quick() -> None:
    """Replace functions of Triton by those below. Leave out the sums in int64 that look for overflows of int32: without `debug`
    nothing reads what they find.
    """
    for owner, name, make in QUICK:
        slow = getattr(owner, name)
        setattr(owner, name, wraps(slow)(make(slow)))
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def patch_lang(slow: Function) -> Function:
    """Patch Triton's language once for each module, not at each call of each function, each `tl.sum` included."""
    patched: set[str] = set()

    def patch_once(fn: Any) -> _Kept:
        module = fn.__globals__["__name__"]
        if module not in patched:
            slow(fn)
            patched.add(module)
        return _Kept()

    return patch_once


def patch_attr(_: Function) -> Function:
    """Call builtins with the interpreter's semantic at once, past the wrapper that asks whether there is one."""
    wrapper = core.builtin(lambda: None).__code__

    def patch_directly(obj: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return patch_directly


def get_np_dtype(slow: Function) -> Function:
    """Remember NumPy's type for each type of Triton."""
    known: dict[str, Any] = {}

    def get_once(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = slow(dtype)
        return known[dtype.name]

    return get_once


def convert_float(slow: Function) -> Function:
    """Convert each of the 256 or 65,536 patterns of a narrow type once. Of an fp32 number that is not subnormal, the upper half
    decides: bf16 is that half, and the bits that e4m3 and e5m2 keep and round by are in it.
    """
    tables: dict[Any, Any] = {}

    def table(source: Any, target: Any, rounding: Any) -> Any:
        key = source.name, target.name, rounding
        if key not in tables:
            halves = np.arange(2 ** min(source.primitive_bitwidth, 16), dtype=f"uint{source.primitive_bitwidth}")
            tables[key] = slow(halves << 16 if source.name == "fp32" else halves, source, target, rounding)
        return tables[key]

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        width = source.primitive_bitwidth
        bits = np.ascontiguousarray(values).reshape(-1).view(f"uint{width}")
        if width <= 16:
            return table(source, target, rounding)[bits].reshape(values.shape)
        cut = target.name == "bf16" and rounding is None
        if source.name == "fp32" and (cut or target.primitive_bitwidth == 8):
            magnitude = bits & 0x7FFFFFFF
            subnormal = (magnitude < 0x00800000) & (magnitude != 0)
            halves = bits >> 16
            found = halves.astype(np.uint16) if cut else table(source, target, rounding)[halves]
            if subnormal.any():
                found[subnormal] = slow(bits[subnormal], source, target, rounding)
            return found.reshape(values.shape)
        return slow(values, source, target, rounding)

    return convert


def tensor_handle(slow: Function) -> Function:
    """Check the size of numbers without the calls that find it."""

    def init(self: Any, data: Any, dtype: Any, *rest: Any) -> None:
        known = type(dtype) is core.pointer_type or (
            type(dtype) is core.dtype and data.itemsize * 8 <= max(8, dtype.primitive_bitwidth)
        )
        if rest or not known:
            slow(self, data, dtype, *rest)
            return
        self.data, self.dtype, self.attr = data, dtype, {}

    return init


PLAIN = frozenset({core.tensor, core.dtype, core.block_type, int, float, bool, str, type(None)})
"""Types of values that hold no constants of Triton."""


def unwrap_if_constexpr(slow: Function) -> Function:
    """Ask for the usual types first."""

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        return value.value if kind is core.constexpr else slow(value)

    return unwrap


def dtype_equal(slow: Function) -> Function:
    """A type is itself, whatever its name."""

    def equal(self: Any, other: Any) -> Any:
        return self is other or slow(self, other)

    return equal


def cast(slow: Function) -> Function:
    """Leave what has the type already as it is. Decide once whether NumPy alone converts one type to another."""
    known: dict[tuple[str, str], bool] = {}

    def by_numpy(source: Any, target: Any) -> bool:
        if source.name in ("fp16", "bf16"):
            return bool(target.is_fp32())  # any other type is reached by way of fp32
        known_number = source.is_int() or source.is_standard_floating()
        return known_number and (target.is_standard_floating() or (target.is_int() and not target.is_bool()))

    def convert(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        if fp_downcast_rounding is not None or type(source) is not core.dtype or type(target) is not core.dtype:
            return slow(self, input, dst_ty, fp_downcast_rounding)
        key = source.name, target.name
        if key not in known:
            known[key] = source != target and by_numpy(source, target)
        if not known[key]:
            return slow(self, input, dst_ty, fp_downcast_rounding)
        made = input.type.with_element_ty(target) if input.type.is_block() else dst_ty
        return core.tensor(self.builder.cast_impl(input.handle, made), made)

    return convert


def expand_dims(slow: Function) -> Function:
    """Spell the shape with one more dimension once."""
    known: dict[tuple[str, int], Any] = {}

    def expand(self: Any, input: Any, axis: int) -> Any:
        key = input.type.name, axis
        if key not in known:
            found = slow(self, input, axis)
            if input.type.is_block() and type(input.dtype) is core.dtype:
                known[key] = found.type
            return found
        data = input.handle.data[(slice(None),) * axis + (None,)]
        return core.tensor(interpreter.TensorHandle(data, input.dtype), known[key])

    return expand


def block_type(slow: Function) -> Function:
    """Check and spell each shape once."""
    known: dict[Any, Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        usual = isinstance(shape, list | core.tuple) and isinstance(element_ty, core.dtype)
        sizes = [size.value if type(size) is core.constexpr else size for size in shape] if usual else []
        if not usual or not all(type(size) is int for size in sizes):
            slow(self, element_ty, shape)
            return
        key = element_ty.name, *sizes
        if key not in known:
            slow(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return init


def with_element_ty(slow: Function) -> Function:
    """Make the type of a shape and an element once."""
    known: dict[tuple[str, str], Any] = {}

    def make(self: Any, element_ty: Any) -> Any:
        if type(element_ty) is not core.dtype:
            return slow(self, element_ty)
        key = self.name, element_ty.name
        if key not in known:
            known[key] = slow(self, element_ty)
        return known[key]

    return make


def block_to_ir(slow: Function) -> Function:
    """For the interpreter the type of a tile of numbers is itself."""

    def to_ir(self: Any, builder: Any) -> Any:
        itself = builder is interpreter.interpreter_builder and type(self.element_ty) is core.dtype
        return self if itself else slow(self, builder)

    return to_ir


def tensor(_: Function) -> Function:
    """Share the constants that say a tensor's shape and size: those of one shape, whatever the type of its numbers."""
    of_type: dict[str, tuple[Any, Any]] = {}
    of_sizes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        name = type.name if type.is_block() else ""
        if name not in of_type:
            sizes = tuple(type.shape.values) if name else ()
            made = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
            of_type[name] = of_sizes.setdefault(sizes, made)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_type[name]

    return init


def tuple_item(slow: Function) -> Function:
    """Take the item at an index, which needs no constant of its own."""

    def item(self: Any, index: Any) -> Any:
        return self.values[index] if type(index) is int else slow(self, index)

    return item


def tuple_equal(slow: Function) -> Function:
    """Compare a shape with a list of sizes."""

    def equal(self: Any, other: Any) -> Any:
        if type(other) is list and all(type(size) is int for size in other):
            return core.constexpr(self.values == other)
        return slow(self, other)

    return equal


def computation_type(slow: Function) -> Function:
    """Remember the type in which two types are added."""
    known: dict[Any, Any] = {}

    def decide(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = slow(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return decide


def broadcast_value(slow: Function) -> Function:
    """Leave two scalars and two tensors of one shape as they are. Decide once which of two others is extended, and to what."""
    known: dict[tuple[str, str], tuple[Any, Any]] = {}
    kinds = (core.dtype, core.pointer_type)

    def extended(self: Any, value: Any, wanted: Any) -> Any:
        if wanted is None:
            return value
        if value.type.is_block():
            return core.tensor(self.builder.create_broadcast(value.handle, wanted.shape), wanted)
        return core.tensor(self.builder.create_splat(wanted, value.handle), wanted)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key in known:
            return extended(self, lhs, known[key][0]), extended(self, rhs, known[key][1])
        found, other = slow(self, lhs, rhs)
        ranks = {len(each.shape.values) for each in (lhs, rhs)}
        if type(lhs.dtype) in kinds and type(rhs.dtype) in kinds and (len(ranks) == 1 or 0 in ranks):
            known[key] = None if found is lhs else found.type, None if other is rhs else other.type
        return found, other

    return broadcast


MOST_CONSTANTS = 4096


def binary_operands(slow: Function) -> Function:
    """Broadcast two operands: two tensors without the checks of other kinds; a constant is broadcast once and cached, so the
    result must not be written to.
    """
    spread: dict[Any, Any] = {}

    def operands(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        kinds = type(lhs), type(rhs)
        first = kinds[0] is core.tensor
        dtype = (lhs if first else rhs).dtype if core.tensor in kinds else None
        if allow_lhs_ptr and type(dtype) is core.pointer_type and kinds[0] is kinds[1] and rhs.dtype.is_int():
            return self.broadcast_impl_value(lhs, rhs)
        if type(dtype) is not core.dtype:
            return slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if kinds[0] is kinds[1]:
            if type(rhs.dtype) is not core.dtype:
                return slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
            if arithmetic_check:
                wanted = self.computation_type_impl(dtype, False, rhs.dtype, False, div_or_mod)
                lhs, rhs = self.cast(lhs, wanted), self.cast(rhs, wanted)
            return self.broadcast_impl_value(lhs, rhs)
        if (number := rhs if first else lhs).__class__ in (int, float, bool):
            value = lhs if first else rhs
            key = repr(number), value.type.name, arithmetic_check, div_or_mod
            if key in spread:
                return (value, spread[key]) if first else (spread[key], value)
            found = slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
            if found[0 if first else 1] is value and len(spread) < MOST_CONSTANTS:
                made = found[1 if first else 0]
                made.handle.data.flags.writeable = False
                spread[key] = made
            return found
        return slow(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return operands


QUICK: tuple[tuple[Any, str, Callable[[Function], Function]], ...] = (
    (interpreter, "_patch_lang", patch_lang),
    (interpreter, "_patch_attr", patch_attr),
    (interpreter, "_get_np_dtype", get_np_dtype),
    (interpreter, "_convert_float", convert_float),
    (core.block_type, "__init__", block_type),
    (core.block_type, "with_element_ty", with_element_ty),
    (core.block_type, "to_ir", block_to_ir),
    (core.tensor, "__init__", tensor),
    (core.tuple, "__getitem__", tuple_item),
    (core.tuple, "__eq__", tuple_equal),
    (semantic.TritonSemantic, "computation_type_impl", computation_type),
    (semantic.TritonSemantic, "cast", cast),
    (semantic.TritonSemantic, "expand_dims", expand_dims),
    (semantic.TritonSemantic, "broadcast_impl_value", broadcast_value),
    (semantic.TritonSemantic, "binary_op_type_checking_impl", binary_operands),
    (interpreter.TensorHandle, "__init__", tensor_handle),
    (core.dtype, "__eq__", dtype_equal),
    (core, "_unwrap_if_constexpr", unwrap_if_constexpr),
)
"""Functions of Triton and what replaces them; the name of one that has moved raises AttributeError."""


@contextmanager
def dots_of_one_order() -> Iterator[None]:
    """In this block a product of tiles sums each number in the order of K, as tensor cores do.

    The interpreter calls a library, whose sums depend on where in the tile a row is.
    """

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        total = d.data.copy()
        for place in range(a.data.shape[-1]):
            total += a.data[..., :, place, None] * b.data[..., None, place, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", dot):
        yield
