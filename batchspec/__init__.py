"""Offline batch inference: prompts from Parquet through static speculative-decoding batches back to Parquet."""

from __future__ import annotations

import sys

__version__ = "0.2.0"


def _imported_by_dash_m() -> bool:
    """Whether `python -m batchspec...` imports this package in order to find the module that it will run."""
    words = sys.orig_argv
    return (
        sys.argv[:1] == ["-m"]
        and not sys.flags.safe_path
        and "-m" in words
        and words[words.index("-m") + 1].split(".")[0] == __name__
    )


if _imported_by_dash_m():  # before any other import
    # -m puts the working directory first in sys.path: a file random.py there would be imported instead of Python's module.
    sys.path.append(sys.path.pop(0))

from typing import TYPE_CHECKING  # noqa: E402

__all__ = ["Engine", "generate"]

if TYPE_CHECKING:
    from batchspec.api import generate as generate
    from batchspec.warm.engine import Engine as Engine
else:

    def __getattr__(name):
        # They import torch and hydra: imported only when used. Hidden from type checkers, which then know every name.
        if name == "generate":
            from batchspec.api import generate

            return generate
        if name == "Engine":
            from batchspec.warm.engine import Engine

            return Engine
        raise AttributeError(f"module 'batchspec' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
