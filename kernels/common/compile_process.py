"""A process that compiles Triton kernels into the cache on disk, for `compile_ahead.py`: `python -m ...compile_process`.

It reads pickled `Order`s from its standard input and answers each with one byte: 1 it compiled the kernel, 0 it could not. It
ends with its input. It needs no GPU, and no torch: importing torch would take seconds of each process, and kernels do not use it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple


class Order(NamedTuple):
    """A kernel to compile, as Triton describes it."""

    module: str
    name: str
    """Of the function in its module."""
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: Any
    """Triton's GPUTarget."""
    options: dict[str, Any]


class Compiler:
    """The parent's end of one process."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def compile(self, order: bytes) -> bool:
        """Whether the process compiled a pickled order. False if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(len(order).to_bytes(4, "big") + order)
            self._process.stdin.flush()
            return self._process.stdout.read(1) == b"\1"
        except OSError:
            return False

    def close(self) -> None:
        """End the process, and what it compiles at present."""
        self._process.kill()
        self._process.communicate()


class _AnyType(type):
    """A type that has every attribute, and gives itself when it is called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyType(name, (), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls


class _AnyModule(ModuleType):
    """A package that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyType(name, (), {})
        setattr(self, name, made)
        return made


class _WithoutTorch:
    """Finds torch and its modules as modules that have every name: kernels' modules name its types and functions only."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] == "torch" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def compile_order(order: Order) -> None:
    """Compile a kernel as a launch on the order's target would."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver

    driver.set_active(SimpleNamespace(get_current_target=lambda: order.target))  # kernels may ask for it
    source = ASTSource(getattr(import_module(order.module), order.name), order.signature, order.constants, order.attributes)
    triton.compile(source, target=order.target, options=order.options)


def main() -> None:
    sys.meta_path.insert(0, _WithoutTorch())
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while len(size := sys.stdin.buffer.read(4)) == 4:
        try:
            compile_order(pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "big"))))
            answer = b"\1"
        except Exception:  # the parent compiles it itself, and raises what is wrong
            answer = b"\0"
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    main()
