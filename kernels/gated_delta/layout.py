"""What the kernels of gated delta rule layers share: columns of products, what a layer keeps of a row, the rows of a pass.

T flat tokens of R rows, HK key heads, HV value heads, G = HV / HK value heads of a key head, DK and DV head sizes, W taps of the
convolution, C = 2 HK DK + HV DV its channels in the order q | k | v, P positions of the rings.

A layer keeps of each slot's row the state after the row's first `folded` tokens, and rings with the inputs of later positions:
position p is at p % P. A round computes positions n .. n + K of a row, of which the next round may reject some. It replays
positions folded .. n-1 from the rings, stores the state there, goes on with its own positions and writes their inputs into the
rings. Whatever is accepted, the next round finds its inputs: nothing is undone, and the state is read and written once.
Formula: models/qwen3_5 and models/qwen3_next of transformers 5.24; Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check


@dataclass(frozen=True, slots=True)
class Columns:
    """Key head group g of a part begins at column offset + g * stride of a product's output; its heads follow each other."""

    offset: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaColumns:
    """Where x [T, N] holds q, k, v and z, and ba [T, 2 HV] holds b and a."""

    key_heads: int
    q: Columns
    k: Columns
    v: Columns
    z: Columns
    b: Columns
    a: Columns

    def part(self, part: Columns, width: int, device: torch.device) -> Tensor:
        """int64 [HK * width] columns of a part, of which a group has `width`."""
        groups = torch.arange(self.key_heads, device=device) * part.stride + part.offset
        return (groups[:, None] + torch.arange(width, device=device)).flatten()


