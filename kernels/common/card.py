"""The properties of a GPU on which the launch settings of kernels depend. No choice depends on a card's name.

A GPU of this process is described by torch. `assumed` puts another card in its place, to plan a job or to compile kernels for a
card that this machine does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

BARRIER_BYTES = 1024
"""Upper bound of shared memory for barriers and sums over warps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU."""

    name: str
    capability: tuple[int, int]
    """Compute capability, as in (9, 0)."""
    num_sms: int
    """Streaming multiprocessors (SMs)."""
    sm_shared_bytes: int
    """Shared memory of an SM."""
    l2_bytes: int
    memory_bytes: int
    bytes_s: float = 0.0
    """Memory bandwidth; 0: unknown, as are the two below."""
    flop_s: float = 0.0
    """Dense bf16 products with fp32 sums."""
    fp8_flop_s: float = 0.0
    """Dense e4m3 products with fp32 sums; 0 also where tensor cores have none."""

    sm_registers: ClassVar[int] = 1 << 16
    """Registers of an SM, of 32 bits: as many since compute capability 5.0."""

    @property
    def block_shared_bytes(self) -> int:
        """Maximum shared memory of a block of threads (CUDA's opt-in limit). CUDA itself needs 1 KB for each block."""
        return self.sm_shared_bytes - 1024

    @property
    def computes_bf16(self) -> bool:
        """Whether tensor cores multiply bf16 (Ampere); Triton supports no older card either."""
        return self.capability >= (8, 0)

    @property
    def has_e4m3(self) -> bool:
        """Whether there are instructions for e4m3: conversions and products (Ada)."""
        return self.capability >= (8, 9)

    @property
    def has_tma(self) -> bool:
        """Whether blocks of tensors can be loaded by descriptor (Hopper)."""
        return self.capability >= (9, 0)

    @property
    def overlaps_launches(self) -> bool:
        """Whether a launch can begin before the one before it has ended (Hopper, see `pdl.py`)."""
        return self.capability >= (9, 0)

    def stages_that_fit(self, stages: int, stage_bytes: int, other_bytes: int = 0) -> int:
        """The largest number of pipeline stages, up to `stages` and at least 1, whose blocks fit into a block's shared memory.

        stage_bytes  of the operands that a step of a loop loads
        other_bytes  that a program needs besides
        Hopper and data-center Blackwell multiply from shared memory: all stages are there. On other cards the newest operands go
        to registers, and Triton keeps one stage less.
        """
        in_registers = 0 if self.capability[0] in (9, 10) else 1
        room = self.block_shared_bytes - other_bytes - BARRIER_BYTES
        return max(1, min(stages, room // stage_bytes + in_registers))

    @property
    def has_wgmma(self) -> bool:
        """Whether a warp group's tensor cores multiply with an operand in its registers (Hopper alone)."""
        return self.capability[0] == 9

    @property
    def has_same_bits_in_all_tiles(self) -> bool:
        """Whether tensor cores give a row the same bits in tiles of any size: measured only on the Hopper generation."""
        return self.capability[0] == 9


INTERPRETER = Card(
    name="the interpreter", capability=(9, 0), num_sms=1, sm_shared_bytes=1 << 30, l2_bytes=0, memory_bytes=0,
)
"""What launch settings are chosen for on a CPU: no limits, and the features of Hopper, so that tests interpret all code."""

_assumed: Card | None = None


def card_of(device: torch.device) -> Card:
    """The assumed card, else that of the device as torch describes it; for a CPU INTERPRETER. Does not synchronise."""
    if _assumed is not None:
        return _assumed
    return _read(device) if device.type == "cuda" else INTERPRETER


def assumed_card() -> Card | None:
    """The card that `assumed` has put in the place of this process's devices; None: none."""
    return _assumed


@contextmanager
def assumed(card: Card) -> Iterator[None]:
    """Within this block all devices are this card. Nothing may be launched. One block at a time, of all threads."""
    global _assumed
    before, _assumed = _assumed, card
    try:
        yield
    finally:
        _assumed = before


@cache
def _read(device: torch.device) -> Card:
    own = torch.cuda.get_device_properties(device)
    return Card(
        name=own.name, capability=(own.major, own.minor), num_sms=own.multi_processor_count,
        sm_shared_bytes=own.shared_memory_per_multiprocessor, l2_bytes=own.L2_cache_size, memory_bytes=own.total_memory,
    )
