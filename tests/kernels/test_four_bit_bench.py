"""The benchmark of dense products with weights of four bits finds right results right and wrong ones wrong, and the fastest
choice of each product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from batchspec.kernels.benchmarks import four_bit_bench
from batchspec.kernels.benchmarks.four_bit_bench import (
    MODELS,
    Forward,
    Shape,
    Timings,
    bytes_of,
    fastest_together,
    floor_us,
    kernels_of,
    line_of,
    time_product,
)
from batchspec.kernels.gemm.four_bit_tiles import candidates
from batchspec.kernels.gemm.four_bit_trial import random_four_bit
from batchspec.kernels.gemm.tiles import Tile
from batchspec.tuning.cards import known_card
from tests.kernels.call_clock import Clock

TILES = [Tile(16, 64, 128, 2, 4, False), Tile(16, 64, 128, 2, 4, True, split=2)]


def test_every_tile_and_the_library_are_checked_and_timed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(four_bit_bench, "candidates", lambda *shape: TILES)
    monkeypatch.setattr(four_bit_bench, "four_bit_tile", lambda *shape: TILES[0])
    monkeypatch.setattr(four_bit_bench, "TOLERANCE", 1e-2)  # the interpreter cuts bf16 off
    weight, rows, clock = random_four_bit(96, 512, 128, device), list[dict[str, Any]](), Clock()
    timer: Any = clock
    timings = time_product([weight], 8, timer, rows.append)
    assert timings == Timings({None: 8.0, TILES[0]: 7.0, TILES[1]: 6.0}, TILES[0])
    assert timings.finalists == [TILES[1], TILES[0], None]
    assert [row["us"] for row in rows] == [8.0, 7.0, 6.0]
    assert capsys.readouterr().out == ""
    line = line_of(timings, 8, weight)
    assert line.split(" | ")[1:] == [
        f"rule    7.00   0% {'16x64 s2 w4 p /1':<18}", f"ptr    7.00   0% {'16x64 s2 w4 p /1':<18}",
        f"tma    6.00   0% {'16x64 s2 w4 t /2':<18}", f"library    8.00   0% {'':<18}",
    ]
    monkeypatch.setattr(four_bit_bench, "TOLERANCE", 1e-9)
    assert time_product([weight], 8, timer, rows.append).us == {}
    assert capsys.readouterr().out.count("WRONG") == 3


def test_the_floor_of_8b_is_bytes_for_few_tokens_and_operations_for_many(device: torch.device) -> None:
    weight = random_four_bit(64, 256, 128, device)
    assert bytes_of(weight) == 64 * 256 * 33 / 64
    assert floor_us(1, 4096, 4096, 8.6e6) == pytest.approx(2.0)
    assert floor_us(256, 4096, 4096, 8.6e6) == pytest.approx(2 * 256 * 4096 * 4096 / 7.9e8)
    forward = Forward(Shape(((64, 256), (32, 128)), 3), 128, device)
    assert forward.floor_us(1) == pytest.approx(3 * (64 * 256 + 32 * 128) * 33 / 64 / 4.3e6, rel=1e-3)


def test_the_fastest_together_are_found_one_product_after_another() -> None:
    """Two products that are fast together only, and one that does not matter."""
    one, two, three = (Tile(16, 64, 128, stages, 4, False) for stages in (2, 3, 4))

    def us(tiles: Sequence[Tile | None]) -> float:
        known: dict[tuple[Tile | None, ...], float] = {(one, one): 10.0, (two, one): 9.0, (two, None): 7.0, (one, None): 12.0}
        return known.get(tuple(tiles[:2]), 11.0)

    found, least = fastest_together(us, [[one, two, three], [one, None], [three]])
    assert (found, least) == ([two, None, three], 7.0)


def test_one_kernel_for_all_splits() -> None:
    shapes, card = MODELS["llama8b"].products, known_card("H200").card
    kernels = kernels_of(shapes, [16], 128, card)
    assert {tile.split for tile in kernels if not tile.direct} == {1, 2}
    assert {tile.split for tile in kernels if tile.direct} == {1, 4, 8}
    asked = {tile for shape in shapes for tile in candidates(16, *shape, 128, card)}
    assert {tile._replace(split=1) for tile in kernels} == {tile._replace(split=1) for tile in asked}
