"""Offline batch inference: prompts from Parquet through static speculative-decoding batches back to Parquet."""

from __future__ import annotations

import os as _os
import sys as _sys

from batchspec.version import __version__ as __version__


def _run_by_dash_m() -> str:
    """The module of this package that `python -m` will run, if it imports the package in order to find it; else empty."""
    words = _sys.orig_argv
    module = words[words.index("-m") + 1] if _sys.argv[:1] == ["-m"] and "-m" in words else ""
    return module if module.split(".")[0] == __name__ else ""


if _run_by_dash_m() and not _sys.flags.safe_path:  # before any other import
    # -m puts the working directory first in sys.path: a file random.py there would be imported instead of Python's module.
    _sys.path.append(_sys.path.pop(0))

if _run_by_dash_m() in ("batchspec", "batchspec.run", "batchspec.cli") or "batchspec" in map(_os.path.basename, _sys.argv[:1]):
    # Python's own default would end the process with the signal, and as process 1 of a container do nothing.
    from batchspec.process.first_signals import handle_first

    handle_first()
    from batchspec.process.program import begin_program

    begin_program()

import typing as _typing  # noqa: E402

__all__ = [
    "BatchspecError", "CapacityError", "CheckpointError", "Completion", "ConfigError", "DivergedError", "Engine", "EngineInUse",
    "InputError", "Interrupted", "JobOutput", "OutputError", "RankLost", "StorageError", "TokenizerFails", "TooManyErrors",
    "Turn", "WorkerLost", "generate",
]

if _typing.TYPE_CHECKING:
    from batchspec.api import generate as generate
    from batchspec.data.dataset.job_rows import JobOutput as JobOutput
    from batchspec.errors import (
        BatchspecError as BatchspecError,
    )
    from batchspec.errors import (
        CapacityError as CapacityError,
    )
    from batchspec.errors import (
        CheckpointError as CheckpointError,
    )
    from batchspec.errors import (
        ConfigError as ConfigError,
    )
    from batchspec.errors import (
        DivergedError as DivergedError,
    )
    from batchspec.errors import (
        EngineInUse as EngineInUse,
    )
    from batchspec.errors import (
        InputError as InputError,
    )
    from batchspec.errors import (
        Interrupted as Interrupted,
    )
    from batchspec.errors import (
        OutputError as OutputError,
    )
    from batchspec.errors import (
        RankLost as RankLost,
    )
    from batchspec.errors import (
        StorageError as StorageError,
    )
    from batchspec.errors import (
        TokenizerFails as TokenizerFails,
    )
    from batchspec.errors import (
        TooManyErrors as TooManyErrors,
    )
    from batchspec.errors import (
        WorkerLost as WorkerLost,
    )
    from batchspec.records import Completion as Completion
    from batchspec.warm.conversations import Turn as Turn
    from batchspec.warm.engine import Engine as Engine
else:
    _MODULES = {
        "generate": "api", "Engine": "warm.engine", "Turn": "warm.conversations", "Completion": "records",
        "JobOutput": "data.dataset.job_rows",
    }

    def __getattr__(name):
        # Some import torch and hydra: imported only when used. Hidden from type checkers, which then know every name.
        if name not in __all__:
            raise AttributeError(f"module 'batchspec' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)

    def __dir__():
        return [*__all__, "__version__"]
