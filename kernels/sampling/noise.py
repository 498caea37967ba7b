"""The noise of draws added to logits, in place:

    logits[t, v] / temperature[r] + Gumbel(keys[r], positions[t], token v),   r = row_ids[t],   -inf below cutoff[t]

with the noise of sample.py; token v is map_ids[v] where a map is given. Rows of temperature 0 stay as they are.
A draft that maximises this is the token that the target would draw by such logits: drafts and draws share their noise.
Bound by integer arithmetic, about 40 instructions an id.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import check, check_draw
from batchspec.kernels.sampling.mix import mix32, position_words, position_words_reference
from batchspec.kernels.sampling.sample import gumbel, gumbel_of

BLOCK = 1024


@triton.jit(do_not_specialize=["vocab"])
def noise_kernel(
    logits, row_ids, positions, keys, temperature, cutoff, map_ids, stride_row, vocab, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + place).to(tl.int64)
    heat = tl.load(temperature + row)
    if heat > 0:
        word0, word1 = position_words(tl.load(keys + row), tl.load(positions + place))
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = lane < vocab
        at = logits + place * stride_row + lane
        ids = lane
        if map_ids is not None:
            ids = tl.load(map_ids + lane, mask=there, other=0).to(tl.int32)
        x = tl.load(at, mask=there, other=0).to(ACC)
        x = tl.where(x >= tl.load(cutoff + place), x, float("-inf")) / heat.to(ACC)  # NaN is not above it
        x += gumbel(mix32(mix32(ids.to(tl.uint32, bitcast=True) + word0) ^ word1)).to(ACC)
        tl.store(at, x, mask=there)


def add_noise(
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
    """Change `logits` in place.

    logits       fp32, bf16, fp16 or fp64 [T, V]  rows may be slices of wider ones
    row_ids      int32 [T]  row of each place
    positions    int64 [T]  position, in prompt + output, of the token that is drafted
    keys         int64 [R]  noise key of each row
    temperature  fp32 [R]   0: the row's logits stay as they are
    cutoff       fp32 [T] (fp64 for fp64 logits)  what lies below becomes -inf, as does NaN
    map_ids      int32 or int64 [V] the token of each column (a draft vocabulary), None: its number

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_places, vocab = logits.shape
    wide = logits.dtype == torch.float64
    check_draw("add_noise", logits, row_ids, positions, keys, temperature, cutoff)
    if map_ids is not None:
        check("add_noise: map_ids", map_ids, (vocab,), torch.int32, torch.int64)
    if not (logits.is_cuda or interpret):
        add_noise_reference(logits, row_ids, positions, keys, temperature, cutoff, map_ids)
    elif num_places:
        noise_kernel[(num_places, triton.cdiv(vocab, BLOCK))](
            logits, row_ids, positions, keys, temperature, cutoff, map_ids, logits.stride(0), vocab,
            ACC=tl.float64 if wide else tl.float32, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def add_noise_reference(
    logits: Tensor, row_ids: Tensor, positions: Tensor, keys: Tensor, temperature: Tensor, cutoff: Tensor,
    map_ids: Tensor | None = None,
) -> None:  # fmt: skip
    """The same in plain torch."""
    ids = torch.arange(logits.shape[1], device=logits.device) if map_ids is None else map_ids
    word0, word1 = position_words_reference(keys[row_ids], positions)
    heat = temperature[row_ids, None].to(cutoff.dtype)
    x = logits.to(cutoff.dtype)
    noise = gumbel_of(word0[:, None], word1[:, None], ids.to(torch.int32))
    noisy = torch.where(x >= cutoff[:, None], x, float("-inf")) / torch.where(heat > 0, heat, 1) + noise
    logits.copy_(torch.where(heat > 0, noisy, x))


def main() -> None:
    bench = Bench("noise")
    for places, vocab in ((64, 16384), (64, 32000), (640, 32000), (1024, 16384)):
        device = bench.device
        inputs = [torch.randn(places, vocab, device=device) for _ in range(bench.num_copies)]
        ids = torch.arange(places, dtype=torch.int32, device=device)
        rest = (ids, ids.long(), ids.long(), torch.ones(places, device=device), torch.full((places,), -torch.inf, device=device))
        bench.row(
            f"T={places} V={vocab} float32",
            [partial(add_noise, x, *rest) for x in inputs],
            [partial(add_noise_reference, x, *rest) for x in inputs],
            num_bytes=2 * inputs[0].nbytes,
        )


if __name__ == "__main__":
    main()
