"""The benchmark of dense FP8 products finds right results right and wrong ones wrong, and its sums are those of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from batchspec.kernels.benchmarks import fp8_bench
from batchspec.kernels.benchmarks.fp8_bench import MODELS, Timings, kernels_of, make, summary, time_product
from batchspec.kernels.gemm.fp8_tiles import Fp8Tile, candidates
from batchspec.tuning.cards import known_card
from tests.kernels.call_clock import Clock
from tests.scaled_mm import library_on_cpu


@pytest.fixture(autouse=True)
def library(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        yield
        return
    with library_on_cpu():
        yield


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[Fp8Tile]:
    found = [Fp8Tile(16, 64, 2, 4), Fp8Tile(16, 64, 2, 4, split=2)]
    monkeypatch.setattr(fp8_bench, "candidates", lambda *shape: found)
    monkeypatch.setattr(fp8_bench, "fp8_tile", lambda *shape, library: found[1])
    return found


@pytest.mark.parametrize("blocked", [True, False])
def test_every_tile_and_the_library_are_checked_and_timed(
    blocked: bool, tiles: list[Fp8Tile], device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    product, rows, clock = make(256, 512, device, blocked=blocked), list[dict[str, Any]](), Clock()
    product = product._replace(weights=product.weights[:1])
    timer: Any = clock
    timings, line = time_product(product, 8, timer, rows.append)
    assert timings == Timings(8.0, 6.0, 6.0, tiles[1])
    assert "T=8 256x512" in line
    assert "1.33x of the library" in line
    assert [row["us"] for row in rows] == [8.0, 7.0, 6.0]
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(fp8_bench, "TOLERANCE", 1e-9)
    timings, _ = time_product(product, 8, timer, rows.append)
    assert timings.fastest == float("inf")
    assert capsys.readouterr().out.count("WRONG") == 3


def test_one_kernel_for_all_splits() -> None:
    shapes = MODELS["llama8b"]
    card = known_card("H200").card
    kernels = kernels_of(shapes, [64], card)
    assert {tile.split for tile in kernels} == {1, 2}
    asked = {tile._replace(split=min(tile.split, 2)) for shape in shapes for tile in candidates(64, *shape, card)}
    assert set(kernels) == asked


def test_a_layer_is_summed_where_all_its_products_were_timed(capsys: pytest.CaptureFixture[str]) -> None:
    name = "qwen3-30b attention"
    found = {(16, *shape): Timings(8.0, 5.0, 4.0, None) for shape in MODELS[name]}
    summary(found, [name], [16, 32])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    sums = "library 16.0 us, rule 10.0, fastest 8.0, bytes at 4.3 TB/s 4.4"
    assert lines[0].split() == f"layer qwen3-30b attention T=16 {sums}".split()
