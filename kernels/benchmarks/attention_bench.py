"""Benchmark of verify attention: `python -m batchspec.kernels.attention.verify_attention [8b] [ragged] [1b] [135m] [shared]
[prefixes] [fp8]`; without names of sections all of them. fp8: over e4m3 K/V, whose bytes are half, with queries in bf16 as
without. prefixes: shared prefixes read by row and read once, and what reading once costs besides the bytes that it saves.

For every shape it prints the error against the reference, and the time of attention and merge from a captured graph, with the
default settings and with the best of some others: the measurements for the choices in `settings.py`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from batchspec.kernels.attention.merge_states import Partials, partials_of
from batchspec.kernels.attention.settings import Config, work_shape
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.verify_attention import verify_attention, verify_attention_reference
from batchspec.kernels.attention.work_list import AttentionWork, SharedPrefixes, WorkShape
from batchspec.kernels.benchmarks.timing import graph_us
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.e4m3 import to_e4m3

PAGE_SIZE, DTYPE = 16, torch.bfloat16
CONFIGS = (Config(64, 4, 3, 3), Config(32, 4, 4, 4), Config(32, 4, 5, 3), Config(64, 4, 2, 4), Config(128, 4, 2, 3))
WIDE = (Config(64, 4, 3, 2), Config(32, 4, 4, 3), Config(64, 4, 2, 3), Config(64, 8, 3, 2), Config(128, 8, 2, 2))
NARROW = (Config(64, 4, 3, 6), Config(64, 4, 4, 4), Config(64, 2, 3, 6), Config(32, 2, 4, 8), Config(128, 4, 2, 4))
FP8 = (Config(64, 4, 3, 4), Config(64, 4, 4, 4), Config(64, 2, 3, 5), Config(64, 2, 4, 5), Config(32, 2, 5, 6),
       Config(32, 1, 4, 8), Config(128, 4, 2, 2), Config(128, 8, 3, 2))
GROUP_CONFIGS = (
    (32, Config(64, 4, 3, 2)), (64, Config(64, 4, 3, 2)), (64, Config(64, 4, 2, 2)), (64, Config(64, 8, 3, 1)),
    (128, Config(64, 8, 3, 1)), (128, Config(128, 8, 2, 1)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    num_heads: int
    kv_heads: int
    head_dim: int
    configs: tuple[Config, ...]
    wide: tuple[Config, ...] = ()
    """Configurations to try for tiles of more than 16 query rows."""


MODELS = {"8b": Model(num_heads=32, kv_heads=8, head_dim=128, configs=CONFIGS, wide=WIDE),
          "1b": Model(num_heads=32, kv_heads=8, head_dim=64, configs=NARROW),
          "135m": Model(num_heads=9, kv_heads=3, head_dim=64, configs=NARROW)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """A batch on the GPU, with several copies of K/V to cycle over, so that none of them is in the L2 cache."""

    name: str
    model: Model
    shape: WorkShape
    q: Tensor
    copies: Tensor
    scales: Tensor | None
    page_table: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    kv_len: Tensor
    shared: SharedPrefixes | None
    num_bytes: int

    def work(self, shape: WorkShape) -> AttentionWork:
        return split_kv_schedule(self.cu_seqlens_q, self.kv_len, self.positions, shape=shape, shared=self.shared)

    def call(self, work: AttentionWork, partials: Partials, out: Tensor, kv: Tensor, **configs: Config) -> None:
        scale = 1 / math.sqrt(self.q.shape[2])
        verify_attention(
            self.q, kv, self.page_table, self.positions, work, partials, scale=scale, out=out,
            scales=self.scales, config=configs.get("config"), group_config=configs.get("group_config"),
        )

    def time_us(self, shape: WorkShape, **configs: Config) -> float:
        work = self.work(shape)
        partials, out = partials_of(work, self.q.shape[2]), torch.empty_like(self.q).contiguous()
        calls: list[Callable[[], None]] = [partial(self.call, work, partials, out, kv, **configs) for kv in self.copies]
        return graph_us(calls, repeats=5, per_graph=max(len(calls), 16))

    def error(self, shape: WorkShape, **configs: Config) -> float:
        """Relative L2 error against the reference; outputs and partial results are filled with NaN first."""
        work = self.work(shape)
        partials, out = partials_of(work, self.q.shape[2]), torch.full_like(self.q, float("nan")).contiguous()
        expected = torch.empty_like(out)
        partials.out.fill_(float("nan"))
        partials.lse.fill_(float("nan"))
        self.call(work, partials, out, self.copies[0], **configs)
        scale = 1 / math.sqrt(self.q.shape[2])
        where = self.page_table, self.positions, work
        verify_attention_reference(self.q, self.copies[0], *where, scale=scale, out=expected, scales=self.scales)
        return float((out.float() - expected.float()).norm() / expected.float().norm())


def make_inputs(
    name: str, model: Model, lengths: list[int], max_q: int, *, samples: int = 1, prefix: int = 0, share: bool = False,
    fp8: bool = False,
) -> Inputs:
    """Groups of `samples` adjacent rows share their first `prefix` tokens; `share`: attention reads them once a group."""
    device, rows = torch.device("cuda"), len(lengths)
    per_row = max(lengths) // PAGE_SIZE + 1
    table = torch.randperm(rows * per_row, device=device).int().view(rows, per_row) + 1
    first = torch.arange(rows, device=device) // samples * samples
    table[:, : prefix // PAGE_SIZE] = table[first, : prefix // PAGE_SIZE]
    size = 2 * (rows * per_row + 1) * PAGE_SIZE * model.kv_heads * model.head_dim
    num_copies = max(1, min(8, (1 << 29) // size))
    pages = rows * per_row + 1
    copies = torch.empty(num_copies, 2, pages, PAGE_SIZE, model.kv_heads, model.head_dim, dtype=DTYPE, device=device).normal_()
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    positions = (kv_len[:, None] - max_q + torch.arange(max_q, device=device)).long().flatten()
    scales = None
    if fp8:
        scales = torch.full((2, model.kv_heads), 2.0**-6, device=device)
        copies = torch.stack([to_e4m3(copy, scales[:, None, None, :, None]) for copy in copies])
    fused = torch.randn(rows * max_q, model.num_heads + 2 * model.kv_heads, model.head_dim, device=device).to(DTYPE)
    shape = work_shape(
        num_rows=rows, max_q=max_q, max_kv=max(lengths), num_heads=model.num_heads, kv_heads=model.kv_heads,
        head_dim=model.head_dim, page_size=PAGE_SIZE, dtype=DTYPE, fp8=fp8,
        card=card_of(device),
    )
    unique = sum(lengths) - (rows - rows // samples) * prefix
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    groups = rows // samples
    shared = SharedPrefixes(
        row_group=ints([row // samples for row in range(rows)]), row_order=ints(list(range(rows))),
        group_start=ints(list(range(0, rows + 1, samples))), shared_len=ints([prefix] * groups),
    )
    return Inputs(
        name=name, model=model, shape=shape, q=fused[:, : model.num_heads], copies=copies, scales=scales, page_table=table,
        positions=positions,
        cu_seqlens_q=ints(list(range(0, rows * max_q + 1, max_q))), kv_len=kv_len, shared=shared if share else None,
        num_bytes=2 * unique * model.kv_heads * model.head_dim * copies.itemsize,
    )


def settings(inputs: Inputs) -> Iterator[tuple[str, WorkShape, dict[str, Config]]]:
    """Settings to try for a shape: the default first, then other configurations, then other splits of the work."""
    shape = inputs.shape
    yield "default", shape, {}
    sms = card_of(inputs.q.device).num_sms
    if inputs.shared is not None:
        for tile, config in GROUP_CONFIGS:
            name = f"group tile {tile} {describe(config)}"
            for waves in (1, 2):
                programs = waves * sms * config.per_sm
                cut = replace(shape, group_tile=tile, group_block=config.block, group_programs=programs)
                yield f"{name}, filled x{waves}", cut, {"group_config": config}
    else:
        configs = inputs.model.wide if shape.tile > 16 and inputs.model.wide else inputs.model.configs
        for config in dict.fromkeys((*configs, *(FP8 if inputs.scales is not None else ()))):
            yield describe(config), replace(shape, block=config.block, programs=sms * config.per_sm), {"config": config}
    for times in (0.5, 2.0):
        yield f"programs x{times}", replace(shape, programs=int(shape.programs * times)), {}
    for chunk in (512, 2048):
        yield f"chunk {chunk}", replace(shape, chunk=chunk), {}


def describe(config: Config) -> str:
    return f"block {config.block} warps {config.num_warps} stages {config.num_stages} per SM {config.per_sm}"


def measure(inputs: Inputs, copy_tb_s: float) -> None:
    """Print one row: time, bandwidth and error of the default, then the fastest setting; then the settings that failed."""
    default, best, best_name, failed = 0.0, math.inf, "", []
    for name, shape, configs in settings(inputs):
        try:
            us = inputs.time_us(shape, **configs)
        except Exception as error:  # a setting may not fit the GPU; report it and continue
            failed.append(f"{name}: {repr(error)[:90]}")
            continue
        default = default or us
        if us < best:
            best, best_name = us, name
    work_us = graph_us([partial(_make, inputs)], repeats=5, per_graph=16)
    tb_s = inputs.num_bytes / default / 1e6
    print(
        f"{inputs.name:<34} {default / 1e3:>8.4f} {tb_s:>6.2f} {tb_s / copy_tb_s:>7.1%} {inputs.error(inputs.shape):>9.1e} "
        f"{work_us:>8.1f} {best / 1e3:>9.4f} {inputs.num_bytes / best / 1e6:>6.2f}  {best_name}",
        flush=True,
    )
    for line in failed:
        print(f"    failed: {line}")


PREFIXES = (
    # model, rows, keys, queries, tokens of the prefix, rows that share it
    ("135m", 256, 320, 4, 128, 2), ("135m", 256, 320, 4, 128, 8), ("135m", 256, 320, 4, 256, 2), ("135m", 256, 320, 4, 256, 32),
    ("135m", 256, 320, 1, 256, 2), ("135m", 256, 1280, 4, 1024, 2), ("135m", 256, 1280, 4, 1024, 4),
    ("135m", 256, 1280, 4, 1024, 256), ("135m", 64, 1280, 4, 1024, 8), ("1b", 256, 1024, 4, 256, 2), ("1b", 256, 1024, 4, 512, 8),
    ("8b", 256, 1024, 4, 128, 2), ("8b", 256, 1024, 4, 256, 4), ("8b", 64, 1024, 4, 512, 2), ("8b", 64, 1024, 4, 512, 8),
    ("8b", 64, 1024, 1, 512, 8), ("8b", 8, 8448, 4, 8192, 2), ("8b", 8, 8448, 4, 8192, 8),
)


def measure_prefixes(copy_tb_s: float, fp8: bool) -> None:
    """Print a row for each of PREFIXES: microseconds of a layer, bytes saved, and the cost of reading once, in bytes."""
    for name, rows, keys, max_q, prefix, samples in PREFIXES:
        model = MODELS[name]
        apart, shared = (
            make_inputs(name, model, [keys] * rows, max_q, samples=samples, prefix=prefix, share=share, fp8=fp8)
            for share in (False, True)
        )
        apart_us, shared_us = (inputs.time_us(inputs.shape) for inputs in (apart, shared))
        saved = (rows - rows // samples) * prefix * 2 * model.kv_heads * model.head_dim * shared.copies.itemsize / 2**20
        cost = saved - (apart_us - shared_us) * copy_tb_s * 1e6 / 2**20
        results = 16 * max_q * rows * model.num_heads * model.head_dim / 2**20
        print(
            f"{name + f' {rows} x {keys} S={max_q}, {prefix} of {samples}':<34} "
            f"by row {apart_us:7.1f} us, once {shared_us:7.1f} us, "
            f"saves {saved:7.1f} MiB, costs {cost:6.1f} MiB, partial results {results:5.1f} MiB",
            flush=True,
        )
        del apart, shared
        torch.cuda.empty_cache()


def _make(inputs: Inputs) -> None:
    inputs.work(inputs.shape)


def _negate(source: Tensor, target: Tensor) -> None:
    torch.neg(source, out=target)  # runs a kernel, unlike copy_


def sections(fp8: bool) -> dict[str, Callable[[], Iterator[Inputs]]]:
    """Name -> the shapes of one section of the table, allocated one at a time because they are large."""
    make = partial(make_inputs, fp8=fp8)

    def target_8b() -> Iterator[Inputs]:
        for rows, keys, widths in ((64, 8448, (1, 2, 4, 6, 8)), (16, 8448, (1, 4)), (4, 8448, (1, 4, 8)), (256, 1024, (1, 2))):
            for width in widths:
                yield make(f"8b {rows} x {keys} S={width}", MODELS["8b"], [keys] * rows, width)

    def ragged() -> Iterator[Inputs]:
        generator = torch.Generator().manual_seed(0)
        lengths = (torch.randn(64, generator=generator) * 1.0 + math.log(4096)).exp().clamp(512, 32768).int().tolist()
        for width in (1, 4):
            yield make(f"8b 64 x lognormal 512..32K S={width}", MODELS["8b"], lengths, width)

    def small(name: str, rows: int, keys: int, widths: tuple[int, ...]) -> Iterator[Inputs]:
        for width in widths:
            yield make(f"{name} {rows} x {keys} S={width}", MODELS[name], [keys] * rows, width)

    def shared() -> Iterator[Inputs]:
        for width in (1, 4):
            for share in (False, True):
                name = f"8b 8 x 8 x 8192+256 S={width} {'shared' if share else 'apart'}"
                yield make(name, MODELS["8b"], [8448] * 64, width, samples=8, prefix=8192, share=share)

    return {
        "8b": target_8b, "ragged": ragged, "1b": partial(small, "1b", 256, 1280, (1, 2)),
        "135m": partial(small, "135m", 256, 768, (1, 2, 3)), "shared": shared,
    }


def main() -> None:
    if not torch.cuda.is_available():
        print("verify_attention: no GPU here, and the torch reference is not timed")
        return
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy_tb_s = 2 * source.nbytes / graph_us([partial(_negate, source, target)]) / 1e6
    del source, target
    print(f"copy {copy_tb_s:.2f} TB/s (bytes read + written), torch {torch.__version__}, triton {triton.__version__}")
    started = time.perf_counter()
    columns = f"{'ms':>8} {'TB/s':>6} {'of copy':>7} {'error':>9} {'list us':>8} {'best ms':>9} {'TB/s':>6}  best setting"
    print(f"{'shape':<34} {columns}")
    fp8, asked = "fp8" in sys.argv[1:], set(sys.argv[1:]) - {"fp8"}
    if not asked or "prefixes" in asked:
        measure_prefixes(copy_tb_s, fp8)
    for name, make in sections(fp8).items():
        if not asked or name in asked:
            for inputs in make():
                try:
                    measure(inputs, copy_tb_s)
                except Exception as error:  # continue with the next shape
                    print(f"{inputs.name:<34} failed: {repr(error)[:200]}", flush=True)
                del inputs
                torch.cuda.empty_cache()
            print(f"    ({time.perf_counter() - started:.0f} s so far)", flush=True)


if __name__ == "__main__":
    main()
