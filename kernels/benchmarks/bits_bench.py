"""Which tiles give a row the same bits on this GPU, and what the products with one order of sums cost.

    python -m batchspec.kernels.benchmarks.bits_bench            # classes of equal bits, then times
    python -m batchspec.kernels.benchmarks.bits_bench --no-times
    python -m batchspec.kernels.benchmarks.bits_bench --no-bits --models 8b --counts 64 256

Two ways to compute a product are of one class if all their outputs have the same bits, for every row and every number of tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.graph_clock import MAX_COPIES, Call, GraphClock
from batchspec.kernels.gemm.linear import launch as launch_linear
from batchspec.kernels.gemm.linear import linear
from batchspec.kernels.gemm.ordered import launch, ordered_linear
from batchspec.kernels.gemm.ordered_tiles import GATED, PLAIN, ordered_tile, segments_of
from batchspec.kernels.gemm.split_k import counters
from batchspec.kernels.gemm.tiles import Tile

COUNTS = (1, 7, 16, 64, 129, 300, 1024, 4096)
TIMED_COUNTS = (16, 64, 128, 256, 512, 1024, 8192)


def _block(tile: Tile) -> tuple[int, int, int, int, int]:
    return tile.block_m, tile.block_n, tile.block_k, tile.stages, tile.warps


BLOCKS = (
    *(_block(tile) for tile, *_ in PLAIN),
    (64, 32, 64, 6, 4), (64, 128, 64, 5, 4), (128, 64, 128, 3, 8), (128, 128, 64, 4, 8),
    (128, 256, 64, 4, 8), (256, 64, 64, 4, 8), (256, 128, 64, 3, 8),
)
GATED_BLOCKS = (
    *(_block(tile) for tile, *_ in GATED),
    (64, 32, 64, 5, 4), (64, 128, 64, 4, 4), (64, 128, 64, 4, 8), (128, 64, 64, 5, 8), (128, 128, 64, 3, 8), (256, 64, 64, 4, 8),
)
SHAPES = {
    "8b": (("linear", 6144, 4096), ("linear", 4096, 4096), ("swiglu", 28672, 4096), ("linear", 4096, 14336)),
    "1b": (("linear", 3072, 2048), ("linear", 2048, 2048), ("swiglu", 16384, 2048), ("linear", 2048, 8192)),
    "135m": (("linear", 960, 576), ("linear", 576, 576), ("swiglu", 3072, 576), ("linear", 576, 1536)),
}
SEGMENTS = (1, 2, 4)


@triton.jit
def dots_kernel(
    q, k, v, out_s, out_o, num_blocks, TILE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, BATCHED: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """The two products of attention over blocks of keys, the weights of the second being the scores of the first.

    BATCHED: as products of three dimensions, the first of which is 1. SWAPPED: K and V are the first operand.
    """
    lane, d, key = tl.arange(0, TILE), tl.arange(0, DIM), tl.arange(0, BLOCK)
    query = tl.load(q + lane[:, None] * DIM + d[None, :])
    acc = tl.zeros([TILE, DIM], tl.float32)
    turned = tl.zeros([DIM, TILE], tl.float32)
    deep = tl.zeros([1, TILE, DIM], tl.float32)
    for block in range(num_blocks):
        at = (block * BLOCK + key)[:, None] * DIM + d[None, :]
        keys, values = tl.load(k + at), tl.load(v + at)
        to_s = out_s + lane[:, None] * (num_blocks * BLOCK) + (block * BLOCK + key)[None, :]
        if SWAPPED:
            s = tl.dot(keys, tl.trans(query))
            tl.store(tl.trans(to_s), s)
            turned = tl.dot(tl.trans(values), s.to(tl.bfloat16), turned * 0.5)
        elif BATCHED:
            s3 = tl.dot(tl.expand_dims(query, 0), tl.expand_dims(tl.trans(keys), 0))
            tl.store(tl.expand_dims(to_s, 0), s3)
            deep = tl.dot(s3.to(tl.bfloat16), tl.expand_dims(values, 0), deep * 0.5)
        else:
            s = tl.dot(query, tl.trans(keys))
            tl.store(to_s, s)
            acc = tl.dot(s.to(tl.bfloat16), values, acc * 0.5)
    to_o = out_o + lane[:, None] * DIM + d[None, :]
    if SWAPPED:
        tl.store(tl.trans(to_o), turned)
    elif BATCHED:
        tl.store(tl.expand_dims(to_o, 0), deep)
    else:
        tl.store(to_o, acc)


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def print_classes(title: str, found: dict[tuple[str, ...], list[str]]) -> None:
    print(f"{title}: {len(found)} classes of bits")
    for number, (_, names) in enumerate(sorted(found.items(), key=lambda item: -len(item[1]))):
        print(f"  class {number}: {len(names)}")
        for name in names:
            print(f"    {name}")


def product_classes(n: int, k: int, device: torch.device) -> None:
    """Classes of the tiles of `linear` and `ordered_linear`, and of the library, over all rows of all numbers of tokens."""
    x = torch.randn(max(COUNTS), k, device=device).bfloat16()
    w = (torch.randn(n, k, device=device) * k**-0.5).bfloat16()
    ways: dict[str, Callable[[Tensor], Tensor]] = {"library": lambda rows: F.linear(rows, w)}
    ways["library, at least 512 rows"] = lambda rows: F.linear(_padded(rows, 512), w)[: len(rows)]
    for block in BLOCKS:
        for tma in (True, False):
            tile = Tile(*block, tma)
            ways[f"linear {block} tma={tma}"] = partial(linear, weight=w, tile=tile)
            for segments in SEGMENTS:
                for split in {1, segments}:
                    if k % (segments * tile.block_k) == 0:
                        own = tile._replace(split=split)
                        ways[f"{segments} segments {block} tma={tma} split={split}"] = partial(
                            ordered_linear, weight=w, segments=segments, tile=own
                        )
    for block in ((16, 64, 64, 4, 4), (32, 64, 64, 4, 4), (32, 128, 64, 4, 4)):
        ways[f"linear {block}, a narrow tile"] = partial(linear, weight=w, tile=Tile(*block, True))
    for block in ((64, 16, 64, 4, 4), (128, 32, 64, 4, 4)):
        ways[f"linear {block}, weight on the left"] = partial(_turned, w=w, tile=Tile(*block, True))
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, way in ways.items():
        try:
            whole = way(x)
            differing = [t for t in COUNTS if not torch.equal(way(x[:t]).view(torch.int16), whole[:t].view(torch.int16))]
        except Exception as failure:
            print(f"  {name}: {type(failure).__name__} {(str(failure).splitlines() or [''])[0][:120]}")
            continue
        found[digest(whole), str(differing)].append(name + (f" DIFFERS at {differing}" if differing else ""))
    print_classes(f"product {n} x {k}", found)


def _padded(rows: Tensor, least: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, max(0, least - len(rows))))


def _turned(x: Tensor, w: Tensor, tile: Tile) -> Tensor:
    out = x.new_empty(len(w), len(x))
    launch_linear(w, x.contiguous(), out=out, tile=tile)
    return out.t().contiguous()


def dots_classes(dim: int, device: torch.device) -> None:
    """Classes of the products of attention, over the first 16 lines of a tile."""
    block, blocks = 64, 8
    q = torch.randn(128, dim, device=device).bfloat16()
    k, v = (torch.randn(block * blocks, dim, device=device).bfloat16() for _ in range(2))
    scores, outs = defaultdict[tuple[str, ...], list[str]](list), defaultdict[tuple[str, ...], list[str]](list)
    for tile in (16, 32, 64, 128):
        for warps in (1, 2, 4, 8):
            for kind in ("plain", "batched", "swapped"):
                s, o = torch.empty(tile, block * blocks, device=device), torch.empty(tile, dim, device=device)
                try:
                    compiled = dots_kernel[(1,)](
                        q, k, v, s, o, blocks, TILE=tile, BLOCK=block, DIM=dim, BATCHED=kind == "batched",
                        SWAPPED=kind == "swapped", num_warps=warps,
                    )
                    torch.cuda.synchronize()
                except Exception as failure:
                    print(f"  tile {tile} warps {warps} {kind}: {type(failure).__name__} {str(failure)[:100]!r}")
                    continue
                wgmma = "wgmma" if "wgmma" in compiled.asm["ptx"] else "mma"
                name = f"tile {tile} warps {warps} {kind}: {wgmma}"
                scores[(digest(s[:16]),)].append(name)
                outs[(digest(o[:16]),)].append(name)
    print_classes(f"q k' of {dim}", scores)
    print_classes(f"p v of {dim}", outs)


def times(op: str, rows: int, k: int, device: torch.device, counts: Sequence[int], segments: Sequence[int]) -> None:
    """For each number of tokens: the library, the chosen tile, and the fastest ones with each of these numbers of segments.

    segments  none: the number of segments of the weight
    """
    gated = op == "swiglu"
    n, own = rows // 2 if gated else rows, segments_of(rows, k)
    copies = min(MAX_COPIES, -(-(1 << 28) // (rows * k * 2)))
    weights = torch.empty(copies, rows, k, dtype=torch.bfloat16, device=device).normal_(std=k**-0.5)
    clock = GraphClock(device)
    counters(device)
    for tokens in counts:
        x = torch.randn(tokens, k, device=device).bfloat16()
        out = x.new_empty(tokens, n)
        library = clock.us([partial(F.linear, x, w) for w in weights])
        line = f"{op} {rows}x{k} T={tokens}: library {library:.1f} us" + (" without the activation" if gated else "")
        for number in segments or (own,):
            chosen = ordered_tile(tokens, n, k, own, gated=gated)
            tiles = list(dict.fromkeys([*([chosen] if number == own else []), *_tiles(gated, number, tokens, n, k)]))
            calls = {tile: [partial(launch, x, w, None, segments=number, tile=tile, out=out, gated=gated) for w in weights]
                     for tile in tiles}
            _compile([partial(calls[tile][0], compile_only=True) for tile in tiles], device)
            measured: dict[Tile, float] = {}
            for tile in tiles:
                try:
                    measured[tile] = clock.us(calls[tile])
                except Exception as failure:
                    print(f"  {number} segments {tile}: {type(failure).__name__} {str(failure)[:80]!r}")
            best = sorted(measured, key=measured.__getitem__)[:3]
            shown = ", ".join(f"{measured[tile]:.1f} {_shown(tile)}" for tile in best)
            if number == own and chosen in measured:
                shown = f"chosen {measured[chosen]:.1f} {_shown(chosen)}; fastest {shown}"
            line += f"\n    {number} segments: {shown}"
        print(line, flush=True)


def _shown(tile: Tile) -> str:
    return f"{'x'.join(map(str, tile[:5]))}{' tma' if tile.tma else ''} split {tile.split}"


def _tiles(gated: bool, segments: int, tokens: int, n: int, k: int) -> list[Tile]:
    found = []
    for block in GATED_BLOCKS if gated else BLOCKS:
        fits = segments == 1 or (k % (segments * block[2]) == 0 and k // segments >= 512)
        if block[0] > max(64, 1 << (tokens - 1).bit_length()) or not fits:
            continue
        for split in {1, segments}:
            programs = triton.cdiv(tokens, block[0]) * triton.cdiv(n, block[1]) * split
            if split == 1 or programs <= 1024:
                found += [Tile(*block, tma, split) for tma in (True, False) if tma or tokens <= 512]
    return found


def _compile(calls: Sequence[Call], device: torch.device) -> None:
    def one(call: Call) -> None:
        torch.cuda.set_device(device.index or 0)
        try:
            call()
        except Exception as failure:
            print(f"  not compiled: {type(failure).__name__} {str(failure)[:80]!r}")

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(one, calls))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m batchspec.kernels.benchmarks.bits_bench")
    parser.add_argument("--no-times", action="store_true", help="classes of bits alone")
    parser.add_argument("--no-bits", action="store_true", help="times alone")
    parser.add_argument("--models", nargs="+", default=["8b", "135m"], choices=tuple(SHAPES), help="whose products are timed")
    parser.add_argument("--counts", nargs="+", type=int, default=TIMED_COUNTS, help="numbers of tokens")
    parser.add_argument("--segments", nargs="+", type=int, default=(), choices=SEGMENTS, help="of K; none: as the weight has")
    given: Any = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bits_bench: no GPU here, nothing to compare")
        return
    device = torch.device("cuda")
    torch.manual_seed(0)
    if not given.no_bits:
        for dim in (64, 128):
            dots_classes(dim, device)
        for n, k in ((576, 1536), (4096, 4096)):
            product_classes(n, k, device)
    for model in () if given.no_times else given.models:
        for product in SHAPES[model]:
            times(*product, device, given.counts, given.segments)


if __name__ == "__main__":
    main()
