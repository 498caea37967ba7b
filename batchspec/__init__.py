"""Offline batch inference: prompts from Parquet through static speculative-decoding batches back to Parquet."""

from __future__ import annotations

import sys

__version__ = "0.2.0"


def _locates() -> bool:
    """Whether this is `python -m batchspec...`, which imports this package to locate its module."""
    words = sys.orig_argv
    return (
        sys.argv[:1] == ["-m"]
        and not sys.flags.safe_path
        and "-m" in words
        and words[words.index("-m") + 1].split(".")[0] == __name__
    )


if _locates():  # before any other import
    # -m puts the working directory first: a file random.py in it would be imported for Python's own.
    sys.path.append(sys.path.pop(0))

from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from batchspec.api import generate as generate
    from batchspec.warm.engine import Engine as Engine


def __getattr__(name: str) -> Any:
    # They import torch and hydra: imported only when used.
    if name == "generate":
        from batchspec.api import generate

        return generate
    if name == "Engine":
        from batchspec.warm.engine import Engine

        return Engine
    raise AttributeError(f"module 'batchspec' has no attribute {name!r}")
