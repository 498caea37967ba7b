"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs, and waits until it needs its results.

    without  ...... n runs ......|end, memory flushed|launch of n+1|.. addresses, weights ..|.. n+1 runs ..
    with it  ...... n runs ......|end, memory flushed|.. n+1 runs ..                 about 1 us a launch less
             launch of n+1|.. addresses, weights ..|wait|

Every kernel that uses PDL follows two rules, by calling `await_earlier`:

    It waits on every path, in every program, before it reads or writes anything that another kernel writes. So when a launch
    has ended, every launch before it has ended too, with PDL or without, and results are the same as without PDL.
    Only after its wait may the next launch start. So at most two launches overlap, and code before the wait may read constants
        and anything that was written before the directly preceding launch. A kernel that waits for another GPU lets the next
        start only after that wait: early programs would occupy multiprocessors that an exchange of another stream may need, and
        the other GPU may be waiting for that exchange.

A CUDA graph captured from such launches keeps these dependencies. Library kernels neither wait nor start others early: a launch
after one gains little. Measured on one H200, whole rounds: 1.2 to 1.9 % less time for a model of 135M, nothing for one of 8B.
So PDL is on if GPU and Triton support it; `set_enabled` turns it off for later launches, to compare.
Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.card import card_of

_enabled = True


def set_enabled(on: bool) -> bool:
    """Turn PDL on or off for kernels launched (or captured) from now on, if the GPU supports it; returns the setting before."""
    global _enabled
    before, _enabled = _enabled, on
    return before


def launch_args(tensor: Tensor) -> dict[str, bool]:
    """The constant PDL of a kernel on this tensor's device, and the matching launch option."""
    if _enabled and tensor.is_cuda and supported(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def supported(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU or newer."""
    return device.type == "cuda" and card_of(device).overlaps_launches


@triton.jit
def await_earlier(PDL: tl.constexpr):
    """Wait until everything that earlier launches wrote is visible, then let the next launch start."""
    await_earlier_alone(PDL)
    start_next(PDL)


@triton.jit
def await_earlier_alone(PDL: tl.constexpr):
    """The wait of a kernel that calls `start_next` later."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next launch start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
