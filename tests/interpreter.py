"""Triton's interpreter without the work that it repeats: a third of its time, the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from triton.runtime import interpreter


class _Kept:
    """What a launch takes back when it ends: the patch that the next launch needs again."""

    def restore(self) -> None:
        """Leave it."""


def make_interpreter_quick() -> None:
    """Patch Triton's language once for each module, not at each call of each function, each `tl.sum` included. Leave out the sums
    in int64 that look for overflows of int32: without `debug` nothing reads what they find.
    """
    patch: Callable[[Any], object] = interpreter._patch_lang
    patched: set[str] = set()

    def patch_once(fn: Any) -> _Kept:
        module = fn.__globals__["__name__"]
        if module not in patched:
            patch(fn)
            patched.add(module)
        return _Kept()

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


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
