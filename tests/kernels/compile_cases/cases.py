"""What a kernel is compiled with: its cases, and the names of the types of arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

I32, I64, PI32, PI64, PF32 = "i32", "i64", "*i32", "*i64", "*fp32"


class Case(NamedTuple):
    """A kernel with one set of constants and types."""

    package: str
    module: str
    kernel: str
    warps: int
    arguments: dict[str, object]
    """In the kernel's order: the type of each, or the value of a constant."""
    stages: int | None = None
    """Pipeline stages of a launch whose shared memory is checked: pointers and strides are then multiples of 16, as tensors have
    them, because only such loads are pipelined. None: not checked."""


class Cases(dict[str, Case]):
    """The cases of a package of `kernels/`, by name."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package
        self.seldom: set[str] = set()
        """Those whose branches other cases reach: they are compiled with -m slow alone."""

    def add(self, name: str, module: str, warps: int, *, stages: Any = None, **arguments: object) -> None:
        """A case of the kernel that `name` begins with, in kernels/PACKAGE/`module`.py."""
        assert name not in self, name
        self[name] = Case(self.package, module, name.split(" ")[0], warps, arguments, stages)
