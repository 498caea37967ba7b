"""Offline batch inference: prompts from Parquet through static speculative-decoding batches back to Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

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
