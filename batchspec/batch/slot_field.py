"""Declares a field of `DeviceBatch`: its type, its width, and the values with which a slot's row begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.upload import NUMPY_DTYPES
from batchspec.records import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotField:
    """How one field of `DeviceBatch` is allocated and what happens to a slot's row of it.

    Compaction moves the row to the new slot. Preemption leaves it as it is: the slot is dead, and `begin` fills the request's
    next slot from the request and its output tokens.
    """

    dtype: torch.dtype = torch.int32
    width: str | int = ""
    """Number of columns, or its name, see `DeviceBatch.allocate`; empty: one value a slot."""
    wanted: Callable[[SamplingMode], bool] | None = None
    """Which modes need the field: it has no columns until there is one. None: every mode."""
    initial: int = 0
    """Value of an empty slot, and of columns that `begin` leaves out."""
    begin: Callable[[Request, Sequence[int]], float | Sequence[float] | NDArray[np.int32]] | None = None
    """Value or row of a request that enters, given its output tokens so far; None: all `initial`."""
    long: bool = False
    """For long rows: only as many columns are written as the longest request of the group needs; the others keep old values."""

    per_group: bool = False
    """The field is a tuple of tensors, one for each K/V group."""

    def columns(self, widths: Mapping[str, int]) -> int | None:
        """The number of columns, given what the names of widths stand for; None: one value a slot."""
        return (widths[self.width] if self.width else None) if isinstance(self.width, str) else self.width

    def array(self, values: Sequence[Any], width: int) -> NDArray[Any]:
        """[requests] values, or [requests, columns] rows of `width` columns, fewer if `long`, padded with `initial`."""
        dtype = NUMPY_DTYPES[self.dtype]
        if not self.width:
            return np.array(values, dtype)
        width = max(map(len, values)) if self.long else width
        rows = np.full((len(values), width), self.initial, dtype)
        for row, value in zip(rows, values, strict=True):
            row[: len(value)] = value
        return rows


def known_tokens(request: Request, output: Sequence[int]) -> NDArray[np.int32]:
    """int32 [tokens]: prompt and output."""
    return np.concatenate((request.prompt_ids, np.array(output, np.int32))) if len(output) else request.prompt_ids


def declared(**options: Any) -> dict[str, SlotField]:
    """Metadata of a dataclass field: a `SlotField` with these options."""
    return {"slot_field": SlotField(**options)}
