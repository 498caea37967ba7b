"""Runs code without its work on one device: Triton kernels are compiled but not launched, and no existing tensor is written.

Memory is allocated, filled with constants or from the host, and views are taken. Other operations of torch return tensors of the
right shape with undefined values: most are not executed; pointwise ones and those in _HARMLESS are. Undefined values have no
effect outside the run:

    they are not written to tensors that existed before the run, and not used as an index
    a host read (`item`, a copy to the CPU), an operator of another library, and any error inside an operation end the run with
        DryRunEnded, which `except Exception` does not catch
    no tensor with undefined values may outlive the run, for instance in a cache: `dry_run` asserts it

Code that passes addresses to another library must ask `is_dry` first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import reduce
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.jit import JITFunction

_CONSTANTS = {
    getattr(torch.ops.aten, name)
    for name in (
        "arange", "empty", "empty_like", "empty_strided", "full", "full_like", "lift_fresh", "new_empty", "new_empty_strided",
        "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like",
    )
}
"""Operations whose results do not depend on values of tensors."""
_HARMLESS = {
    getattr(torch.ops.aten, name)
    for name in (
        "_to_copy", "cat", "stack", "repeat", "clone", "cumsum", "sum", "mean", "amax", "argmax", "topk", "sort", "_softmax",
    )
}
"""Operations that are executed, on undefined values too, as pointwise ones are: they use no value as an index."""

_ENDING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
"""Tags of operations that end a dry run."""


class DryRunEnded(BaseException):
    """The run reached an operation that it can neither execute nor skip; the message names it."""


_is_dry: ContextVar[bool] = ContextVar("_is_dry", default=False)
_lock = Lock()
"""One dry run at a time, because each replaces JITFunction.run and puts it back."""


def is_dry() -> bool:
    """Whether this thread is in a dry run."""
    return _is_dry.get()


def dry_run(run: Callable[[], object], device: torch.device) -> str | None:
    """Call `run` without its work on `device` (see above). Launches of other threads are not affected.

    Returns None, or why the run ended early. Raises AssertionError if a tensor with undefined values is still alive after it.
    """
    mode, ended = _DryRun(device), None
    with _lock:
        launch, outside = JITFunction.run, _is_dry.set(True)

        def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            return launch(self, *args, warmup=warmup or _is_dry.get(), **options)

        JITFunction.run = compile_only
        try:
            with mode:
                run()
        except (DryRunEnded, Exception) as error:
            ended = str(error)
        finally:
            JITFunction.run = launch
            _is_dry.reset(outside)
    mode.check()
    return ended


class _DryRun(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._undefined: list[StorageWeakRef] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """For a mode that says True here, torch imports its compiler, which takes several seconds."""
        return False

    def check(self) -> None:
        """Raises AssertionError if the memory of a tensor with undefined values is still in use."""
        if any(not memory.expired() for memory in self._undefined):
            gc.collect()
        assert all(memory.expired() for memory in self._undefined), "a tensor of a dry run was kept"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            return self._dispatch(func, args, kwargs or {})
        except Exception as error:
            raise DryRunEnded(f"{func}: {error}") from error

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace != "aten":
            raise NotImplementedError("an operator of another library")
        if func.overloadpacket in _CONSTANTS and not func._schema.is_mutable:
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # it consists of other operations
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        to = kwargs.get("device")
        touches = any(isinstance(leaf, Tensor) and leaf.device == self._device for leaf in tree_leaves((args, kwargs)))
        if func.is_view or not (touches or (to is not None and torch.device(to).type == self._device.type)):
            return func(*args, **kwargs)
        if not _ENDING.isdisjoint(func.tags) and func.overloadpacket not in _SHAPES:
            raise ValueError("its result depends on values, or it takes random numbers")
        written = self._written(func._schema, args, kwargs)
        if to is not None:
            self._check_device(torch.device(to))
        if all(value.alias_info is not None for value in func._schema.returns):
            found = [written[name] for value in func._schema.returns for name in value.alias_info.before_set]
            return found[0] if len(found) == 1 else found or None
        if torch.Tag.pointwise in func.tags or func.overloadpacket in _HARMLESS:
            found = func(*args, **kwargs)
            return tree_map_only(Tensor, self._undefine, found) if touches else found
        args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs if to is None else {**kwargs, "device": "meta"}))
        return tree_map_only(Tensor, self._made, _SHAPES.get(func.overloadpacket, func)(*args, **kwargs))

    def _written(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the operation would write, by their alias names in its schema."""
        written: dict[str, Any] = {}
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written |= dict.fromkeys(argument.alias_info.before_set, value)
                for tensor in tree_leaves(value):
                    self._check_device(tensor.device)
        return written

    def _check_device(self, device: torch.device) -> None:
        """Raises ValueError for another device: a result there would depend on undefined values."""
        if device.type != self._device.type:
            raise ValueError(f"{device} would read {self._device}")

    def _made(self, shape: Tensor) -> Tensor:
        return self._undefine(torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=self._device))

    def _undefine(self, tensor: Tensor) -> Tensor:
        self._undefined.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor


def _shape(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return _shape(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)


def _added_product(_: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b)


def _scaled_product(a: Tensor, b: Tensor, *others: Any, **options: Any) -> Tensor:
    return _product(a, b, next(value for value in (*others, *options.values()) if isinstance(value, torch.dtype)))


def _selected(x: Tensor, dim: int, ids: Tensor) -> Tensor:
    return _shape(*x.shape[:dim], ids.numel(), *x.shape[dim + 1 :], dtype=x.dtype)


def _indexed(x: Tensor, ids: Sequence[Tensor | None]) -> Tensor:
    """x indexed by ids of its first dimensions, or of those after some that stay."""
    given = [one for one in ids if one is not None and one.dtype not in (torch.bool, torch.uint8)]
    kept = len(ids) - len(given)
    if any(one is not None for one in ids[:kept]):
        raise ValueError("only ids of dimensions side by side, and the last ones given")
    size = reduce(torch._C._infer_size, (one.shape for one in given))
    return _shape(*x.shape[:kept], *size, *x.shape[len(ids) :], dtype=x.dtype)


def _padded(x: Tensor, pad: Sequence[int], *_: Any) -> Tensor:
    pairs = [0] * (2 * x.dim() - len(pad)) + [n for i in range(len(pad), 0, -2) for n in pad[i - 2 : i]]
    return _shape(*(n + before + after for n, before, after in zip(x.shape, pairs[::2], pairs[1::2], strict=True)), dtype=x.dtype)


def _normed(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Layer norm; its means and deviations are not used."""
    unused = _shape(0, dtype=torch.float32)
    return _shape(*x.shape, dtype=x.dtype), unused, unused


def _attended(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Flash attention of concatenated rows, q [T, NH, D]."""
    unused = _shape(0, dtype=torch.int64)
    return _shape(*q.shape, dtype=q.dtype), _shape(q.shape[1], q.shape[0], dtype=torch.float32), unused, unused, unused


_SHAPES = {
    torch.ops.aten.mm: _product,
    torch.ops.aten.addmm: _added_product,
    torch.ops.aten._scaled_mm: _scaled_product,
    torch.ops.aten._scaled_mm_v2: _scaled_product,
    torch.ops.aten.index_select: _selected,
    torch.ops.aten.index: _indexed,
    torch.ops.aten.constant_pad_nd: _padded,
    torch.ops.aten.native_layer_norm: _normed,
    torch.ops.aten._flash_attention_forward: _attended,
}
"""Shapes of the results of common operations. torch's own shape functions import its compiler, which takes several seconds."""


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
