"""One entry of the table of benchmarks: a kernel, its shapes, and how to make the calls that are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.common.graph_clock import MAX_COPIES, Call

Ways = Mapping[str, Sequence[Call]]

BYTES_S = 4.3e12
"""The most that an H200 reads in a second."""
BF16_FLOP_S, FP8_FLOP_S = 7.9e14, 1.5e15
"""The most that its tensor cores reach within the power limit of the card."""
NUM_COPIES = 4
CACHE_BYTES = 120 << 20
"""Copies of a weight are at least so large together: more than the L2 cache of an H200 holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one shape, on the default device of torch."""

    calls: Sequence[Call]
    """The kernel as the engine launches it. Each element is the same call on another copy of the inputs, so that the inputs are
    not in the L2 cache when the calls take turns. They return what `reference` returns, or a function that does."""
    reference: Callable[[], Tensor] | None
    """What the first call must return; it leaves the inputs as they are. None: it would take too long."""
    num_bytes: float
    """Bytes that one call reads and writes, or 0 if they say nothing."""
    flop: float = 0.0
    """Operations of the tensor cores of one call."""
    flop_s: float = BF16_FLOP_S
    compare: Ways = field(default_factory=dict)
    """Other ways to the same result, e.g. of a library, by name."""
    settings: Callable[[], Ways] = dict
    """The kernel with other tiles, by name; made and timed with `--sweep` alone."""

    @property
    def limit_us(self) -> float:
        """The least time by bytes and operations."""
        return 1e6 * max(self.num_bytes / BYTES_S, self.flop / self.flop_s)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An entry of the table."""

    name: str
    make: Callable[..., Case]
    columns: str
    """Names of the arguments of `make`, in the order of each shape."""
    shapes: Sequence[tuple[Any, ...]]
    tiny: tuple[Any, ...]
    """A shape that the interpreter computes within a second."""

    def labelled(self, shape: tuple[Any, ...]) -> str:
        return " ".join(f"{column}={value}" for column, value in zip(self.columns.split(), shape, strict=True))

    def matching(self, pattern: str) -> Iterator[tuple[Any, ...]]:
        """The shapes whose label has every word of the pattern."""
        for shape in self.shapes:
            if all(word in self.labelled(shape).split() for word in pattern.split()):
                yield shape


def copies(make: Callable[[], Any], nbytes: int = 0) -> list[Any]:
    """Four copies of inputs, or as many of a weight of `nbytes` as the L2 cache does not hold."""
    return [make() for _ in range(min(MAX_COPIES, max(2, CACHE_BYTES // nbytes + 1)) if nbytes else NUM_COPIES)]


def noise(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def ints(low: int, high: int, *shape: int) -> Tensor:
    """Random int32 numbers from `low` to below `high`."""
    return torch.randint(low, high, shape, dtype=torch.int32)


def unwritten(like: Tensor) -> Tensor:
    """A tensor of NaN with this shape, or of -7 if it has integers."""
    return torch.full_like(like, torch.nan if like.is_floating_point() else -7)


def into(out: Tensor, call: Call) -> Callable[[], Tensor]:
    """A function that makes the call, which writes `out`, and returns `out`."""

    def run() -> Tensor:
        call()
        return out

    return run


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN if some values were not written."""
    difference = (actual.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp(min=torch.finfo(torch.float32).tiny))
