"""What layer 0 of an EAGLE-3 head reads: out[t] = norm(embedding[token]) beside norm(hidden[t]), in one launch.

The token of a place is given, or it is the one behind its position in its line, token_ids[row_ids[t], positions[t] + 1].
Roundings are those of `batchspec.kernels.norm_rope.norm`: the normed value, then its product with the weight; fp32 inside (fp64
for fp64).
Bound by memory at prefill sizes (4 * H * itemsize bytes a place), by launch latency at decode sizes, where it stands for a
gather, two norms and two copies. Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.attempt import attempt
from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.norm_rope.norm import VALUES_PER_THREAD, rms_norm_reference


@triton.jit
def store_norm(source, weight, out, lane, EPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr):
    exists = lane < WIDTH
    x = tl.load(source + lane, mask=exists, other=0.0).to(ACC)
    scale = tl.load(weight + lane, mask=exists, other=0.0).to(ACC)
    normed = (x * (1.0 / tl.sqrt(tl.sum(x * x, 0) * (1.0 / WIDTH) + EPS))).to(out.dtype.element_ty)
    tl.store(out + lane, normed.to(ACC) * scale, mask=exists)


@triton.jit(do_not_specialize=["num_tokens"])
def head_input_kernel(
    token_ids, row_ids, positions, hidden, embedding, embedding_norm, hidden_norm, out, token_stride, hidden_stride, out_stride,
    max_len, num_tokens, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With `positions` None token_ids is one token a place, token_stride apart."""
    await_earlier(PDL)
    place = tl.program_id(0).to(tl.int64)
    at = place * token_stride
    if positions is not None:
        at = tl.load(row_ids + place).to(tl.int64) * max_len + tl.load(positions + place) + 1
        at = tl.minimum(at, num_tokens - 1)
    token = tl.load(token_ids + at).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    row = out + place * out_stride
    store_norm(embedding + token * WIDTH, embedding_norm, row, lane, EPS, WIDTH, ACC)
    store_norm(hidden + place * hidden_stride, hidden_norm, row + WIDTH, lane, EPS, WIDTH, ACC)


def head_input(
    token_ids: Tensor, hidden: Tensor, embedding: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float, *,
    out: Tensor, row_ids: Tensor | None = None, positions: Tensor | None = None, interpret: bool = False,
) -> None:  # fmt: skip
    """Write both halves of every place.

    token_ids       int32 [T] of any stride, or with positions [lines, M], contiguous: the tokens of each line
    hidden          fp32, bf16, fp16 or fp64 [T, H]  rows may be slices of wider ones
    embedding       [V, H] of the same dtype
    embedding_norm  [H], hidden_norm [H] of the same dtype
    out             [T, 2H] of the same dtype: the embedding's half first
    row_ids         int32 or int64 [T], positions int64 [T]: the line of each place and its position there, or both None

    A place at the end of its line gets any token: what it drafts is never looked at. Ids are not checked, that would read the
    device. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_places, width = hidden.shape
    check("head_input: hidden", hidden, (num_places, width), *FLOATS, rows=True)
    check("head_input: embedding", embedding, (embedding.shape[0], width), hidden.dtype)
    check("head_input: embedding_norm", embedding_norm, (width,), hidden.dtype)
    check("head_input: hidden_norm", hidden_norm, (width,), hidden.dtype)
    check("head_input: out", out, (num_places, 2 * width), hidden.dtype, rows=True)
    if (row_ids is None) != (positions is None):
        raise ValueError("head_input: row_ids and positions go together; give both or neither")
    if row_ids is not None and positions is not None:
        check("head_input: row_ids", row_ids, (num_places,), torch.int32, torch.int64)
        check("head_input: positions", positions, (num_places,), torch.int64)
    shape = (num_places,) if positions is None else (token_ids.shape[0], token_ids.shape[-1])
    check("head_input: token_ids", token_ids, shape, torch.int32, strided=positions is None)
    if not (hidden.is_cuda or interpret):
        head_input_reference(
            token_ids, hidden, embedding, embedding_norm, hidden_norm, eps, out=out, row_ids=row_ids, positions=positions
        )
    elif num_places:
        block = max(16, triton.next_power_of_2(width))
        head_input_kernel[(num_places,)](
            token_ids, row_ids, positions, hidden, embedding, embedding_norm, hidden_norm, out, token_ids.stride(-1),
            hidden.stride(0), out.stride(0), token_ids.shape[-1], token_ids.numel(), EPS=eps, WIDTH=width, BLOCK=block,
            ACC=tl.float64 if hidden.dtype == torch.float64 else tl.float32,
            num_warps=min(16, max(1, block // (32 * VALUES_PER_THREAD))), **launch_args(hidden),
        )  # fmt: skip


def head_input_reference(
    token_ids: Tensor, hidden: Tensor, embedding: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float, *,
    out: Tensor, row_ids: Tensor | None = None, positions: Tensor | None = None,
) -> None:  # fmt: skip
    """The same in plain torch."""
    width = hidden.shape[1]
    if row_ids is not None and positions is not None:
        places = (row_ids * token_ids.shape[1] + positions + 1).clamp_(max=token_ids.numel() - 1)
        token_ids = token_ids.view(-1).index_select(0, places)
    rms_norm_reference(embedding.index_select(0, token_ids), embedding_norm, eps, out=out[:, :width])
    rms_norm_reference(hidden, hidden_norm, eps, out=out[:, width:])


def main() -> None:
    bench = Bench("head_input")
    shapes = ((64, 4096, 128256), (256, 4096, 128256), (16384, 4096, 128256), (256, 576, 49152), (1024, 576, 49152))
    for places, width, vocab in shapes:
        shape = f"T={places} H={width} bfloat16"
        with attempt(shape):
            bench_shape(bench, shape, places, width, vocab)


def bench_shape(bench: Bench, shape: str, places: int, width: int, vocab: int) -> None:
    def noise(*size: int) -> Tensor:
        return torch.randn(*size, device=bench.device).bfloat16()

    inputs = [noise(places, width) for _ in range(bench.num_copies)]
    weights = (noise(vocab, width), noise(width), noise(width))
    tokens = torch.randint(0, vocab, (16, 2 * places), dtype=torch.int32, device=bench.device)
    row_ids = torch.randint(0, 16, (places,), dtype=torch.int32, device=bench.device)
    positions = torch.randint(0, 2 * places, (places,), device=bench.device)
    out = torch.full((places, 2 * width), float("nan"), dtype=torch.bfloat16, device=bench.device)
    expected = torch.empty_like(out)
    at: dict[str, Any] = {"row_ids": row_ids, "positions": positions}
    head_input(tokens, inputs[0], *weights, 1e-5, out=out, **at)
    head_input_reference(tokens, inputs[0], *weights, 1e-5, out=expected, **at)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=1e-3)
    bench.row(
        shape,
        [partial(head_input, tokens, x, *weights, 1e-5, out=out, **at) for x in inputs],
        [partial(head_input_reference, tokens, x, *weights, 1e-5, out=expected, **at) for x in inputs],
        num_bytes=4 * inputs[0].nbytes,
    )


if __name__ == "__main__":
    main()
