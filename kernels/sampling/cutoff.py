"""Top-k, top-p and min-p as one number a place: the smallest logit that may be drawn. One launch, no sort.

    top-k  the k-th largest logit (ties with it are kept)
    top-p  the largest v with mass{x >= v} >= top_p * mass of what top-k left,   mass = sum of exp((x - max) / temperature)
    min-p  max + temperature * log(min_p), as a floor under both
    (Holtzman et al. 2020, arXiv 1904.09751; Nguyen et al. 2024, arXiv 2407.01082)

Both searches are those of `threshold.py`, over the row as it lies; sums have one fixed order, so a place's cutoff does not depend
on the places beside it. Bound by memory: three reads of the row (five if flat), from the second-level cache while the rows fit.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.attempt import attempt
from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import check
from batchspec.kernels.sampling.threshold import ends_of, smallest_kept

BLOCK = 4096
DEPTH = 8
"""Listed logits of a lane, BLOCK lanes a row: 128 KB a row."""
NUM_WARPS = 32
STAGES = 4
"""Blocks of the row in flight: one program has an SM for itself, so that nothing else hides the latency of its loads."""
MAX_PASSES = 10
"""Each pass quarters the bracket; logits that lie closer than that are ties or nearly so, and are searched where they lie."""
QUICK_TOP = 512
"""Likeliest tokens that the reference sorts first: nearly always they hold the whole kept set of top-p."""


@triton.jit
def cutoff_kernel(
    logits, row_ids, temperature, top_k, top_p, min_p, listed, out_cutoff, stride_row, vocab,
    MAX_PASSES: tl.constexpr, STAGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + place)
    heat = tl.load(temperature + row)
    k, p, share = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    cutoff = tl.full([], float("-inf"), tl.float32)
    if (heat > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (share > 0)):
        source = logits + place * stride_row
        list_of_place = listed + place * (DEPTH * BLOCK)
        top, bottom, num_finite = ends_of(source, vocab, STAGES, BLOCK)
        inverse_heat = 1.0 / heat
        if (k > 0) & (k < vocab) & (k <= num_finite):
            cutoff = smallest_kept(
                source, list_of_place, vocab, cutoff, bottom, top, inverse_heat, k.to(tl.float32),
                True, MAX_PASSES, STAGES, DEPTH, BLOCK,
            )  # fmt: skip
        if (p < 1) & (num_finite > 0):
            # All logits below this together weigh less than half of 1 - p: the nucleus ends above them.
            low = top + heat * tl.log((1.0 - p) * 0.5 / vocab)
            low = tl.maximum(tl.where(p < 0.99999, low, bottom), tl.maximum(bottom, cutoff))
            cutoff = smallest_kept(
                source, list_of_place, vocab, cutoff, low, top, inverse_heat, p, False, MAX_PASSES, STAGES, DEPTH, BLOCK
            )
        if share > 0:
            cutoff = tl.maximum(cutoff, top + heat * tl.log(share))
    tl.store(out_cutoff + place, cutoff)


def cutoff(
    logits: Tensor,
    row_ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    out_cutoff: Tensor,
    interpret: bool = False,
) -> None:
    """Write the smallest logit of each place's kept set: every token at or above it is kept.

    logits       fp32 or fp64 [T, V]  without NaN and +inf; rows may be slices of wider ones
    row_ids      int32 or int64 [T]  row of each place
    temperature  fp32 [R]  0: greedy, the cutoff is -inf
    top_k        int32 [R]  0 or at least V: off
    top_p        fp32 [R]  1: off
    min_p        fp32 [R]  0: off
    out_cutoff   [T] of logits' dtype  -inf where nothing is cut; a logit of the row, or the floor of min-p where that is higher

    Order: temperature, top-k, top-p (of what top-k left), min-p (of the likeliest token). The kernel works on fp32; fp64 logits
    take the reference on a GPU too. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_places, vocab = logits.shape
    num_rows = temperature.numel()
    check("cutoff: logits", logits, (num_places, vocab), torch.float32, torch.float64, rows=True)
    check("cutoff: row_ids", row_ids, (num_places,), torch.int32, torch.int64)
    check("cutoff: temperature", temperature, (num_rows,), torch.float32)
    check("cutoff: top_k", top_k, (num_rows,), torch.int32)
    check("cutoff: top_p", top_p, (num_rows,), torch.float32)
    check("cutoff: min_p", min_p, (num_rows,), torch.float32)
    check("cutoff: out_cutoff", out_cutoff, (num_places,), logits.dtype)
    if logits.dtype == torch.float64 or not (logits.is_cuda or interpret):
        cutoff_reference(logits, row_ids, temperature, top_k, top_p, min_p, out_cutoff=out_cutoff)
    elif num_places:
        block = min(BLOCK, max(16, triton.next_power_of_2(vocab)))
        listed = torch.empty(num_places * DEPTH * block, dtype=torch.float32, device=logits.device)
        cutoff_kernel[(num_places,)](
            logits, row_ids, temperature, top_k, top_p, min_p, listed, out_cutoff, logits.stride(0), vocab,
            MAX_PASSES=MAX_PASSES, STAGES=STAGES, DEPTH=DEPTH, BLOCK=block, num_warps=min(NUM_WARPS, max(1, block // 128)),
        )  # fmt: skip


def cutoff_reference(
    logits: Tensor, row_ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, out_cutoff: Tensor
) -> None:
    """The same in plain torch, by sorting. Reads back how much of it was needed on a CPU only."""
    vocab = logits.shape[1]
    greedy = temperature[row_ids] <= 0
    heat = torch.where(greedy, 1, temperature[row_ids].to(logits.dtype)).unsqueeze(1)
    k = top_k[row_ids]
    k = torch.where((k > 0) & (k < vocab), k, vocab)
    p, share = top_p[row_ids].to(logits.dtype), min_p[row_ids].to(logits.dtype)
    num = vocab if logits.is_cuda else min(QUICK_TOP, vocab)
    total = torch.logsumexp(logits / heat, 1)
    while True:
        best = logits.topk(num, dim=1).values
        cut, complete = _cut_of_sorted(best, total, heat, k, p, vocab)
        # Reading `complete` costs nothing on a CPU; on a GPU the whole row was sorted.
        if num == vocab or bool(complete.all()):
            break
        num = vocab
    floor = best[:, 0] + heat.squeeze(1) * share.log()
    cut = torch.where(share > 0, torch.maximum(cut, floor), cut)
    out_cutoff.copy_(torch.where(greedy, -torch.inf, cut))


def _cut_of_sorted(best: Tensor, total: Tensor, heat: Tensor, top_k: Tensor, top_p: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Cutoffs of top-k and top-p from the N likeliest logits in falling order [T, N], and whether N was enough."""
    num = best.shape[1]
    no_top_k, no_top_p = top_k >= vocab, top_p >= 1
    kth = best.gather(1, (top_k.clamp(max=num) - 1).long().unsqueeze(1))
    # Ties at the k-th that run to the last column may run on behind it.
    ties_end = best[:, -1] < kth.squeeze(1) if num < vocab else torch.ones_like(no_top_k)
    k_fits = no_top_k | ((top_k <= num) & ties_end)
    in_k = best >= kth  # ties at the k-th are kept
    scaled = best / heat
    # The mass that top-p measures is what top-k left; without top-k it is the whole vocabulary's.
    mass = torch.where(no_top_k, total, torch.logsumexp(scaled.masked_fill(~in_k, -torch.inf), 1)).unsqueeze(1)
    before = (scaled - mass).exp().masked_fill(~in_k, 0).cumsum(1).roll(1, 1)
    before[:, 0] = 0
    num_kept = (in_k & (before < top_p.unsqueeze(1))).sum(1, keepdim=True).clamp(min=1)
    nucleus = best.gather(1, num_kept - 1).squeeze(1)
    without_top_p = torch.where(no_top_k, -torch.inf, kth.squeeze(1))
    nucleus_fits = (num_kept.squeeze(1) < num) | ~no_top_k
    return torch.where(no_top_p, without_top_p, nucleus), k_fits & (no_top_p | nucleus_fits)


def main() -> None:
    bench = Bench("cutoff")
    for places, vocab in ((64, 128256), (256, 128256), (256, 49152)):
        for label, scale, k, p in (
            ("top-p 0.95, peaked", 4.0, 0, 0.95), ("top-p 0.95, flat", 1.0, 0, 0.95), ("top-k 50", 4.0, 50, 1.0),
            ("top-k 50, top-p 0.9", 4.0, 50, 0.9),
        ):  # fmt: skip
            shape = f"T={places} V={vocab}, {label}"
            with attempt(shape):
                bench_shape(bench, shape, places, vocab, scale, k, p)


def bench_shape(bench: Bench, shape: str, places: int, vocab: int, scale: float, k: int, p: float) -> None:
    device = bench.device
    num_copies = 2 if bench.on_gpu else 1
    inputs = [torch.randn(places, vocab, device=device) * scale for _ in range(num_copies)]
    row_ids = torch.arange(places, dtype=torch.int32, device=device)
    heat, top_p, min_p = (torch.full((places,), value, device=device) for value in (0.9, p, 0.0))
    rest = (row_ids, heat, torch.full_like(row_ids, k), top_p, min_p)
    out, expected = torch.full((2, places), float("nan"), device=device)
    cutoff(inputs[0], *rest, out_cutoff=out)
    cutoff_reference(inputs[0], *rest, out_cutoff=expected)
    # Sums in another order move the end of a nucleus of thousands by a token or two.
    torch.testing.assert_close((inputs[0] >= out[:, None]).sum(1), (inputs[0] >= expected[:, None]).sum(1), rtol=1e-3, atol=1)
    bench.row(
        shape,
        [partial(cutoff, x, *rest, out_cutoff=out) for x in inputs],
        [partial(cutoff_reference, inputs[0], *rest, out_cutoff=expected)],
        num_bytes=inputs[0].nbytes,
    )


if __name__ == "__main__":
    main()
