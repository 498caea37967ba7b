"""The `batchspec` command, and `python -m batchspec COMMAND` for an environment whose scripts are not on the PATH."""

from __future__ import annotations

from batchspec.process.program import begin_program

begin_program()  # before the other imports
from batchspec.cli import console  # noqa: E402

if __name__ == "__main__":
    console()
