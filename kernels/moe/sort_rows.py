"""Copies rows of x into the order of the list of pairs, so that the rows of one expert follow each other.

    out[places[t * k + s]] = x[t]        for each slot s of the k of token t

The grouped products read the rows of a unit as one block by TMA. `quantise_rows` does the same for FP8 rows. Products of few
pairs that gather rows by token (`blocks.rows_of_tokens`) save this launch.
Each program reads one row of x and writes its k copies. Bound by launch latency at decode sizes, by memory at prefill sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.units import Routing


@triton.jit
def sort_rows_kernel(x, places, out, stride_x, k, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    await_earlier(PDL)
    row = tl.load(places + token * SLOTS).to(tl.int64)
    values = tl.load(x + token * stride_x + lane, mask=lane < k)
    for slot in tl.static_range(SLOTS):
        own = row
        if slot + 1 < SLOTS:  # this load need not wait for the stores below
            row = tl.load(places + token * SLOTS + slot + 1).to(tl.int64)
        tl.store(out + own * k + lane, values, mask=lane < k)


def sort_rows(x: Tensor, routing: Routing, *, interpret: bool = False) -> Tensor:
    """Rows of x [T, K], of any float dtype, in the order of the list of pairs: [P, K]. Does not synchronise on a GPU.

    Rows may be slices of wider rows. Raises ValueError for other shapes or strides.
    """
    num_tokens, k = x.shape
    check("sort_rows: x", x, (num_tokens, k), *FLOATS, rows=True)
    check_places("sort_rows", routing, num_tokens)
    if not (x.is_cuda or interpret):
        return sort_rows_reference(x, routing)
    out = x.new_empty(len(routing.pairs), k)
    block = max(128, triton.next_power_of_2(k))
    if len(out):
        sort_rows_kernel[(num_tokens,)](
            x, routing.places, out, x.stride(0), k, SLOTS=routing.expert_ids.shape[1], BLOCK=block,
            num_warps=min(8, max(1, block * x.itemsize // (32 * 16))), **launch_args(x),
        )
    return out


def check_places(kernel: str, routing: Routing, num_tokens: int) -> None:
    """Raise ValueError unless the routing is one of `num_tokens` tokens."""
    top_k = routing.expert_ids.shape[1]
    check(f"{kernel}: expert_ids", routing.expert_ids, (num_tokens, top_k), torch.int32)
    check(f"{kernel}: places", routing.places, (num_tokens * top_k,), torch.int32)


def sort_rows_reference(x: Tensor, routing: Routing) -> Tensor:
    """`sort_rows` in plain torch."""
    return x[routing.pairs.long() // routing.expert_ids.shape[1]]
