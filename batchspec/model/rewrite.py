"""Replaces the weights of a loaded model in place: every tensor keeps its address, so that captured graphs read the new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from batchspec.errors import CheckpointError


def rewrite(old: Any, new: Any, where: str) -> None:
    """Copy each tensor of `new` into the corresponding tensor of `old`, an object built in the same way from other weights.

    where  what the objects are, for messages
    Raises CheckpointError, before anything is copied, if they differ in more than the values of their tensors: captured graphs
    have other values built in (for example the static activation scale of an FP8 checkpoint).
    """
    for tensor, other in list(_tensors(old, new, where)):
        tensor.copy_(other)


def _tensors(old: Any, new: Any, where: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tensor of `old`, with the corresponding one of `new`."""
    if type(old) is not type(new):
        raise _differs(where, type(old).__name__, type(new).__name__)
    if isinstance(old, Tensor):
        if (old.shape, old.dtype, old.is_mkldnn) != (new.shape, new.dtype, new.is_mkldnn):
            raise _differs(where, f"{old.dtype} {list(old.shape)}", f"{new.dtype} {list(new.shape)}")
        yield old, new
    elif isinstance(old, list | tuple | dict):
        if len(old) != len(new) or (isinstance(old, dict) and old.keys() != new.keys()):
            raise _differs(where, old, new)
        for key in old if isinstance(old, dict) else range(len(old)):
            yield from _tensors(old[key], new[key], f"{where}[{key}]")
    elif fields := _fields(old):
        for field in fields:
            yield from _tensors(getattr(old, field), getattr(new, field), f"{where}.{field}")
    elif old is not new and old != new:
        raise _differs(where, old, new)


def _fields(value: Any) -> list[str]:
    """Attribute names of an object of ours; none for a number, a text, a dtype or a function."""
    if not type(value).__module__.startswith(("batchspec.", "kernels.")) or isinstance(value, type):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [name for name in (*slots, *getattr(value, "__dict__", ())) if hasattr(value, name)]


def _differs(where: str, old: Any, new: Any) -> CheckpointError:
    return CheckpointError(
        f"{where.replace('._', '.')} is {old} now and would be {new}: weights are replaced in place only where nothing but "
        "numbers changes; close this engine and make one from the new weights"
    )
