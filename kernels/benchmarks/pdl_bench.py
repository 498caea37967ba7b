"""Benchmark of programmatic dependent launch, `python -m batchspec.kernels.common.pdl`: layers of small models, captured in one
graph without PDL and in one with it.

One layer is norm, QKV, RoPE and K/V write, attention, O with the residual sum, norm, gate-up with SwiGLU, down with the residual
sum; each kernel reads what the one before it wrote. The results of both graphs must be bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.settings import work_shape
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.verify_attention import verify_attention
from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.timing import graph_us
from batchspec.kernels.common import pdl
from batchspec.kernels.gemm.activation import silu_and_mul
from batchspec.kernels.gemm.linear import linear, linear_add
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.norm_rope.norm import rms_norm
from batchspec.kernels.norm_rope.rope_write import rope_write

PAGE_SIZE = 16
TILE = Tile(64, 64, 64, 4, 4, True)
# layers, hidden size, heads, K/V heads, head_dim, intermediate size, rows, keys a row, queries a row
SHAPES = {
    "135m 256 x 768 S=1": (30, 576, 9, 3, 64, 1536, 256, 768, 1),
    "135m 256 x 768 S=3": (30, 576, 9, 3, 64, 1536, 256, 768, 3),
    "135m 16 x 768 S=3": (30, 576, 9, 3, 64, 1536, 16, 768, 3),
    "1b 256 x 1280 S=1": (16, 2048, 32, 8, 64, 8192, 256, 1280, 1),
}


class Layers:
    """The layers of a model with random weights, and one forward pass through all of them."""

    def __init__(
        self, layers: int, hidden: int, heads: int, kv_heads: int, dim: int, inner: int, rows: int, keys: int, width: int
    ) -> None:
        self.layers, self.dim, tokens = layers, dim, rows * width
        new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        ints = partial(torch.arange, device="cuda", dtype=torch.int32)
        all_heads, pages = heads + 2 * kv_heads, -(-keys // PAGE_SIZE)
        self.norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        self.weights = [
            [
                new(n, k).mul_(k**-0.5)
                for n, k in ((all_heads * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner))
            ]
            for _ in range(layers)
        ]
        self.kv = new(layers, 2, rows * pages + 1, PAGE_SIZE, kv_heads, dim)
        self.table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages) + 1
        self.cu_seqlens_q, self.kv_len = ints(0, tokens + 1, width), torch.full((rows,), keys, dtype=torch.int32, device="cuda")
        positions = keys - width + ints(width).long().expand(rows, width)
        self.positions = positions.flatten()
        self.slot_mapping = (self.table.gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE).flatten()
        self.freqs = 10000.0 ** (-ints(0, dim, 2) / dim)
        self.shape = work_shape(
            num_rows=rows, max_q=width, max_kv=keys, num_heads=heads, kv_heads=kv_heads, head_dim=dim, page_size=PAGE_SIZE,
            dtype=torch.bfloat16, num_sms=torch.cuda.get_device_properties("cuda").multi_processor_count,
        )  # fmt: skip
        self.start = new(tokens, hidden)
        self.residual, self.normed = torch.empty_like(self.start), torch.empty_like(self.start)
        self.qkv, self.q, self.attended = new(tokens, all_heads * dim), new(tokens, heads, dim), new(tokens, heads, dim)
        self.gate_up, self.inner = new(tokens, 2 * inner), new(tokens, inner)

    def forward(self) -> None:
        torch.neg(self.start, out=self.residual)
        work = split_kv_schedule(self.cu_seqlens_q, self.kv_len, self.positions, shape=self.shape)
        partials = partials_of(work, self.dim)
        for layer in range(self.layers):
            w_qkv, w_out, w_gate_up, w_down = self.weights[layer]
            rms_norm(self.residual, self.norm, 1e-5, out=self.normed)
            linear(self.normed, w_qkv, tile=TILE, out=self.qkv)
            rope_write(
                self.qkv, self.positions, self.freqs, self.kv[layer], self.slot_mapping, attention_factor=1.0, out_q=self.q
            )
            verify_attention(
                self.q, self.kv[layer], self.table, self.positions, work, partials, scale=self.dim**-0.5, out=self.attended,
                early=True,
            )  # fmt: skip
            linear_add(self.attended.flatten(1), w_out, residual=self.residual, tile=TILE)
            rms_norm(self.residual, self.norm, 1e-5, out=self.normed)
            linear(self.normed, w_gate_up, tile=TILE, out=self.gate_up)
            silu_and_mul(self.gate_up, out=self.inner)
            linear_add(self.inner, w_down, residual=self.residual, tile=TILE)

    def result(self, graph: Callable[[], float]) -> tuple[float, Tensor, Tensor]:
        """Microseconds a layer, and the residual stream, keys and values after the last replay."""
        self.residual.fill_(float("nan"))
        us = graph() / self.layers
        return us, self.residual.clone(), self.kv[:, :, : PAGE_SIZE * 4].clone()


def main() -> None:
    if not torch.cuda.is_available():
        print("pdl: no GPU here, and there is no torch reference to time")
        return
    supported = pdl.supported(torch.device("cuda", torch.cuda.current_device()))
    answer = "supported" if supported else "NOT supported"
    print(f"programmatic dependent launch: {answer}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'shape':<24} {'us a layer':>10} {'with PDL':>10} {'less':>7}")
    for name, shape in SHAPES.items():
        with continue_on_error(name):
            layers, found = Layers(*shape), []
            for on in (False, True):
                before = pdl.set_enabled(on)
                try:
                    found.append(layers.result(partial(graph_us, [layers.forward], repeats=15, per_graph=2)))
                finally:
                    pdl.set_enabled(before)
            (off, *plain), (us, *early) = found
            torch.testing.assert_close(early, plain, rtol=0, atol=0)
            print(f"{name:<24} {off:>10.2f} {us:>10.2f} {1 - us / off:>7.1%}", flush=True)


if __name__ == "__main__":
    main()
