"""Offline batch inference: prompts from Parquet through static speculative-decoding batches back to Parquet."""

from __future__ import annotations

import sys

__version__ = "0.2.0"


def _run_by_dash_m() -> str:
    """The module of this package that `python -m` will run, if it imports the package in order to find it; else empty."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if sys.argv[:1] == ["-m"] and "-m" in words else ""
    return module if module.split(".")[0] == __name__ else ""


if _run_by_dash_m() and not sys.flags.safe_path:  # before any other import
    # -m puts the working directory first in sys.path: a file random.py there would be imported instead of Python's module.
    sys.path.append(sys.path.pop(0))

if _run_by_dash_m() in ("batchspec", "batchspec.run", "batchspec.cli"):
    from batchspec.process.program import begin_program

    begin_program()  # Python's own default would end the process with the signal, and as process 1 of a container do nothing

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
