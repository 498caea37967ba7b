"""`batchspec families`: the model families, and what a job of each can use: weights, drafters, GPUs, a model to begin with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser

TABLE = Path(__file__).with_name("families.txt")
"""Written by `families_table.py`, which needs torch and seconds to compute it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    ArgumentParser(prog="batchspec families", description=__doc__).parse_args(argv)
    terminal.show(TABLE.read_text(encoding="utf-8").rstrip("\n"))
    return 0
