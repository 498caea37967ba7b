"""The instructions of batch-invariant attention, compiled for sm_90 without a GPU, with the arguments of its wrappers.

A query has the same bits in every tile and in prefill if they all multiply the same numbers in one instruction, and if the
compiler fuses no product with a sum that another kernel does not. The interpreter cannot see either.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

ROOT = Path(__file__).parents[2]
TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv",
    int: "i32", float: "fp32",
}

TENSOR_CORES = r"(mma\.sync|wgmma\.mma_async)\S*?\.(m\d+)n\d+(k\d+)(?:\.row\.col)?\.(\S+)"
"""An instruction, its sizes M and K and its types, with any N."""


class Attention(NamedTuple):
    """An attention of four heads for each of two K/V heads. Tiles hold 4 * queries lines in rounds, 128 in prefill."""

    queries: int
    """Of each row; 0: a prefill of 65."""
    head_dim: int
    fp8: bool
    window: int = 0
    """With learned sinks if not 0."""
    keys: int = 4096
    """Of the longest row; above 2,048 it has several parts."""

    def __str__(self) -> str:
        what = f"round of {self.queries}" if self.queries else "prefill"
        return f"{what} D={self.head_dim} {'e4m3' if self.fp8 else 'bf16'} window {self.window} {self.keys} keys"

    @property
    def lines(self) -> int:
        """Of a tile."""
        return max(16, 4 * self.queries) if self.queries else 128


CASES = (
    *(Attention(queries, dim, fp8=True) for queries in (1, 8, 16, 0) for dim in (64, 128)),
    *(Attention(queries, 64, fp8=True, window=128) for queries in (1, 8, 16, 0)),
    *(Attention(queries, 256, fp8=True) for queries in (1, 16, 0)),
    Attention(1, 96, fp8=True, keys=512), Attention(0, 96, fp8=True, keys=512), Attention(0, 64, fp8=True, keys=512),
    Attention(1, 64, fp8=False), Attention(8, 128, fp8=False), Attention(16, 128, fp8=False), Attention(0, 128, fp8=False),
)


class Launches:
    """Stands in for a kernel: keeps the arguments of the last launch."""

    def __getitem__(self, grid: object) -> Launches:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        self.args, self.named = args, named


def launched(case: Attention) -> tuple[Any, Launches]:
    """The kernel, and the arguments with which its wrapper launches it."""
    from batchspec.kernels.attention import ordered_attention as rounds
    from batchspec.kernels.attention import ordered_prefill as prefill
    from batchspec.kernels.attention.merge_states import partials_of
    from batchspec.kernels.attention.settings import ordered_work_shape
    from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule

    count = case.queries or 65
    q = torch.zeros(count, 8, case.head_dim, dtype=torch.bfloat16)
    kv = torch.zeros(2, 1, 16, 2, case.head_dim, dtype=torch.float8_e4m3fn if case.fp8 else torch.bfloat16)
    table = torch.zeros(1, case.keys // 16, dtype=torch.int32)
    bounds, length = torch.tensor([0, count], dtype=torch.int32), torch.tensor([case.keys], dtype=torch.int32)
    positions = torch.arange(case.keys - count, case.keys)
    given: dict[str, Any] = {
        "scale": 0.1, "out": torch.empty_like(q), "scales": torch.ones(2, 2) if case.fp8 else None,
        "sink_logits": torch.zeros(8) if case.window else None, "interpret": True,
    }
    launches = Launches()
    if not case.queries:
        kernel = prefill.ordered_prefill_kernel
        with patch.object(prefill, "ordered_prefill_kernel", launches):
            prefill.ordered_prefill(
                q, kv, table, positions, bounds, length, max_q=count, max_kv=case.keys, window=case.window, **given
            )
        return kernel, launches
    kernel = rounds.ordered_attention_kernel
    shape = ordered_work_shape(
        num_rows=1, max_q=count, max_kv=case.keys, num_heads=8, kv_heads=2, head_dim=case.head_dim, page_size=16, num_sms=132,
        window=case.window,
    )
    work = split_kv_schedule(bounds, length, positions, shape=shape)
    with patch.object(rounds, "ordered_attention_kernel", launches), patch.object(rounds, "merge_states"):
        rounds.ordered_attention(q, kv, table, positions, work, partials_of(work, case.head_dim), **given)
    return kernel, launches


def summary(case: Attention) -> dict[str, Any]:
    """What the kernel is compiled to, in a process without Triton's interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, launches = launched(case)
    options = {name: value for name, value in launches.named.items() if name not in kernel.arg_names and value is not None}
    given = dict(zip(kernel.arg_names, launches.args, strict=False)) | launches.named | {"WIDE": False, "PDL": True}
    types, known = {}, {}
    for name in kernel.arg_names:
        value = given[name]
        types[name] = "constexpr" if name.isupper() or value is None else TYPES[getattr(value, "dtype", type(value))]
        if types[name] == "constexpr":
            known[name] = value
    even = [name for name in types if (types[name][0] == "*" and name not in ("items", "num_items")) or "stride_" in name]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}  # multiples of 16, as in a model
    source = ASTSource(fn=kernel, signature=types, constexprs=known, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx, products = compiled.asm["ptx"], [line for line in compiled.asm["ttgir"].splitlines() if re.search(r"dot %", line)]
    return {
        "lines": given["TILE"],
        "warps": options["num_warps"],
        "widths": sorted(set(re.findall(r"kWidth = (\d+)", " ".join(products)))),
        "instructions": sorted({" ".join(found) for found in re.findall(TENSOR_CORES, ptx)}),
        "products": len(products),
        "fused": len(re.findall(r"fma\.rn\.f32", ptx)),
    }


@pytest.fixture(scope="module")
def summaries() -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.second
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile_sums_over_16_neighbours_of_k_at_once_and_fuses_only_what_is_written_so(
    case: Attention, summaries: list[dict[str, Any]]
) -> None:
    block, loops = 64 if case.head_dim <= 128 else 32, 1 if case.queries or case.window else 2
    found = summaries[CASES.index(case)]
    assert found["lines"] == case.lines
    assert found["products"] == 3 * loops
    wide, narrow = "wgmma.mma_async m64 k16 f32.bf16.bf16", "mma.sync m16 k16 f32.bf16.bf16.f32"
    assert found["instructions"] == [wide if case.lines >= 64 else narrow]
    assert found["widths"] == ["2"]  # neighbours of K in a register; with 4, two instructions share 32 of K
    assert found["fused"] == loops * case.lines * block // (32 * found["warps"])  # one for each score: s * scale - peak


if __name__ == "__main__":
    print(json.dumps([summary(case) for case in CASES]))
