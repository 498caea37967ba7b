"""For benchmark mains that time shapes of models: the options that they share, and a file of their timings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch


def parser_of(module: str, models: Iterable[str], tokens: Iterable[int]) -> argparse.ArgumentParser:
    """--models (by default all), --tokens and --jobs of `python -m batchspec.kernels.MODULE`."""
    parser, names = argparse.ArgumentParser(prog=f"python -m batchspec.kernels.{module}"), list(models)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(tokens))
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    return parser


def add_limits(parser: argparse.ArgumentParser, *, seconds: float) -> None:
    """Add --seconds, with this default, and --out."""
    parser.add_argument("--seconds", type=float, default=seconds, help="start no new case after this time")
    parser.add_argument("--out", help="append each timing as JSON to this file")


def parse_on_gpu(parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """The arguments; without a GPU None, after one line that says so."""
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        return arguments
    print(f"{parser.prog.rpartition('.')[2]}: no GPU here, nothing to time")
    return None


def json_lines(path: str | None) -> Callable[[dict[str, Any]], None]:
    """A function that appends a line to the file; without a path it does nothing."""

    def save(row: dict[str, Any]) -> None:
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    return save
