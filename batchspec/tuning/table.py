"""The fastest measured way to compute each matrix product on this GPU: the table, and the tuner that makes it.

The table `conf/tuned/<gpu>.json` is part of the package; one in the user's cache folder, written by `batchspec doctor --tune`,
has precedence. Products in neither table are computed by the library (cuBLAS).
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from batchspec.errors import ConfigError
from batchspec.kernels.gemm.autotune import Trial, run_trials
from batchspec.kernels.gemm.four_bit_trial import FourBitTrial
from batchspec.kernels.gemm.tiles import Tile
from batchspec.process.machine import user_cache

TOKEN_COUNTS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 1024)
Product = tuple[str, int, int]
"""op, rows of the weight, K; ops: linear, linear_add, swiglu, norm_linear, norm_swiglu, lm_head (batchspec.kernels), and those of
weights of four bits (`batchspec.kernels.gemm.four_bit_tiles.op_of`)."""
Table = dict[Product, list[tuple[int, Tile | None]]]
"""Choices for a product by number of tokens, ascending; None if the library was fastest."""


def measured_tile(op: str, tokens: int, rows: int, k: int, device: torch.device) -> Tile | None:
    """The tile measured fastest for `op` with a weight [rows, k] on this device, or None: the library.

    It is that of the next larger number of tokens in the table; None beyond the largest, for an unknown product and on a CPU.
    Raises ConfigError if a table is invalid.
    """
    if device.type != "cuda":
        return None
    choices = _table_of(device).get((op, rows, k), ())
    place = bisect_left(choices, tokens, key=lambda choice: choice[0])
    return choices[place][1] if place < len(choices) else None


def is_measured(op: str, rows: int, k: int, device: torch.device) -> bool:
    """Whether the table for this device has the product, so that None of `measured_tile` means that the library was faster."""
    return device.type == "cuda" and (op, rows, k) in _table_of(device)


def tuned_products(device: torch.device) -> frozenset[Product]:
    """The products in the tables for this GPU. Raises ConfigError if a table is invalid."""
    return tuned_of(torch.cuda.get_device_name(device))


def tuned_of(gpu: str) -> frozenset[Product]:
    """The same by what torch calls a GPU."""
    return frozenset(_table(gpu))


def table_in_use(device: torch.device) -> Table:
    """All choices that this process makes on this device, none on a CPU. Raises ConfigError if a table is invalid."""
    return _table_of(device) if device.type == "cuda" else {}


def adopt(table: Table, device: torch.device) -> None:
    """Make these choices on this device from now on, whatever the files say: those of another process with an equal device."""
    if device.type == "cuda":
        _adopted[torch.cuda.get_device_name(device)] = table
        forget_tables()


def tune(shapes: Iterable[Product], device: torch.device, *, token_counts: Sequence[int] = TOKEN_COUNTS) -> list[dict[str, Any]]:
    """Time the library and every candidate for each product and number of tokens; prints a line each.

    Returns the table's entries for `save`. Takes about ten seconds a product on an H200. Needs a GPU that does nothing else.
    """
    results = run_trials(shapes, token_counts, device, _trial_of)
    return [_entry(result.as_json()) for result in results]


def _trial_of(op: str, rows: int, k: int, device: torch.device) -> Trial:
    return (FourBitTrial if op.startswith("four_bit") else Trial)(op, rows, k, device)


def save(entries: Sequence[dict[str, Any]], gpu: str, path: Path | None = None) -> Path:
    """Add entries to the table of this GPU (device name), in the user's cache folder unless a path is given.

    A product's entries replace all its earlier ones. Returns the path. Raises ConfigError if the old table is invalid.
    """
    path = _cache_path(gpu) if path is None else path
    new = {_key(entry) for entry in entries}
    kept = [entry for entry in _read(path) if _key(entry) not in new] if path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = sorted([*kept, *entries], key=lambda entry: (*_key(entry), entry["tokens"]))
    lines = ",\n".join(json.dumps(entry) for entry in merged)
    text = f'{{"gpu": {json.dumps(gpu)}, "torch": "{torch.__version__}", "products": [\n{lines}\n]}}\n'
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)  # a reader never sees half a table
    forget_tables()
    return path


def forget_tables() -> None:
    """Read the files again at the next question for a tile."""
    _table.cache_clear()
    _table_of.cache_clear()


@cache
def _table_of(device: torch.device) -> Table:
    """Cached: asking CUDA for a device's name takes microseconds, and a prefill pass asks for four tiles a layer."""
    return _table(torch.cuda.get_device_name(device))


_adopted: dict[str, Table] = {}
"""Table by name of a GPU."""


@cache
def _table(gpu: str) -> Table:
    if gpu in _adopted:
        return _adopted[gpu]
    table: Table = {}
    shipped = files("batchspec.conf").joinpath("tuned", _file_name(gpu))
    paths = [Path(str(shipped))]
    with suppress(FileNotFoundError):
        paths.append(_cache_path(gpu))
    for path in paths:
        if path.is_file():
            table |= _parse(_read(path), path)
    return table


def _parse(entries: Iterable[dict[str, Any]], path: Path) -> Table:
    table: Table = {}
    for entry in entries:
        try:
            tile = None if entry["tile"] is None else Tile(**entry["tile"])
            table.setdefault(_key(entry), []).append((int(entry["tokens"]), tile))
        except (KeyError, TypeError) as error:
            raise _invalid(path, f"an entry is wrong ({error!r})") from None
    return {key: sorted(choices, key=lambda choice: choice[0]) for key, choices in table.items()}


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["products"])
    except (ValueError, KeyError, TypeError) as error:
        raise _invalid(path, repr(error)) from None


def _invalid(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: not a table of tuned products: {what}; delete the file")


def _entry(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in ("op", "rows", "k", "tokens", "us", "library_us", "tile")}


def _key(entry: dict[str, Any]) -> Product:
    return entry["op"], entry["rows"], entry["k"]


def _file_name(gpu: str) -> str:
    """NVIDIA H200 -> nvidia_h200.json"""
    return "".join(c if c.isalnum() else "_" for c in gpu.lower()) + ".json"


def _cache_path(gpu: str) -> Path:
    return user_cache() / "batchspec" / "tuned" / _file_name(gpu)
