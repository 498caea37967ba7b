"""Add the Gumbel noise of `sample` to draft logits, in place:

    logits[t, v] / temperature[r] + Gumbel(keys[r], positions[t], token v),   r = row_ids[t],   -inf below cutoff[t]

Token v is map_ids[v] if a map is given. Rows of temperature 0 stay unchanged.
The argmax of the result is the token that the target would draw from these logits: drafter and target share their noise.
Bound by integer arithmetic, about 40 instructions an id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check, check_draw
from batchspec.kernels.sampling.counter_rng import mix32, position_words, position_words_reference
from batchspec.kernels.sampling.sample import gumbel, gumbel_of

BLOCK = 1024


@triton.jit(do_not_specialize=["vocab"])
def add_gumbel_noise_kernel(
    logits, row_ids, positions, keys, temperature, cutoff, map_ids, stride_row, vocab, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + t).to(tl.int64)
    temp = tl.load(temperature + row)
    if temp > 0:
        word0, word1 = position_words(tl.load(keys + row), tl.load(positions + t))
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_vocab = lane < vocab
        at = logits + t * stride_row + lane
        ids = lane
        if map_ids is not None:
            ids = tl.load(map_ids + lane, mask=in_vocab, other=0).to(tl.int32)
        x = tl.load(at, mask=in_vocab, other=0).to(ACC)
        x = tl.where(x >= tl.load(cutoff + t), x, float("-inf")) / temp.to(ACC)  # false for NaN
        x += gumbel(mix32(mix32(ids.to(tl.uint32, bitcast=True) + word0) ^ word1)).to(ACC)
        tl.store(at, x, mask=in_vocab)


def add_gumbel_noise(
    logits: Tensor,
    row_ids: Tensor,
    positions: Tensor,
    keys: Tensor,
    temperature: Tensor,
    cutoff: Tensor,
    map_ids: Tensor | None = None,
    *,
    interpret: bool = False,
) -> None:
    """Scale `logits`, apply the cutoff and add the noise, in place.

    logits       fp32, bf16, fp16 or fp64 [T, V]  rows may be slices of wider ones
    row_ids      int32 [T]  row of each flat token
    positions    int64 [T]  position, in prompt + output, of the token being drafted
    keys         int64 [R]  noise key of each row
    temperature  fp32 [R]   0: the row's logits stay unchanged
    cutoff       fp32 [T] (fp64 for fp64 logits)  lower logits become -inf, as does NaN
    map_ids      int32 or int64 [V] draft id -> target id of a draft vocabulary; None: the column is the id

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, vocab = logits.shape
    wide = logits.dtype == torch.float64
    check_draw("add_gumbel_noise", logits, row_ids, positions, keys, temperature, cutoff)
    if map_ids is not None:
        check("add_gumbel_noise: map_ids", map_ids, (vocab,), torch.int32, torch.int64)
    if not (logits.is_cuda or interpret):
        add_gumbel_noise_reference(logits, row_ids, positions, keys, temperature, cutoff, map_ids)
    elif num_tokens:
        add_gumbel_noise_kernel[(num_tokens, triton.cdiv(vocab, BLOCK))](
            logits, row_ids, positions, keys, temperature, cutoff, map_ids, logits.stride(0), vocab,
            ACC=tl.float64 if wide else tl.float32, BLOCK=BLOCK, num_warps=4,
        )


def add_gumbel_noise_reference(
    logits: Tensor, row_ids: Tensor, positions: Tensor, keys: Tensor, temperature: Tensor, cutoff: Tensor,
    map_ids: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    ids = torch.arange(logits.shape[1], device=logits.device) if map_ids is None else map_ids
    word0, word1 = position_words_reference(keys[row_ids], positions)
    temp = temperature[row_ids, None].to(cutoff.dtype)
    x = logits.to(cutoff.dtype)
    noise = gumbel_of(word0[:, None], word1[:, None], ids.to(torch.int32))
    noisy = torch.where(x >= cutoff[:, None], x, float("-inf")) / torch.where(temp > 0, temp, 1) + noise
    logits.copy_(torch.where(temp > 0, noisy, x))
