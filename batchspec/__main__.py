"""`python -m batchspec COMMAND`: the `batchspec` command, for an environment whose scripts are not on the PATH."""

from __future__ import annotations

import sys

from batchspec.cli import console

if __name__ == "__main__":
    sys.exit(console())
