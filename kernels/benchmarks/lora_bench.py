"""Times the low-rank products of LoRA adapters beside the base products that they add to, in bf16, on the shapes of Llama-3.1-8B.

    python -m batchspec.kernels.benchmarks.lora_bench [--rows 256] [--per-row 1 4] [--adapters 16] [--ranks 16 32 64] [--sweep]

Every row has an adapter, and all adapters have the same number of rows. Each pair is checked against its reference first. A line
has the microseconds of the base product (the library's), of the first and second low-rank product, of both in a row, and of both
as a share of the base product; the last line of a table is the sum over a layer, times the layers of the model. `--sweep` times
other splits of K and tiles of tokens. Without a GPU the references alone run, on small shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.timing import graph_us, wall_us
from batchspec.kernels.lora.lora_expand import lora_expand, lora_expand_reference
from batchspec.kernels.lora.lora_shrink import MOST_SPLITS, lora_shrink, lora_shrink_reference
from batchspec.kernels.lora.lora_tokens import BLOCKS, LoraTokens, lora_tokens

LAYERS = 32
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "gate_up": ((14336, 14336), 4096), "down": ((4096,), 14336),
}
"""For each product: rows of its parts, and K."""
NUM_COPIES = 4
"""Copies of weights and inputs, so that a timing does not find them in the L2 cache."""
TOLERANCE = 1e-2


class Case(NamedTuple):
    """The inputs of one pair of products."""

    x: Tensor
    weight: Tensor
    a: Tensor
    b: Tensor
    scales: Tensor
    out: Tensor
    part_rows: tuple[int, ...]

    @classmethod
    def random(cls, part_rows: tuple[int, ...], k: int, tokens: int, adapters: int, rank: int, device: torch.device) -> Case:
        rows, parts = sum(part_rows), len(part_rows)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def noise(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(dtype)

        return cls(
            noise(tokens, k), noise(rows, k, scale=k**-0.5), noise(adapters, parts, rank, k, scale=k**-0.5),
            noise(adapters, rows, rank, scale=rank**-0.5), torch.ones(adapters, parts, device=device), noise(tokens, rows),
            part_rows,
        )

    def pair(self, tokens: LoraTokens, splits: int | None = None) -> None:
        """Both products in a row."""
        h = lora_shrink(self.x, self.a, self.scales, tokens, splits=splits)
        lora_expand(h, self.b, self.scales, tokens, part_rows=self.part_rows, out=self.out)

    def check(self, tokens: LoraTokens, splits: int | None = None) -> None:
        """Raises AssertionError if the pair differs from its reference."""
        self.out.normal_()  # timed calls add to it until bf16 holds no further sum
        before, expected = self.out.clone(), self.out.clone()
        self.pair(tokens, splits)
        h = lora_shrink_reference(self.x, self.a, self.scales, tokens)
        lora_expand_reference(h, self.b, self.scales, tokens, part_rows=self.part_rows, out=expected)
        found, expected = self.out.double() - before.double(), expected.double() - before.double()
        error = float((found - expected).norm() / expected.norm())
        assert error < TOLERANCE, f"the kernels differ from the reference by {error:.1e}"
        self.out.copy_(before)


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    return graph_us(calls) if torch.cuda.is_available() else wall_us(calls)


def table(
    rows: int, per_row: int, adapters: int, rank: int, *, sweep: bool, shapes: dict[str, tuple[tuple[int, ...], int]]
) -> None:
    """One table: all products of a layer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = torch.arange(rows, device=device) % adapters + 1
    ids = own.repeat_interleave(per_row).int()
    tokens = lora_tokens(ids, adapters)
    print(f"{rows} rows x {per_row} tokens, {adapters} adapters of rank {rank}, tiles of {tokens.block} tokens")
    print(f"{'product':<9} {'base us':>9} {'shrink':>9} {'expand':>9} {'both':>9} {'of base':>8} {'GB/s':>7}")
    sums = [0.0] * 2
    for name, (part_rows, k) in shapes.items():
        cases = [Case.random(part_rows, k, rows * per_row, adapters, rank, device) for _ in range(NUM_COPIES)]
        cases[0].check(tokens)
        hs = [lora_shrink(case.x, case.a, case.scales, tokens) for case in cases]
        base = time_us([partial(torch.mm, case.x, case.weight.t()) for case in cases])
        shrink = time_us([partial(lora_shrink, case.x, case.a, case.scales, tokens) for case in cases])
        expands = [
            partial(lora_expand, h, case.b, case.scales, tokens, part_rows=part_rows, out=case.out)
            for case, h in zip(cases, hs, strict=True)
        ]
        expand = time_us(expands)
        both = time_us([partial(case.pair, tokens) for case in cases])
        num_bytes = sum(t.nbytes for t in (cases[0].x, cases[0].a, cases[0].b)) + 2 * cases[0].out.nbytes
        gb_s = num_bytes / both / 1e3
        print(f"{name:<9} {base:>9.1f} {shrink:>9.1f} {expand:>9.1f} {both:>9.1f} {both / base:>8.1%} {gb_s:>7.0f}", flush=True)
        sums = [sums[0] + base, sums[1] + both]
        if sweep:
            _sweep(cases, ids, adapters)
    per_model = [LAYERS * us / 1e3 for us in sums]
    print(f"{LAYERS} layers: base {per_model[0]:.2f} ms, adapters {per_model[1]:.2f} ms")
    lists = time_us([partial(lora_tokens, ids, adapters)])
    print(f"the list of tokens, once a round: {lists:.1f} us\n", flush=True)


def _sweep(cases: Sequence[Case], ids: Tensor, adapters: int) -> None:
    """Both products with other splits of K and tiles of tokens."""
    for block in BLOCKS:
        tokens = lora_tokens(ids, adapters, block)
        splits, found = 1, []
        while splits <= MOST_SPLITS:
            cases[0].check(tokens, splits)
            found.append(f"{splits}: {time_us([partial(case.pair, tokens, splits) for case in cases]):.1f}")
            splits *= 2
        print(f"    tiles of {block:>3} tokens, us of both by splits of K  {'  '.join(found)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--per-row", type=int, nargs="+", default=[1, 4], help="tokens of a row in a round, K + 1")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args(arguments)
    shapes = SHAPES
    if not torch.cuda.is_available():
        print("no GPU here: the references alone, on shapes 16 times smaller")
        shapes = {name: (tuple(rows // 16 for rows in part_rows), k // 16) for name, (part_rows, k) in SHAPES.items()}
    for rank in given.ranks:
        for per_row in given.per_row:
            table(given.rows, per_row, given.adapters, rank, sweep=given.sweep, shapes=shapes)


if __name__ == "__main__":
    main()
