"""What the benchmarks of recurrent layers share: the kernels of a recurrence read and write the states of rows.

The references compute one token after another, each by launches of the host, and are left out for more than 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from torch import Tensor

from batchspec.kernels.benchmarks.case import Case, copies, into, unwritten

MOST_TOKENS = 64
"""The most tokens of a pass whose result is compared with that of a reference."""
MOST_COPIED = 65536
"""A pass of more tokens has one copy of its states: several would take gigabytes."""


class State(Protocol):
    """A dataclass of tensors, which a recurrence keeps of rows."""

    @property
    def state(self) -> Tensor: ...


S = TypeVar("S", bound=State)


def states_of(make: Callable[[], S], tokens: int) -> list[S]:
    """Copies of the states for a pass of so many tokens."""
    return copies(make) if tokens <= MOST_COPIED else [make()]


def recurrence(
    kernel: Callable[[S, Tensor], None], reference: Callable[[S, Tensor], None], states: list[S], like: Tensor, read_bytes: int
) -> Case:
    """kernel, reference  write an output, given the states of rows, and change these
    like                  of the shape and dtype of the output [tokens, ...]
    read_bytes            of the inputs that are no state
    """
    out, expected = unwritten(like), unwritten(like)
    values: dict[str, Any] = {field.name: getattr(states[0], field.name).clone() for field in fields(states[0])}  # type: ignore[arg-type]
    before = type(states[0])(**values)
    return Case(
        calls=[into(out, lambda state=state: kernel(state, out)) for state in states],  # type: ignore[misc]
        reference=into(expected, lambda: reference(before, expected)) if len(out) <= MOST_TOKENS else None,
        num_bytes=2 * before.state.nbytes + read_bytes + out.nbytes,
    )