def split_columns(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> DeltaColumns:
    """Of q | k | v | z and b | a, each part with all of its heads (Qwen3.5)."""
    group, keys = value_heads // key_heads, key_heads * key_dim
    return DeltaColumns(
        key_heads=key_heads, q=Columns(0, key_dim), k=Columns(keys, key_dim), v=Columns(2 * keys, group * value_dim),
        z=Columns(2 * keys + value_heads * value_dim, group * value_dim), b=Columns(0, group), a=Columns(value_heads, group),
    )


def interleaved_columns(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> DeltaColumns:
    """Of one q | k | v | z and one b | a after another, for each key head with its value heads (Qwen3-Next)."""
    group = value_heads // key_heads
    values = group * value_dim
    stride = 2 * (key_dim + values)
    return DeltaColumns(
        key_heads=key_heads, q=Columns(0, stride), k=Columns(key_dim, stride), v=Columns(2 * key_dim, stride),
        z=Columns(2 * key_dim + values, stride), b=Columns(0, 2 * group), a=Columns(group, 2 * group),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """Weights of the convolution and of the gates."""

    conv: Tensor
    """[C, W] of the model's dtype; the last tap is that of the token itself"""
    a_log: Tensor
    """[HV] fp32 or of the model's dtype"""
    dt_bias: Tensor
    """[HV] fp32 or of the model's dtype"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaState:
    """What a layer keeps of the rows, one entry a slot. Each tensor is contiguous but for its first dimension."""

    state: Tensor
    """[slots, HV, DV, DK] fp32, bf16 or, with fp64 inputs, fp64: after the first `folded` tokens. Undefined if these are none"""
    conv_inputs: Tensor
    """[slots, P, C] of the model's dtype: inputs of the convolution"""
    keys: Tensor
    """[slots, P, HK, DK] of the model's dtype: after the convolution and SiLU, of length 1"""
    values: Tensor
    """[slots, P, HV, DV] of the model's dtype: after the convolution and SiLU"""
    gates: Tensor
    """[slots, P, HV, 2] fp32 (fp64 for fp64): g, the logarithm of the decay, and beta"""
    folded: Tensor
    """int32 [slots], the same for all layers: the kernels only read it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBatch:
    """The flat tokens of a pass. Row r has tokens cu_seqlens[r] .. cu_seqlens[r+1]-1, at consecutive positions; from
    cu_seqlens[R] on there is padding, which counts as row 0."""

    cu_seqlens: Tensor
    """int32 [R+1]"""
    positions: Tensor
    """int64 [T]"""
    row_ids: Tensor
    """int32 [T]"""
    slots: Tensor
    """int32 [R] the slot of each row; no slot twice among rows that are not dead"""
    live: Tensor | None = None
    """int32 [R]; 0 is a dead row, whose state is neither read nor written. None: rows without tokens alone are dead"""
    max_tokens: int
    """No row has more tokens than this (host bound)."""

    def rows(self) -> list[tuple[int, slice, int]]:
        """(slot, flat tokens, position of the first) of each row that is not dead. Synchronises on a GPU."""
        live = [1] * len(self.slots) if self.live is None else self.live.tolist()
        bounds = pairwise(self.cu_seqlens.tolist())
        return [
            (slot, slice(begin, end), int(self.positions[begin]))
            for slot, (begin, end), lives in zip(self.slots.tolist(), bounds, live, strict=True)
            if lives and end > begin
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """The inputs of the recurrence for T flat tokens, as `convolve` gives them."""

    q: Tensor
    """[T, HK, DK] of the model's dtype, of length 1 / sqrt(DK)"""
    k: Tensor
    """[T, HK, DK], of length 1"""
    v: Tensor
    """[T, HV, DV]"""
    gates: Tensor
    """[T, HV, 2] fp32 (fp64 for fp64): g and beta"""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and gates: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def ring_of(positions: Tensor, ring: Tensor) -> Tensor:
    """int64: where a ring [slots, P, ...] holds these positions."""
    return positions % ring.shape[1]


@triton.jit
def row_of(row, cu_seqlens, positions, slots, live):
    """(first flat token, number of tokens, position of the first, slot) of a row; a dead one has no token."""
    begin = tl.load(cu_seqlens + row)
    count = tl.load(cu_seqlens + row + 1) - begin
    if live is not None:
        count = tl.where(tl.load(live + row) != 0, count, 0)
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.load(positions + begin, mask=count > 0, other=0).to(tl.int32)
    return begin, count, first, slot


def check_batch(kernel: str, batch: DeltaBatch, num_tokens: int) -> None:
    """`check` the tensors of a pass of T tokens. Raises ValueError."""
    num_rows = batch.slots.numel()
    check(f"{kernel}: cu_seqlens", batch.cu_seqlens, (num_rows + 1,), torch.int32)
    check(f"{kernel}: positions", batch.positions, (num_tokens,), torch.int64)
    check(f"{kernel}: row_ids", batch.row_ids, (num_tokens,), torch.int32)
    check(f"{kernel}: slots", batch.slots, (num_rows,), torch.int32)
    if batch.live is not None:
        check(f"{kernel}: live", batch.live, (num_rows,), torch.int32)


def check_state(kernel: str, state: DeltaState, dtype: torch.dtype) -> None:
    """`check` what a layer with this model dtype keeps; all of it is compared with the shapes of `state` and `keys`. Raises
    ValueError."""
    (slots, value_heads, value_dim, key_dim), (_, ring, key_heads, _) = state.state.shape, state.keys.shape
    if value_heads % key_heads:
        raise ValueError(f"{kernel}: {value_heads} value heads are no multiple of {key_heads} key heads")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    states = (torch.float64,) if dtype == torch.float64 else (torch.float32, torch.bfloat16)
    for name, tensor, shape, dtypes in (
        ("state", state.state, (value_heads, value_dim, key_dim), states),
        ("conv_inputs", state.conv_inputs, (ring, channels), (dtype,)),
        ("keys", state.keys, (ring, key_heads, key_dim), (dtype,)),
        ("values", state.values, (ring, value_heads, value_dim), (dtype,)),
        ("gates", state.gates, (ring, value_heads, 2), (wide(dtype),)),
    ):
        check(f"{kernel}: {name}[0]", tensor[0], shape, *dtypes)
    check(f"{kernel}: folded", state.folded, (slots,), torch.int32)


def check_inputs(kernel: str, inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, out: Tensor) -> None:
    """`check` everything that the recurrence reads, and its output [T, HV, DV] of the model's dtype. Raises ValueError."""
    num_tokens, (_, value_heads, value_dim, key_dim) = len(inputs.q), state.state.shape
    dtype, keys = inputs.q.dtype, (num_tokens, state.keys.shape[2], key_dim)
    check_state(kernel, state, dtype)
    check_batch(kernel, batch, num_tokens)
    check(f"{kernel}: q", inputs.q, keys, *FLOATS)
    check(f"{kernel}: k", inputs.k, keys, dtype)
    check(f"{kernel}: v", inputs.v, (num_tokens, value_heads, value_dim), dtype)
    check(f"{kernel}: gates", inputs.gates, (num_tokens, value_heads, 2), wide(dtype))
    check(f"{kernel}: out", out, (num_tokens, value_heads, value_dim), dtype)
