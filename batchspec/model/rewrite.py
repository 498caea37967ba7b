"""Replaces the weights of a loaded model in place: every tensor keeps its address, so that captured graphs read the new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.model.layers.base import GroupedSpec, ProductSpec
from batchspec.model.layers.forward import BlockSource, GroupedProduct, Product

T = TypeVar("T")


class Named:
    """A source of weights that notes by which names the files have what it gives. It keeps that, so no `id` is given twice."""

    def __init__(self, source: BlockSource, prefix: str) -> None:
        self._source, self._prefix, self._given = source, prefix, dict[int, tuple[Any, str]]()

    def product(self, spec: ProductSpec) -> Product:
        return self._note(self._source.product(spec), *(part.name for part in spec.parts))

    def matrix(self, spec: ProductSpec) -> Tensor:
        return self._note(self._source.matrix(spec), *(part.name for part in spec.parts))

    def vector(self, name: str) -> Tensor:
        return self._note(self._source.vector(name), name)

    def grouped(self, spec: GroupedSpec) -> GroupedProduct:
        return self._note(self._source.grouped(spec), spec.name)

    def _note(self, given: T, first: str, *more: str) -> T:
        self._given[id(given)] = given, ", ".join((self._prefix + first, *(name.rpartition(".")[2] for name in more)))
        return given

    def name(self, given: object) -> str | None:
        """The name of what was given, of several projections their names; None: it was not given."""
        return self._given[id(given)][1] if id(given) in self._given else None


def rewrite(old: Any, new: Any, where: str, named: Named | None = None) -> None:
    """Copy each tensor of `new` into the corresponding tensor of `old`, an object built in the same way from other weights.

    where  what the objects are, for messages
    named  the source that `new` was built from, for messages about its parts
    Raises CheckpointError, before anything is copied, if they differ in more than the values of their tensors: captured graphs
    have other values built in (for example the static activation scale of an FP8 checkpoint).
    """
    for tensor, other in list(_tensors(old, new, where, named)):
        tensor.copy_(other)


def _tensors(old: Any, new: Any, where: str, named: Named | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tensor of `old`, with the corresponding one of `new`."""
    where = (None if named is None else named.name(new)) or where
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
            yield from _tensors(old[key], new[key], where, named)
    elif fields := _fields(old):
        for field in fields:
            yield from _tensors(getattr(old, field), getattr(new, field), where, named)
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
        f"{where} has {old} now and would have {new}: weights are replaced in place only where nothing but the values of tensors "
        "changes; close this engine and make one from the new weights"
    )
