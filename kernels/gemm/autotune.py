"""Autotune: time and check the tile choices of a matrix product against cuBLAS, for `batchspec doctor --tune`.

Every tile choice is captured in a CUDA graph that cycles over several copies of the weight, because a model's layers never find
their weights in the L2 cache. Weights and inputs are random: a GPU multiplies zeros faster, at lower power. The fastest few are
timed again, together with cuBLAS. A tile choice that fails here (too much shared memory) is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.graph_clock import MAX_COPIES, Call, GraphClock
from batchspec.kernels.gemm.activation import silu_and_mul
from batchspec.kernels.gemm.linear import launch, norm_reference, num_sms
from batchspec.kernels.gemm.lm_head import lm_head, lm_head_reference
from batchspec.kernels.gemm.split_k import counters
from batchspec.kernels.gemm.tiles import Tile, candidates
from batchspec.kernels.norm_rope.norm import rms_norm

COPIES_BYTES = 1 << 28
DTYPE = torch.bfloat16
FINALISTS = 4
EPS = 1e-5
TOLERANCE = 0.02
"""Maximum error, as a fraction of the largest value: two to three roundings to bf16."""


class Result(NamedTuple):
    """The fastest tile for one product and number of tokens; `tile` is None if no candidate beat cuBLAS."""

    op: str
    tokens: int
    rows: int
    k: int
    tile: Tile | None
    us: float
    library_us: float
    candidate: Tile | None
    """The fastest tile, even if cuBLAS is faster."""
    candidate_us: float
    error: float
    """Error of the candidate against fp32, as a share of the largest value; for lm_head the share of tokens that differ."""

    def as_json(self) -> dict[str, Any]:
        values = self._asdict()
        for field in ("tile", "candidate"):
            values[field] = None if values[field] is None else values[field]._asdict()
        return {name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()}


class Trial:
    """One op with random weights on a GPU, for any number of tokens. The weights of this class are plain: [copies, rows, k]."""

    more_tokens: tuple[int, ...] = ()
    """Numbers of tokens that are timed besides those of all products."""

    def __init__(self, op: str, rows: int, k: int, device: torch.device) -> None:
        self.op, self.rows, self.k = op, rows, k
        self.gated = "swiglu" in op
        self.norm = torch.rand(k, device=device).add_(0.5).to(DTYPE)
        self.device = self.norm.device  # includes the device index
        self.weights: Sequence[Any] = self.make_weights()
        self._clock = GraphClock(self.device)

    def make_weights(self) -> Sequence[Any]:
        """As many weights as the L2 cache does not hold."""
        copies = min(MAX_COPIES, -(-COPIES_BYTES // (self.rows * self.k * DTYPE.itemsize)))
        return list(torch.empty(copies, self.rows, self.k, dtype=DTYPE, device=self.device).normal_(std=self.k**-0.5))

    def candidates(self, tokens: int) -> list[Tile]:
        return candidates(self.op, tokens, self.rows, self.k, card_of(self.device))

    def kernel_of(self, tile: Tile, tokens: int) -> tuple[Any, ...]:
        """Tiles with equal ones are computed by one compiled kernel. It does not depend on tokens, rows or the number of splits.
        """
        n = self.rows // 2 if self.gated else self.rows
        return *tile[:6], tile.work(tokens, n, self.k, num_sms(self.device)).split

    def matrix(self) -> Tensor:
        """The first weight in fp32."""
        wide: Tensor = self.weights[0].float()
        return wide

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """x [T, K], and the output tensor: [T, N], or for lm_head ids [T]."""
        x = torch.randn(tokens, self.k, device=self.device).to(DTYPE)
        if self.op == "lm_head":
            return x, torch.zeros(tokens, dtype=torch.int32, device=self.device)
        return x, x.new_zeros(tokens, self.rows // 2 if self.gated else self.rows)

    def calls(self, tile: Tile, x: Tensor, out: Tensor, *, compile_only: bool = False) -> list[Call]:
        """The kernel on each copy of the weight."""
        if self.op == "lm_head":
            return [partial(lm_head, x, w, out_ids=out, tile=tile, compile_only=compile_only) for w in self.weights]
        options: dict[str, Any] = {"out": out, "tile": tile, "gated": self.gated, "compile_only": compile_only}
        if self.op == "linear_add":
            options["residual"] = out
        if self.op.startswith("norm"):
            options |= {"norm": self.norm, "eps": EPS}
        return [partial(launch, x, w, **options) for w in self.weights]

    def library(self, x: Tensor, out: Tensor) -> list[Call]:
        """The same by cuBLAS and separate kernels. For linear_add only the product: there, the next norm's kernel adds the
        residual."""
        if self.op == "lm_head":
            return [partial(lm_head_reference, x, w, out_ids=out) for w in self.weights]

        normed = torch.empty_like(x) if self.op.startswith("norm") else None

        def run(w: Tensor) -> None:
            if normed is not None:
                rms_norm(x, self.norm, EPS, out=normed)
            y = F.linear(x if normed is None else normed, w)
            if self.gated:
                silu_and_mul(y, out=out)

        return [partial(run, w) for w in self.weights]

    def error(self, tile: Tile, x: Tensor, out: Tensor) -> float:
        """The error, see `Result.error`. Runs the kernel twice on poisoned outputs; if the runs differ, the error is infinite."""
        if self.op == "linear_add":
            start = torch.randn_like(out)
        else:
            start = torch.full_like(out, -7 if self.op == "lm_head" else torch.nan)
        runs = []
        for _ in range(2):
            out.copy_(start)
            self.calls(tile, x, out)[0]()
            runs.append(out.clone())
        if not torch.equal(*runs):
            return float("inf")
        if self.op == "lm_head":
            lm_head_reference(x, self.weights[0], out_ids=out)
            return float((out != runs[0]).float().mean())
        wanted = self._wide(x, start.float())
        return float((runs[0].float() - wanted).abs().max() / wanted.abs().max())

    def _wide(self, x: Tensor, start: Tensor) -> Tensor:
        """The result in fp32, products with fp32 inputs (not TF32, which is off unless someone turned it on)."""
        wide = norm_reference(x, self.norm, EPS).float() if self.op.startswith("norm") else x.float()
        y = wide @ self.matrix().t()
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return start + y if self.op == "linear_add" else y

    def run(self, tokens: int) -> Result:
        """Time every candidate and the library for this many tokens."""
        x, out = self.inputs(tokens)
        library = self.library(x, out)
        library_us = self._clock.us(library)
        times: dict[Tile, float] = {}
        for tile in self.candidates(tokens):
            try:
                times[tile] = self._clock.us(self.calls(tile, x, out))
            except Exception as failure:
                print(f"{self.op} {tokens}x{self.rows}x{self.k} {tile}: {_line(failure)}", flush=True)
        finals: list[tuple[float, Tile | None, float]] = [(float("inf"), None, float("nan"))]
        for tile in sorted(times, key=times.__getitem__)[:FINALISTS]:
            error = self.error(tile, x, out)
            if error > TOLERANCE:
                print(f"{self.op} {tokens}x{self.rows}x{self.k} {tile}: WRONG, error {error:.3g}", flush=True)
            else:
                finals.append((self._clock.us(self.calls(tile, x, out), repeats=9), tile, error))
        library_us = min(library_us, self._clock.us(library, repeats=9))
        torch.cuda.empty_cache()  # frees the partial sums of deleted graphs
        us, winner, error = min(finals, key=lambda final: final[0])
        tile_or_library = winner if us < library_us else None
        fastest_us = min(us, library_us)
        return Result(self.op, tokens, self.rows, self.k, tile_or_library, fastest_us, library_us, winner, us, error)


def compile_ahead(trial: Trial, token_counts: Iterable[int]) -> None:
    """Compile the kernels of all candidates in parallel."""
    todo: dict[tuple[Any, ...], Call] = {}
    for tokens in token_counts:
        x, out = trial.inputs(tokens)
        for tile in trial.candidates(tokens):
            todo[trial.kernel_of(tile, tokens)] = trial.calls(tile, x, out, compile_only=True)[0]
    counters(trial.device)  # allocate them before the threads start

    def continue_on_error(call: Call) -> None:
        torch.cuda.set_device(trial.device.index or 0)  # the current device is thread-local
        try:
            call()
        except Exception as failure:
            print(f"{trial.op}: not compiled: {_line(failure)}", flush=True)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(continue_on_error, todo.values()))


def run_trials(
    products: Iterable[tuple[str, int, int]], token_counts: Sequence[int], device: torch.device,
    trial_of: Callable[[str, int, int, torch.device], Trial] = Trial,
) -> list[Result]:
    """Time all products (op, weight rows, K), each by a trial, and print a line for each."""
    results: list[Result] = []
    print(f"{'product':<44} {'library us':>11} {'TFLOP/s':>8} {'tile us':>9} {'TFLOP/s':>8} {'ratio':>6} {'error':>8}  tile")
    for op, rows, k in products:
        begin = time.perf_counter()
        trial = trial_of(op, rows, k, device)
        counts = (*token_counts, *trial.more_tokens)
        compile_ahead(trial, counts)
        compiled_s = time.perf_counter() - begin
        for tokens in counts:
            result = trial.run(tokens)
            results.append(result)
            print(_row(result), flush=True)
        print(f"  {op} {rows}x{k}: {time.perf_counter() - begin:.1f} s, {compiled_s:.1f} of it to compile", flush=True)
        del trial
    return results


def _row(result: Result) -> str:
    flop = 2e-6 * result.tokens * result.rows * result.k
    tile = result.candidate
    cut = "-" if tile is None else "x".join(map(str, tile[:3])) + f" {tile.stages} stages {tile.warps} warps"
    if tile is not None:
        cut += (" tma" if tile.tma else " ptr") + (f" split {tile.split}" if tile.split > 1 else "")
        cut += f" stream {tile.per_sm}" if tile.per_sm else ""
    name = f"{result.op} T={result.tokens} {result.rows}x{result.k}"
    library = f"{result.library_us:>11.2f} {flop / result.library_us:>8.1f}"
    own = f"{result.candidate_us:>9.2f} {flop / result.candidate_us:>8.1f} {result.library_us / result.candidate_us:>5.2f}x"
    return f"{name:<44} {library} {own} {result.error:>8.4f}  {cut}"


def _line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"
